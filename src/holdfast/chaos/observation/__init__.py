"""Observe a training run from inside each Python process of its command.

The entry point is `observer.start`. `torch_observer` hooks into torch and `file_audit` into files;
`step_recorder`, `trained_models` and `digests` turn their observations into digests; `trace_writer`
writes them down, and `shield` keeps all of this from disturbing the script. Torch is not imported
here: the script imports its own.
"""
