"""Decide why an attempt ended: from its evidence to a single cause.

In reading order:

- ``candidate`` and ``weighing``: the possible causes found in statements, and how certain each one
  is, with the special cases ``own_errors``, ``shadowing`` and ``error_lines``.
- ``exit_signs`` and ``ends``: whether the attempt ended well and, if not, the cause that exit
  statuses, signals and counters suggest.
- ``case``, which combines the two, and ``choosing``: which of these causes wins.
- ``doubts`` and ``good_ends``: whether an exit status of 0 can be trusted, and what is wrong with a
  run that ended well, such as a loss that did not fall.
"""
