"""The kernels that CUDA would choose, and the memory that they keep and need.

Two entry points:

- `emulation.emulated_kernels` registers rules on the fake device for operators that behave
  differently on an unknown device than on CUDA: `attention`, `recurrent` layers, `sequences`, RMS
  norm and losses. `autocast_policy` does the same for autocast.
- `scratch.scratch_of` returns the memory that a CUDA kernel needs only while it runs; `scratch_cpu`
  measures it for the CPU.

Lists of operators are in ``operators.yaml``, read by `operators`.
"""
