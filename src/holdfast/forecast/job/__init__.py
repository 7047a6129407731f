"""Run a user's ``build()`` and training step on the fake device, in a separate process.

Entry point: `tracing.trace_job` starts the process and returns the traces. It imports no torch.

Read `tracing` (the parent) with `time_limits`, then `child` (the process that traces), `building`
(what ``build()`` returns), `training_job` (one training step of any size), `sample_batch` (batches
of any size) and `user_functions` (which parts of a step the user's code performs itself).
"""
