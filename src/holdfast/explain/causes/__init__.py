"""From evidence to the one cause of an end. Nothing here puts anything into words.

In reading order: ``candidate`` and ``weighing``, the possible causes found in statements, and how
certain each one is, with the special cases ``own_errors``, ``shadowing`` and ``error_lines``;
``ends``, what exit statuses, signals and counters suggest; ``case``, which combines the two;
``choosing``, which of them is the cause, as a table of rules. ``doubts`` and ``good_ends`` examine
runs that ended with status 0.
"""
