"""Out-of-memory errors: recognise them, release memory, and decide what to try next.

Read in this order:

- ``oom``: recognise an out-of-memory error in any of its forms and release what it holds.
- ``ladder``: which remedy comes next (retry, recompute, split), and when to try larger
  micro-batches again.
- ``saved_bytes``: which modules to recompute, measured by what they keep for the backward pass.
- ``recompute``: activation checkpointing of chosen modules for one attempt.
- ``host_memory``, ``onednn``: what glibc and oneDNN need in order to survive a refused allocation.

Nothing here runs a training step: `guard` does, and carries out the ladder's decisions.
"""
