"""Emulate the kernels that CUDA would choose for each operator, and the memory that they need.

Entry points:

- `emulation.emulated_kernels` makes operators allocate on the fake device as they would on CUDA. It
  covers operators that torch runs differently on a device that it does not know: attention,
  recurrent layers, operators on sequences, RMS norm and losses.
- `autocast_policy.installed` makes autocast behave on the fake device as it does on CUDA.
- `scratch.scratch_of` returns the scratch memory that a CUDA kernel needs while it runs.
  `scratch_cpu.scratch_of` measures the scratch memory of CPU kernels.

The `operators` module reads the lists of operators from ``operators.yaml``.
"""
