"""Inject a fault into the processes of a command.

A plan (`plan`) describes the fault. It is written to a file, from which `injector` reads it in each
process, to inject the fault at the planned moment. `injector` uses `clock` to shift the time, and
`seccomp` to let the campaign decide about system calls: `refuser` simulates a full or failing disk,
and `change_watcher` kills the process at a chosen point of a save.
"""
