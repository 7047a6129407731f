"""Check the result of a loss function.

A loss function may return a scalar tensor (a mean over the samples), a `Loss`, a pair ``(mean,
items)``, or a sequence or dict of `Loss` objects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from holdfast.core.containers import children_of, rebuild
from holdfast.core.errors import BatchError

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Loss:
    """A mean loss, with the number of items over which the mean is taken.

    When a batch is split into micro-batches that contain different numbers of items, such as tokens
    that are not padding, the number of items is needed to combine their losses exactly.

    If a loss is the sum of several terms, each a mean over its own items, return a sequence or a
    dict of `Loss` objects. When a batch is split, each term is weighted by its own items.

    Args:
        mean: The mean loss over `items`, shape ``()``, with an autograd graph.
        items: The number of tokens, frames or samples over which the mean is taken, as a number or
            a tensor with one element. For a weighted mean, the sum of the weights, which need not
            be an integer.
        extra: Additional results of the forward pass, such as logits, keyed by name. They are
            returned in `StepResult.extra`. If the batch was split, tensors with one row per sample
            are concatenated, numbers are averaged over the samples, and any other value becomes a
            list with one entry per micro-batch. Since a count would be averaged too, return it as a
            tensor with one row per sample.

    Example:
        >>> Loss(torch.tensor(2.0), items=7).items
        7
    """

    mean: torch.Tensor
    items: int | float | torch.Tensor
    extra: Mapping[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class Terms:
    """The checked result of a loss function: a sum of one or more mean losses."""

    # The mean of each term, shape ``()``.
    means: tuple[torch.Tensor, ...]
    # The number of items of each term: a number, or a tensor of shape ``()`` on a device.
    items: tuple[Any, ...]
    # Whether the loss function returned the numbers of items. If not, the items are the samples of
    # the batch.
    declared: bool
    # Whether the numbers of items must be integers. A pair (mean, items) requires this, because a
    # user may return a pair of two losses by mistake.
    counted: bool = False
    # The detached additional results, keyed by name.
    extra: Mapping[str, Any] | None = None

    def total(self) -> torch.Tensor:
        """Return the sum of the means, shape ``()``. For a single term, this is its mean itself."""
        return sum(self.means[1:], self.means[0])

    def check_items(self) -> None:
        """Raise H203 if a term has no items. Numbers that are on a device are not checked."""
        for items in self.items:
            if not isinstance(items, torch.Tensor) and items <= 0:
                raise bad_items(items)

    def read(self) -> tuple[list[float], list[float]]:
        """Return the means and the numbers of items as Python numbers.

        Cost: one host sync, or none on the CPU.

        Raises:
            BatchError: H203 if a number of items is not valid.
        """
        device = self.means[0].device
        values = (*self.means, *self.items)
        tensors = [
            value.detach().to(device, torch.float64)
            for value in values
            if isinstance(value, torch.Tensor)
        ]
        tensor_values = iter(torch.stack(tensors).tolist())
        numbers = []
        for value in values:
            is_tensor = isinstance(value, torch.Tensor)
            numbers.append(next(tensor_values) if is_tensor else float(value))
        means = numbers[: len(self.means)]
        counts = numbers[len(self.means) :]
        for count in counts:
            check_count(count, counted=self.counted)
        return means, counts


def read_loss(returned: Any, samples: int | None, *, needs_graph: bool = True) -> Terms:
    """Check the result of a loss function, and return it as a sum of terms.

    Args:
        returned: The result: a scalar tensor, a `Loss`, a pair ``(mean, items)``, or a sequence or
            dict of `Loss` objects.
        samples: Number of samples in the batch, which is the number of items if the loss function
            does not return one. None if unknown.
        needs_graph: Whether the loss must have an autograd graph.

    Raises:
        BatchError: H201 if the result is not a scalar loss, H202 if it has no graph, H203 if a
            number of items is not a count of zero or more.
    """
    default_items = 1 if samples is None else samples
    if _is_usual_loss(returned):
        return Terms(means=(returned,), items=(default_items,), declared=False)
    losses = _losses_in(returned)
    is_pair = not losses and isinstance(returned, tuple) and len(returned) == 2
    pairs: list[tuple[Any, Any]] = [(returned, default_items)]
    if losses:
        pairs = [(loss.mean, loss.items) for loss in losses]
    elif is_pair:
        pairs = [returned]
    means = tuple(_scalar(mean) for mean, _ in pairs)
    if needs_graph and not any(mean.requires_grad for mean in means):
        raise BatchError(
            "loss_fn returned a loss without a graph",
            limit="backward needs a loss that depends on parameters with requires_grad",
            fix=(
                "do not detach the loss, call .item() on it or compute it under no_grad, and check"
                " that the model's parameters require gradients."
            ),
            rule="H202",
        )
    return Terms(
        means=means,
        items=tuple(_count(items, counted=is_pair) for _, items in pairs),
        declared=is_pair or bool(losses),
        counted=is_pair,
        extra=_extra(losses),
    )


def _is_usual_loss(returned: Any) -> bool:
    """Return whether the result is a real scalar tensor with a graph, the most common case."""
    if type(returned) is not torch.Tensor or not returned.requires_grad:
        return False
    return returned.dim() == 0 and not returned.is_complex()


def _losses_in(returned: Any) -> list[Loss]:
    """Return the `Loss` objects in a result. Empty if the result contains anything else."""
    if isinstance(returned, Loss):
        return [returned]
    terms = list(returned.values()) if isinstance(returned, Mapping) else returned
    if isinstance(terms, (list, tuple)) and all(isinstance(term, Loss) for term in terms):
        return list(terms)
    return []


def _extra(losses: Sequence[Loss]) -> dict[str, Any] | None:
    """Return the detached additional results of all terms, or None if there are none."""
    merged: dict[str, Any] = {}
    for loss in losses:
        if loss.extra is None:
            continue
        if not isinstance(loss.extra, Mapping):
            raise BatchError(
                f"extra of a Loss is a {type(loss.extra).__name__}",
                limit="extra must be a dict of additional results by name",
                fix='pass a dict, such as Loss(mean, items, extra={"logits": logits}).',
                rule="H201",
            )
        for name, value in loss.extra.items():
            merged[name] = _detached(value)
    return merged or None


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    children = children_of(value)
    if not children:
        return value
    return rebuild(value, {key: _detached(child) for key, child in children.items()})


def put_together(parts: Sequence[tuple[int | None, Mapping[str, Any] | None]]) -> dict[str, Any]:
    """Combine the additional results of all micro-batches into those of the whole batch.

    Tensors with one row per sample are concatenated, numbers are averaged over the samples, and any
    other value becomes a list with one entry per micro-batch.

    Args:
        parts: For each micro-batch, the number of samples (None if unknown) and the additional
            results (see `Loss`).
    """
    values: dict[str, list[Any]] = {}
    sizes: dict[str, list[int | None]] = {}
    for samples, extra in parts:
        for name, value in (extra or {}).items():
            values.setdefault(name, []).append(value)
            sizes.setdefault(name, []).append(samples)
    return {name: _combine(values[name], sizes[name]) for name in values}


def _combine(values: list[Any], sizes: list[int | None]) -> Any:
    """Combine the values of one additional result: concatenate or average them, or list them.

    Args:
        values: One value per micro-batch.
        sizes: The number of samples in each micro-batch, or None if unknown.
    """
    if len(values) == 1:
        return values[0]
    if all(_has_rows(value, samples) for value, samples in zip(values, sizes, strict=True)):
        return torch.cat(values)
    if all(_is_number(value) for value in values):
        weights = [samples or 1 for samples in sizes]
        weighted = [weight * value for weight, value in zip(weights, values, strict=True)]
        return sum(weighted) / sum(weights)
    return values


def _has_rows(value: Any, samples: int | None) -> bool:
    """Return whether a value is a tensor with one row per sample."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == samples


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float))


