"""Spikes and divergence in losses and gradient norms.

Arithmetic on floats, no torch. A `SpikeDetector` compares each step with the usual ones (see
``usual_values``):

- hard: loss and gradient norm are both far above the usual ones in the same step.
- diverged: the level of the recent losses has left its usual range.

Only finite, unsuspected values enter the statistics. ``benchmarks/spikes`` reports how many spikes
and divergences are detected.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from holdfast.core.containers import check_count, check_number
from holdfast.core.policy.kinds import Objective
from holdfast.numerics.usual_values import (
    LOSS_FLOOR,
    NORM_FLOOR,
    USUAL_SCATTERS,
    Bounds,
    UsualValues,
)

# --- The window of usual values. The figures below were chosen on the design runs of
# ``benchmarks/spikes_runs``, unless another source is given.

# Values in the window. This is the window of OLMo-core's spike detection.
_WINDOW = 128
# The newest values are left out of the window, so that a slow change does not hide itself.
_LAG = 32
# Values needed in the window before anything is suspected.
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
# Calm steps after a rollback which show that the data has not changed.
_RETURNED = 10

# --- Harmless spikes, which the run has survived.

# Steps for which one is remembered.
_SPIKE_MEMORY_STEPS = 10_000
# A new spike counts if its distance is this many times that of the second-largest harmless one.
_TAIL = 2.0

# --- CUSUM (Page, 1954) of the losses in the upper quarter of the usual ones. Healthy losses move
# it by -0.2 a step on average; if three quarters of them lie there, it rises by 0.6 a step and is
# full after 20 steps.

_DRIFT_BACK = 0.6
_DRIFT_FULL = 12.0
_DRIFT_OVER = 6.0


class Level(Enum):
    """How far a step stands out."""

    CALM = "calm"
    HARD = "hard"
    DIVERGED = "diverged"


class SpikeDetector:
    """Judges each step by its loss and its gradient norm, before it is committed.

    Nothing is suspected in the first 96 values of a key. `Level.DIVERGED` is returned once.
    Afterwards, the caller either rolls back and calls `return_to`, or lets the new level become the
    usual one. So no level is suspected forever. With any objective but ``"minimize"`` the level of
    the loss means nothing, and every step is calm.

    Cost: about 3 microseconds a step and no sync, since it takes numbers that are on the host.
    """

    def __init__(self, *, objective: Objective) -> None:
        self._minimizes = objective == "minimize"
        self._monitors: dict[str, _LossMonitor] = {}
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
        if key not in self._monitors:
            self._monitors[key] = _LossMonitor()
        if not self._minimizes:
            return Level.CALM
        return self._monitors[key].judge(loss, norm, self.steps)

    def accepted(self, key: str, loss: float, norm: float) -> None:
        """Add the step that was judged last to the statistics, because it was committed."""
        if math.isfinite(loss) and math.isfinite(norm):
            self._monitors[key].accept(loss, norm, self.steps)

    def usual_norm(self, key: str) -> float | None:
        """Return the largest usual norm, 2.5 scatters above the middle, or None if unknown."""
        monitor = self._monitors.get(key)
        if monitor is None or monitor.norm is None:
            return None
        return monitor.norm.above(USUAL_SCATTERS)

    def is_calm(self) -> bool:
        """Return whether nothing is suspected, so that a checkpoint may be marked as good."""
        return self.suspicious_since() is None

    def suspicious_since(self) -> int | None:
        """Return the steps judged since the current suspicion began, or None if there is none.

        The step with the first sign is included.
        """
        first_signs = [
            monitor.suspected_since
            for monitor in self._monitors.values()
            if monitor.suspected_since is not None
        ]
        if not first_signs:
            return None
        return self.steps - min(first_signs) + 1

    def return_to(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the statistics of an earlier `state_dict` after a rollback."""
        self.load_state_dict(state_dict)
        for monitor in self._monitors.values():
            monitor.begin_after_rollback()

    def state_dict(self) -> dict[str, Any]:
        """Return all statistics as JSON values."""
        return {
            "steps": self.steps,
            "tracks": {key: monitor.state_dict() for key, monitor in self._monitors.items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.steps = check_count(state_dict["steps"])
        self._monitors = {
            key: _LossMonitor.from_state(state) for key, state in state_dict["tracks"].items()
        }


# The attributes of a monitor by their names in the checkpoint format: tables, numbers, and numbers
# that may be None.
_TABLES_IN_STATE = {
    "kept": "values",
    "held": "suspected",
    "spikes": "harmless_spikes",
    "held_spikes": "suspected_spikes",
}
_NUMBERS_IN_STATE = {
    "unseen": "new_values",
    "start": "start",
    "first_back": "first_loss_after_rollback",
    "age": "age",
    "last_sign": "last_sign",
    "drift": "drift",
    "hard": "hard",
}
_OPTIONAL_NUMBERS_IN_STATE = {
    "calm_steps": "calm_steps",
    "began": "suspected_since",
    "odd_since": "odd_since",
    "first": "first_level",
}


class _LossMonitor:
    """Keeps the statistics of one key, and judges its steps by them.

    A loss far above the usual ones, or an odd level, begins a *suspicion*. While it lasts, new
    values are kept apart. It ends in one of two ways. If there is no further sign for some steps,
    these values count as usual, and the spikes as harmless. If the level leaves its usual range,
    the run has diverged, and the statistics restart.
    """

    def __init__(self) -> None:
        # --- What is usual

        # Rows of step, loss and norm, accepted without suspicion.
        self.values: list[list[float]] = []
        # Values since the window was last evaluated.
        self.new_values = 0
        # Only values after this step count as usual.
        self.start = 0
        self.loss: UsualValues | None = None
        self.norm: UsualValues | None = None
        # The usual losses when their level was best, and the level at the beginning of the run.
        self.best: UsualValues | None = None
        self.first_level: float | None = None
        self.bounds = Bounds()
        # Rows of step and distance.
        self.harmless_spikes: list[list[float]] = []

        # --- The newest steps

        # Steps of this key. `last_sign` and `odd_since` are counted in them.
        self.age = 0
        # Whether the step judged last is far out.
        self.hard = False
        self.recent: deque[float] = deque(maxlen=_RECENT)
        # CUSUM of the losses in the upper quarter.
        self.drift = 0.0
        # When the level became odd.
        self.odd_since: int | None = None

        # --- The current suspicion

        # The step at which it began, counted over all keys.
        self.suspected_since: int | None = None
        self.last_sign = 0
        # Rows of step, loss and norm, and of step and distance.
        self.suspected: list[list[float]] = []
        self.suspected_spikes: list[list[float]] = []

        # --- Since the last rollback

        # Calm steps, or None if there was no rollback.
        self.calm_steps: int | None = None
        self.first_loss_after_rollback = 0.0

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
            if norm > self.bounds.norm_far:
                distance = self._record_spike(loss, norm, now)
                self.hard = self._exceeds_harmless_spikes(distance, now)
        levels_are_due = self.age % _LEVEL_INTERVAL == 0 or self.suspected_since is not None
        if levels_are_due and self._check_level(now):
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
            # The suspicion lasted until the new level was known, which is the case now.
            self.suspected_since = None
        self.loss = UsualValues.of([loss for _, loss, _ in window], LOSS_FLOOR)
        self.norm = UsualValues.of([norm for _, _, norm in window], NORM_FLOOR)
        if self.first_level is None:
            self.first_level = self.loss.middle
        if self.best is None or self.loss.middle < self.best.middle:
            self.best = self.loss
        self._update_bounds()

    def _update_bounds(self) -> None:
        if self.loss and self.norm and self.best and self.first_level is not None:
            self.bounds = Bounds.of(self.loss, self.norm, self.best, self.first_level)
        else:
            self.bounds = Bounds()

    def _update_drift(self, loss: float) -> None:
        """Update the CUSUM: it rises with losses in the upper quarter and falls with others."""
        change = 1.0 if loss > self.bounds.odd else -_DRIFT_BACK
        self.drift = min(max(self.drift + change, 0.0), _DRIFT_FULL)

    def _note_sign(self, now: int) -> None:
        """Begin a suspicion, or prolong the current one."""
        self.last_sign = self.age
        if self.suspected_since is None:
            self.suspected_since = now

    def _record_spike(self, loss: float, norm: float, now: int) -> float:
        """Record a spike as suspected, and return its distance from the usual values.

        This is the distance of the loss or of the norm, whichever is smaller.
        """
        assert self.loss is not None
        assert self.norm is not None
        distance = min(self.loss.distance(loss), self.norm.distance(norm))
        self.suspected_spikes.append([now, distance])
        return distance

    def _exceeds_harmless_spikes(self, distance: float, now: int) -> bool:
        """Return whether a spike is far larger than those that this run has recently survived.

        It is compared with the second-largest one. With fewer than two, every spike counts.
        """
        first_step = now - _SPIKE_MEMORY_STEPS
        self.harmless_spikes = [spike for spike in self.harmless_spikes if spike[0] > first_step]
        if len(self.harmless_spikes) < 2:
            return True
        distances = sorted(spike[1] for spike in self.harmless_spikes)
        return distance > _TAIL * distances[-2]

    def _check_level(self, now: int) -> bool:
        """Update the current suspicion, and return whether the run has diverged.

        An odd level begins or prolongs the suspicion, and enough steps without a sign end it. The
        run has diverged if the recent level is far above its usual range, or has been raised for
        too many steps.
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
        """Note when the level became odd: the CUSUM became full and has stayed high since."""
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

        Nothing is reported if good weights reach this level directly after a rollback, because then
        the data has changed, not the model.
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
        tables = {
            name: _columns(getattr(self, attribute)) for name, attribute in _TABLES_IN_STATE.items()
        }
        numbers = {
            name: getattr(self, attribute)
            for name, attribute in {**_NUMBERS_IN_STATE, **_OPTIONAL_NUMBERS_IN_STATE}.items()
        }
        return {
            "columns": tables,
            "recent": list(self.recent),
            **numbers,
            "loss": self.loss and self.loss.state(),
            "norm": self.norm and self.norm.state(),
            "best": self.best and self.best.state(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> _LossMonitor:
        """Return the statistics that `state_dict` returned.

        Raises:
            KeyError, TypeError, ValueError: The state is damaged.
        """
        monitor = cls()
        for name, attribute in _TABLES_IN_STATE.items():
            setattr(monitor, attribute, _rows(state["columns"][name]))
        for name, attribute in _NUMBERS_IN_STATE.items():
            setattr(monitor, attribute, check_number(state[name]))
        for name, attribute in _OPTIONAL_NUMBERS_IN_STATE.items():
            setattr(monitor, attribute, check_number(state[name], or_none=True))
        monitor.recent = deque(map(check_number, state["recent"]), maxlen=_RECENT)
        monitor.loss = UsualValues.from_state(state["loss"])
        monitor.norm = UsualValues.from_state(state["norm"])
        monitor.best = UsualValues.from_state(state["best"])
        monitor._update_bounds()
        return monitor


def _median(values: Sequence[float]) -> float:
    """Return the median; for an even number of values, the upper of the two middle ones."""
    return sorted(values)[len(values) // 2]


def _columns(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """Transpose a table to columns, which take less space as JSON."""
    return [list(column) for column in zip(*rows, strict=True)]


def _rows(columns: Sequence[Sequence[Any]]) -> list[list[float]]:
    return [[check_number(value) for value in row] for row in zip(*columns, strict=True)]
