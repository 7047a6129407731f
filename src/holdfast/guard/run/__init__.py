"""One run: the loop over batches, its steps, recovery from failed steps, and resuming.

Read in this order:

loop            what happens between two batches: when to save, when to stop, how to rewind
steps           `Steps` runs, counts and records a step; `Recovery` decides what follows NaN or
                Inf, a loss spike, or an optimizer that ran out of memory
sample_reports  which samples NaN or Inf came from
session         from opening the run directory to closing it, and saves on request
saved_state     what a checkpoint holds, with ``settings`` of optimizers and schedulers
restoration     resumes from a checkpoint, and rolls back to an earlier state
own_steps       refuses optimizer steps outside of `Guard.step`
last_steps      how far earlier guards of the same process got
"""
