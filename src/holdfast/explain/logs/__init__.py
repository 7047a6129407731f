"""Read logs of any size into statements: what was raised and what was printed, by which process.

Entry point: `text.read_log`. Logs are untrusted: nothing in them is followed or evaluated. Which
statement matters is judged in ``explain.causes.weighing``.

In reading order: ``keeping`` decides which lines of a log are kept; ``lines`` strips the prefixes
that launchers and loggers add; ``progress`` recognises lines that show progress; ``tracebacks``
reads exceptions; ``processes`` combines these for the lines of one process, and ``text`` for the
whole log. ``quick`` makes searches for many patterns fast.
"""
