"""What to do to the learning rate when the batch changes, for losses that are means over the
batch. Advice only.
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
Rule = Literal["linear", "square root", "none"]

_GOYAL = "Goyal et al., arXiv 1706.02677"
_MALLADI = "Malladi et al., arXiv 2205.10287"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to change."""

    rule: Rule  # how the rate follows the batch
    factor: float  # what every learning rate is multiplied by
    # By parameter group (alpha of RMSprop); empty: leave them
    betas: tuple[tuple[float, ...], ...] = ()
    eps: tuple[float, ...] = ()  # by parameter group; empty: leave it
    reason: str  # why, and where the rule ends
    source: str  # where it was published; empty for no change


def rate_of(group: Mapping[str, Any]) -> float:
    """Return the learning rate of a group of parameters.

    1 where the optimizer finds its steps without one.
    """
    rate = group.get("lr")
    return 1.0 if rate is None else float(rate)


def advise_learning_rate(optimizer: Optimizer, old_batch: int, new_batch: int, *, by: By) -> Advice:
    """Return what to change so that training behaves as before, for the same number of samples.

    Args:
        optimizer: The one whose rate is asked for.
        old_batch: So many before.
        new_batch: So many now.
        by: What the two numbers count. ``"batch"``: samples of one update, over all micro-batches
            and ranks. ``"accumulation"``: micro-batches of one update, and ``"micro_batch"``:
            samples of one forward, while the samples of the update stay the same.

    Raises:
        PolicyError: H105 for a number that is no whole number >= 1, or another `by`.

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
    _check(old_batch, new_batch, by)
    if by != "batch":
        return _unchanged(
            "one update still averages over the same samples, whatever number of pieces they pass"
            " in; if the samples of an update do change, ask by='batch' with their numbers"
        )
    k = new_batch / old_batch
    if k == 1:
        return _unchanged("the batch is the same")
    name, groups = type(optimizer).__name__, optimizer.param_groups
    if isinstance(optimizer, torch.optim.SGD):
        return Advice(
            rule="linear",
            factor=k,
            reason=(
                f"{k:g} x the samples in an update make 1/{k:g} x the updates, each of which has to"
                f" go {k:g} x as far; leave the momentum alone. It ends where a step is no longer"
                " small beside the curvature (above 8192 images there), and a large rate needs a"
                " warm-up"
            ),
            source=_GOYAL,
        )
    # Of Adam's kind: it divides by the root of a decaying mean of squares.
    if isinstance(optimizer, torch.optim.RMSprop) or all(
        {"betas", "eps"} <= set(group) for group in groups
    ):
        return _square_root(optimizer, name, k)
    return _unchanged(f"no published rule is known for {name}: try the old rate first")


def _unchanged(reason: str) -> Advice:
    return Advice(rule="none", factor=1.0, source="", reason=reason)


def _square_root(optimizer: Optimizer, name: str, k: float) -> Advice:
    decays = [
        group["betas"] if "betas" in group else (group["alpha"],)
        for group in optimizer.param_groups
    ]
    fits = all(k * (1 - decay) < 1 for betas in decays for decay in betas)
    ends = (
        ""
        if fits
        else f"; the decay rates are left alone, since {k:g} x (1 - beta) is no longer below 1"
    )
    return Advice(
        rule="square root",
        factor=math.sqrt(k),
        betas=(
            tuple(tuple(1 - k * (1 - decay) for decay in betas) for betas in decays) if fits else ()
        ),
        eps=tuple(group["eps"] / math.sqrt(k) for group in optimizer.param_groups),
        reason=(
            f"{name} divides by the size of a gradient that is mostly noise, which shrinks with the"
            f" root of the batch: the rate by sqrt({k:g}), 1 - beta by {k:g}, eps by"
            f" 1/sqrt({k:g}){ends}. Where the batch is so large that the noise is small, the rule"
            " says too little"
        ),
        source=_MALLADI,
    )


def _check(old_batch: object, new_batch: object, by: object) -> None:
    for name, value in (("old_batch", old_batch), ("new_batch", new_batch)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            limit = "it must be a whole number >= 1"
            raise PolicyError(f"{name}={value!r}", limit=limit, fix="pass a count.", rule="H105")
    if by not in get_args(By):
        limit, fix = f"it must be one of {get_args(By)}", "say what the two numbers count."
        raise PolicyError(f"by={by!r}", limit=limit, fix=fix, rule="H105")
