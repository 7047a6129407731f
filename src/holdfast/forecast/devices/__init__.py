"""The memory and speed of GPUs, and the duration of a step on them.

Entry points: `catalogue.find_device` and `timing.step_seconds`. The figures and their sources are
in ``devices.yaml``.
"""
