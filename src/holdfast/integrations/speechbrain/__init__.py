"""Guarded training in SpeechBrain: a ``Brain`` whose steps are transactions of a guard.

    class ASR(HoldfastMixin, sb.Brain): ...

``compute_forward``, ``compute_objectives``, the hooks, ``freeze_optimizers``, precision, the
options of the recipe (``max_grad_norm``, ``nonfinite_patience``, ``grad_accumulation_factor``,
``precision``) and the checkpointer stay SpeechBrain's. As long as nothing goes wrong, the results
are SpeechBrain's to the bit, with three exceptions:

- All parameter groups of each optimizer are clipped. SpeechBrain clips the first group only.
- The last window of an epoch is stepped although it is not full. SpeechBrain drops its gradients.
- An optimizer that ``freeze_optimizers`` leaves out gets no gradients. SpeechBrain accumulates them
  until it is stepped again.

What else is different:

- ``nonfinite_patience`` is how many losses with NaN or Inf in a row are skipped before the run
  rolls back to a good state or ends. ``check_loss_isfinite`` and ``check_gradients`` are not
  called, since such a step is never made.
- ``on_fit_batch_end`` gets ``should_step=False`` for a step that was skipped. If a batch was split,
  it gets the last part with its outputs, and the loss of the whole batch. ``optimizer_step`` counts
  the steps that were made.
- A checkpoint within an epoch waits for the end of a window. After SIGTERM one is saved, and the
  process exits.
- A Brain with its own ``fit_batch`` (a GAN) calls `HoldfastMixin.guarded_step` in it. Whatever does
  not go through that is not guarded.
- Checkpoints are sealed when they are complete and verified before they are loaded.

Only a single process is supported.

Read in this order: ``brain`` (the mixin), ``padded_batches`` (how a batch is split),
``checkpoints`` (the folders).
"""

from holdfast.integrations.speechbrain.brain import HoldfastMixin

__all__ = ["HoldfastMixin"]
