"""How long each phase of training may stand still.

Learned from the run above a floor, or as asked for. Pure.

A phase may take 8 times the longest that it took lately, and never less than its floor. What counts
is that something moves: a long evaluation that hands out batches moves with each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.core.errors import PolicyError, did_you_mean
from holdfast.recorder.progress import Phase

FLOORS: Mapping[Phase, float] = {
    Phase.STARTING: 900.0,
    Phase.FIRST_STEP: 1800.0,
    Phase.DATA_WAIT: 30.0,
    Phase.FORWARD_BACKWARD: 30.0,
    Phase.OPTIMIZER: 30.0,
    Phase.EVALUATION: 600.0,
    Phase.SAVING: 600.0,
    Phase.END_OF_EPOCH: 600.0,
    Phase.ENDING: 300.0,
}
"""Seconds. Steps repeat, so 30 s and what is learned suffice.

What comes once or seldom cannot be learned in time:
reading a data set into memory, compiling a large model, a metric over a whole test set, a
checkpoint on a network disk take minutes. (NVIDIA's resiliency extension allows 60 minutes before
the first step and 45 after it.)
"""

# As for the loader's workers: of 1 M heavy-tailed steps none is so much longer than the longest
# before
_FACTOR = 8.0
_ONCE = frozenset({Phase.STARTING, Phase.FIRST_STEP, Phase.ENDING})
_OTHERS = ("all", "moving")
_WINDOW_SECONDS, _WINDOW_COUNT = 3600.0, 256


def name_of(phase: Phase) -> str:
    """Return the words for a phase, such as ``"data wait"``."""
    return (
        "forward/backward"
        if phase is Phase.FORWARD_BACKWARD
        else phase.name.lower().replace("_", " ")
    )


_PHASES = {name_of(phase): phase for phase in Phase}


@dataclass(frozen=True, slots=True, kw_only=True)
class HangLimits:
    """How long is too long.

    Args:
        fixed: Limits in seconds that were given for a phase; nothing is learned for these.
            `math.inf` is never.
        moving_seconds: How long a process is left alone that stands still but uses a processor, or
            moves bytes: to end a run that still computes is worse than to wait an hour.
    """

    fixed: Mapping[Phase, float] = field(default_factory=dict)
    moving_seconds: float = 3600.0

    @classmethod
    def parse(cls, settings: Sequence[str]) -> HangLimits:
        """Return the limits that a command line gives, such as ``["data wait=120", "saving=off"]``.

        Args:
            settings: ``PHASE=SECONDS`` each; ``off`` for no limit. Besides the phases there are
                ``all`` (each phase that is not named), and ``moving``, as the field of this class.

        Raises:
            PolicyError: H726 if there is no ``=``, H727 for an unknown phase, H728 for what is no
                positive number.
        """
        fixed: dict[Phase, float] = {}
        others: dict[str, float] = {}
        for name, number in map(_read, settings):
            if name == "all":
                fixed = dict.fromkeys(Phase, number) | fixed
            elif name in _PHASES:
                fixed[_PHASES[name]] = number
            else:
                others["moving_seconds"] = number
        return cls(fixed=fixed, **others)

    def floor(self, phase: Phase) -> float:
        """Return the least that a phase may take, in seconds."""
        return self.fixed.get(phase, FLOORS[phase])

    def limit(self, phase: Phase, longest_seconds: float) -> float:
        """Return what a phase may take, in seconds, if it took so long lately."""
        is_learned = phase not in self.fixed and phase not in _ONCE
        return max(self.floor(phase), _FACTOR * longest_seconds if is_learned else 0.0)


def _read(setting: str) -> tuple[str, float]:
    left, equals, right = setting.partition("=")
    name = " ".join(left.lower().replace("_", " ").replace("-", " ").split())
    name = "forward/backward" if name in ("forward backward", "forward", "backward") else name
    known = [*_PHASES, *_OTHERS]
    if not equals:
        raise PolicyError(
            f"{setting!r} is no limit",
            limit="a limit is written PHASE=SECONDS",
            fix="for instance --hang-limit 'data wait=120', or 'saving=off'.",
            rule="H726",
        )
    if name not in known:
        raise PolicyError(
            f"{left.strip()!r} is no phase",
            limit=f"there are {', '.join(known)}",
            fix=did_you_mean(name, known, otherwise="take one of these."),
            rule="H727",
        )
    text = right.strip()
    try:
        number = math.inf if text.lower() in ("off", "none") else float(text.removesuffix("s"))
    except ValueError:
        number = math.nan
    if not number > 0:
        limit = "it takes a number of seconds above 0, or 'off'"
        raise PolicyError(
            f"{name}={text}", limit=limit, fix=f"for instance '{name}=120'.", rule="H728"
        )
    return name, number


@dataclass(slots=True)
class _Longest:
    """The longest of what ended lately: in this window of time and the one before."""

    began: float
    count: int = 0
    now: float = 0.0
    before: float = 0.0


class LearnedLimits:
    """The limits of one process, as they follow from how it trains.

    A window closes after an hour in which a phase ended at least 256 times: what comes seldom is
        never forgotten, and
    what comes with each step is forgotten after one to two hours.
    """

    def __init__(self, limits: HangLimits) -> None:
        self._limits = limits
        self._longest: dict[Phase, _Longest] = {}

    def ended(self, phase: Phase, seconds: float, now: float) -> None:
        """Note that a phase, or a part of it that made progress, took so long.

        `now`: any monotonic clock.
        """
        kept = self._longest.setdefault(phase, _Longest(now))
        if now - kept.began >= _WINDOW_SECONDS and kept.count >= _WINDOW_COUNT:
            kept.before, kept.now, kept.began, kept.count = kept.now, 0.0, now, 0
        kept.count += 1
        kept.now = max(kept.now, seconds)

    def limit(self, phase: Phase) -> float:
        """Return how long a phase may stand still, in seconds."""
        kept = self._longest.get(phase)
        return self._limits.limit(phase, 0.0 if kept is None else max(kept.now, kept.before))
