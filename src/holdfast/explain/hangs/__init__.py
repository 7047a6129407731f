"""Diagnose a hang: which process is to blame, at which line it hangs, and what it is waiting for.

All functions are pure. ``supervise.watch`` inspects the processes and decides when one of them has
made no progress for too long.

The entry point is `blame.diagnose_hang`, which takes a list of `process_samples.ExaminedProcess`.
The modules, in reading order, are ``process_samples`` (what was seen of a process), ``frames`` (the
interpretation of a stack), ``classification`` (how a single process hangs) and ``blame`` (the
comparison of processes).
"""
