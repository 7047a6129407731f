"""Forecast how much memory a training step needs, without the GPU that it is for.

A user's ``build()`` and a few training steps run on tensors that have shapes and no data. Every
allocation of one steady step is recorded, made any size, and played through a simulation of torch's
caching allocator.

Entry points: `plan.forecasting.make_forecast` answers a whole request (the command ``holdfast
plan``); `job.tracing.trace_job` traces one job and returns the recorded steps.

Read in this order:

1. `trace.events`: what a recorded step is.
2. `job`: how a user's job is built and stepped, in a child process.
3. `fake`: the device without memory on which it runs.
4. `kernels`: which kernels CUDA would choose there, what they keep and what they need.
5. `trace`: how a step is recorded, scaled to another size, and cut into micro-batches.
6. `allocator` and `devices`: the simulated allocator, and what is known of each GPU.
7. `plan`: which micro-batch size fits, and which settings to recommend.
"""
