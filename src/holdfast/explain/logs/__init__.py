"""Read logs of any size into statements: the exceptions and lines that each process printed.

Entry point: `text.read_log`. Logs are untrusted input: no link or path in them is opened, and
nothing in them is executed. ``explain.causes.weighing`` judges which statements matter.

Modules, in reading order:

- ``keeping`` decides which lines of a log are kept.
- ``lines`` strips the prefixes that launchers and loggers add.
- ``progress`` recognizes lines that show progress.
- ``tracebacks`` reads exceptions.
- ``processes`` uses these modules to read the lines of one process, and ``text`` reads a whole log.
- ``quick`` speeds up searches for many patterns.
"""
