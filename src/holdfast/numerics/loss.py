"""What a loss function may return, and what is said when it returns something else."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from holdfast.core.containers import children_of, rebuilt
from holdfast.core.errors import BatchError

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Loss:
    """A mean over loss-bearing items, so that accumulation over micro-batches is exact for ragged
    data.

    A loss of several terms, each a mean over items of its own, is a sequence or a dict of these:
    the total is the sum of the means, and each is weighted by its own items when a batch is split.

    Args:
        mean: The mean loss over `items`, shape ``()``, with a graph.
        items: How many tokens, frames or samples the mean is over: a number or a tensor of one
            element. Of a weighted mean, the sum of the weights, which need not be whole.
        extra: More that came of the forward pass, by name, such as logits: it comes back in
            `StepResult.extra`. Of a batch in parts, tensors with a row for each sample are
            concatenated, numbers become their mean over the samples, so that a count does not stay
            one (return a row for each sample), of all else there is a list.

    Example:
        >>> Loss(torch.tensor(2.0), items=7).items
        7
    """

    mean: torch.Tensor
    items: int | float | torch.Tensor
    extra: Mapping[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class Terms:
    """What a loss function returned, checked."""

    means: tuple[torch.Tensor, ...]  # of each term, shape (); a loss that is not declared has one
    items: tuple[Any, ...]  # of each term: a number, or a tensor of shape () on a device
    declared: bool  # the loss function said the items
    # They came as a bare pair, and so must be whole: it could be meant as two losses
    counted: bool = False
    extra: Mapping[str, Any] | None = None  # detached

    def total(self) -> torch.Tensor:
        """Return the sum of the means, shape ``()``; of one term, that mean itself."""
        return sum(self.means[1:], self.means[0])

    def check_items(self) -> None:
        """Raise H203 if a term is known to be over nothing; items on a device are not looked at."""
        for items in self.items:
            if not isinstance(items, torch.Tensor) and items <= 0:
                raise bad_items(items)

    def read(self) -> tuple[list[float], list[float]]:
        """Return the means and the items as numbers. Cost: one host sync, or none on the CPU."""
        device, values = self.means[0].device, (*self.means, *self.items)
        tensors = [
            value.detach().to(device, torch.float64)
            for value in values
            if isinstance(value, torch.Tensor)
        ]
        numbers = iter(torch.stack(tensors).tolist())
        read = [
            next(numbers) if isinstance(value, torch.Tensor) else float(value) for value in values
        ]
        counts = read[len(self.means) :]
        for count in counts:
            check_count(count, counted=self.counted)
        return read[: len(self.means)], counts


def read_loss(returned: Any, samples: int | None, *, needs_graph: bool = True) -> Terms:
    """Check what a loss function returned.

    A scalar tensor, a `Loss`, a pair of mean and items, several `Loss`.

    H201 for something that is no scalar loss, H202 for one without a graph if it needs one, H203
    for items that are no count of zero or more. `samples` are the items of a bare scalar; None if
    unknown.
    """
    if (
        type(returned) is torch.Tensor
        and returned.requires_grad
        and not (returned.dim() or returned.is_complex())
    ):
        # The usual one
        return Terms(means=(returned,), items=(1 if samples is None else samples,), declared=False)
    pairs, declared = _pairs(returned, samples)
    counted = declared and isinstance(returned, tuple) and not isinstance(returned[0], Loss)
    means = tuple(_scalar(mean) for mean, _ in pairs)
    if needs_graph and not any(mean.requires_grad for mean in means):
        raise BatchError(
            "loss_fn returned a loss without a graph",
            limit="backward needs a loss that depends on parameters with requires_grad",
            fix=(
                "do not detach the loss, call .item() on it, or compute it under no_grad; check"
                " that the parameters of the model require gradients."
            ),
            rule="H202",
        )
    found = tuple(_count(items, counted=counted) for _, items in pairs)
    return Terms(
        means=means, items=found, declared=declared, counted=counted, extra=_extra(returned)
    )


def _extra(returned: Any) -> dict[str, Any] | None:
    """Return what the terms of a loss have brought beside it, without graphs."""
    terms = [returned] if isinstance(returned, Loss) else returned
    terms = (
        terms.values()
        if isinstance(terms, Mapping)
        else terms
        if isinstance(terms, (list, tuple))
        else ()
    )
    given: list[Any] = [
        term.extra for term in terms if isinstance(term, Loss) and term.extra is not None
    ]
    for each in given:
        if not isinstance(each, Mapping):
            limit, fix = (
                "it is a dict of what is given back by name",
                'such as Loss(mean, extra={"logits": logits}).',
            )
            raise BatchError(
                f"extra of a Loss is a {type(each).__name__}", limit=limit, fix=fix, rule="H201"
            )
    return {name: _detached(value) for extra in given for name, value in extra.items()} or None


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    children = children_of(value)
    return (
        value
        if not children
        else rebuilt(value, {key: _detached(each) for key, each in children.items()})
    )


def put_together(parts: Sequence[tuple[int | None, Mapping[str, Any] | None]]) -> dict[str, Any]:
    """Return what the parts of a batch have brought beside their losses, as the whole batch would
    have.

    Tensors with a row for each sample of their part are concatenated, numbers are averaged over the
    samples. What is neither is a list of what each part has given.
    """
    names = dict.fromkeys(name for _, extra in parts for name in extra or ())
    return {
        name: _joined([(size, extra[name]) for size, extra in parts if extra and name in extra])
        for name in names
    }


def _joined(values: list[tuple[int | None, Any]]) -> Any:
    if len(values) == 1:
        return values[0][1]
    if all(
        isinstance(value, torch.Tensor) and value.dim() and len(value) == size
        for size, value in values
    ):
        return torch.cat([value for _, value in values])
    if all(
        isinstance(v, (int, float)) or (isinstance(v, torch.Tensor) and v.numel() == 1)
        for _, v in values
    ):
        weights = [size or 1 for size, _ in values]
        return sum(w * v for w, (_, v) in zip(weights, values, strict=True)) / sum(weights)
    return [value for _, value in values]


def without_graph(run: Callable[[], _T]) -> _T:
    """Run a loss function for its value only: without a graph, unless it differentiates by itself.

    A penalty on a gradient (R1, WGAN-GP) needs a graph also where nobody wants that of the loss.
    """
    try:
        with torch.no_grad():
            return run()
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
    with torch.enable_grad():
        return run()


def _pairs(returned: Any, samples: int | None) -> tuple[list[tuple[Any, Any]], bool]:
    """Return mean and items of each term, and whether the items were declared."""
    if isinstance(returned, torch.Tensor):
        return [(returned, 1 if samples is None else samples)], False
    several = list(returned.values()) if isinstance(returned, Mapping) else returned
    if (
        isinstance(several, (list, tuple))
        and several
        and all(isinstance(term, Loss) for term in several)
    ):
        return [(term.mean, term.items) for term in several], True
    if isinstance(returned, Loss):
        return [(returned.mean, returned.items)], True
    if isinstance(returned, tuple) and len(returned) == 2:
        return [returned], True
    return [(returned, 1 if samples is None else samples)], False


def _scalar(mean: Any) -> torch.Tensor:
    if isinstance(mean, torch.Tensor) and mean.numel() == 1 and not mean.is_complex():
        return mean.reshape(()) if mean.dim() else mean
    holds_loss = hasattr(mean, "loss") or (isinstance(mean, Mapping) and "loss" in mean)
    raise BatchError(
        f"loss_fn returned {_describe(mean)}",
        limit=(
            "a scalar mean loss is needed, or Loss(mean=..., items=...), or a pair (mean, items),"
            " or a sequence or dict of nothing but Loss"
        ),
        fix=(
            "return the loss in it."
            if holds_loss
            else (
                "reduce it, for instance with .mean(), and return the tensor "
                "itself; of several losses return the sum, and nothing beside it."
            )
        ),
        rule="H201",
    )


def _count(items: Any, *, counted: bool) -> Any:
    if isinstance(items, torch.Tensor):
        if (
            items.numel() != 1
            or items.requires_grad
            or items.is_complex()
            or items.dtype == torch.bool
        ):
            raise bad_items(items)
        items = items.detach().reshape(())
        if items.device.type != "cpu":
            return items  # a look at it would be a sync: it is read along with the gradients
        items = items.item()
    if isinstance(items, np.generic):
        items = items.item()
    if not isinstance(items, (int, float)) or isinstance(items, bool):
        raise bad_items(items)
    check_count(items, counted=counted)
    return items


def check_count(items: float, *, counted: bool) -> None:
    """Raise H203 unless a mean can be over so many items (`counted`: whole ones).

    None at all is for the caller.
    """
    if not 0 <= items < math.inf or (counted and items != int(items)):
        raise bad_items(items)


def bad_items(items: Any) -> BatchError:
    """Return the error about items that are no count."""
    known = items is None or isinstance(items, (bool, int, float, str))
    what = (
        f"items={items!r:.40}"
        if known
        else f"loss_fn returned a loss and, as its items, {_describe(items)}"
    )
    return BatchError(
        what,
        limit=(
            "a pair is read as (mean, items): the mean loss, and the positive number of items that"
            " it is over"
        ),
        fix=(
            "if these are two losses: return loss_a + loss_b. If it is a count: a whole number of"
            " tokens, frames or samples, such as int(mask.sum()), and leave out batches without"
            " any. All else: return the loss alone. Loss(mean, items=...) takes a sum of weights"
            " too."
        ),
        rule="H203",
    )


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        graph = " with a graph" if value.requires_grad else ""
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}{graph}"
    size = f" of {len(value)}" if isinstance(value, (tuple, list)) else ""
    return f"a {type(value).__name__}{size}"
