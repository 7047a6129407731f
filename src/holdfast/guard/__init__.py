"""Act inside the training process: make steps as transactions, save, resume and recover.

The entry point is `Guard`. The parts below this package (``memory``, ``numerics``, ``loader``,
``checkpoint``) decide; only this package calls backward, steps optimizers, restores and retries.

Read in this order:

guard         `Guard`, the public face; ``hosted`` and ``accumulation`` for loops of frameworks
arguments     checks what was passed to `Guard` and makes `Parts` of it; ``optimizers``,
              ``schedules`` and ``scheduler_interface`` for what they check
run           one run: its loop over batches, its steps, its session
step          one step: attempts, passes, replays; ``result`` for what they return
splitting     whether a batch may be split, and how its parts are weighted
cursor        where the data is; ``loader_positions`` returns there
state         snapshots of buffers and of registered state; ``phase`` says what a run is doing
saving        what a checkpoint holds and when it is saved; ``optimizer_state`` and
              ``scheduler_state`` for two of its parts
ranks         what several ranks do together
stop          what happens on SIGTERM and other signals
directory     the run directory and its lock; ``record`` writes the recording
diagnosis     passes what a step has shown to ``learning``
images        writes images, such as grids of samples
"""
