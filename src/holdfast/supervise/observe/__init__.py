"""The observer that runs inside every Python process of a supervised command and records it.

All code in this package follows three rules. Its errors are written to the run directory and never
reach the script. It does not import torch before the script does. It costs only a few microseconds
per step.

Read in this order:

1. ``observer``: observes one process; started by ``injected/sitecustomize.py``.
2. ``hooks``: installs hooks in torch and other packages once the script has imported them.
3. ``step_tracker``: recognizes steps in the calls that the hooks report, and ``training_phases``
   tracks interruptions such as saves. ``step_writer`` records the steps, together with the values
   that ``optimizer_facts`` and ``values`` read.
4. ``process_end``, ``stack_writer``, ``logged_scalars``, ``launchers``: how the process exits,
   stack traces on request, the values that the script logs, and the detection of launchers.
"""
