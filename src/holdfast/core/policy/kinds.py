"""What each policy field may be.

Types that pydantic checks, each with the rest of the sentence "it must be".
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Gt, Le, Lt, MinLen, Predicate

from holdfast.core.errors import PolicyError, nearest
from holdfast.core.policy.sources import Sourced, named
from holdfast.core.secrets import without_secrets
from holdfast.core.text import sanitise

SplitHazard = Literal["batch_norm", "buffers", "coupled_loss"]
ClipBy = Literal["global", "optimizer", "group"]
Precision = Literal["fp32", "bf16", "fp16"]
SpikeAction = Literal["off", "warn", "skip", "roll_back"]
Objective = Literal["minimize", "adversarial", "reinforcement"]
SchedulerInterval = Literal["step", "epoch"]
StopSignal = Literal["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGQUIT"]

_BELOW = Lt(2**53)  # what is counted is put into records, and into floats
_WHOLE = "a whole number >= 1 and below 2**53"
_Rule = Annotated[str, Predicate(re.compile(r"H8[0-9]{2}").fullmatch)]
_Count = Annotated[int, Ge(1), _BELOW]
# As a limit zero would freeze training, and a negative one climb the gradient (pytorch#31367).
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
Texts = Annotated[_Texts, "a list of texts"]
Rules = Annotated[tuple[_Rule, ...], "a list of rules like H808"]
FlagOrTexts = Annotated[bool | Annotated[_Texts, MinLen(1)], "true, false, or names of modules"]
Hazards = Annotated[
    tuple[SplitHazard, ...], f"a list of some of {', '.join(map(repr, get_args(SplitHazard)))}"
]
StopSignals = Annotated[
    tuple[StopSignal, ...], f"a list of some of {', '.join(map(repr, get_args(StopSignal)))}"
]
ExitCodeOrNone = Annotated[
    Annotated[int, Ge(0), Le(255)] | None, "a whole number from 0 to 255, or None"
]
StepEpochOrNone = Annotated[SchedulerInterval | None, "'step', 'epoch' or None"]


@functools.cache
def _checker(kind: Any) -> tuple[Any, str]:
    """Return what checks the values of a type, and what is allowed in words."""
    from pydantic import TypeAdapter  # here: it takes 0.1 s, and a policy of defaults needs none

    said = [each for each in getattr(kind, "__metadata__", ()) if isinstance(each, str)]
    return TypeAdapter(kind), said[0] if said else f"one of {', '.join(map(repr, get_args(kind)))}"


def check(name: str, kind: Any, given: Any) -> Any:
    """Return the value of a field: an argument as it is, a list as a tuple.

    What the text of a `Sourced` means.

    Raises:
        PolicyError: H102, naming the field, its value, where that came from, and what is allowed.
    """
    checker, allowed = _checker(kind)
    argument = not isinstance(given, Sourced)
    for each in (
        (tuple(given) if isinstance(given, list) else given,) if argument else given.readings()
    ):
        with contextlib.suppress(ValueError):
            return checker.validate_python(each, strict=argument)
    value = given if argument else given.value
    shown = value if isinstance(value, str) and not argument else repr(value)
    shown = sanitise(*without_secrets([shown]), most=400)
    what = f"{name}={shown}{named(given)}"
    known = re.findall(r"['\"](\w+)['\"]", allowed)
    meant = (nearest(word, known) for word in re.findall(r"[\w-]+", shown) if word not in known)
    fix = next(
        (f"did you mean {near!r}?" for near in meant if near),
        "give such a value, or leave it out for the default.",
    )
    raise PolicyError(what, limit=f"it must be {allowed}", fix=fix, rule="H102")
