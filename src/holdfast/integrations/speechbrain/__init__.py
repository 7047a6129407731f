"""SpeechBrain: a ``Brain`` whose optimizer steps are transactions and whose checkpoints verify.

    class ASR(HoldfastMixin, sb.Brain): ...

``compute_forward``, ``compute_objectives``, the hooks, ``freeze_optimizers``, precision, the
options of the recipe (``max_grad_norm``, ``nonfinite_patience``, ``grad_accumulation_factor``,
``precision``) and the checkpointer stay SpeechBrain's. While nothing goes wrong, a training is
SpeechBrain's own, bit for bit, but for three things:

- the norm of each optimizer is over all its parameter groups, where SpeechBrain clips the first
  group only;
- the last window of an epoch is stepped although it is not full, where SpeechBrain drops its
  gradients;
- an optimizer that ``freeze_optimizers`` leaves out gathers no gradients, where SpeechBrain adds
  them up until it is stepped again.

``nonfinite_patience`` is how many losses of NaN or Inf in a row are passed over before training
returns to a good state or ends. ``check_loss_isfinite`` and ``check_gradients`` are not called:
such a step is never made.

``on_fit_batch_end`` gets ``should_step=False`` for a step that was skipped, and of a batch that was
cut the last part with its outputs; the loss is that of all. ``optimizer_step`` counts steps that
were made. Checkpoints within an epoch wait for the end of a window. After SIGTERM there is one, and
the process ends. A Brain with a ``fit_batch`` of its own (a GAN) calls `HoldfastMixin.guarded_step`
there; what goes past it is not guarded.

One process; several are refused.
"""

from holdfast.integrations.speechbrain.brain import HoldfastMixin

__all__ = ["HoldfastMixin"]
