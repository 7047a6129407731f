"""Save and resume an unchanged training script, for `holdfast run --resume`.

The script does not import holdfast. As soon as it has imported torch, the observer of
`holdfast run` imports this package and calls `start.start`, which begins to watch the script:

- Every loop over a torch ``DataLoader`` is watched. The outermost loop that is running is the
  *current loop*. Once it has ended, it is a *finished loop*. A loop inside another one is part of
  the outer loop's body. The code between two finished loops is a *gap*.
- At the first optimizer step, the models and optimizers are found in the script's variables, and a
  `ScriptGuard` is created for them. It counts the steps and saves checkpoints, as a `Guard` does
  for a loop that keeps its own ``optimizer.step()``.
- A *boundary* is a point at which the script can be saved: before the current loop fetches its next
  batch, and after a loop has finished.
- A checkpoint also holds the finished loops, the position in the current one, and the script's
  variables.

When the command is started again, the script runs from the top. This is the *replay*. A loop that
had finished is not run again: it ends at once, and the script's variables get the values that they
had after it. The current loop skips the batches that had been trained on. Then the state of the
checkpoint is restored, and the script continues with the next batch.

Start with `script` and `training`, which contain the whole sequence of events:

start           begins to watch the script, with hooks of torch and of Python
script          `Script`: the loops and steps of the script
training        `Training`: what is saved of the script from its first step on
script_guard    `ScriptGuard`: counts the steps, and writes the checkpoints

They use:

requirements    checks at the first step that the script can be resumed
refusal         ends a script that cannot be resumed exactly
trained_objects finds the models and optimizers of the script in its variables
frames          which frames and modules belong to the script, and access to local variables
saved_script    what a checkpoint holds about the script
proof           compares the steps that are repeated after a resume with the recorded ones

``loops``       where a loop runs, how it requests its batches, and how it has ended
``variables``   which variables are saved, and how they are saved and restored
``replaying``   brings a restarted script back to the place where its checkpoint was saved
"""
