"""Explain why a run ended: from its logs and recordings to a verdict with evidence and a fix.

Entry points: `collecting.collect` for a run directory, or `collecting.collect_log` for a bare log,
returns an `Evidence`; `judging.judge` turns it into a `Verdict`. `rules.find_rule` explains the id
at the end of an error, a finding or a verdict.

Read it in the order in which a verdict is made:

1. ``evidence``: the records that hold everything known about an attempt. ``collecting`` fills them
   in, using the readers in ``logs`` and ``runs``.
2. ``signatures``: the catalogue of known failures, as data, and how they are found in a text.
3. ``causes``: the possible causes, and which of them is chosen.
4. ``judging``: ties these steps together and computes the confidence.
5. ``wording``: makes the `Verdict`. ``observations`` and ``exhibits`` read the events and quote
   them, for ``causes`` and ``wording``.

``hangs`` explains processes that make no progress; the watchdog of ``holdfast run`` uses it
directly.

Nothing here imports torch: an explanation must work when the CUDA context is dead, and start fast.
"""
