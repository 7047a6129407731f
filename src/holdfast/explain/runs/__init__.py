"""Read the evidence in a run directory. ``explain.causes`` decides what caused the run's end.

The entry point is `attempts.collect_attempt`, which handles an attempt of a supervised run.
``explain.collecting`` handles bare logs and runs without a supervisor.

``recordings`` opens a run directory and reads its event rings, even if they are damaged. The other
modules interpret what was recorded:

- ``supervision``: why an attempt was started, and how it ended
- ``observed_process``: the attempt's processes
- ``guard_records``: the remedies that Guards applied, and how the Guards ended
- ``statements``: the exceptions
- ``recorded_steps``: the losses, and the time spent waiting for data
- ``output_sections``: the output of the attempt
- ``divergence`` and ``learning``: whether the loss diverged or fell
"""
