"""Detect spikes and divergence in losses and gradient norms.

A `SpikeDetector` compares each step with the usual values of the run (see ``usual_values``), and
detects two kinds of problems:

- A *hard* step, or spike: both the loss and the gradient norm are far above their usual values.
- A *divergence*: the level of the recent losses has left its usual range.

A *sign* is a single observation that suggests one of these problems. A level is *odd* while a
measure of drift, the CUSUM below, is high. Suspicious and non-finite values do not enter the
statistics. The module works on floats and does not use torch. ``benchmarks/spikes`` reports how
many spikes and divergences are detected.
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

# --- The window of usual values. All constants below were chosen based on the design runs of
# ``benchmarks/spikes_runs``, unless another source is given.

# Number of values in the window, the same as in OLMo-core's spike detection.
_WINDOW = 128
# The window leaves out this many of the newest values. Otherwise a slow change would shift the
# usual values and stay undetected.
_LAG = 32
# Nothing is suspected before the window has this many values.
_LEAST_WINDOW = 64
# Number of the newest values to store.
_KEPT_VALUES = 256
# The window is evaluated once per this many new values, because each evaluation sorts it twice.
_REFRESH = 16

# --- Levels: medians of the newest losses.

# Number of losses whose median is the recent level.
_RECENT = 20
# Number of losses whose median is the short level.
_SHORT = 7
# Number of steps between two evaluations of the levels.
_LEVEL_INTERVAL = 4

# --- How long a suspicion lasts.

# A suspicion ends after this many steps without another sign.
_CALM_AFTER = 10
# A raised level counts as permanent if it has been odd for this many steps. This is long enough for
# two independent medians.
_ODD_FOR = 40
# If this many values are suspected and the run has not diverged, they are added to the usual ones.
_MOST_SUSPECTED = 60
# A state may be called good after this many steps without a sign. Some kinds of damage become
# visible only after 20 to 40 steps.
GOOD_AFTER = 50
# After this many calm steps since a rollback, a raised level is not blamed on changed data.
_RETURNED = 10

# --- Harmless spikes: spikes from which the run has recovered.

# Harmless spikes are remembered for this many steps.
_SPIKE_MEMORY_STEPS = 10_000
# A new spike is hard only if its distance is at least this many times the second-largest distance
# of harmless spikes.
_TAIL = 2.0

# --- CUSUM (cumulative sum, Page, 1954): a measure of drift. It rises by 1 with each loss in the
# upper quarter of the usual losses, and falls by `_DRIFT_BACK` with each other loss. Healthy losses
# change it by -0.2 per step on average. If three quarters of the losses are in the upper quarter,
# it rises by 0.6 per step and reaches its largest value after 20 steps.

_DRIFT_BACK = 0.6
# The largest value of the CUSUM. The level becomes odd when the CUSUM is within 1 of it.
_DRIFT_FULL = 12.0
# The level stops being odd if the CUSUM falls below this.
_DRIFT_OVER = 6.0


class Level(Enum):
    """The detector's judgment of a step."""

    CALM = "calm"
    HARD = "hard"
    DIVERGED = "diverged"


class SpikeDetector:
    """Judges each step by its loss and gradient norm before the step is committed.

    The first 96 values of a loss function are never suspected. `Level.DIVERGED` is returned once
    per divergence. The caller then either rolls back and calls `return_to`, or continues, in which
    case the new level becomes the usual one. No level is therefore suspected forever.

    Cost: about 3 microseconds per step. No host sync, because it works with Python floats.

    Args:
        objective: How the loss is used. Unless it is ``"minimize"``, the level of the loss has no
            meaning, and every step counts as calm.
    """

    def __init__(self, *, objective: Objective) -> None:
        self._minimizes = objective == "minimize"
        self._monitors: dict[str, _LossMonitor] = {}
        # The number of judged steps with finite values, over all loss functions. `return_to` resets
        # it to an earlier value.
        self.steps = 0

    def judge(self, key: str, loss: float, norm: float) -> Level:
        """Judge a step. A step with NaN or Inf counts as calm, because it is handled elsewhere.

        Args:
            key: Identifies the loss function. Each loss function has its own statistics.
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

    def calm_loss(self, key: str) -> float | None:
        """Return a loss up to which the next step is certain to be judged calm.

        A step can thus be committed before its loss is known, unless its loss turns out to be
        larger.

        Args:
            key: Identifies the loss function, as in `judge`.

        Returns:
            The loss, which is Inf if every step is calm. None if the next step must be judged
            before it is committed, because something is suspected.
        """
        monitor = self._monitors.get(key)
        if monitor is None or not self._minimizes:
            return math.inf
        return monitor.calm_loss()

    def accepted(self, key: str, loss: float, norm: float) -> None:
        """Add the last judged step to the statistics, after the step was committed."""
        if math.isfinite(loss) and math.isfinite(norm):
            self._monitors[key].accept(loss, norm, self.steps)

    def usual_norm(self, key: str) -> float | None:
        """Return the largest norm that is still usual, or None if too few steps were seen.

        The limit is 2.5 scatters above the median (see ``usual_values``).
        """
        monitor = self._monitors.get(key)
        if monitor is None or monitor.norm is None:
            return None
        return monitor.norm.above(USUAL_SCATTERS)

    def is_calm(self) -> bool:
        """Return whether nothing is suspected, so that a checkpoint may be marked as good."""
        return self.suspicious_since() is None

    def suspicious_since(self) -> int | None:
        """Return how many steps ago the current suspicion began, or None if there is none.

        The step with the first sign is included, so the result is at least 1.
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
        """Restore earlier statistics after a rollback, and discard all suspicion.

        Args:
            state_dict: The result of `state_dict` at the step to which the run was rolled back.
        """
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
        """Restore the statistics that `state_dict` returned."""
        self.steps = check_count(state_dict["steps"])
        self._monitors = {
            key: _LossMonitor.from_state(state) for key, state in state_dict["tracks"].items()
        }


