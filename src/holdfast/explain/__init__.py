"""Explain why a run ended: turn its logs and recordings into a verdict with evidence and a fix.

Entry points: `collecting.collect` for a run directory, or `collecting.collect_log` for a bare log,
returns an `Evidence`; `judging.judge` turns it into a `Verdict`. `rules.find_rule` explains the id
at the end of an error, a finding or a verdict.

Read it in the order in which a verdict is made:

1. ``evidence``: the records that hold everything known about an attempt. ``collecting`` fills them
   in, using the readers in ``logs`` and ``runs``.
2. ``signatures``: the catalogue of known failures, as data, and how they are found in a text.
3. ``causes``: the possible causes, which of them wins (``choosing``), and what counts as a good
   end (``ends``, then ``doubts`` and ``good_ends``).
4. ``judging``: ties these steps together and computes the confidence; its docstring says from what.
5. ``wording``: writes the `Verdict`. Both ``causes`` and ``wording`` use ``observations`` to read
   the recorded events, and ``exhibits`` to quote them as evidence.

``hangs`` explains processes that make no progress; the watchdog of ``holdfast run`` uses it
directly.

Nothing here imports torch: it must work when the CUDA context is dead, and start fast.
"""
