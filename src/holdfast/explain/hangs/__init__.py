"""Diagnose a hang: which process is to blame, at which line, and what it is waiting for.

All functions are pure. ``supervise.watch`` inspects the processes and decides when one of them has
made no progress for too long.

Entry point: `blame.diagnose_hang`, which takes a list of `evidence.Examined`. Modules, in reading
order: ``evidence`` (the observations about a process), ``frames`` (what a stack shows),
``classification`` (how a single process hangs) and ``blame`` (the comparison of processes).
"""
