"""Reasons not to split a batch, and what a split promises.

`HAZARD_RULES` lists the reasons. Each rule looks at a `HazardCase`, which contains all that is
known about a loss function, and returns a `Hazard` or None. The policy may allow a hazard by name
(``Policy(allow_split_with=...)``); the batch is then split, but the split promises less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from holdfast.core.errors import BatchError
from holdfast.core.events.data import Promise
from holdfast.core.policy.kinds import SplitHazard
from holdfast.core.text import counted
from holdfast.guard.splitting.trial.split_result import SplitCheckResult
from holdfast.guard.splitting.weighting import Weighting

# The maximum number of weightings that a message about a coupled loss names.
_MAX_WEIGHTINGS_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class HazardCase:
    """What is known about a loss function and its models before a batch is split."""

    # The layers that compute statistics over the samples in their current mode, such as BatchNorm.
    mixing_layers: Sequence[nn.Module]
    # The names of buffers, other than running statistics, that a forward pass changes.
    changed_buffers: Sequence[str]
    # The combined result of all trials. None if there has been no trial.
    result: SplitCheckResult | None


@dataclass(frozen=True, slots=True)
class Hazard:
    """A reason why splitting a batch would, or may, change training."""

    # The name to include in ``Policy(allow_split_with=...)`` to split the batch anyway.
    name: SplitHazard
    why: str


def statistics_over_samples(case: HazardCase) -> Hazard | None:
    """BatchNorm and similar layers would see only the samples of a micro-batch."""
    if not case.mixing_layers:
        return None
    layers = counted(len(case.mixing_layers), f"{type(case.mixing_layers[0]).__name__} layer")
    return Hazard(
        "batch_norm",
        f"in training mode, {layers} would compute statistics over a micro-batch instead of the"
        " batch",
    )


def changed_buffer(case: HazardCase) -> Hazard | None:
    """A buffer that each forward pass updates would be updated once per micro-batch."""
    if not case.changed_buffers:
        return None
    return Hazard("buffers", f"each forward pass changes the buffer {case.changed_buffers[0]!r}")


def failed_trial(case: HazardCase) -> Hazard | None:
    """A failed trial proves nothing, so splitting may change the gradient."""
    if case.result is None or case.result.outcome != "unknown":
        return None
    return Hazard(
        "coupled_loss",
        f"a trial could not show whether splitting keeps the gradient ({case.result.why};"
        " set check_split=False if you know that it does)",
    )


def coupled_samples(case: HazardCase) -> Hazard | None:
    """In a trial, the parts of a batch had a different gradient from the whole batch."""
    if case.result is None or case.result.outcome != "coupled":
        return None
    return Hazard("coupled_loss", _describe_coupling(case.result))


Rule: TypeAlias = Callable[[HazardCase], Hazard | None]
# All hazards of a case count, but the first one that the policy does not allow is reported. What
# the layers of a model show is certain, so it comes before the result of a trial.
HAZARD_RULES: tuple[Rule, ...] = (
    statistics_over_samples,
    changed_buffer,
    failed_trial,
    coupled_samples,
)


def find_hazards(case: HazardCase) -> list[Hazard]:
    """Return the reasons not to split a batch, in the order of `HAZARD_RULES`."""
    hazards = [rule(case) for rule in HAZARD_RULES]
    return [hazard for hazard in hazards if hazard is not None]


def promise_of_split(
    hazards: Sequence[Hazard],
    result: SplitCheckResult | None,
    *,
    may_change_later: bool,
    has_dropout: bool,
) -> Promise:
    """Return what a split promises, if the policy allows all hazards.

    Args:
        hazards: The hazards of the split.
        result: The combined result of all trials. None if there has been no trial.
        may_change_later: Whether splitting may change the gradient later.
        has_dropout: Whether a layer of the models drops values in its current mode.
    """
    draws = "none" if result is None else result.draws
    # If samples share random numbers, splitting changes the variance of the loss, but not its
    # expected value.
    if hazards or may_change_later or draws in ("shared", "unknown"):
        return "changes training"
    if draws == "own" or has_dropout:
        return "equal in distribution"
    return "equal up to rounding"


def has_active_dropout(models: Iterable[nn.Module]) -> bool:
    """Return whether a layer of the models, such as dropout, drops values in its current mode."""
    return any(
        module.training and _dropout_rate(module) > 0
        for model in models
        for module in model.modules()
    )


def _dropout_rate(module: nn.Module) -> float:
    # Attention and recurrent layers have an attribute `dropout`, which other modules may use for
    # anything, such as a layer.
    rate: Any = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0.0)
    return rate if isinstance(rate, float) else 0.0


def refused_by_policy(micro_batch_size: int, hazard: Hazard) -> BatchError:
    """Return error H206 or H207 for a policy that sets the micro-batch size.

    Args:
        micro_batch_size: The number of samples that the policy sets.
        hazard: A hazard that the policy does not allow.
    """
    advice = ""
    if hazard.name == "coupled_loss":
        advice = (
            "if samples are independent but the items of the mean cannot be counted from the"
            " batch, return Loss(mean, items). If the loss compares samples, pass"
            " TwoPass(outputs, loss). If batches are padded to the longest sample, trim each"
            " part to its own longest sample and leave padding out of the mean"
            " (docs/how-to/out-of-memory.md). Otherwise, "
        )
    return BatchError(
        f"micro_batch_size={micro_batch_size}, and {hazard.why}",
        limit="splitting such a batch changes training",
        fix=(
            f'{advice}use micro_batch_size="auto" (which tries recompute before splitting), or'
            f" allow it with Policy(allow_split_with=({hazard.name!r},))."
        ),
        rule="H207" if hazard.name == "coupled_loss" else "H206",
    )


def _describe_coupling(result: SplitCheckResult) -> str:
    """Return a message on how much the gradients differ and which weightings were tried."""
    if result.why:
        return result.why
    difference = _describe_difference(result.difference)
    return f"the gradient over 4 samples {difference}{_describe_tried(result.failed)}"


def _describe_difference(share: float) -> str:
    if math.isnan(share):
        return "differs from the gradient over 3 + 1 of them in at least one batch"
    if math.isinf(share):
        return "is finite, but the gradient over 3 + 1 of them is not"
    percent = f"{share:.1%}" if share >= 1e-3 else f"{100 * share:.1g}%"
    return f"differs by {percent} from the gradient over 3 + 1 of them"


def _describe_tried(failed: Sequence[Weighting]) -> str:
    if not failed:
        return ""
    tried = ", weighted as a mean over samples"
    others = [str(weighting) for weighting in failed if weighting.kind not in ("samples", "sum")]
    if others:
        names = ", ".join(others[:_MAX_WEIGHTINGS_NAMED])
        if len(others) > _MAX_WEIGHTINGS_NAMED:
            names += f" and {len(others) - _MAX_WEIGHTINGS_NAMED} more"
        tried += f"; neither a sum nor a mean over {names} matches"
    return tried
