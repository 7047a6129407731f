"""Logs of any size, read into statements: what was raised and what was printed, by which process.

Entry point: `text.read_log`. The text of a log comes from strangers: nothing in it is followed or
evaluated, and nothing here judges which statement matters (see ``explain.weighing``).

In reading order: ``keeping`` decides which lines of a log are kept; ``lines`` takes off what
launchers and loggers put before a line; ``progress`` finds lines that show that a run continues;
``tracebacks`` reads exceptions; ``processes`` joins all that for the lines of one process; ``text``
for the whole log. ``quick`` makes searches for many patterns fast.
"""
