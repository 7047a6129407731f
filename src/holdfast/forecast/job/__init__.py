"""Run the user's ``build()`` and training step on the fake device, in a separate process.

Entry point: `tracing.trace_job` starts the process and returns the traces. The `tracing` module
does not import torch.

Read in this order:

1. `tracing` and `time_limits`: start the child process, limit its time and read its answer.
2. `child`: trace the job in the child process.
3. `building`: call ``build()`` and check its result.
4. `training_job`: run a training step with any number of samples.
5. `sample_batch`: create batches of any size.
6. `user_functions`: observe which parts of a step the user's code performs itself.
"""
