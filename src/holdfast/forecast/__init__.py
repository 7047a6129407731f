"""Forecast how much GPU memory a training step needs, without that GPU.

The user's ``build()`` and a few training steps run on tensors that have shapes but no data. After a
few warm-up steps, every allocation in one step is recorded. The recording is then scaled to any
batch size and replayed through a simulation of torch's caching allocator.

Entry points: `plan.forecasting.make_forecast` makes the forecast for the command ``holdfast plan``.
`job.tracing.trace_job` only traces one job and returns the recorded steps.

Read in this order:

1. `trace.events`: what a recorded step contains.
2. `job`: how the user's job is built and its steps are run, in a child process.
3. `fake`: the fake device on which the job runs. The device has no memory.
4. `kernels`: which kernels CUDA would choose, how much memory they save for the backward pass, and
   how much they need while they run.
5. `trace`: how a step is recorded, scaled to another batch size, and split into micro-batches.
6. `allocator` and `devices`: the simulated allocator, and the catalog of GPUs.
7. `plan`: which micro-batch size fits, and which settings to recommend.

Where to look first:

- The search for the largest micro-batch: `_PlanSearch` in `plan.planning`.
- The check whether a step fits a device: `plan.fit`.
- The size of the default margin, and the reasons for it: `plan.fit.default_margin_bytes`.
- The scratch memory that an operator needs: `kernels.scratch`.
- The memory and speed of a GPU: ``devices/devices.yaml``.
"""
