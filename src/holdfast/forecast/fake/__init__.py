"""A device without memory, on which a training step runs with shapes only.

Entry point: `device.forecast_device`, a context in which code runs on the fake device.

Read `device` (the device and its dispatch mode), then how questions about values are answered:
`known_values` (what follows from the batch), `guesses` (what must be guessed) and `data_dependent`
(operators whose shapes depend on values); then how CUDA looks to user code: `stand_ins`,
`cuda_module` and `placement` (moving modules).
"""
