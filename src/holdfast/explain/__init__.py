"""Explain why a run ended: turn its logs and recordings into a verdict with evidence and a fix.

Entry points:

- `collecting.collect` reads a run directory and `collecting.collect_log` reads a bare log. Both
  return an `Evidence`.
- `judging.judge` turns an `Evidence` into a `Verdict`.
- `rules.find_rule` returns the page that explains a rule id, such as the id at the end of an error
  message.

Modules, in the order in which a verdict is made:

1. ``evidence`` defines the records that hold all evidence about an attempt. ``collecting`` fills
   in these records with the readers in ``logs`` and ``runs``.
2. ``signatures`` holds the catalog of known failures as data, and finds these failures in text.
3. ``causes`` collects the possible causes and chooses one of them (``choosing``). It also decides
   whether a run ended well (``ends``, then ``doubts`` and ``good_ends``).
4. ``judging`` runs steps 2 and 3 and decides how certain the chosen cause is.
5. ``wording`` writes the `Verdict`. Both ``causes`` and ``wording`` use ``observations`` to
   interpret the recorded events, and ``exhibits`` to quote them as evidence.

``flight`` compares the dumps of torch's flight recorder, for a run and on their own. ``records``
judges what other tools recorded.

``hangs`` explains why a process makes no progress. The watchdog of ``holdfast run`` calls it
directly.

This package never imports torch, so that it starts quickly and works even if the CUDA context is
corrupted.
"""
