"""Choose settings that fit a device.

`forecasting.make_forecast` answers a whole request; `planning` finds the largest micro-batch of
each plan; `fit` checks with the simulated allocator whether a step fits. Read `fit`, `planning`,
`forecasting`.
"""
