"""Save the state of a run, in checkpoints on disk and in snapshots in host memory.

Read in this order:

components    the contents of a checkpoint: converts live objects to components, and back
saves         when a save is due, and in which thread it is written
best          the best checkpoints of each metric, in ``best/`` in the run directory
snapshots     copies of the last good states in host memory, for rollbacks
reserves      host memory that training can do without
unsaved       the exit code and the message of a process that ends with unsaved steps
unkept        counters in schedulers and optimizers that are missing from checkpoints
"""
