"""Save and resume an unchanged training script, for `holdfast run --resume`.

The script does not import holdfast. As soon as it has imported torch, the observer of
`holdfast run` imports this package and calls `start.start`, which begins to watch the script:

- Every loop over a torch ``DataLoader`` is watched. The outermost loop that is running is the
  *current loop*. Once it has ended, it is a *finished loop*. A loop inside another one is part of
  the outer loop's body.
- At the first optimizer step, the models and optimizers are found in the script's variables, and a
  `ScriptGuard` is created for them. It counts the steps and saves checkpoints, as a `Guard` does
  for a loop that keeps its own ``optimizer.step()``.
- A *boundary* is a place at which the script can be saved: before the current loop fetches its next
  batch, and after a loop has finished.
- A checkpoint also holds the finished loops, the position in the current one, and the script's
  variables.

When the command is started again, the script runs from the top. A loop that had finished is not run
again: it ends at once, and the script's variables get the values that they had after it. The
current loop skips the batches that had been trained on. Then the state of the checkpoint is
restored, and the script continues with the next batch.

Read in this order:

script         `Script`: the loops and steps of the script
training       `Training`: what is saved of it from its first step on
loops          one loop over a loader, and the iterator that the script gets
loop_places    which statement of the script iterates a loader; ``bytecode`` answers questions about
               its compiled code
saved_script   what a checkpoint holds about the script
replay         ends finished loops at once and continues in the current one; meanwhile, ``silence``
               discards what the script prints and writes
variable_kinds which variables of the script are saved, and how; ``variable_writer`` saves them and
               ``variable_reader`` restores them, with ``namespaces``, ``stack``, ``large_data`` and
               ``random_sources``
objects        finds the models and optimizers of the script; ``support`` checks at the first step
               that the script can be resumed
gap_weights    saves the weights with which models are evaluated between two loops
script_guard   the guard of the script
proof          compares the steps that are repeated after a resume with the recorded ones
refusal        ends a script that cannot be resumed exactly
"""
