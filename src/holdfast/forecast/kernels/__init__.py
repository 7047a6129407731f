"""Which kernels CUDA would choose, what they keep for the backward pass, and what they need.

Two entry points:

- `emulation.emulated_kernels` registers rules on the fake device for operators where a device that
  torch does not know would do something else than CUDA: `attention`, `recurrent` layers,
  `sequences`, RMS norm and losses. `autocast_policy` does the same for autocast.
- `scratch.scratch_of` returns the memory that a CUDA kernel needs only while it runs; `scratch_cpu`
  measures it for the CPU.

Lists of operators are in ``operators.yaml``, read by `operators`.
"""
