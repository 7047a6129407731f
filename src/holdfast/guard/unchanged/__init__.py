"""Save and resume an unchanged training script, for `holdfast run --resume`.

The script does not import holdfast. The observer of `holdfast run` imports this package once the
script has imported torch, and `start.start` begins to watch the script:

- Every loop over a torch ``DataLoader`` is watched. A *finished loop* is one that has ended and was
  not inside another one. The loop that is running is the *current loop*.
- At the first optimizer step, the models and optimizers are found in the script's variables, and a
  `ScriptGuard` is created for them. It counts the steps and saves checkpoints, as a `Guard` does
  for a loop that keeps its own ``optimizer.step()``.
- A checkpoint also holds the finished loops, the position in the current one, and the script's
  variables.

When the command is started again, the script runs from the top. Loops that had finished are not run
again: each gives its variables the values that they had after the loop, and ends at once. In the
current loop, the batches that were trained are skipped. Then the state of the checkpoint is
restored, and the script continues with the next batch.

Read in this order:

script         `Script`: the loops, the steps and the state of the script
loops          one loop over a loader, and the iterator that the script gets
loop_places    which statement of the script iterates a loader; ``bytecode`` answers questions about
               its compiled code
saved_script   what a checkpoint holds about the script
replay         ends finished loops at once and continues in the current one; ``silence`` discards
               what the script prints and writes meanwhile
variables      saves and restores the script's variables, with ``stack`` and ``variable_kinds``
objects        finds the models and optimizers of the script; ``support`` checks at the first step
               that the script can be resumed
gap_weights    keeps the weights with which models are evaluated between two loops
script_guard   the guard of the script
proof          compares the steps that are repeated after a resume with the recorded ones
refusal        ends a script that cannot be resumed exactly
"""
