"""Steps as transactions: a step is attempted, and then committed, skipped or undone.

Start with `engine`, which runs a step. `attempts` makes one attempt and undoes it. `passes` runs
the forward and backward passes of an attempt, over the whole batch or over micro-batches.
`failures` classifies the errors after which an attempt is repeated, and `remedies` makes the
changes that let the next attempt succeed. `replay` finds the origin of NaN or Inf. `repetition`
makes some steps twice to find wrong results of the hardware. `host_reads` finds the lines of a loss
function that make a device wait. The package ``splitting`` decides
whether a batch may be split.
"""
