"""What a loss function may return, and what is said when it returns something else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from holdfast.core.errors import BatchError


@dataclass(frozen=True, slots=True)
class Loss:
    """A mean over loss-bearing items, so that accumulation over micro-batches is exact for ragged data.

    Args:
        mean: The mean loss over `items`, shape ``()``, with a graph.
        items: How many tokens, frames or samples the mean is over: a number or a tensor of one element.

    Example:
        >>> Loss(torch.tensor(2.0), items=7).items
        7
    """

    mean: torch.Tensor
    items: int | float | torch.Tensor


def read_loss(returned: Any, samples: int | None, *, needs_graph: bool = True) -> tuple[torch.Tensor, Any, bool]:
    """Check what a loss function returned.

    Args:
        returned: A scalar tensor, a `Loss`, or a pair of mean and items.
        samples: Samples in the micro-batch, the items of a bare scalar; None if unknown.
        needs_graph: Whether a loss without a graph is an error.

    Returns:
        The mean, shape ``()``; the items; whether they were declared.

    Raises:
        BatchError: H201 for something that is no scalar loss, H202 for one without a graph, H203 for items
            that are not a number of zero or more.
    """
    declared = isinstance(returned, (Loss, tuple))
    if isinstance(returned, Loss):
        mean, items = returned.mean, returned.items
    elif isinstance(returned, tuple) and len(returned) == 2:
        mean, items = returned
    else:
        mean, items = returned, 1 if samples is None else samples
    if not isinstance(mean, torch.Tensor) or mean.numel() != 1 or mean.is_complex():
        raise BatchError(
            f"loss_fn returned {_describe(mean)}",
            limit="a scalar mean loss is needed, or Loss(mean=..., items=...), or a pair (mean, items)",
            fix="reduce it, for instance with .mean(), and return the tensor itself.",
            rule="H201",
        )
    if needs_graph and not mean.requires_grad:
        raise BatchError(
            "loss_fn returned a loss without a graph",
            limit="backward needs a loss that depends on parameters with requires_grad",
            fix="do not detach the loss, call .item() on it, or compute it under no_grad; check that the "
            "parameters of the model require gradients.",
            rule="H202",
        )
    if isinstance(items, torch.Tensor) and items.numel() == 1:
        items = items.detach().reshape(())
        if items.device.type == "cpu":
            items = items.item()  # free on the CPU; on a device it would be a sync
    if isinstance(items, np.generic):
        items = items.item()
    if not isinstance(items, torch.Tensor):
        _check_items(items)
    return mean.reshape(()), items, declared


def _check_items(items: Any) -> None:
    if isinstance(items, (int, float)) and not isinstance(items, bool) and math.isfinite(items) and items >= 0:
        return
    raise bad_items(items)


def bad_items(items: Any) -> BatchError:
    """Return the error about a number of items that no mean can be over."""
    return BatchError(
        f"items={items!r}",
        limit="the mean loss must be over a positive number of items",
        fix="return the number of tokens, frames or samples that the mean is over; leave out batches without any.",
        rule="H203",
    )


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
