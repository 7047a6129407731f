"""Watch the processes of a running attempt from outside: hangs, stops and growing memory.

Read in this order:

1. ``threads``: the two threads that watch, and what happens if one of them fails.
2. ``watchdog``: notices that training makes no progress, examines it and proposes a remedy.
3. ``processes``: which processes are watched, and for how long each has made no progress.
4. ``limits``: how long a phase may take.
5. ``stacks``, ``py_spy``, ``faulthandler_dumps``, ``process_evidence``: what is read from a process
   that makes no progress.
6. ``inspection``: the same for a process that was started without holdfast (``holdfast attach``).

Nothing here acts on a process: ``launch.attempt`` does. Growing memory is the subject of
``supervise.leaks``.
"""
