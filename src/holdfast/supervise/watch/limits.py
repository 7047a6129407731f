"""How long each phase of training may stand still: learned from the run, or as the user asks. Pure.

A phase may take 8 times the longest that it took recently, and never less than its floor. What
counts is that something moves: a long evaluation that hands out batches moves with each of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.core.errors import PolicyError, did_you_mean
from holdfast.recorder.progress import Phase

# Least limit of each phase, in seconds. Steps repeat, so 30 s suffice for their phases until more
# is learned. What comes once or rarely cannot be learned in time: reading a data set into memory,
# compiling a large model, a metric over a whole test set, a checkpoint on a network disk take
# minutes. (NVIDIA's resiliency extension allows 60 minutes before the first step and 45 after it.)
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
# As for the loader's workers: none of a million heavy-tailed steps took so many times the longest
# one before it.
_SLACK_FACTOR = 8.0
# These come once, so there is nothing to learn from.
_PHASES_SEEN_ONCE = frozenset({Phase.STARTING, Phase.FIRST_STEP, Phase.ENDING})
# Settings that are no phases; see `HangLimits.parse`.
_OTHER_SETTINGS = ("all", "moving")
_WINDOW_SECONDS = 3600.0
_WINDOW_COUNT = 256


def name_of(phase: Phase) -> str:
    """Return a phase in words, such as ``"data wait"``."""
    if phase is Phase.FORWARD_BACKWARD:
        return "forward/backward"
    return phase.name.lower().replace("_", " ")


_PHASES = {name_of(phase): phase for phase in Phase}


@dataclass(frozen=True, slots=True, kw_only=True)
class HangLimits:
    """How long is too long.

    Args:
        fixed: Limits in seconds that were given for a phase, for which nothing is learned.
            `math.inf` is no limit.
        moving_seconds: How long a process is left alone that makes no progress but uses a processor
            or moves bytes: ending a run that still computes is worse than waiting an hour.
    """

    fixed: Mapping[Phase, float] = field(default_factory=dict)
    moving_seconds: float = 3600.0

    @classmethod
    def parse(cls, settings: Sequence[str]) -> HangLimits:
        """Return the limits that a command line gives, such as ``["data wait=120", "saving=off"]``.

        Args:
            settings: Each is ``PHASE=SECONDS``, or ``PHASE=off`` for no limit. Besides the phases
                there are ``all`` (every phase that is not named), and ``moving``, the field of this
                class.

        Raises:
            PolicyError: H726 without ``=``, H727 for an unknown phase, H728 if the limit is not a
                positive number.
        """
        limits = dict(map(_parse_setting, settings))
        moving_seconds = limits.pop("moving", cls().moving_seconds)
        fixed: dict[Phase, float] = {}
        if "all" in limits:
            fixed = dict.fromkeys(Phase, limits.pop("all"))
        fixed |= {_PHASES[name]: seconds for name, seconds in limits.items()}
        return cls(fixed=fixed, moving_seconds=moving_seconds)

    def floor(self, phase: Phase) -> float:
        """Return the least limit of a phase, in seconds."""
        return self.fixed.get(phase, FLOORS[phase])

    def limit(self, phase: Phase, longest_seconds: float) -> float:
        """Return the limit of a phase in seconds, given the longest that it took recently."""
        if phase in self.fixed or phase in _PHASES_SEEN_ONCE:
            return self.floor(phase)
        return max(self.floor(phase), _SLACK_FACTOR * longest_seconds)


def _parse_setting(setting: str) -> tuple[str, float]:
    """Return the name and the seconds of a setting such as ``"data_wait=120s"``."""
    left, equals, right = setting.partition("=")
    if not equals:
        raise PolicyError(
            f"{setting!r} is no limit",
            limit="a limit is written PHASE=SECONDS",
            fix="for instance --hang-limit 'data wait=120', or 'saving=off'.",
            rule="H726",
        )
    name = " ".join(left.lower().replace("_", " ").replace("-", " ").split())
    if name in ("forward backward", "forward", "backward"):
        name = "forward/backward"
    names = [*_PHASES, *_OTHER_SETTINGS]
    if name not in names:
        raise PolicyError(
            f"{left.strip()!r} is no phase",
            limit=f"the phases are {', '.join(names)}",
            fix=did_you_mean(name, names, otherwise="use one of these."),
            rule="H727",
        )
    text = right.strip()
    seconds = _parse_seconds(text)
    if not seconds > 0:
        raise PolicyError(
            f"{name}={text}",
            limit="a limit is a number of seconds above 0, or 'off'",
            fix=f"for instance '{name}=120'.",
            rule="H728",
        )
    return name, seconds


def _parse_seconds(text: str) -> float:
    """Return a number of seconds; infinity for ``off``, NaN for what is no number."""
    if text.lower() in ("off", "none"):
        return math.inf
    try:
        return float(text.removesuffix("s"))
    except ValueError:
        return math.nan


@dataclass(slots=True)
class _LongestDuration:
    """The longest duration of a phase, in the present window of time and in the one before."""

    window_began: float
    count: int = 0
    in_window: float = 0.0
    in_window_before: float = 0.0

    def add(self, seconds: float, now: float) -> None:
        window_is_over = now - self.window_began >= _WINDOW_SECONDS
        if window_is_over and self.count >= _WINDOW_COUNT:
            self.in_window_before = self.in_window
            self.in_window = 0.0
            self.window_began = now
            self.count = 0
        self.count += 1
        self.in_window = max(self.in_window, seconds)

    @property
    def seconds(self) -> float:
        return max(self.in_window, self.in_window_before)


class LearnedLimits:
    """The limits of one process, learned from how it trains.

    A window closes after an hour in which a phase ended at least 256 times. So a phase that comes
    rarely is never forgotten, and one that comes with each step is forgotten after one to two
    hours.

    Args:
        limits: Floors, and what the user has fixed.
    """

    def __init__(self, limits: HangLimits) -> None:
        self._limits = limits
        self._longest: dict[Phase, _LongestDuration] = {}

    def add_duration(self, phase: Phase, seconds: float, now: float) -> None:
        """Learn that a phase, or a part of it that made progress, took this long.

        Args:
            phase: The phase that has ended.
            seconds: How long it took.
            now: The time on any monotonic clock, in seconds.
        """
        self._longest.setdefault(phase, _LongestDuration(now)).add(seconds, now)

    def limit(self, phase: Phase) -> float:
        """Return how long a phase may stand still, in seconds."""
        longest = self._longest.get(phase)
        return self._limits.limit(phase, 0.0 if longest is None else longest.seconds)
