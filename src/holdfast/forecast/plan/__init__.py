"""Choose precision, recomputation and micro-batch size so that a step fits a device.

Read in this order:

1. `fit`: check with the simulated allocator whether a step fits.
2. `planning`: find the largest micro-batch of each plan, and rank the plans.
3. `forecasting`: trace the job, plan for each device, and verify the recommended plans. Its
   `make_forecast` is the entry point.
"""
