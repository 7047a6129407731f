"""Diagnose a hang: which process is to blame, at which line, and what it is waiting for.

All functions are pure. ``supervise.watch`` inspects the processes and decides how long is too long.

Entry point: `blame.diagnose_hang`, from a list of `evidence.Examined`. Read ``evidence`` first
(what was observed of a process), then ``frames`` (what a stack says), ``classification`` (how one
process hangs) and ``blame`` (comparing processes).
"""
