"""Save the state of a run, in checkpoints on disk and in snapshots in host memory.

Read in this order:

components    the contents of a checkpoint: converts live objects to components, and back
saves         `Saving`: saves checkpoints, in the training thread or in the background. It uses:
              save_schedule (when a save is due), save_writer (one save), writer_thread (the thread
              and its host buffers), save_results (results of the saves) and directory_check
end_report    reports the unsaved steps of a run that has ended
best          the best checkpoints of each metric, in ``best/`` in the run directory
snapshots     copies of the last good states in host memory, for rollbacks
reserves      host memory that training can do without
unsaved       the exit code and the message of a process that ends with unsaved steps
unkept        counters in schedulers and optimizers that are missing from checkpoints
"""