# The attributes of a `_LossMonitor` that are saved in checkpoints, keyed by their names in the
# checkpoint: first tables, then numbers, and then numbers that may be None.
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
    """Keeps the statistics of one loss function, and judges its steps.

    A loss far above the usual ones, or an odd level, begins a *suspicion*. During a suspicion, new
    values do not enter the statistics. A suspicion ends in one of two ways. If no further sign
    appears for some steps, the suspected values are added to the statistics, and the suspected
    spikes count as harmless. If the level leaves its usual range, the run has diverged, and the
    statistics start over.
    """

    def __init__(self) -> None:
        # --- The usual values

        # Rows of step, loss and norm that were accepted without suspicion.
        self.values: list[list[float]] = []
        # Number of values added since the window was last evaluated.
        self.new_values = 0
        # Only values after this step count as usual.
        self.start = 0
        # The usual losses.
        self.loss: UsualValues | None = None
        # The usual gradient norms.
        self.norm: UsualValues | None = None
        # The usual losses at the time when their median was lowest.
        self.best: UsualValues | None = None
        # The level of the losses at the beginning of the run.
        self.first_level: float | None = None
        self.bounds = Bounds()
        # Rows of step and distance (see `_record_spike`).
        self.harmless_spikes: list[list[float]] = []

        # --- The newest steps

        # Number of judged steps. `last_sign` and `odd_since` are values of this counter.
        self.age = 0
        # Whether the last judged step is a hard one.
        self.hard = False
        # The newest losses.
        self.recent: deque[float] = deque(maxlen=_RECENT)
        # The CUSUM of losses in the upper quarter of the usual losses.
        self.drift = 0.0
        # The `age` at which the level became odd.
        self.odd_since: int | None = None

        # --- The current suspicion

        # The step at which the suspicion began, counted over all loss functions.
        self.suspected_since: int | None = None
        # The `age` at the last sign.
        self.last_sign = 0
        # Rows of step, loss and norm that were committed during the suspicion.
        self.suspected: list[list[float]] = []
        # Rows of step and distance of the spikes that were recorded during the suspicion.
        self.suspected_spikes: list[list[float]] = []

        # --- The time since the last rollback

        # Number of calm steps since the last rollback, or None if there was no rollback.
        self.calm_steps: int | None = None
        self.first_loss_after_rollback = 0.0

    def judge(self, loss: float, norm: float, now: int) -> Level:
        """Judge a step.

        Args:
            loss: The mean loss of the step.
            norm: The gradient norm of the step.
            now: The number of the step, counted over all loss functions.
        """
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
            return self._diverge(now)
        if self.hard:
            return Level.HARD
        if self.calm_steps is not None and self.suspected_since is None:
            self.calm_steps += 1
        return Level.CALM

    def calm_loss(self) -> float | None:
        """Return a loss up to which the next step is certain to be judged calm; see `judge`.

        A step with such a loss is not hard, since its loss is not far from the usual ones. It could
        only be judged diverged if the level of the losses before it were already suspicious.
        """
        if self.loss is None:
            return math.inf
        calm = min(self.bounds.loss_far, self.bounds.gone)
        high_losses = sum(loss > calm for loss in self.recent)
        if self.suspected_since is not None or high_losses > 0:
            return None
        return calm

    def accept(self, loss: float, norm: float, now: int) -> None:
        """Add the values of a committed step to the statistics, unless it was a hard step."""
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
        """Discard all suspicion, after these statistics were restored by a rollback."""
        self._forget_level()
        self.suspected_since = None
        self.calm_steps = 0
        self._evaluate_window()

    def _evaluate_window(self) -> None:
        """Compute the usual values and the bounds from the window, if it has enough values."""
        self.new_values = 0
        del self.values[:-_KEPT_VALUES]
        window = [row for row in self.values[-_WINDOW - _LAG : -_LAG] if row[0] > self.start]
        if len(window) < _LEAST_WINDOW:
            return
        if self.loss is None:
            # After a divergence, the suspicion lasts until the new level is known, as it is now.
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
        """Update the CUSUM with a new loss."""
        change = 1.0 if loss > self.bounds.odd else -_DRIFT_BACK
        self.drift = min(max(self.drift + change, 0.0), _DRIFT_FULL)

    def _note_sign(self, now: int) -> None:
        """Begin a suspicion, or prolong the current one."""
        self.last_sign = self.age
        if self.suspected_since is None:
            self.suspected_since = now

    def _record_spike(self, loss: float, norm: float, now: int) -> float:
        """Record a suspected spike, and return its distance from the usual values.

        The distance is that of the loss or that of the gradient norm, whichever is smaller.
        """
        assert self.loss is not None
        assert self.norm is not None
        distance = min(self.loss.distance(loss), self.norm.distance(norm))
        self.suspected_spikes.append([now, distance])
        return distance

    def _exceeds_harmless_spikes(self, distance: float, now: int) -> bool:
        """Return whether a spike is much larger than the harmless spikes of this run.

        The spike is compared with the second-largest harmless one. Returns True if there are fewer
        than two harmless spikes.
        """
        first_step = now - _SPIKE_MEMORY_STEPS
        self.harmless_spikes = [spike for spike in self.harmless_spikes if spike[0] > first_step]
        if len(self.harmless_spikes) < 2:
            return True
        distances = sorted(spike[1] for spike in self.harmless_spikes)
        return distance > _TAIL * distances[-2]

    def _check_level(self, now: int) -> bool:
        """Update the current suspicion, and return whether the run has diverged.

        An odd level begins or prolongs a suspicion, and enough steps without a sign end it. The run
        has diverged if the recent level is far above its usual range, or if it has been moderately
        raised for too many steps.
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
        """Update `odd_since`. A level is odd once the CUSUM has peaked, and while it stays high."""
        if self.drift < _DRIFT_OVER:
            self.odd_since = None
        elif self.odd_since is None and self.drift > _DRIFT_FULL - 1.0:
            self.odd_since = self.age

    def _end_suspicion(self) -> None:
        """End the suspicion: count the suspected values as usual, and the spikes as harmless."""
        self.suspected_since = None
        self.harmless_spikes += self.suspected_spikes
        self.suspected_spikes = []
        self._merge_suspected()

    def _merge_suspected(self) -> None:
        """Add the suspected values to the usual ones."""
        self.values += self.suspected
        self.suspected = []
        self._evaluate_window()

    def _diverge(self, now: int) -> Level:
        """Start new statistics at the current level of the losses, and return the judgment.

        The judgment is `Level.DIVERGED`, or `Level.CALM` if the losses had this level directly
        after a rollback. In that case, the weights are good, so the data must have changed.
        """
        is_reported = (
            self.calm_steps is None
            or self.calm_steps >= _RETURNED
            or self._began_well_after_rollback()
        )
        self.start = now
        self.suspected_since = self.suspected_since or now
        self._forget_level()
        return Level.DIVERGED if is_reported else Level.CALM

    def _began_well_after_rollback(self) -> bool:
        """Return whether losses were still near the usual level right after the rollback.

        They were if the first loss is nearer to the usual level than to the recent one.
        """
        if self.loss is None:
            return False
        # The recent level is above the usual one, so compare the loss with their midpoint.
        return 2 * self.first_loss_after_rollback < _median(self.recent) + self.loss.middle

    def _forget_level(self) -> None:
        """Discard the usual values and the suspected values, so that a new level can be learned."""
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
        """Create a monitor from the result of `state_dict`.

        Raises:
            KeyError, TypeError, ValueError: If the state is damaged.
        """
        # Each entry is assigned to the attribute that the tables above map its name to.
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
    """Return the median. For an even number of values, this is the upper middle value."""
    return sorted(values)[len(values) // 2]


def _columns(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """Transpose rows to columns, which take less space as JSON."""
    return [list(column) for column in zip(*rows, strict=True)]


def _rows(columns: Sequence[Sequence[Any]]) -> list[list[float]]:
    return [[check_number(value) for value in row] for row in zip(*columns, strict=True)]
