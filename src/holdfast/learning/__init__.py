"""Why a run does not learn: violated contracts, and learning rates, inputs or gradients far off.

Entry points: `watch.watch` for any training loop; `observer.Observer`, which `watch` and the guard
drive; `alignment.report_alignment` for speech synthesisers; `learning_rate.advise_learning_rate`.

Read it in this order: `finding` (what is reported), `observations` (what is known about a run),
`observer` (how it is collected, with one module for each kind of subject: `models`, `optimizers`,
`schedulers`, `layers`, `inputs`, and `functions` with `losses`, `arguments`, `targets` and
`sources` for losses), `sampling` (in which steps), `rules` (what the numbers mean), `explanations`
(which finding explains which).

Not here: NaN traced to its origin, clipping and loss spikes (`numerics`), and everything that acts
on a run (`guard`).
"""
