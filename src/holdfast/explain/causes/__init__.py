"""From evidence to the one cause of an end.

In reading order:

- ``candidate`` and ``weighing``: the possible causes found in statements, and how certain each one
  is, with the special cases ``own_errors``, ``shadowing`` and ``error_lines``.
- ``exit_signs`` and ``ends``: the cause that exit statuses, signals and counters suggest.
- ``case``, which combines the two, and ``choosing``: which of all these is the cause.
- ``doubts`` and ``good_ends``: what is wrong with a run that ended with status 0.
"""
