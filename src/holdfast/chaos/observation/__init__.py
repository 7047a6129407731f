"""Observe a training run from inside each Python process of its command.

The entry point is `observer.start`. `torch_observer` observes the training loop, and `file_audit`
observes accesses to files. `step_recorder`, `trained_models` and `digests` compute digests of the
data and the training state, and `trace_writer` writes them to the trace. `shield` keeps the
observer from disturbing the script. No module in this package imports torch; the script does.
"""
