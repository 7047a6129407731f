"""Carry out a fault inside the processes of a command.

`plan` says what is to happen and is written to a file; `injector` reads it in each process and acts
when the moment has come, with `clock` for a shifted time and `seccomp` for a full or failing disk.
"""
