"""What each policy field may be, and which fields exclude each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, get_args

from holdfast.core.errors import PolicyError

if TYPE_CHECKING:
    from holdfast.core.policy import Policy

SplitHazard = Literal["batch_norm", "buffers", "coupled_loss"]
ClipBy = Literal["global", "optimizer", "group"]
Precision = Literal["fp32", "bf16", "fp16"]
SpikeAction = Literal["off", "warn", "skip", "roll_back"]
Objective = Literal["minimize", "adversarial", "reinforcement"]
SchedulerInterval = Literal["step", "epoch"]

_Check = tuple[str, Callable[[Any], bool]]
"""What is allowed, as the rest of the sentence "it must be", and whether a value is."""


def check_policy(policy: Policy) -> None:
    """Check every field by itself, and then the fields against each other.

    Raises:
        PolicyError: H102 for a value, H109 for values that exclude each other.
    """
    for name, (allowed, is_allowed) in _CHECKS.items():
        value = getattr(policy, name)
        if not is_allowed(value):
            raise bad_value(name, value, allowed)
    for what, because, fix in _contradictions(policy):
        raise PolicyError(what, limit=because, fix=fix, rule="H109")


def bad_value(name: str, value: object, expected: str) -> PolicyError:
    """Return the error about a value, H102; `expected` is what is allowed."""
    return PolicyError(f"{name}={value!r}", limit=f"it must be {expected}", fix=f"pass {expected}.", rule="H102")


def _contradictions(policy: Policy) -> Iterator[tuple[str, str, str]]:
    """Yield what a policy asks for with one field and rules out with another, why that is so, and the fix."""
    size = policy.micro_batch_size
    if policy.clip_by != "global" and policy.max_grad_norm is None:
        what = f"clip_by={policy.clip_by!r} with max_grad_norm=None"
        yield what, "there is no limit to clip to", "pass max_grad_norm, for instance 1.0, or clip_by='global'."
    if policy.save_interval_minutes is not None and policy.save_interval_steps is None:
        what = f"save_interval_minutes={policy.save_interval_minutes!r} with save_interval_steps=None"
        yield what, "no checkpoints are written", "pass save_interval_steps='auto' or a number, or drop the minutes."
    if policy.spike_clip and policy.spike_action == "off":
        what = "spike_clip=True with spike_action='off'"
        yield what, "spikes are not looked for", "use spike_action='warn' to clip spikes only."
    if policy.drop_nonfinite_samples and not policy.provenance:
        what = "drop_nonfinite_samples=True with provenance=False"
        yield what, "the samples are not looked for", "leave provenance on: it finds the samples."
    if policy.allow_split_with and size is None:
        what = f"allow_split_with={policy.allow_split_with!r} with micro_batch_size=None"
        yield what, "no batch is ever split", "use micro_batch_size='auto', or allow nothing."
    if policy.forecast_micro_batch_size is not None and size != "auto":
        what = f"forecast_micro_batch_size={policy.forecast_micro_batch_size} with micro_batch_size={size!r}"
        yield what, "a size that is given is not forecast", 'use micro_batch_size="auto", or drop the forecast.'
    by_spikes = policy.spike_action == "roll_back" and policy.objective == "minimize"
    by_nonfinite = policy.nonfinite_patience is not None and policy.max_rollbacks > 0
    if policy.rollback_lr_factor is not None and not (by_spikes or by_nonfinite):
        what = f"rollback_lr_factor={policy.rollback_lr_factor!r} in a run that never rolls back"
        because = "neither spikes nor non-finite steps lead to a rollback"
        yield what, because, "set nonfinite_patience and max_rollbacks >= 1, or drop rollback_lr_factor."


def _whole(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _positive(value: Any) -> bool:
    # As a limit zero would freeze training, and a negative one climb the gradient (pytorch#31367).
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _texts(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, str) and item for item in value)


def _one_of(kind: Any) -> _Check:
    allowed = get_args(kind)
    return f"one of {', '.join(map(repr, allowed))}", lambda value: value in allowed


_FLAG: _Check = "true or false", lambda value: isinstance(value, bool)
_COUNT: _Check = "a whole number >= 1", _whole
_OPTIONAL_COUNT: _Check = "a whole number >= 1, or None to turn it off", lambda value: value is None or _whole(value)
_STEPS: _Check = (
    'a whole number >= 1, "auto", or None to turn it off',
    lambda value: value is None or value == "auto" or _whole(value),
)
_LIMIT: _Check = "a finite number > 0, or None to turn it off", lambda value: value is None or _positive(value)
_TEXTS: _Check = "a tuple of texts", _texts
_HAZARDS = get_args(SplitHazard)

_CHECKS: dict[str, _Check] = {
    "micro_batch_size": _STEPS,
    "grow_after_steps": _COUNT,
    "forecast_micro_batch_size": _OPTIONAL_COUNT,
    "forecast_peak_bytes": _OPTIONAL_COUNT,
    "recompute": (
        "true, false, or names of modules",
        lambda value: isinstance(value, bool) or (bool(value) and _texts(value)),
    ),
    "check_split": _FLAG,
    "allow_split_with": (
        f"a tuple of some of {', '.join(map(repr, _HAZARDS))}",
        lambda value: isinstance(value, tuple) and all(item in _HAZARDS for item in value),
    ),
    "cpu_malloc_threshold_bytes": _OPTIONAL_COUNT,
    "max_grad_norm": _LIMIT,
    "clip_by": _one_of(ClipBy),
    "adaptive_clip_factor": _LIMIT,
    "provenance": _FLAG,
    "drop_nonfinite_samples": _FLAG,
    "nonfinite_patience": _OPTIONAL_COUNT,
    "max_rollbacks": ("a whole number >= 0", lambda value: _whole(value, 0)),
    "spike_action": _one_of(SpikeAction),
    "spike_clip": _FLAG,
    "snapshot_interval_steps": _OPTIONAL_COUNT,
    "rollback_lr_factor": (
        "a number above 0 and below 1, or None to turn it off",
        lambda value: value is None or (_positive(value) and value < 1),
    ),
    "diagnose": _FLAG,
    "objective": _one_of(Objective),
    "frozen": _TEXTS,
    "ignore_rules": _TEXTS,
    "precision": _one_of(Precision),
    "save_interval_steps": _STEPS,
    "save_interval_minutes": _LIMIT,
    "async_save": _FLAG,
    "save_overhead": ("a number above 0 and below 1", lambda value: _positive(value) and value < 1),
    "mean_time_between_failures_hours": ("a finite number > 0", _positive),
    "keep_latest_k": _COUNT,
    "scheduler_interval": ("'step', 'epoch' or None", lambda value: value in ("step", "epoch", None)),
}
