"""Guarded training in SpeechBrain: a ``Brain`` whose steps are run as transactions.

    class ASR(HoldfastMixin, sb.Brain): ...

``compute_forward``, ``compute_objectives``, the hooks, ``freeze_optimizers``, precision, the
recipe's options (``max_grad_norm``, ``nonfinite_patience``, ``grad_accumulation_factor``,
``precision``) and the checkpointer work as in SpeechBrain. As long as nothing goes wrong, the
results are bit-for-bit identical to SpeechBrain's, with three exceptions:

- All parameter groups of each optimizer are clipped. SpeechBrain clips only the first group.
- The last window of an epoch is trained as a step even if it is incomplete. SpeechBrain discards
  its gradients.
- An optimizer that is frozen by ``freeze_optimizers`` gets no gradients. SpeechBrain accumulates
  them until the optimizer is stepped again.

Other differences:

- ``nonfinite_patience`` is the number of consecutive steps with NaN or Inf that are skipped before
  the run rolls back to a good state or ends. ``check_loss_isfinite`` and ``check_gradients`` are
  not called, because the guard detects NaN and Inf itself.
- ``on_fit_batch_end`` gets ``should_step=False`` for a skipped step. If a batch was split, the hook
  gets the last part, the outputs for that part, and the loss of the whole batch. Skipped steps do
  not increase ``optimizer_step``.
- A checkpoint within an epoch is delayed until the end of a window. After SIGTERM, a checkpoint is
  saved and the process exits.
- A Brain with its own ``fit_batch``, such as a GAN, must call `HoldfastMixin.guarded_step` in that
  method. Its other steps are not guarded.
- Checkpoints are sealed when they are complete, and verified before they are loaded.

Only a single process is supported.

Read in this order: ``brain`` (the mixin), ``padded_batches`` (how a batch is split),
``checkpoints`` (the checkpoint folders).
"""

from holdfast.integrations.speechbrain.brain import HoldfastMixin

__all__ = ["HoldfastMixin"]
