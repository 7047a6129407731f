"""Explain why a run ended: from its logs and recordings to a verdict with evidence and a fix.

Entry points: `collecting.collect` for a run directory, or `collecting.collect_log` for a bare log,
returns an `Evidence`; `judging.judge` turns it into a `Verdict`. `rules.find_rule` explains the id
at the end of an error, a finding or a verdict.

Read it in the order in which a verdict is made:

1. ``evidence``: what is known, as records. ``collecting`` and ``attempts`` gather it, with the
   readers in ``logs`` and ``runs``.
2. ``signature`` and ``signatures``: the known ways to fail, as data. ``matching`` finds those that
   match a text.
3. ``candidate`` and ``weighing``: possible causes that texts show, and how certain each is.
4. ``runtime_causes``: the cause that exit statuses, signals and counters suggest.
5. ``choosing``: which of all these is the cause, as a table of rules. ``doubts`` and ``good_ends``
   examine a run that ended with status 0.
6. ``judging``: all of it in one place, with the confidence. ``wording`` makes the `Verdict`, with
   sentences from ``remarks`` and quotations from ``exhibits``; both ask ``observations``.

``hangs`` explains processes that stand still; the watchdog of ``holdfast run`` uses it directly.

Nothing here imports torch: an explanation must work when the CUDA context is dead, and start fast.
"""
