"""Choose the precision, recomputation and micro-batch size with which a step fits a device.

Read in this order:

1. `fit`: check with the simulated allocator whether a step fits.
2. `planning`: find the largest micro-batch for each plan, and recommend a plan.
3. `forecasting`: trace the job, plan for each device, and verify the recommended plans. Its
   `make_forecast` is the entry point.
"""
