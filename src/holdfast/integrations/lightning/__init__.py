"""Guarded training in Lightning: a strategy for steps, and a plugin for checkpoint files.

    Trainer(strategy=HoldfastStrategy())                 # or "holdfast", once this is imported
    Trainer(strategy=HoldfastDDPStrategy(), devices=2)   # several processes; or "holdfast_ddp"
    Trainer(plugins=[VerifiedCheckpointIO()])            # checkpoint files only

With a strategy, Lightning still provides ``training_step``, ``self.log``, hooks, accumulation,
schedules, precision and clipping, in the same order. As long as nothing goes wrong, the results are
bit-exactly those of plain Lightning. Differences:

- When ``on_before_zero_grad`` is called, the gradients of the last step no longer exist.
- ``on_before_optimizer_step`` sees clipped gradients, unless ``configure_gradient_clipping`` is
  overridden or the clipping algorithm is ``"value"``.
- A scheduler with ``interval="step"`` does not advance when a step is skipped, although
  ``global_step`` counts that step.
- If a batch was split, ``training_step`` is called once for each part, and what it logs is the mean
  over the parts.

A window of ``accumulate_grad_batches`` is one step, and each of its batches is a transaction.

Checkpoints hold the random state, so training resumes with the same dropout. Whether it resumes
with the same batches depends on the loader: a `holdfast.DataLoader` always does, and torch's
loader, shuffled or not, only if the checkpoint is from the end of an epoch.

Read in this order: ``strategy`` (the guard's life within ``fit``), ``optimization``,
``automatic_optimization`` and ``manual_optimization`` (how a step is made), ``step_logs`` (what is
logged while parts of it are repeated), ``checkpoints`` (the files), ``delayed_saves`` (when they
are written), ``unsupported`` (what is refused).
"""

from holdfast.integrations.lightning.checkpoints import VerifiedCheckpointIO
from holdfast.integrations.lightning.strategy import HoldfastDDPStrategy, HoldfastStrategy

__all__ = ["HoldfastDDPStrategy", "HoldfastStrategy", "VerifiedCheckpointIO"]
