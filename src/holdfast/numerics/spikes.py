"""Spikes and divergence in losses and gradient norms, and what to do about them.

Arithmetic on floats, no torch. A `SpikeDetector` measures how far a value lies above the usual
ones, in units of their own upward scatter:

- hard: loss and gradient norm lie far above the usual ones in the same step.
- diverged: the level of the recent losses has left its usual range.

Only finite, unsuspected values enter the statistics. ``benchmarks/spikes`` reports how many spikes
and divergences are detected.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from holdfast.core.containers import check_count, check_number
from holdfast.core.events.decisions import Decision, RollBack, SkipStep, Stop
from holdfast.core.policy.kinds import Objective, SpikeAction

# --- The window of usual values. The figures below were chosen on the design runs of
# ``benchmarks/spikes_runs``, unless another source is given.

# Values in the window. This is the window of OLMo-core's spike detection.
_WINDOW = 128
# The newest values are left out of the window, so that a slow change does not hide itself.
_LAG = 32
# Values in the window before anything is suspected.
_LEAST_WINDOW = 64
_KEPT_VALUES = 256
# Values between two evaluations of the window, each of which costs two sorts.
_REFRESH = 16

# --- Levels: medians of the newest losses.

_RECENT = 20
_SHORT = 7
# Steps between two evaluations of the levels.
_LEVEL_INTERVAL = 4

# --- How long a suspicion lasts.

# Steps without a further sign after which it ends.
_CALM_AFTER = 10
# Steps after which an odd level counts as permanent: two independent medians.
_ODD_FOR = 40
# Values after which the suspected values count as usual, unless the run diverged.
_MOST_SUSPECTED = 60
# Steps without a sign after which a state may be called good: some damage shows 20 to 40 steps
# later.
GOOD_AFTER = 50
# Calm steps after a rollback that show that the data is like before.
_RETURNED = 10
# Steps for which a harmless spike is remembered.
_SPIKE_MEMORY_STEPS = 10_000

# --- Distances above the middle, in units of the scatter. In 18,000 healthy steps of the design
# runs the recent level reached 1.2 at most, and loss and norm together 2.8 (logarithmic) and 6.9
# (linear).

# A norm is usual up to this distance.
_USUAL = 2.5
_FAR = 6.0
_FAR_LINEAR = 15.0
# A spike counts if it is this many times as far out as the second-largest harmless one.
_TAIL = 2.0
_SHORT_ODD = 1.8
_RAISED = 0.7
_GONE = 2.2
# Above the best level that the run ever had.
_DRIFTED = 3.5

# --- CUSUM (Page, 1954) of the losses in the upper quarter of the usual ones. Healthy losses move
# it by -0.2 a step on average; if three quarters of them lie there, it rises by 0.6 a step and is
# full after 20 steps.

_DRIFT_BACK = 0.6
_DRIFT_FULL = 12.0
_DRIFT_OVER = 6.0

# --- Least scatter and least rises, as shares of the value, so that a ripple in a very calm run
# raises no alarm. A loss must rise by 20 % and a norm by 82 % to be far, and a level by 28 % to be
# gone.

_LOSS_FLOOR = 0.03
_NORM_FLOOR = 0.1
_ODD_RISE = 0.1
_LEAST_RISE = 0.25
# The share of the run's gain that must be lost: losses of 1e-6 and 1e-4 are both fully trained.
_LEAST_LOSS = 0.1

# The largest number that the arithmetic below may reach, so that it stays finite.
_LARGEST = 1e300
_SMALLEST = 1e-300
_LARGEST_EXPONENT = 700.0

# Quantiles of the standard normal distribution, at 0.75, 0.95 and about 0.99.
_SIGMAS_AT_UPPER_QUARTILE = 0.6745
_SIGMAS_AT_95 = 1.645
_SIGMAS_AT_SECOND_LARGEST = 2.4


class Level(Enum):
    """How far a step stands out."""

    CALM = "calm"
    HARD = "hard"
    DIVERGED = "diverged"


class SpikeDetector:
    """Judges each step by its loss and its gradient norm, before it is committed.

    Nothing is suspected in the first 96 values of a key. `Level.DIVERGED` is returned once. Then
    either the caller rolls back and calls `return_to`, or the new level becomes the usual one, so
    no level is suspected forever. With any objective but ``"minimize"`` the level of the loss means
    nothing, and every step is calm.

    Cost: about 3 microseconds a step and no sync, since it takes numbers that are on the host.
    """

    def __init__(self, *, objective: Objective) -> None:
        self._minimizes = objective == "minimize"
        self._tracks: dict[str, _Track] = {}
        # Steps with finite values judged so far, over all keys. `return_to` reduces it.
        self.steps = 0

    def judge(self, key: str, loss: float, norm: float) -> Level:
        """Return how far a step stands out. NaN and Inf are not judged here.

        Args:
            key: Identifies the loss function. Losses with different meanings need different keys.
            loss: The mean loss of the step.
            norm: The L2 norm of all gradients before clipping.
        """
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return Level.CALM
        self.steps += 1
        if key not in self._tracks:
            self._tracks[key] = _Track()
        if not self._minimizes:
            return Level.CALM
        return self._tracks[key].judge(loss, norm, self.steps)

    def accepted(self, key: str, loss: float, norm: float) -> None:
        """Add the step that was judged last to the statistics, because it was committed."""
        if math.isfinite(loss) and math.isfinite(norm):
            self._tracks[key].accept(loss, norm, self.steps)

    def usual_norm(self, key: str) -> float | None:
        """Return the largest usual norm, 2.5 scatters above the middle, or None if unknown."""
        track = self._tracks.get(key)
        if track is None or track.norm is None:
            return None
        return track.norm.above(_USUAL)

    def is_calm(self) -> bool:
        """Return whether nothing is suspected, so that a checkpoint may be marked as good."""
        return self.suspicious_since() is None

    def suspicious_since(self) -> int | None:
        """Return the steps judged since the current suspicion began, or None if there is none.

        The step with the first sign is included.
        """
        first_signs = [
            track.suspected_since
            for track in self._tracks.values()
            if track.suspected_since is not None
        ]
        if not first_signs:
            return None
        return self.steps - min(first_signs) + 1

    def return_to(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the statistics of an earlier `state_dict` after a rollback."""
        self.load_state_dict(state_dict)
        for track in self._tracks.values():
            track.begin_after_rollback()

    def state_dict(self) -> dict[str, Any]:
        """Return all statistics as JSON values."""
        return {
            "steps": self.steps,
            "tracks": {key: track.state_dict() for key, track in self._tracks.items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.steps = check_count(state_dict["steps"])
        self._tracks = {
            key: _Track.from_state(state) for key, state in state_dict["tracks"].items()
        }


def decide_after_spike(  # noqa: PLR0913
    level: Level,
    *,
    action: SpikeAction,
    hard_in_a_row: int,
    patience: int | None,
    rollbacks_in_a_row: int,
    max_rollbacks: int,
    reason: str,
) -> Decision | None:
    """Return what to do about a conspicuous step, or None to commit it like any other.

    Args:
        level: How far it stands out.
        action: The strongest reaction that is allowed.
        hard_in_a_row: Consecutive hard steps, this one included.
        patience: Consecutive hard steps after which single batches are no longer blamed: then
            ``"roll_back"`` rolls back, and ``"skip"`` commits the step. With None, hard steps are
            skipped until they turn out to be a divergence.
        rollbacks_in_a_row: Rollbacks since the run last got past a divergence.
        max_rollbacks: If the run diverges again after this many such rollbacks, it stops.
        reason: What is conspicuous; becomes the decision's reason.
    """
    if action in ("off", "warn") or level is Level.CALM:
        return None
    if level is Level.HARD and (patience is None or hard_in_a_row < patience):
        return SkipStep(reason=reason, promise="changes training")
    if action == "skip":
        return None
    if rollbacks_in_a_row < max_rollbacks:
        return RollBack(reason=reason, promise="changes training", rewind_data=False)
    if level is Level.DIVERGED:
        return Stop(
            reason=f"after {rollbacks_in_a_row} rollback(s) again: {reason}",
            promise="changes training",
        )
    return None


@dataclass(frozen=True, slots=True)
class _Usual:
    """The middle and the upward scatter of some values, logarithmic if all of them are positive."""

    middle: float
    upper_quartile: float
    scatter: float
    # The mean magnitude, which shares are relative to, or None on the logarithmic scale.
    unit: float | None

    @classmethod
    def of(cls, values: Sequence[float], floor: float) -> _Usual:
        """Return the statistics of some values.

        Args:
            values: Those of a window.
            floor: The least scatter, as a share of the value.
        """
        # Quantiles of the upper half stand for the median absolute deviation: they need one sort,
        # and logarithms of three values only.
        ordered = sorted(values)
        if ordered[0] > 0:
            return cls._logarithmic(ordered, floor)
        return cls._linear(ordered, floor)

    @classmethod
    def _logarithmic(cls, ordered: Sequence[float], floor: float) -> _Usual:
        middle, upper, high = _upper_quantiles(ordered)
        scatter = max(
            _logarithm(upper / middle) / _SIGMAS_AT_UPPER_QUARTILE,
            _logarithm(high / middle) / _SIGMAS_AT_95,
            floor,
        )
        return cls(middle, upper, scatter, None)

    @classmethod
    def _linear(cls, ordered: Sequence[float], floor: float) -> _Usual:
        middle, upper, high = _upper_quantiles(ordered)
        # Divided before they are summed, which stays finite.
        unit = sum(abs(value) / len(ordered) for value in ordered)
        scatter = max(
            (upper - middle) / _SIGMAS_AT_UPPER_QUARTILE,
            (high - middle) / _SIGMAS_AT_95,
            (ordered[-2] - middle) / _SIGMAS_AT_SECOND_LARGEST,
        )
        if high == middle:
            # Nearly all are equal, such as the zeros of a hinge loss: only the largest value shows
            # a scatter.
            scatter = ordered[-1] - middle
        scatter = min(max(scatter, floor * unit, _SMALLEST), _LARGEST)
        return cls(middle, upper, scatter, unit)

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> _Usual:
        """Return what `state` returned."""
        return cls(*(check_number(value, or_none=True) for value in state))

    def state(self) -> list[float | None]:
        """Return the fields as JSON values."""
        return [self.middle, self.upper_quartile, self.scatter, self.unit]

    def far(self) -> float:
        """Return the threshold above which a value is far from the usual ones."""
        return self.above(_FAR if self.unit is None else _FAR_LINEAR)

    def above(self, scatters: float, least_rise: float = 0.0) -> float:
        """Return the value that lies this many scatters above the middle.

        Args:
            scatters: The distance.
            least_rise: The least distance, as a share of the value.
        """
        if self.unit is None:
            exponent = max(scatters * self.scatter, least_rise)
            return self.middle * math.exp(min(exponent, _LARGEST_EXPONENT))
        if self.unit == 0:
            # All values are 0, so there is no scale to measure a distance by.
            return math.inf
        return self.middle + max(scatters * self.scatter, least_rise * self.unit)

    def distance(self, value: float) -> float:
        """Return by how many scatters a value exceeds the middle, which must be smaller."""
        if self.unit is None:
            rise = _logarithm(value / self.middle)
        else:
            rise = value - self.middle
        return min(rise / self.scatter, _LARGEST)


def _usual_or_none(state: Sequence[Any] | None) -> _Usual | None:
    return None if state is None else _Usual.from_state(state)


def _upper_quantiles(ordered: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and the quantiles at 0.75 and 0.95."""
    size = len(ordered)
    return ordered[size // 2], ordered[size * 3 // 4], ordered[size * 19 // 20]


def _logarithm(ratio: float) -> float:
    # A ratio of two finite numbers may be Inf.
    return math.log(min(ratio, _LARGEST))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bounds:
    """The values above which a loss, a norm or a level is suspicious. Without statistics, none."""

    loss_far: float = math.inf
    norm_far: float = math.inf
    # For the median of the newest seven losses.
    short_odd: float = math.inf
    # For single losses, which CUSUM counts.
    odd: float = math.inf
    # For the recent level, once losses have been odd for long.
    raised: float = math.inf
    # For the recent level, at once.
    gone: float = math.inf


def _bounds(loss: _Usual, norm: _Usual, best: _Usual, first_level: float) -> _Bounds:
    gained = max(0.0, first_level - best.middle)
    # Above this level a noticeable share of what the run has gained is lost.
    matters = best.middle + _LEAST_LOSS * gained
    gone = min(loss.above(_GONE, _LEAST_RISE), best.above(_DRIFTED, _LEAST_RISE))
    return _Bounds(
        loss_far=loss.far(),
        norm_far=norm.far(),
        short_odd=loss.above(_SHORT_ODD),
        odd=max(loss.upper_quartile, loss.above(0.0, _ODD_RISE), matters),
        raised=max(loss.above(_RAISED, _LEAST_RISE), matters),
        gone=max(gone, matters),
    )


class _Track:
    """The statistics of one key. The names in `state_dict` are those of the checkpoint format."""

    def __init__(self) -> None:
        # Rows of step, loss and norm: those that were accepted without suspicion, and those that
        # were accepted while something is suspected.
        self.values: list[list[float]] = []
        self.suspected: list[list[float]] = []
        # Rows of step and distance: harmless spikes, and spikes of the current suspicion.
        self.harmless_spikes: list[list[float]] = []
        self.suspected_spikes: list[list[float]] = []
        self.recent: deque[float] = deque(maxlen=_RECENT)
        # Values since the window was last evaluated.
        self.new_values = 0
        # Only values after this step count as usual.
        self.start = 0
        # Calm steps since the last rollback, or None if there was none.
        self.calm_steps: int | None = None
        # The loss of the first step after the last rollback.
        self.first_loss_after_rollback = 0.0
        # The step at which the current suspicion began.
        self.suspected_since: int | None = None
        # Steps of this key. `last_sign` and `odd_since` are counted in them.
        self.age = 0
        self.last_sign = 0
        self.odd_since: int | None = None
        # CUSUM of the losses in the upper quarter.
        self.drift = 0.0
        # Whether the step judged last is far out.
        self.hard = False
        self.loss: _Usual | None = None
        self.norm: _Usual | None = None
        # The level that the run began with.
        self.first_level: float | None = None
        # The statistics of the losses when their level was best.
        self.best: _Usual | None = None
        self.bounds = _Bounds()

    def judge(self, loss: float, norm: float, now: int) -> Level:
        """Return how far a step stands out. `now` is its number among all judged steps."""
        self.hard = False
        self.age += 1
        self.recent.append(loss)
        if self.loss is None:
            return Level.CALM
        if self.calm_steps == 0 and len(self.recent) == 1:
            self.first_loss_after_rollback = loss
        self._update_drift(loss)
        if loss > self.bounds.loss_far:
            self._note_sign(now)
            self.hard = norm > self.bounds.norm_far and self._exceeds_harmless(loss, norm, now)
        levels_are_due = self.age % _LEVEL_INTERVAL == 0 or self.suspected_since is not None
        if levels_are_due and self._has_diverged(now):
            return self._leave_level(now)
        if self.hard:
            return Level.HARD
        if self.calm_steps is not None and self.suspected_since is None:
            self.calm_steps += 1
        return Level.CALM

    def accept(self, loss: float, norm: float, now: int) -> None:
        """Add the values of a committed step to the statistics, unless they are far out."""
        if self.hard:
            return
        if self.suspected_since is not None and self.loss is not None:
            self.suspected.append([now, loss, norm])
        else:
            self.values.append([now, loss, norm])
            self.new_values += 1
        if self.new_values >= _REFRESH or len(self.suspected) >= _MOST_SUSPECTED:
            self._merge_suspected()

    def begin_after_rollback(self) -> None:
        """Discard what was suspected: the run was rolled back to these statistics."""
        self._forget_level()
        self.suspected_since = None
        self.calm_steps = 0
        self._evaluate_window()

    def _evaluate_window(self) -> None:
        """Compute the usual values and all bounds from the newest values, if there are enough."""
        self.new_values = 0
        del self.values[:-_KEPT_VALUES]
        window = [row for row in self.values[-_WINDOW - _LAG : -_LAG] if row[0] > self.start]
        if len(window) < _LEAST_WINDOW:
            return
        if self.loss is None:
            # The new level can be determined by now.
            self.suspected_since = None
        self.loss = _Usual.of([loss for _, loss, _ in window], _LOSS_FLOOR)
        self.norm = _Usual.of([norm for _, _, norm in window], _NORM_FLOOR)
        if self.first_level is None:
            self.first_level = self.loss.middle
        if self.best is None or self.loss.middle < self.best.middle:
            self.best = self.loss
        self._update_bounds()

    def _update_bounds(self) -> None:
        if self.loss and self.norm and self.best and self.first_level is not None:
            self.bounds = _bounds(self.loss, self.norm, self.best, self.first_level)
        else:
            self.bounds = _Bounds()

    def _update_drift(self, loss: float) -> None:
        """Update the CUSUM: it rises with losses in the upper quarter and falls with others."""
        change = 1.0 if loss > self.bounds.odd else -_DRIFT_BACK
        self.drift = min(max(self.drift + change, 0.0), _DRIFT_FULL)

    def _note_sign(self, now: int) -> None:
        """Begin a suspicion, or prolong the current one."""
        self.last_sign = self.age
        if self.suspected_since is None:
            self.suspected_since = now

    def _exceeds_harmless(self, loss: float, norm: float, now: int) -> bool:
        """Return whether a spike is larger than the ones that this run has already survived."""
        assert self.loss is not None
        assert self.norm is not None
        distance = min(self.loss.distance(loss), self.norm.distance(norm))
        self.suspected_spikes.append([now, distance])
        oldest = now - _SPIKE_MEMORY_STEPS
        self.harmless_spikes = [spike for spike in self.harmless_spikes if spike[0] > oldest]
        if len(self.harmless_spikes) < 2:
            return True
        second_largest = sorted(spike[1] for spike in self.harmless_spikes)[-2]
        return distance > _TAIL * second_largest

    def _has_diverged(self, now: int) -> bool:
        """Return whether the recent level has left the usual range, at once or for long.

        This also notes signs of a suspicion, and ends one that has had no sign for long enough.
        """
        if len(self.recent) < _RECENT:
            return False
        self._update_odd_since()
        odd_for = 0 if self.odd_since is None else self.age - self.odd_since + 1
        short_level = _median(list(self.recent)[-_SHORT:])
        if odd_for or short_level > self.bounds.short_odd:
            self._note_sign(now)
        elif self.suspected_since is not None and self.age - self.last_sign >= _CALM_AFTER:
            self._end_suspicion()
        level = _median(self.recent)
        if level > self.bounds.gone:
            return True
        return odd_for > _ODD_FOR and level > self.bounds.raised

    def _update_odd_since(self) -> None:
        """Note when the level became odd: the CUSUM is full and has not fallen since."""
        if self.drift < _DRIFT_OVER:
            self.odd_since = None
        elif self.odd_since is None and self.drift > _DRIFT_FULL - 1.0:
            self.odd_since = self.age

    def _end_suspicion(self) -> None:
        """Count the suspected values and spikes as harmless."""
        self.suspected_since = None
        self.harmless_spikes += self.suspected_spikes
        self.suspected_spikes = []
        self._merge_suspected()

    def _merge_suspected(self) -> None:
        """Count the suspected values as usual."""
        self.values += self.suspected
        self.suspected = []
        self._evaluate_window()

    def _leave_level(self, now: int) -> Level:
        """Restart the statistics at this level, and report a divergence.

        Nothing is reported if good weights reach the same level directly after a rollback: then the
        data has changed, not the model.
        """
        reported = (
            self.calm_steps is None
            or self.calm_steps >= _RETURNED
            or self._began_well_after_rollback()
        )
        self.start = now
        self.suspected_since = self.suspected_since or now
        self._forget_level()
        return Level.DIVERGED if reported else Level.CALM

    def _began_well_after_rollback(self) -> bool:
        """Return whether the first loss after the rollback was nearer to the usual level."""
        if self.loss is None:
            return False
        return 2 * self.first_loss_after_rollback < _median(self.recent) + self.loss.middle

    def _forget_level(self) -> None:
        """Discard all knowledge about the current level of the losses."""
        self.suspected = []
        self.suspected_spikes = []
        self.odd_since = None
        self.hard = False
        self.recent.clear()
        self.drift = 0.0
        self.loss = None
        self.norm = None
        self.best = None
        self._update_bounds()

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics as JSON values."""
        return {
            "columns": {
                "kept": _columns(self.values),
                "held": _columns(self.suspected),
                "spikes": _columns(self.harmless_spikes),
                "held_spikes": _columns(self.suspected_spikes),
            },
            "recent": list(self.recent),
            "unseen": self.new_values,
            "start": self.start,
            "calm_steps": self.calm_steps,
            "first_back": self.first_loss_after_rollback,
            "began": self.suspected_since,
            "age": self.age,
            "last_sign": self.last_sign,
            "odd_since": self.odd_since,
            "drift": self.drift,
            "hard": self.hard,
            "loss": self.loss and self.loss.state(),
            "norm": self.norm and self.norm.state(),
            "first": self.first_level,
            "best": self.best and self.best.state(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> _Track:
        """Return the statistics that `state_dict` returned.

        Raises:
            KeyError, TypeError, ValueError: The state is damaged.
        """
        track = cls()
        columns = state["columns"]
        track.values = _rows(columns["kept"])
        track.suspected = _rows(columns["held"])
        track.harmless_spikes = _rows(columns["spikes"])
        track.suspected_spikes = _rows(columns["held_spikes"])
        track.recent = deque(map(check_number, state["recent"]), maxlen=_RECENT)
        track.new_values = check_number(state["unseen"])
        track.start = check_number(state["start"])
        track.calm_steps = check_number(state["calm_steps"], or_none=True)
        track.first_loss_after_rollback = check_number(state["first_back"])
        track.suspected_since = check_number(state["began"], or_none=True)
        track.age = check_number(state["age"])
        track.last_sign = check_number(state["last_sign"])
        track.odd_since = check_number(state["odd_since"], or_none=True)
        track.drift = check_number(state["drift"])
        track.hard = check_number(state["hard"])
        track.loss = _usual_or_none(state["loss"])
        track.norm = _usual_or_none(state["norm"])
        track.first_level = check_number(state["first"], or_none=True)
        track.best = _usual_or_none(state["best"])
        track._update_bounds()
        return track


def _median(values: Sequence[float]) -> float:
    """Return the median; for an even number of values, the upper of the two middle ones."""
    return sorted(values)[len(values) // 2]


def _columns(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """Transpose a table to columns, which take less space as JSON."""
    return [list(column) for column in zip(*rows, strict=True)]


def _rows(columns: Sequence[Sequence[Any]]) -> list[list[float]]:
    return [[check_number(value) for value in row] for row in zip(*columns, strict=True)]
