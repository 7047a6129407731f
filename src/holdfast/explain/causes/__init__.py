"""Find the single most likely cause of an attempt's end.

In reading order:

- ``candidate`` and ``candidate_search`` find possible causes in statements and decide how certain
  each cause is. ``holdfast_errors``, ``shadowing``, ``error_lines`` and ``earlier_tracebacks``
  handle special cases.
- ``exit_signs`` and ``ends`` decide whether the attempt ended well. If it did not, they name the
  cause that its exit statuses, signals and counters suggest.
- ``case`` combines these results, and ``choosing`` picks one of the causes.
- ``doubts`` decides whether an exit status of 0 can be trusted. ``good_ends`` finds problems in a
  run that ended well, such as a loss that did not fall.
"""
