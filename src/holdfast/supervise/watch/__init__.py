"""Watch the processes of a running attempt from outside: hangs, stops and growing memory.

Read in this order:

1. ``threads``: the two threads that watch, and what happens if one of them fails.
2. ``watchdog``: notices that training stands still, examines it and proposes a remedy.
3. ``processes``: which processes are watched, and for how long each has not moved.
4. ``limits``: how long a phase may take.
5. ``stacks``, ``py_spy``, ``faulthandler_dumps``, ``process_evidence``: what is read from a process
   that stands still.
6. ``inspection``: the same for a process that was started without holdfast (``holdfast attach``).

Nothing here acts on a process: ``launch.attempt`` does. Growing memory is in ``supervise.leaks``.
"""
