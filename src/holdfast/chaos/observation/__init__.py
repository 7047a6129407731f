"""Observe a training run from inside each Python process of its command.

The entry point is `observer.start`. `torch_observer` observes the training loop, and `file_audit`
observes files. `step_recorder`, `trained_models` and `digests` compute digests of what happens, and
`trace_writer` writes them to the trace. `shield` keeps our code from disturbing the script. Nothing
here imports torch; the script imports it.
"""
