"""Out-of-memory errors: recognize them, release memory, and decide what to try next.

Read in this order:

- ``oom``: recognize out-of-memory errors in all their forms, and release the memory they hold.
- ``ladder``: choose the next remedy (retry, recompute, split), and decide when to try larger
  micro-batches again.
- ``saved_bytes``: measure what modules save for the backward pass, and choose which of them to
  recompute.
- ``recompute``: activation checkpointing of chosen modules during one attempt.
- ``host_memory``, ``onednn``: settings of glibc and oneDNN without which a process cannot recover
  from a refused allocation.

Nothing in this package runs a training step. `guard` does, and carries out the ladder's decisions.
"""
