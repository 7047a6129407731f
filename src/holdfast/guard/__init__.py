"""Act inside the training process: run steps as transactions, save, resume and recover.

The entry point is `Guard`. The packages below this one (``memory``, ``numerics``, ``loader``,
``checkpoint``) decide; only this package calls backward, steps optimizers, restores and retries.

Read in this order:

guard         `Guard`, the public face; ``hosted`` and ``accumulation`` serve the loops of
              frameworks
arguments     checks the arguments of `Guard` and makes `Parts` of them, with ``optimizers``,
              ``schedules`` and ``scheduler_interface``
context       what the objects that carry out a run share
run           one run: its loop over batches, its steps, what follows NaN or a spike, resuming
step          one step: attempts, passes, replays; their results are in ``result``
splitting     whether a batch may be split, and how its parts are weighted
cursor        the position in the data; ``loader_positions`` returns to it after a resume
state         copies of what an attempt may change; ``phase`` says what a run is doing
saving        what a checkpoint holds, when it is saved, and the best checkpoints;
              ``optimizer_state`` and ``scheduler_state`` for two of its parts
ranks         several ranks: the same decisions on all, and one that runs out of memory or fails
stop          what happens on SIGTERM and other signals
directory     the run directory and its lock; ``record`` writes the recording
diagnosis     passes observations of each step to ``learning``, and records its findings
images        writes images, such as grids of samples
"""
