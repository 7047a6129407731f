"""What each policy field may be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

from holdfast.core.errors import PolicyError

SplitHazard = Literal["batch_norm", "buffers", "coupled_loss"]
ClipBy = Literal["global", "optimizer", "group"]
Precision = Literal["fp32", "bf16", "fp16"]
SpikeAction = Literal["off", "warn", "skip", "roll_back"]
Objective = Literal["minimize", "adversarial", "reinforcement"]
SchedulerInterval = Literal["step", "epoch"]

_Check = tuple[str, Callable[[Any], bool]]
"""What is allowed, as the rest of the sentence "it must be", and whether a value is."""


def bad_value(name: str, value: object, expected: str) -> PolicyError:
    """Return the error about a value, H102; `expected` is what is allowed."""
    return PolicyError(f"{name}={value!r}", limit=f"it must be {expected}", fix=f"pass {expected}.", rule="H102")


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
_COUNT_OR_AUTO: _Check = (
    'a whole number >= 1, "auto", or None to turn it off',
    lambda value: value is None or value == "auto" or _whole(value),
)
_LIMIT: _Check = "a finite number > 0, or None to turn it off", lambda value: value is None or _positive(value)
_TEXTS: _Check = "a tuple of texts", _texts
_HAZARDS = get_args(SplitHazard)

CHECKS: dict[str, _Check] = {
    "micro_batch_size": _COUNT_OR_AUTO,
    "grow_after_steps": _COUNT,
    "forecast_micro_batch_size": _OPTIONAL_COUNT,
    "recompute": (
        "true, false, or names of modules",
        lambda value: isinstance(value, bool) or (bool(value) and _texts(value)),
    ),
    "check_split": _FLAG,
    "allow_split_with": (
        f"a tuple of some of {', '.join(map(repr, _HAZARDS))}",
        lambda value: isinstance(value, tuple) and all(item in _HAZARDS for item in value),
    ),
    "cpu_malloc_threshold_bytes": _COUNT_OR_AUTO,
    "max_grad_norm": _LIMIT,
    "clip_by": _one_of(ClipBy),
    "provenance": _FLAG,
    "drop_nonfinite_samples": _FLAG,
    "nonfinite_patience": _OPTIONAL_COUNT,
    "max_rollbacks": ("a whole number >= 0", lambda value: _whole(value, 0)),
    "spike_action": _one_of(SpikeAction),
    "snapshot_interval_steps": _OPTIONAL_COUNT,
    "diagnose": _FLAG,
    "objective": _one_of(Objective),
    "frozen": _TEXTS,
    "ignore_rules": _TEXTS,
    "precision": _one_of(Precision),
    "save_interval_steps": _COUNT_OR_AUTO,
    "save_interval_minutes": _LIMIT,
    "async_save": _FLAG,
    "save_overhead": ("a number above 0 and below 1", lambda value: _positive(value) and value < 1),
    "mean_time_between_failures_hours": ("a finite number > 0", _positive),
    "keep_latest_k": _COUNT,
    "scheduler_interval": ("'step', 'epoch' or None", lambda value: value in ("step", "epoch", None)),
}
