"""Start a command under supervision, shut it down, determine why it ended, and restart it.

Read in this order:

1. ``supervisor``: the loop over attempts, with the options and the outcome of a run.
2. ``attempt``: the event loop that serves a running attempt.
3. ``signals``, ``shutdown``: forward signals, and decide when the command is killed.
4. ``restarts``: decides whether to start another attempt, using the verdict from ``verdicts``.
5. ``hosts``: coordinates a run that spans several hosts.

Supporting modules: ``run_folder`` (the run directory), ``commands`` and ``child_start`` (starting
the command), ``output`` and ``output_log`` (the command's output), and ``kernel`` (system calls).
"""
