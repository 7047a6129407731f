"""Runs inside every Python process of a supervised command, and records what it does.

Three guarantees hold for everything here: no error of ours reaches the script (it is noted in the
run directory), torch is not imported before the script imports it, and a step costs microseconds.

Read in this order:

1. ``observer``: the observer of one process, started by ``injected/sitecustomize.py``.
2. ``hooks``: what is hooked into torch and other packages once the script has imported them.
3. ``step_tracker``: what a step is, made of the calls that the hooks report; ``optimizer_facts``,
   ``values`` and ``pending_values`` read what is recorded about it.
4. ``process_end``, ``stack_writer``, ``logged_scalars``, ``launchers``: how the process ends, its
   stacks on demand, what the script logs, and whether the process is a launcher.
"""
