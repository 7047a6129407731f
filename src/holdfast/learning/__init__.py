"""Diagnose why a run does not learn, from usage errors to badly scaled updates and inputs.

Entry points: `watch.watch` for any training loop; `observer.Observer`, which `watch` and the guard
use; `alignment.report_alignment` for speech synthesis; `learning_rate.advise_learning_rate`.

Read the modules in this order:

1. `finding`: defines a finding, and which findings explain others.
2. `observations`: lists all measurements.
3. `observer`: takes the measurements, with one module per subject: `models`, `optimizers`,
   `layers`, `inputs`, and the package `losses`.
4. `sampling`: decides which steps are observed, and when rules are applied.
5. `rules`: interprets the measurements.

Where to make a change:

- To change when a rule reports, or its message, edit the module of its subject in ``rules``. The
  page that ``holdfast explain`` shows is in ``explain/learning_rules.md``.
- To change which findings are hidden by others, edit `finding.EXPLAINED_BY`.
- To change how often steps are observed, or when rules are applied, edit `sampling`.
- To add a measurement, add a field to `observations`, and set it in the observer of its subject.

Tracing NaN to its origin, clipping and loss spikes are in `numerics`. Code that acts on a run is in
`guard`.
"""
