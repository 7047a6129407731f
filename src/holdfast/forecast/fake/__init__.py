"""A fake device, on which tensors have shapes but no memory.

Entry point: `device.forecast_device`, a context in which code runs on the fake device.

Read in this order:

1. `device`: the device and its dispatch mode.
2. `known_values`: values that follow from the sample batch. `guesses`: answers to questions about
   all other values. `data_dependent`: operators whose results or shapes depend on values.
3. `stand_ins` and `cuda_module`: replacements that make the fake device look like CUDA to user
   code. `placement`: moving modules to the fake device.
"""
