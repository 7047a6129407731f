"""Run the user's ``build()`` and training step on the fake device, in a separate process.

Entry point: `tracing.trace_job` starts the process and returns the traces. It does not import
torch.

Read in this order:

1. `tracing` and `time_limits`: the parent process.
2. `child`: the process that traces the job.
3. `building`: calling ``build()`` and checking its result.
4. `training_job`: running a training step with any number of samples.
5. `sample_batch`: creating batches of any size.
6. `user_functions`: observing which parts of a step the user's code performs itself.
"""
