"""What each policy field may be, and which fields exclude each other.

The values are merged before they come here (``policy_sources``); what the fields mean is said in ``policy``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal, get_args

from holdfast.core.errors import PolicyError

if TYPE_CHECKING:
    from holdfast.core.policy import Policy

SplitHazard = Literal["batch_norm", "buffers", "coupled_loss"]
ClipBy = Literal["global", "optimizer", "group"]
Precision = Literal["fp32", "bf16", "fp16"]
SpikeAction = Literal["off", "warn", "skip", "roll_back"]
Objective = Literal["minimize", "adversarial", "reinforcement"]
SchedulerInterval = Literal["step", "epoch"]


def check_policy(policy: Policy) -> None:
    """Check every field by itself, and then the fields against each other.

    Raises:
        PolicyError: H102 for a value, H109 for values that exclude each other.
    """
    for name, check in _CHECKS.items():
        value = getattr(policy, name)
        expected = check(value)
        if expected is not None:
            raise bad_value(name, value, expected)
    for what, because, fix in _contradictions(policy):
        raise PolicyError(what, limit=because, fix=fix, rule="H109")


def bad_value(name: str, value: object, expected: str) -> PolicyError:
    """Return the error about a value, H102.

    Args:
        name: Of the field, the variable or the option.
        value: What was given.
        expected: What is allowed, as the rest of the sentence "it must be".
    """
    return PolicyError(f"{name}={value!r}", limit=f"it must be {expected}", fix=f"pass {expected}.", rule="H102")


def _contradictions(policy: Policy) -> Iterator[tuple[str, str, str]]:
    """Yield what a policy asks for with one field and rules out with another, why that is so, and the fix."""
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
    if policy.allow_split_with and policy.micro_batch_size is None:
        what = f"allow_split_with={policy.allow_split_with!r} with micro_batch_size=None"
        yield what, "no batch is ever split", "use micro_batch_size='auto', or allow nothing."
    if policy.forecast_micro_batch_size is not None and policy.micro_batch_size != "auto":
        what = f"forecast_micro_batch_size={policy.forecast_micro_batch_size} with "
        what += f"micro_batch_size={policy.micro_batch_size!r}"
        yield what, "a size that is given is not forecast", 'use micro_batch_size="auto", or drop the forecast.'
    by_spikes = policy.spike_action == "roll_back" and policy.objective == "minimize"
    by_nonfinite = policy.nonfinite_patience is not None and policy.max_rollbacks > 0
    if policy.rollback_lr_factor is not None and not (by_spikes or by_nonfinite):
        what = f"rollback_lr_factor={policy.rollback_lr_factor!r} in a run that never rolls back"
        because = "neither spikes nor non-finite steps lead to a rollback"
        yield what, because, "set nonfinite_patience and max_rollbacks >= 1, or drop rollback_lr_factor."


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_micro_batch_size(value: object) -> str | None:
    fine = value is None or value == "auto" or _is_count(value)
    return None if fine else 'a whole number >= 1, "auto", or None to turn splitting off'


def _check_interval(value: object) -> str | None:
    fine = value is None or value == "auto" or _is_count(value)
    return None if fine else 'a whole number >= 1, "auto", or None to turn it off'


def _check_norm(value: object) -> str | None:
    # Zero would freeze training and a negative limit would climb the gradient (pytorch#31367).
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf):
        return None
    return "a finite number > 0, or None to turn clipping off"


def _check_count(value: object) -> str | None:
    return None if _is_count(value) else "a whole number >= 1"


def _check_count_or_none(value: object) -> str | None:
    return None if value is None or _is_count(value) else "a whole number >= 1, or None to turn it off"


def _check_flag(value: object) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def _check_recompute(value: object) -> str | None:
    if isinstance(value, tuple) and value and _check_texts(value) is None:
        return None
    return None if isinstance(value, bool) else "true, false, or names of modules"


def _check_rollbacks(value: object) -> str | None:
    return None if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else "a whole number >= 0"


def _check_fraction(value: object) -> str | None:
    if value is None or (isinstance(value, float) and 0 < value < 1):
        return None
    return "a number above 0 and below 1, or None to turn it off"


def _check_share(value: object) -> str | None:
    return None if isinstance(value, float) and 0 < value < 1 else "a number above 0 and below 1"


def _check_hours(value: object) -> str | None:
    fine = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
    return None if fine else "a finite number > 0"


def _check_minutes(value: object) -> str | None:
    return None if value is None or _check_hours(value) is None else "a finite number > 0, or None for no limit"


def _check_texts(value: object) -> str | None:
    fine = isinstance(value, tuple) and all(isinstance(item, str) and item for item in value)
    return None if fine else "a tuple of texts"


def _check_hazards(value: object) -> str | None:
    allowed = get_args(SplitHazard)
    fine = isinstance(value, tuple) and all(item in allowed for item in value)
    return None if fine else f"a tuple of some of {', '.join(map(repr, allowed))}"


def _check_choice(*allowed: object) -> Callable[[object], str | None]:
    def check(value: object) -> str | None:
        return None if value in allowed else "one of " + ", ".join(map(repr, allowed))

    return check


_CHECKS: dict[str, Callable[[object], str | None]] = {
    "micro_batch_size": _check_micro_batch_size,
    "grow_after_steps": _check_count,
    "forecast_micro_batch_size": _check_count_or_none,
    "forecast_peak_bytes": _check_count_or_none,
    "recompute": _check_recompute,
    "check_split": _check_flag,
    "allow_split_with": _check_hazards,
    "cpu_malloc_threshold_bytes": _check_count_or_none,
    "max_grad_norm": _check_norm,
    "clip_by": _check_choice(*get_args(ClipBy)),
    "adaptive_clip_factor": _check_norm,
    "provenance": _check_flag,
    "drop_nonfinite_samples": _check_flag,
    "nonfinite_patience": _check_count_or_none,
    "max_rollbacks": _check_rollbacks,
    "spike_action": _check_choice(*get_args(SpikeAction)),
    "spike_clip": _check_flag,
    "snapshot_interval_steps": _check_count_or_none,
    "rollback_lr_factor": _check_fraction,
    "diagnose": _check_flag,
    "objective": _check_choice(*get_args(Objective)),
    "frozen": _check_texts,
    "ignore_rules": _check_texts,
    "precision": _check_choice(*get_args(Precision)),
    "save_interval_steps": _check_interval,
    "save_interval_minutes": _check_minutes,
    "async_save": _check_flag,
    "save_overhead": _check_share,
    "mean_time_between_failures_hours": _check_hours,
    "keep_latest_k": _check_count,
    "scheduler_interval": _check_choice(*get_args(SchedulerInterval), None),
}
