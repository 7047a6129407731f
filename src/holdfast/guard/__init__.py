"""Act inside the training process: run steps as transactions, save, resume and recover.

The entry point is `Guard`. The lower packages (``memory``, ``numerics``, ``loader``,
``checkpoint``) make decisions. Only this package acts on them: it calls backward, steps optimizers,
restores state and retries.

Read in this order:

guard         `Guard`, the public class; ``hosted`` and ``accumulation`` adapt it to the loops of
              frameworks
arguments     checks the arguments of `Guard` and collects them in `Parts`, with ``optimizers``,
              ``schedules`` and ``scheduler_interface``; ``reachable`` finds objects inside
              others, such as the optimizer of a scheduler
context       `RunContext`: the objects that the engine, the session and their parts share
run           one run: the loop over batches, its steps, recovery from NaN and spikes, resuming
step          one step: attempts, passes and replays; ``result`` defines their results, and
              ``precision`` the autocast context of the forward pass
decision      decides a step one step late; ``timing`` states which steps
splitting     whether a batch may be split, and how its parts are weighted
evaluation    runs a function on every batch of a loader, for `Guard.evaluate_batches`
cursor        the position in the data; ``loader_positions`` returns to it after a resume, and
              ``handed_out`` checks that a step's batch still holds the loader's samples
state         copies of the state that an attempt may change; ``phase`` tracks the phase of a run
saving        what a checkpoint contains, when it is saved, and the best checkpoints;
              ``optimizer_state`` and ``scheduler_state`` handle two of its parts
ranks         several ranks: making the same decisions on all of them, and handling a rank that
              runs out of memory or fails
stop          handling of SIGTERM and other signals
directory     the run directory and its lock; ``record`` writes the recording
unchanged     saves and resumes a script that does not import holdfast
diagnosis     passes observations of each step to ``learning``, and records its findings
images        writes images, such as grids of samples
"""
