"""Diagnose why a run does not learn: broken contracts, and steps, inputs or gradients off scale.

Entry points: `watch.watch` for any training loop; `observer.Observer`, which `watch` and the guard
drive; `alignment.report_alignment` for speech synthesisers; `learning_rate.advise_learning_rate`.

Read it in this order: `finding` (what is reported, and which findings explain others),
`observations` (what is measured), `observer` (how it is measured, with one module for each kind of
subject: `models`, `optimizers`, `layers`, `inputs`, and the package `losses`), `sampling` (which
steps are observed, and when rules are applied), `rules` (what the numbers mean).

Where to make a change:

- When a rule reports, and its message: the module of its subject in ``rules``. The page that
  ``holdfast explain`` shows is in ``explain/learning_rules.md``.
- Which findings are hidden behind others: `finding.EXPLAINED_BY`.
- How often steps are observed, and when rules are applied to a run: `sampling`.
- A new measurement: a field in `observations`, filled in by the observer of its subject.

Not here: tracing NaN to its origin, clipping and loss spikes (`numerics`), and anything that acts
on a run (`guard`).
"""
