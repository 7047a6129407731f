"""Guarded training in Lightning: a strategy for steps, and a plugin for checkpoint files.

    Trainer(strategy=HoldfastStrategy())                 # or "holdfast", once this is imported
    Trainer(strategy=HoldfastDDPStrategy(), devices=2)   # several processes; or "holdfast_ddp"
    Trainer(plugins=[VerifiedCheckpointIO()])            # checkpoint files only

With a strategy, ``training_step``, ``self.log``, hooks, accumulation, schedules, precision and
clipping still work as in Lightning, in the usual order. As long as nothing goes wrong, the results
are bit-for-bit identical to those of plain Lightning. These are the differences:

- When ``on_before_zero_grad`` is called, the gradients of the last step no longer exist.
- ``on_before_optimizer_step`` sees clipped gradients, unless ``configure_gradient_clipping`` is
  overridden or the clipping algorithm is ``"value"``.
- A scheduler with ``interval="step"`` does not advance when a step is skipped, although
  ``global_step`` counts that step.
- If a batch is split, ``training_step`` is called once for each part, and the logged values are
  means over the parts.

With ``accumulate_grad_batches``, each window of batches is one step, and each batch in the window
is a transaction.

Checkpoints contain the random state, so training resumes with the same dropout. With a
`holdfast.DataLoader`, it also resumes with the same batches. With torch's loader, the batches are
the same only if the checkpoint is from the end of an epoch.

Read in this order: ``strategy`` (opens the guard in ``fit`` and closes it), ``optimization``,
``automatic_optimization`` and ``manual_optimization`` (run the steps), ``step_logs`` (corrects
logged values when parts of a step are repeated), ``checkpoints`` (the checkpoint files),
``delayed_saves`` (when checkpoints are written), ``unsupported`` (settings that are refused).
"""

from holdfast.integrations.lightning.checkpoints import VerifiedCheckpointIO
from holdfast.integrations.lightning.strategy import HoldfastDDPStrategy, HoldfastStrategy

__all__ = ["HoldfastDDPStrategy", "HoldfastStrategy", "VerifiedCheckpointIO"]
