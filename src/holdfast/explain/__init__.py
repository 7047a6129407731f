"""Explain why a run ended: from its logs and recordings to a verdict with evidence and a fix.

Entry points: `collecting.collect` for a run directory, or `collecting.collect_log` for a bare log,
returns an `Evidence`; `judging.judge` turns it into a `Verdict`. `rules.find_rule` explains the id
at the end of an error, a finding or a verdict.

Read it in the order in which a verdict is made:

1. ``evidence``: the records that hold everything known about an attempt. ``collecting`` and
   ``attempts`` fill them in, using the readers in ``logs`` and ``runs``.
2. ``signature`` and ``signatures``: the catalogue of known failures, as data. ``matching`` finds
   the signatures that match a text.
3. ``candidate`` and ``weighing``: the possible causes found in logs and exceptions, and how certain
   each one is.
4. ``runtime_causes``: the cause suggested by exit statuses, signals and kernel counters.
5. ``choosing``: which of all these is the cause, as a table of rules. ``doubts`` and ``good_ends``
   examine a run that ended with status 0.
6. ``judging``: ties these steps together and computes the confidence. ``wording`` makes the
   `Verdict`, with sentences from ``remarks`` and quotations from ``exhibits``; both ask
   ``observations``.

``hangs`` explains processes that make no progress; the watchdog of ``holdfast run`` uses it
directly.

Nothing here imports torch: an explanation must work when the CUDA context is dead, and start fast.
"""
