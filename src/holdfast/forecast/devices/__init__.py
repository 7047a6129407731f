"""Look up the memory and speed of GPUs, and estimate how long a step takes on them.

Entry points: `catalogue.find_device` and `timing.step_seconds`. The figures and their sources are
in ``devices.yaml``.
"""
