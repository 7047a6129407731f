"""Time limits for the phases of training, learned from the run or set by the user.

A limit applies to the time without progress, not to the whole phase: a long evaluation makes
progress with every batch. The learned limit is 8 times the longest recent duration, but at least
the phase's minimum. This module reads no clock and no files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.core.errors import PolicyError, did_you_mean
from holdfast.recorder.progress import ProcessPhase

# Minimum limit of each phase, in seconds. 30 s is enough for the phases of a step, because steps
# repeat and a longer limit is soon learned. A phase that occurs only once or rarely gets a long
# minimum, because its duration cannot be learned in time: loading a dataset into memory, compiling
# a large model, computing a metric on a test set or writing a checkpoint to a network disk takes
# minutes.
# (NVIDIA's resiliency extension allows 60 minutes before the first step and 45 minutes after it.)
FLOORS: Mapping[ProcessPhase, float] = {
    ProcessPhase.STARTING: 900.0,
    ProcessPhase.FIRST_STEP: 1800.0,
    ProcessPhase.DATA_WAIT: 30.0,
    ProcessPhase.FORWARD_BACKWARD: 30.0,
    ProcessPhase.OPTIMIZER: 30.0,
    ProcessPhase.EVALUATION: 600.0,
    ProcessPhase.SAVING: 600.0,
    ProcessPhase.END_OF_EPOCH: 600.0,
    ProcessPhase.ENDING: 300.0,
}
# Learned limit as a multiple of the longest recent duration; the same factor as for loader workers.
# Among a million steps with heavy-tailed durations, no step took this many times as long as the
# longest step before it.
_SLACK_FACTOR = 8.0
# These phases occur only once, so there is no duration to learn from.
_PHASES_SEEN_ONCE = frozenset({ProcessPhase.STARTING, ProcessPhase.FIRST_STEP, ProcessPhase.ENDING})
# Names of settings other than phases; see `HangLimits.parse`.
_OTHER_SETTINGS = ("all", "moving")
# Minimum length of a time window, in seconds and in durations; see `LearnedLimits`.
_WINDOW_SECONDS = 3600.0
_WINDOW_COUNT = 256


def phase_name(phase: ProcessPhase) -> str:
    """Return the name of a phase for messages, such as ``"data wait"``."""
    if phase is ProcessPhase.FORWARD_BACKWARD:
        return "forward/backward"
    return phase.name.lower().replace("_", " ")


_PHASES = {phase_name(phase): phase for phase in ProcessPhase}


@dataclass(frozen=True, slots=True, kw_only=True)
class HangLimits:
    """The user's time limits and the minimum limits, which apply to all processes.

    Args:
        fixed: Limits set by the user, in seconds, keyed by phase. They replace learned limits.
            `math.inf` means no limit.
        moving_seconds: How long a process without progress is left running while it uses CPU time
            or transfers data. Killing a run that still computes is worse than waiting for an hour.
    """

    fixed: Mapping[ProcessPhase, float] = field(default_factory=dict)
    moving_seconds: float = 3600.0

    @classmethod
    def parse(cls, settings: Sequence[str]) -> HangLimits:
        """Parse limits from the command line, such as ``["data wait=120", "saving=off"]``.

        Args:
            settings: Strings of the form ``PHASE=SECONDS``, or ``PHASE=off`` for no limit. Two
                other names are allowed: ``all`` sets every phase that is not named, and ``moving``
                sets `moving_seconds`.

        Raises:
            PolicyError: H726 if a setting contains no ``=``, H727 for an unknown phase, H728 if the
                limit is not a positive number.
        """
        limits = dict(map(_parse_setting, settings))
        moving_seconds = limits.pop("moving", cls().moving_seconds)
        fixed: dict[ProcessPhase, float] = {}
        if "all" in limits:
            fixed = dict.fromkeys(ProcessPhase, limits.pop("all"))
        fixed |= {_PHASES[name]: seconds for name, seconds in limits.items()}
        return cls(fixed=fixed, moving_seconds=moving_seconds)

    def floor(self, phase: ProcessPhase) -> float:
        """Return the minimum limit of a phase, in seconds."""
        return self.fixed.get(phase, FLOORS[phase])

    def limit(self, phase: ProcessPhase, longest_seconds: float) -> float:
        """Return the limit of a phase in seconds, given its longest recent duration."""
        if phase in self.fixed or phase in _PHASES_SEEN_ONCE:
            return self.floor(phase)
        return max(self.floor(phase), _SLACK_FACTOR * longest_seconds)


def _parse_setting(setting: str) -> tuple[str, float]:
    """Return the name and the seconds of a setting such as ``"data_wait=120s"``."""
    left, equals, right = setting.partition("=")
    if not equals:
        raise PolicyError(
            f"{setting!r} is not a limit",
            limit="a limit is written PHASE=SECONDS",
            fix="for example --hang-limit 'data wait=120' or 'saving=off'.",
            rule="H726",
        )
    name = " ".join(left.lower().replace("_", " ").replace("-", " ").split())
    if name in ("forward backward", "forward", "backward"):
        name = "forward/backward"
    names = [*_PHASES, *_OTHER_SETTINGS]
    if name not in names:
        raise PolicyError(
            f"{left.strip()!r} is not a phase",
            limit=f"the phases are {', '.join(names)}",
            fix=did_you_mean(name, names, otherwise="use one of these."),
            rule="H727",
        )
    text = right.strip()
    seconds = _parse_seconds(text)
    if not seconds > 0:
        raise PolicyError(
            f"{name}={text}",
            limit="a limit is a positive number of seconds, or 'off'",
            fix=f"for example '{name}=120'.",
            rule="H728",
        )
    return name, seconds


def _parse_seconds(text: str) -> float:
    """Parse a number of seconds; ``off`` becomes infinity, and invalid text becomes NaN."""
    if text.lower() in ("off", "none"):
        return math.inf
    try:
        return float(text.removesuffix("s"))
    except ValueError:
        return math.nan


@dataclass(slots=True)
class _LongestDuration:
    """The longest duration of a phase in the current and the previous time window."""

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
    """The time limits of one process, learned from its own training.

    The limit of a phase depends on its longest duration in the current and the previous time
    window. A window lasts at least an hour and contains at least 256 durations, so the durations of
    a rare phase are kept for a long time. Those of a phase that occurs in every step are forgotten
    after one to two hours.
    """

    def __init__(self, limits: HangLimits) -> None:
        self._limits = limits
        self._longest: dict[ProcessPhase, _LongestDuration] = {}

    def add_duration(self, phase: ProcessPhase, seconds: float, now: float) -> None:
        """Learn from the duration of a phase, or from the time between two signs of progress in it.

        Args:
            phase: The phase.
            seconds: The duration.
            now: The current time in seconds, on any monotonic clock.
        """
        self._longest.setdefault(phase, _LongestDuration(now)).add(seconds, now)

    def limit(self, phase: ProcessPhase) -> float:
        """Return how long a phase may go without progress, in seconds."""
        longest = self._longest.get(phase)
        return self._limits.limit(phase, 0.0 if longest is None else longest.seconds)
