"""One run: the loop over batches, its steps, recovery from failed steps, and resuming.

Read in this order:

loop            iterates over batches; saves, stops and rewinds between them
steps           `Steps` runs, counts and records a step; ``undecided`` holds one whose result
                was not read yet, and ``joint_steps`` is for several ranks
recovery        `Recovery` decides how to continue after NaN or Inf, a loss spike, or an optimizer
                that ran out of memory
sample_reports  reports the samples that caused NaN or Inf
session         opens and closes the run directory, and saves on request
saved_state     gathers the contents of a checkpoint; ``settings`` compares the settings of
                optimizers and schedulers with those at the start of the run
restoration     resumes from a checkpoint, and rolls back to an earlier state
own_steps       counts optimizer steps that a loop takes itself; ``own_step_refusals`` has the
                errors for steps that are refused, ``backward_losses`` observes their losses,
                ``taken_steps`` records them, ``unseen_steps`` notices those that cannot be
                counted, and ``fetch_ahead`` notices batches that are fetched too early
time_limit      stops the run before its time is over; ``slurm`` reads when a Slurm job ends
last_steps      stores the steps that earlier guards in the same process reached
"""
