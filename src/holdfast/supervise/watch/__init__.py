"""Watch the processes of a running attempt from outside for hangs, stops and growing memory.

Read in this order:

1. ``threads``: the two threads that watch an attempt, and the handling of their errors.
2. ``watchdog``: detects a lack of progress, examines the processes and proposes a remedy.
3. ``processes``: chooses the processes to watch, and measures how long each has gone without
   progress.
4. ``limits``: determines how long each phase of training may go without progress.
5. ``stacks``, ``py_spy``, ``faulthandler_dumps``, ``process_evidence``: the evidence that is
   collected from a process that makes no progress.
6. ``inspection``, ``recorded_progress``: inspect a process that was started without holdfast
   (``holdfast attach``), and the steps that a process records if it has a Guard or is observed.

This package never ends or continues a process of the command; ``launch.attempt`` does.
``supervise.leaks`` analyzes growing memory.
"""
