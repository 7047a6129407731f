"""Steps as transactions: a step is attempted, and then committed, skipped or taken back.

Read `engine` first, which runs a step. `attempts` makes one attempt and takes it back. `passes`
runs the forward and backward passes of an attempt, over the whole batch or over micro-batches.
`failures` classifies the errors after which an attempt is repeated, and `remedies` makes the
changes that let the next attempt succeed. `replay` finds out where NaN or Inf came from. Whether a
batch may be split is decided in ``splitting``.
"""
