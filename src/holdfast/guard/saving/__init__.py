"""What a checkpoint holds, when it is saved, and snapshots in host memory.

Read in this order:

components    what a checkpoint holds: from live objects to its components, and back
saves         when a save is due, and in which thread it is written
best          the best checkpoints of each metric, in ``best/`` in the run directory
snapshots     copies of the last good states in host memory, for rollbacks
reserves      host memory that training can do without
unsaved       the exit code and the message of a process that ends with unsaved steps
unkept        counters of schedulers and optimizers that no checkpoint holds
"""
