"""Diagnose why a run does not learn: broken contracts, and steps, inputs or gradients off scale.

Entry points: `watch.watch` for any training loop; `observer.Observer`, which `watch` and the guard
drive; `alignment.report_alignment` for speech synthesisers; `learning_rate.advise_learning_rate`.

Read it in this order: `finding` (what is reported), `observations` (what is measured), `observer`
(how it is collected, one module per kind of subject: `models`, `optimizers`, `schedulers`,
`layers`, `inputs`, and `functions` with `losses`, `arguments`, `targets` and `sources` for losses),
`sampling` (which steps are looked at), `rules` (what the numbers mean), `explanations` (which
findings explain others).

Not here: tracing NaN to its origin, clipping and loss spikes (`numerics`), and anything that acts
on a run (`guard`).
"""
