"""Implement a fake device, on which tensors have shapes but no memory.

Entry point: `device.forecast_device`, a context manager in which code runs on the fake device.

Read in this order:

1. `device`: the device and its dispatch mode.
2. `known_values`: track values that follow from the sample batch. `guesses`: guess all other values
   that code reads. `data_dependent`: run operators whose results or shapes depend on values.
3. `stand_ins` and `cuda_module`: make the fake device look like CUDA to user code. `placement`:
   move modules to the fake device.
"""
