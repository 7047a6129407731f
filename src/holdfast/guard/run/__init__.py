"""One run: its loop over batches, its steps, recovery after a step that failed, and resuming.

Read in this order:

loop          what happens between two batches: when to save, when to stop, how to rewind
steps         `Steps` runs, counts and records a step; `Recovery` decides what follows NaN or Inf,
              a loss spike, or an optimizer that ran out of memory
session       the state of the run: resuming, rolling back, and what the guard itself saves
own_steps     refuses optimizer steps outside of `Guard.step`
last_steps    how far earlier guards of the same process got
"""
