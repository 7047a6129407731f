"""Diagnose why a run does not learn: broken contracts, and steps, inputs or gradients off scale.

Entry points: `watch.watch` for any training loop; `observer.Observer`, which `watch` and the guard
drive; `alignment.report_alignment` for speech synthesisers; `learning_rate.advise_learning_rate`.

Read it in this order: `finding` (what is reported), `observations` (what is measured), `observer`
(how it is collected, one module per kind of subject: `models`, `optimizers`, `schedulers`,
`layers`, `inputs`, and `functions` with `losses`, `arguments`, `targets` and `sources` for losses),
`sampling` (which steps are looked at), `rules` (what the numbers mean), `explanations` (which
findings explain others).

Where to make a change:

- When a rule reports, and its sentence: the module of its subject in ``rules``. The page that
  ``holdfast explain`` shows is in ``explain/learning_rules.md``.
- Which findings are hidden behind others: `explanations.EXPLAINED_BY`.
- How densely steps are observed, and when a run is judged: `sampling`.
- A new measurement: a field in `observations`, filled in by the observer of its subject.

Not here: tracing NaN to its origin, clipping and loss spikes (`numerics`), and anything that acts
on a run (`guard`).
"""
