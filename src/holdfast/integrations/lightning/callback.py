"""What a callback can do in a Lightning training whose strategy is somebody else's: look, record, leave out, verify.

It cannot retry a step, cut a batch or return to an earlier state: out of memory ends such a training.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from holdfast.integrations.lightning.files import VerifiedCheckpointIO, save_when_stopped
from holdfast.integrations.protocol import load
from holdfast.integrations.recording import Recording

load("lightning.pytorch")
from lightning.pytorch.callbacks import Callback  # noqa: E402


class HoldfastCallback(Callback):
    """Records every step, leaves out those with NaN or Inf, and has checkpoints verified.

    A step whose gradients are not finite moves no weight, buffer or random number: its gradients are emptied before
    the optimizer sees them, and after ``nonfinite_patience`` of them in a row training ends. The schedule goes on all
    the same. In fp16 Lightning's own scaler skips such steps; here they are only looked at. Checkpoints are written
    and read by a `VerifiedCheckpointIO`, unless another plugin does that; after SIGTERM there is one more.

    Args:
        holdfast_policy: As `holdfast.Guard` takes it; used are ``nonfinite_patience``, ``diagnose``, ``objective``,
            ``frozen`` and ``ignore_rules``.
        holdfast_run_dir: Where it is recorded; None: ``holdfast`` in the trainer's ``default_root_dir``.

    Example:
        ``Trainer(callbacks=[HoldfastCallback(holdfast_run_dir="runs/a")])``
    """

    def __init__(self, holdfast_policy: Any = None, holdfast_run_dir: str | os.PathLike[str] | None = None) -> None:
        self._recording = Recording(holdfast_policy, holdfast_run_dir, instead="HoldfastStrategy")
        self._loss: torch.Tensor | None = None  # of the batch, not read yet

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Let checkpoints be verified, before one is loaded."""
        # Anything but Lightning's plain one was chosen on purpose.
        if type(trainer.strategy.checkpoint_io).__name__ == "TorchCheckpointIO":
            trainer.strategy.checkpoint_io = VerifiedCheckpointIO(self._recording.emit)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Open the recording."""
        given = {"world_size": trainer.world_size, "global_step": trainer.global_step, "model": pl_module}
        self._recording.open(trainer.default_root_dir, by="Lightning", **given)
        if pl_module.automatic_optimization:
            self._recording.watch(pl_module, trainer.optimizers[0])

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Record the findings, and close the recording."""
        self._recording.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Close the recording, with the name of the exception in it; after SIGTERM there is a checkpoint."""
        if self._recording.is_open:
            save_when_stopped(trainer, exception)
        self._recording.close(exception)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Mark that a batch has begun."""
        self._recording.begin_batch(first=batch_idx % trainer.accumulate_grad_batches == 0)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        """Take the loss of the batch, which Lightning has divided by the batches of a step."""
        if pl_module.automatic_optimization:
            self._loss = loss.detach() * trainer.accumulate_grad_batches

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Empty gradients that hold NaN or Inf; after too many such steps in a row, raise H501."""
        loss, self._loss = self._loss, None
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        self._recording.before_step(optimizer, loss, scaled=scaled, undo=pl_module.automatic_optimization)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Mark how the batch has ended."""
        self._recording.end_step(trainer.global_step)
        self._recording.record_step()
