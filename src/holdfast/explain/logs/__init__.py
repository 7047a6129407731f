"""Convert logs of any size to statements: the exceptions and lines that each process printed.

The entry point is `text.read_log`. Logs are untrusted input: the links and paths in them are never
opened, and nothing in them is executed. ``explain.causes.weighing`` judges which statements matter.

Modules, in reading order:

- ``keeping`` decides which lines of a log are kept.
- ``lines`` strips the prefixes that launchers and loggers add.
- ``progress`` recognizes lines that show progress.
- ``tracebacks`` parses exceptions.
- ``processes`` uses these modules to parse the lines of one process, and ``text`` reads a whole
  log.
- ``quick`` speeds up searches for many patterns.
"""
