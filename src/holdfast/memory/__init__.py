"""Recognize out-of-memory errors, release memory, and decide what to try next.

Read in this order:

- ``oom``: recognize out-of-memory errors in all their forms, and release the memory that they keep
  alive.
- ``ladder``: choose the next remedy (retry, recompute or split), and decide when to try larger
  micro-batches again.
- ``saved_bytes``: measure what modules save for the backward pass, and choose which of them to
  recompute.
- ``recompute``: apply activation checkpointing to chosen modules during one attempt.
- ``host_copy``: copy tensors to the host while it continues.
- ``host_memory``, ``onednn``: change glibc and oneDNN settings so that a process can recover from
  a refused allocation.

Nothing in this package runs a training step. The `guard` package runs the steps and carries out the
ladder's decisions.
"""
