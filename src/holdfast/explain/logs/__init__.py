"""Convert logs of any size to statements: the exceptions and lines that each process printed.

The entry point is `log_text.read_log`. Logs are untrusted input: the links and paths in them are
never opened, and nothing in them is executed. ``explain.causes.candidate_search`` judges which
statements matter.

Modules, in reading order:

- ``excerpt`` reads the lines of a log that may matter.
- ``lines`` strips the prefixes that launchers and loggers add.
- ``progress`` recognizes lines that show progress, and ``completion`` lines that say that a run is
  done.
- ``printed_values`` extracts the losses and gradient norms.
- ``tracebacks`` parses exceptions.
- ``processes`` uses these modules to parse the lines of one process, ``log_end`` judges the last
  lines, and ``log_text`` reads a whole log.
- ``quick_pattern`` speeds up searches for many patterns.
"""
