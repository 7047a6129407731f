"""Watch the processes of a running attempt from outside for hangs, stops and growing memory.

Read in this order:

1. ``threads``: the two threads that watch an attempt, and the handling of their errors.
2. ``watchdog``: detects a lack of progress, examines the processes and proposes a remedy.
3. ``processes``: chooses the processes to watch, and measures how long each has gone without
   progress.
4. ``limits``: determines how long each phase of training may go without progress.
5. ``stacks``, ``py_spy``, ``faulthandler_dumps``, ``process_evidence``: the evidence that is
   collected from a process that makes no progress. ``stack_text`` describes it as text.
6. ``inspection``: inspects a process that was started without holdfast (``holdfast attach``).
   ``inspected_processes`` chooses the processes. ``recorded_progress``, ``stack_phases`` and
   ``thread_activity`` find out what they do.
7. ``resources``, ``loop_stacks``: measure what makes a running training loop slow.

This package never ends or continues a process of the command; ``launch.attempt`` does.
``supervise.leaks`` analyzes growing memory.
"""
