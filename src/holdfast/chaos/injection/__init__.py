"""Inject a fault into the processes of a command.

`plan` describes the fault. The plan is written to a file, which `injector` reads in each process
and executes at the planned moment. `injector` uses `clock` to shift the time, and `seccomp` to
simulate a full or failing disk.
"""
