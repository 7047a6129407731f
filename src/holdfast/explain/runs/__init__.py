"""Read the evidence in a run directory. ``explain.causes`` decides what caused the run's end.

Entry point: `attempts.collect_attempt`, for an attempt of a supervised run. ``explain.collecting``
handles bare logs and runs without a supervisor.

``recordings`` opens a run directory and reads its event rings, even if they are damaged. Other
modules interpret them:

- ``supervision``: why an attempt was started, and how it ended
- ``observed``: the attempt's processes
- ``guard_records``: the remedies that Guards applied, and how the Guards ended
- ``statements``: exceptions
- ``recorded_steps``: losses, and the time spent waiting for data
- ``output_sections``: the output of the attempt
- ``divergence`` and ``learning``: whether the loss diverged or fell
"""
