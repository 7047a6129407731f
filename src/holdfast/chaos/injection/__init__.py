"""Carry out a fault inside the processes of a command.

`plan` describes the fault and is written to a file; `injector` reads it in each process and acts
when its moment has come, with `clock` for a shifted time and `seccomp` for a full or failing disk.
"""