def without_graph(run: Callable[[], _T]) -> _T:
    """Run a loss function whose autograd graph is not needed, and return its result.

    The function runs under ``no_grad``. If that fails, it runs again with gradients enabled,
    because some losses call autograd themselves, such as the gradient penalties R1 and WGAN-GP.
    """
    try:
        with torch.no_grad():
            return run()
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
    with torch.enable_grad():
        return run()


def _scalar(mean: Any) -> torch.Tensor:
    """Return a mean loss, reshaped to ``()``. Raise H201 if it is not a real scalar tensor."""
    if isinstance(mean, torch.Tensor) and mean.numel() == 1 and not mean.is_complex():
        return mean.reshape(()) if mean.dim() else mean
    if hasattr(mean, "loss") or (isinstance(mean, Mapping) and "loss" in mean):
        fix = "return the loss that it contains."
    else:
        fix = (
            "reduce the loss to a scalar tensor, for example with .mean(). If there are several"
            " losses, return only their sum."
        )
    raise BatchError(
        f"loss_fn returned {_describe(mean)}",
        limit=(
            "loss_fn must return a scalar mean loss, Loss(mean=..., items=...), a pair (mean,"
            " items), or a sequence or dict of Loss objects"
        ),
        fix=fix,
        rule="H201",
    )


def _count(items: Any, *, counted: bool) -> Any:
    """Check a number of items, and convert it to a Python number.

    A tensor on a device is returned without reading its value, because that would need a host sync.
    """
    if isinstance(items, torch.Tensor):
        is_number = items.numel() == 1 and not items.is_complex() and items.dtype != torch.bool
        if not is_number or items.requires_grad:
            raise bad_items(items)
        items = items.detach().reshape(())
        if items.device.type != "cpu":
            return items
        items = items.item()
    if isinstance(items, np.generic):
        items = items.item()
    if not isinstance(items, (int, float)) or isinstance(items, bool):
        raise bad_items(items)
    check_count(items, counted=counted)
    return items


def check_count(items: float, *, counted: bool) -> None:
    """Raise H203 if a value cannot be a number of items. `Terms.check_items` rejects zero.

    Args:
        items: The value to check.
        counted: Whether the value must be an integer.
    """
    is_in_range = 0 <= items < math.inf
    if not is_in_range or (counted and items != int(items)):
        raise bad_items(items)


def bad_items(items: Any) -> BatchError:
    """Return the error H203 for a value that is not a valid number of items."""
    if items is None or isinstance(items, (bool, int, float, str)):
        problem = f"items={items!r:.40}"
    else:
        problem = f"loss_fn returned a loss and, as its items, {_describe(items)}"
    return BatchError(
        problem,
        limit=(
            "a pair means (mean, items): the mean loss, and the positive number of items over which"
            " the mean is taken"
        ),
        fix=(
            "to return two losses, return loss_a + loss_b. To return a count, use a whole number of"
            " tokens, frames or samples, such as int(mask.sum()), and skip batches without any."
            " Otherwise return only the loss. Loss(mean, items=...) also accepts a sum of weights."
        ),
        rule="H203",
    )


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        graph = " with a graph" if value.requires_grad else ""
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}{graph}"
    size = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    return f"a {type(value).__name__}{size}"
