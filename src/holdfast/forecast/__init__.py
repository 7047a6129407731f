"""Forecast how much GPU memory a training step needs, without that GPU.

A user's ``build()`` and a few training steps run on tensors with shapes but no data. Every
allocation of one steady step is recorded, scaled to any batch size, and replayed through a
simulation of torch's caching allocator.

Entry points: `plan.forecasting.make_forecast` answers a whole request (the command ``holdfast
plan``); `job.tracing.trace_job` traces one job and returns the recorded steps.

Read in this order:

1. `trace.events`: what a recorded step is.
2. `job`: how a user's job is built and stepped, in a child process.
3. `fake`: the fake device on which it runs, which has no memory.
4. `kernels`: which kernels CUDA would choose, and how much memory they keep and need.
5. `trace`: how a step is recorded, scaled to another size, and cut into micro-batches.
6. `allocator` and `devices`: the simulated allocator, and the catalogue of GPUs.
7. `plan`: which micro-batch size fits, and which settings to recommend.

Where to look first:

- How the largest micro-batch is found: `_PlanSearch` in `plan.planning`.
- Whether a step fits a device: `plan.fit`.
- How large the default margin is, and why: `plan.fit.default_margin_bytes`.
- How much scratch memory an operator needs: `kernels.scratch`.
- The figures of a GPU: ``devices/devices.yaml``.
"""
