"""Diagnosis of a hang: which process is to blame, at which line, and what it waits for.

Pure: the processes are looked at by ``supervise.watch``, which also decides what is too long.

Entry point: `blame.diagnose_hang`, from a list of `evidence.Examined`. Read ``evidence`` first, for
what was seen of a process; then ``frames``, for what a stack says; ``classification``, for how one
process hangs; and ``blame``, which compares processes.
"""
