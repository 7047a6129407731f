"""Start a command under supervision, shut it down, judge how it ended and restart it.

Read in this order:

1. ``supervisor``: the loop over attempts, and the options and outcome of a run.
2. ``attempt``: the event loop while one attempt runs, and how it ended.
3. ``signals`` forwards signals; ``shutdown`` decides when the command is killed.
4. ``restarts``: the rules for another attempt; ``verdicts``: why the last one failed.
5. ``hosts``: one run on several hosts.

Details: ``run_folder`` (the run directory), ``commands`` and ``child_start`` (how the command is
started), ``output`` and ``output_log`` (what it prints), ``kernel``.
"""
