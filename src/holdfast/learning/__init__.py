"""Diagnose why a run does not learn, from usage errors to badly scaled updates and inputs.

Entry points: `watch.watch` for any training loop; `observer.Observer`, which `watch` and the guard
use; `alignment.report_alignment` for speech synthesis; `learning_rate.advise_learning_rate`.

Read the modules in this order:

1. `finding`: defines a finding, and which findings explain others.
2. `observations`: lists all measurements.
3. `measurements`: carries what is measured on the device to the host, which reads it later.
4. `observer`: takes the measurements, with one module per subject: `models`, `optimizers`,
   `layers`, `inputs`, and the package `losses`.
5. `sampling`: decides which steps are observed, and when rules are applied.
6. `rules`: interprets the measurements.

Where to make a change:

- To change when a rule reports, or its message, edit the module of its subject in ``rules``. The
  page that ``holdfast explain`` shows is in ``explain/learning_rules.md``.
- To change which findings are hidden by others, edit `finding.EXPLAINED_BY`.
- To change how often steps are observed, or when rules are applied, edit `sampling`.
- To add a measurement, add a field to `observations`. In the observer of its subject, a method
  ``measure_...`` computes it on the device without reading it, and a method ``note_...`` sets the
  field.

Tracing NaN to its origin, clipping and loss spikes are in `numerics`. Code that acts on a run is in
`guard`.
"""
