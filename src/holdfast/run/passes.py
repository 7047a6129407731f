"""Forward and backward over a batch, in one pass or several that add up to the same gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from holdfast.core.policy import Precision
from holdfast.data.splitting import fresh
from holdfast.run.loss import bad_items, read_loss
from holdfast.run.mixed_precision import LossScale, autocast
from holdfast.run.promises import LossFunction, Promises


class Passes:
    """Runs a loss function and its backward.

    Args:
        promises: Knows whether a loss function may be given the batch itself.
        loss_scale: Of fp16.
        device_type: Where autocast applies.
        precision: Autocast type.
    """

    def __init__(self, promises: Promises, loss_scale: LossScale, device_type: str, precision: Precision) -> None:
        self._promises = promises
        self._loss_scale = loss_scale
        self._device_type = device_type
        self._precision: Precision = precision

    def whole(
        self, batch: Any, size: int | None, loss_fn: LossFunction, inputs: Sequence[torch.Tensor] | None
    ) -> tuple[torch.Tensor, float | torch.Tensor]:
        """Run one pass, with no arithmetic of ours: bit-identical to a bare loop.

        Args:
            batch: The batch.
            size: Its samples, None if unknown.
            loss_fn: Of the batch.
            inputs: Where gradients may go; None: everywhere.

        Returns:
            The mean loss, shape ``()``, detached, and the items that it is over.
        """
        loss, items, _ = self._forward(batch, size, loss_fn)
        if not isinstance(items, torch.Tensor) and items <= 0:
            raise bad_items(items)
        self._backward(loss, inputs)
        return loss.detach(), items

    def parted(
        self,
        parts: Sequence[tuple[Any, int]],
        size: int,
        loss_fn: LossFunction,
        parameters: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor] | None,
    ) -> tuple[torch.Tensor, float]:
        """Run several passes, each weighted by its share of the items.

        Declared items are known only after each forward pass, so weights are relative to an estimate, and the
        gradients are corrected once at the end. For bare means the estimate is the truth.

        Args:
            parts: Micro-batches with their samples.
            size: Samples of all.
            loss_fn: Of a micro-batch.
            parameters: Whose gradients are corrected.
            inputs: As `whole`.

        Returns:
            As `whole`, over all parts.
        """
        estimate, total, loss = 0.0, 0.0, None
        for part, samples in parts:
            mean, items, declared = self._forward(part, samples, loss_fn)
            count = float(items)  # of a device tensor: a sync for each part, only when a batch is split
            if not 0 <= count < float("inf"):
                raise bad_items(count)
            if count == 0:
                continue  # a part without any item has no mean, and weighs nothing
            if not estimate:
                estimate = count * size / samples if declared else float(size)
            self._backward(mean * (count / estimate), inputs)
            total += count
            share = mean.detach() * count
            loss = share if loss is None else loss + share
        if loss is None:
            raise bad_items(0)
        if total != estimate:
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], estimate / total)
        return loss / total, total

    def _forward(self, part: Any, samples: int | None, loss_fn: LossFunction) -> tuple[torch.Tensor, Any, bool]:
        with autocast(self._device_type, self._precision), self._promises.pristine(loss_fn, fresh(part)) as given:
            returned = loss_fn(given)
        return read_loss(returned, samples)

    def _backward(self, loss: torch.Tensor, inputs: Sequence[torch.Tensor] | None) -> None:
        self._loss_scale.scale(loss).backward(inputs=inputs)  # type: ignore[no-untyped-call]
