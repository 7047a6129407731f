"""Give advice on how to scale the learning rate with the batch size.

The advice applies to losses that are averaged over the batch. This module never changes an
optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch.optim import Optimizer

from holdfast.core.errors import PolicyError

By = Literal["batch", "accumulation", "micro_batch"]
ScalingRule = Literal["linear", "square root", "none"]

GOYAL = "Goyal et al., arXiv 1706.02677"
MALLADI = "Malladi et al., arXiv 2205.10287"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """How to change an optimizer's settings for a new batch size.

    Args:
        rule: How the learning rate scales with the batch size.
        factor: The factor by which to multiply every learning rate.
        betas: New betas for each parameter group (``alpha`` for RMSprop). Empty to leave them
            unchanged.
        eps: New eps for each parameter group. Empty to leave it unchanged.
        reason: The reason for the advice, and the limits of the rule.
        source: The publication that the rule comes from, or an empty string if nothing changes.
    """

    rule: ScalingRule
    factor: float
    betas: tuple[tuple[float, ...], ...] = ()
    eps: tuple[float, ...] = ()
    reason: str
    source: str


def rate_of(group: Mapping[str, Any]) -> float:
    """Return the learning rate of a parameter group, or 1 if it has none."""
    rate = group.get("lr")
    return 1.0 if rate is None else float(rate)


def advise_learning_rate(optimizer: Optimizer, old_batch: int, new_batch: int, *, by: By) -> Advice:
    """Return how to change an optimizer's settings when the batch size changes.

    With the change, training on the same number of samples should behave as before.

    Args:
        optimizer: The optimizer to advise on.
        old_batch: The previous batch size.
        new_batch: The new batch size.
        by: The unit of the two sizes. ``"batch"``: samples per update, over all micro-batches and
            ranks. ``"accumulation"``: micro-batches per update. ``"micro_batch"``: samples per
            forward pass. The last two assume that the number of samples per update stays the same.

    Returns:
        The advised change, with the reason and the source.

    Raises:
        PolicyError: H105 if a batch size is not a whole number >= 1, or if `by` is not valid.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> advise_learning_rate(torch.optim.SGD([weight], lr=0.1), 256, 1024, by="batch").factor
        4.0
        >>> advise_learning_rate(torch.optim.AdamW([weight], lr=1e-3), 256, 1024, by="batch").factor
        2.0
        >>> optimizer = torch.optim.AdamW([weight], lr=1e-3)
        >>> advise_learning_rate(optimizer, 2, 8, by="accumulation").factor
        1.0
    """
    _check_size("old_batch", old_batch)
    _check_size("new_batch", new_batch)
    if by not in get_args(By):
        raise PolicyError(
            f"by={by!r}",
            limit=f"by must be one of {get_args(By)}",
            fix="pass the unit of the two batch sizes.",
            rule="H105",
        )
    if by != "batch":
        return _no_change(
            "an update still averages over the same samples. If the number of samples per update"
            " changes, pass by='batch' with the old and the new number"
        )
    ratio = new_batch / old_batch
    if ratio == 1:
        return _no_change("the batch size is the same")
    if isinstance(optimizer, torch.optim.SGD):
        return _linear(ratio)
    if _divides_by_mean_square(optimizer):
        return _square_root(optimizer, ratio)
    name = type(optimizer).__name__
    return _no_change(f"no published rule is known for {name}. Try the previous rate first")


def _divides_by_mean_square(optimizer: Optimizer) -> bool:
    """Return whether an optimizer divides by the root of a running mean square, as Adam does."""
    if isinstance(optimizer, torch.optim.RMSprop):
        return True
    return all("betas" in group and "eps" in group for group in optimizer.param_groups)


def _no_change(reason: str) -> Advice:
    """Return the advice to leave all settings unchanged."""
    return Advice(rule="none", factor=1.0, source="", reason=reason)


def _linear(ratio: float) -> Advice:
    """Return the advice for SGD: multiply the learning rate by the ratio of the batch sizes."""
    return Advice(
        rule="linear",
        factor=ratio,
        reason=(
            f"with {ratio:g} times as many samples per update, there are 1/{ratio:g} as many"
            f" updates, so each one has to move {ratio:g} times as far. Do not change the momentum."
            " The rule no longer holds if steps are large compared with the curvature (above 8192"
            " images in the source), and a high learning rate needs a warm-up"
        ),
        source=GOYAL,
    )


def _square_root(optimizer: Optimizer, ratio: float) -> Advice:
    """Return the advice for Adam and RMSprop: multiply the rate by the square root of the ratio."""
    decays = [
        group["betas"] if "betas" in group else (group["alpha"],)
        for group in optimizer.param_groups
    ]
    reason = (
        f"{type(optimizer).__name__} divides by the size of the gradient, which is mostly noise and"
        " shrinks with the square root of the batch size. Multiply the rate by"
        f" sqrt({ratio:g}), 1 - beta by {ratio:g} and eps by 1/sqrt({ratio:g})"
    )
    betas: tuple[tuple[float, ...], ...] = ()
    # A beta becomes 1 - ratio * (1 - beta), which must stay above 0.
    if all(ratio * (1 - decay) < 1 for group in decays for decay in group):
        betas = tuple(tuple(1 - ratio * (1 - decay) for decay in group) for group in decays)
    else:
        reason += f". Do not change the betas, because {ratio:g} x (1 - beta) would not be below 1"
    return Advice(
        rule="square root",
        factor=math.sqrt(ratio),
        betas=betas,
        eps=tuple(group["eps"] / math.sqrt(ratio) for group in optimizer.param_groups),
        reason=(
            f"{reason}. If the batch is so large that there is little noise, this rule changes the"
            " rate too little"
        ),
        source=MALLADI,
    )


def _check_size(name: str, value: object) -> None:
    """Raise H105 if a batch size is not a whole number >= 1."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return
    raise PolicyError(
        f"{name}={value!r}",
        limit="a batch size must be a whole number >= 1",
        fix="pass a positive integer.",
        rule="H105",
    )
