"""The types of policy fields, against which pydantic checks the values.

The string in a type's metadata describes the allowed values and completes the sentence "it must be
...". ``sources`` reads the values from files, environment variables and options.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Iterable
from datetime import timedelta
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Gt, Le, Lt, MinLen, Predicate

from holdfast.core.errors import PolicyError, nearest
from holdfast.core.policy.durations import is_time_limit
from holdfast.core.policy.sources import SourcedValue, describe_sources
from holdfast.core.secret_text import SecretText
from holdfast.core.secrets import SecretUrl, without_secrets
from holdfast.core.text import sanitise


def _some_of(choices: Any) -> str:
    """Describe the allowed values of a field that takes a list of the given choices."""
    return f"a list with any of {', '.join(map(repr, get_args(choices)))}"


SplitHazard = Literal["batch_norm", "buffers", "coupled_loss"]
ClipBy = Literal["global", "optimizer", "group"]
Precision = Literal["fp32", "bf16", "fp16"]
SpikeAction = Literal["off", "warn", "skip", "roll_back"]
Decide = Literal["auto", "now", "late"]
Objective = Literal["minimize", "adversarial", "reinforcement"]
SchedulerInterval = Literal["step", "epoch"]
StopSignal = Literal["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGQUIT"]

# Counts are below 2**53 because they are converted to floats in records, and floats represent whole
# numbers exactly only up to 2**53.
_BELOW = Lt(2**53)
_WHOLE = "a whole number >= 1 and below 2**53"
_Rule = Annotated[str, Predicate(re.compile(r"H8[0-9]{2}").fullmatch)]
_Count = Annotated[int, Ge(1), _BELOW]
# Limits must be positive: with a gradient norm limit of zero, the model would not train, and a
# negative limit would reverse the direction of the gradient (pytorch#31367).
_Positive = Annotated[float, Gt(0), Lt(math.inf)]
_Texts = tuple[Annotated[str, MinLen(1)], ...]

Flag = Annotated[bool, "true or false"]
Count = Annotated[_Count, _WHOLE]
CountOrZero = Annotated[int, Ge(0), _BELOW, "a whole number >= 0 and below 2**53"]
OptionalCount = Annotated[_Count | None, f"{_WHOLE}, or None to turn it off"]
CountOrAuto = Annotated[
    _Count | Literal["auto"] | None, f'{_WHOLE}, "auto", or None to turn it off'
]
Hours = Annotated[_Positive, "a finite number > 0"]
Limit = Annotated[_Positive | None, "a finite number > 0, or None to turn it off"]
Share = Annotated[float, Gt(0), Lt(1), "a number above 0 and below 1"]
Texts = Annotated[_Texts, "a list of strings"]
Rules = Annotated[tuple[_Rule, ...], "a list of rule ids such as H808"]
FlagOrTexts = Annotated[bool | Annotated[_Texts, MinLen(1)], "true, false, or module names"]
Hazards = Annotated[tuple[SplitHazard, ...], _some_of(SplitHazard)]
StopSignals = Annotated[tuple[StopSignal, ...], _some_of(StopSignal)]
ExitCodeOrNone = Annotated[
    Annotated[int, Ge(0), Le(255)] | None, "a whole number from 0 to 255, or None"
]
StepEpochOrNone = Annotated[SchedulerInterval | None, "'step', 'epoch' or None"]
NotifyOrNone = Annotated[
    Annotated[str, Predicate(str.strip)] | None,
    "a URL such as https://ntfy.sh/TOPIC, a command, or None",
]
UrlOrNone = Annotated[SecretUrl | None, "a URL such as s3://bucket/run, or None"]
TimeLimit = Annotated[
    timedelta | str | None,
    Predicate(is_time_limit),
    (
        "a time > 0 such as 11h30m, 90m, 45s, 1d2h, 11:30:00 or 1-02:00:00,"
        " 'auto', or None for no limit"
    ),
]

# Types whose values may be secrets.
_SECRET_KINDS = (NotifyOrNone,)
# Longer values are truncated in error messages.
_MAX_SHOWN_CHARACTERS = 400


def check(name: str, kind: Any, value: Any) -> Any:
    """Validate a field's value, convert it to the field's type and return it.

    Args:
        name: The name of the field.
        kind: The type of the field, which is one of the types above.
        value: Either a Python argument, which must already have that type (a list counts as a
            tuple), or a `SourcedValue`, whose string is converted.

    Returns:
        The value. A string that may be a secret is returned as a `SecretText`.

    Raises:
        PolicyError: H102 for an invalid value. The message names the field, the value, its source
            and the allowed values.
    """
    is_argument = not isinstance(value, SourcedValue)
    for reading in _readings(value):
        with contextlib.suppress(ValueError):
            valid = _type_adapter(kind).validate_python(reading, strict=is_argument)
            is_secret = kind in _SECRET_KINDS and isinstance(valid, str)
            return SecretText("".join(valid)) if is_secret else valid
    shown = _shown(value)
    allowed = _allowed(kind)
    raise PolicyError(
        f"{name}={shown}{describe_sources(value)}",
        limit=f"it must be {allowed}",
        fix=_fix_of_wrong_value(shown, allowed),
        rule="H102",
    )


def _readings(value: Any) -> Iterable[Any]:
    """Return the possible interpretations of a value, in the order in which to try them."""
    if isinstance(value, SourcedValue):
        return value.readings()
    if isinstance(value, list):
        return (tuple(value),)
    return (value,)


@functools.cache
def _type_adapter(kind: Any) -> Any:
    # Imported here because importing pydantic takes 0.1 s, and a policy without any values of its
    # own needs no validation.
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _allowed(kind: Any) -> str:
    """Describe a type's allowed values, to complete the sentence "it must be ..."."""
    for metadata in getattr(kind, "__metadata__", ()):
        if isinstance(metadata, str):
            return metadata
    return f"one of {', '.join(map(repr, get_args(kind)))}"


def _shown(value: Any) -> str:
    """Format a value as the user wrote it: strings verbatim, and arguments as Python literals."""
    is_argument = not isinstance(value, SourcedValue)
    raw_value = value if is_argument else value.value
    text = raw_value if isinstance(raw_value, str) and not is_argument else repr(raw_value)
    (text,) = without_secrets([text])
    return sanitise(text, most=_MAX_SHOWN_CHARACTERS)


def _fix_of_wrong_value(shown: str, allowed: str) -> str:
    """Return a fix that suggests the allowed word most similar to a word in the value, if any."""
    allowed_words = re.findall(r"['\"](\w+)['\"]", allowed)
    for word in re.findall(r"[\w-]+", shown):
        if word in allowed_words:
            continue
        meant = nearest(word, allowed_words)
        if meant is not None:
            return f"did you mean {meant!r}?"
    return "pass an allowed value, or omit it to use the default."
