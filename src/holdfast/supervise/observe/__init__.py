"""Run inside every Python process of a supervised command, and record what it does.

Everything here keeps three promises: our errors do not reach the script (they are noted in the run
directory), torch is not imported before the script imports it, and the cost per step is a few
microseconds.

Read in this order:

1. ``observer``: the observer of one process, started by ``injected/sitecustomize.py``.
2. ``hooks``: the hooks that are installed in torch and other packages once the script has imported
   them.
3. ``step_tracker``: assembles steps from the calls that the hooks report, and ``training_phases``
   shows what interrupts them. ``step_writer`` writes the steps down, with numbers that
   ``optimizer_facts`` and ``values`` read.
4. ``process_end``, ``stack_writer``, ``logged_scalars``, ``launchers``: how the process ends, its
   stacks on request, what the script logs, and whether the process is a launcher.
"""
