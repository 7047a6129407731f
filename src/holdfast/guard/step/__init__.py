"""The step as a transaction: it is attempted, and then committed, skipped or taken back.

Read `engine` first, which drives a step. `attempts` makes one attempt and takes it back; `passes`
runs its forward and backward passes, over the whole batch or over micro-batches. `failures` says
why an attempt must be repeated, and `remedies` changes what is necessary before that. `replay`
finds where NaN or Inf came from. Whether a batch may be split is decided in ``splitting``.
"""
