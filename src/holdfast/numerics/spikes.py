"""Spikes, divergence and NaN in losses and gradient norms, and what to do about them.

Arithmetic on floats, no torch.

A `SpikeDetector` measures how far a value stands above the usual ones, in units of their own upward
scatter:

hard      loss and norm stand far out together
diverged  the recent losses as a whole have left their usual level

Only finite, unsuspected values enter the statistics. ``benchmarks/spikes`` reports what they find.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from holdfast.core.containers import count, number
from holdfast.core.events.event import Decision, RollBack, SkipStep, Stop
from holdfast.core.policy.kinds import Objective, SpikeAction

_WINDOW = 128  # values that say what is usual; OLMo-core's window
_LAG = 32  # newest values left out of it, so that a creeping change does not hide itself
_ENOUGH = 64  # values in it before anything is said
_KEPT = 256  # values kept
_REFRESH = 16  # values between two looks at the window: each costs two sorts
_RECENT = 20  # losses whose median is the recent level
_SHORT = 7  # losses whose median is the newest level
_LOOK = 4  # steps between two looks at the levels
_CALM_AFTER = 10  # steps without a sign that end a suspicion
_ODD_FOR = 40  # steps after which an odd level is no passing matter: two independent medians
_HOLD = 60  # values after which what is suspected, and is no divergence, counts as usual
# Steps without a sign after which a state may be called good: some damage shows 20 to 40 later
GOOD_AFTER = 50
_RETURNED = 10  # calm steps after a rollback that show that the data is what it was
_TAIL_STEPS = 10_000  # how long a spike that came to nothing is remembered

# Distances above the middle in units of the scatter. In 18,000 healthy steps of the design runs the
# recent level came to 1.2 at most, loss and norm together to 2.8 (logarithmic) and 6.9 (linear).
_USUAL = 2.5  # up to which a norm is usual
_FAR = 6.0
_FAR_LINEAR = 15.0
_TAIL = 2.0  # times the second-largest spike that came to nothing
_SHORT_ODD = 1.8
_RAISED = 0.7
_GONE = 2.2
_DRIFTED = 3.5  # above the best level that the run ever had

# CUSUM (Page 1954) of the losses in the upper quarter of the usual ones. Healthy losses move it by
# -0.2 a step on average; by 0.6 when three quarters of them lie there, so it is full after 20
# steps.
_DRIFT_BACK = 0.6
_DRIFT_FULL = 12.0
_DRIFT_OVER = 6.0

# Least scatter and least rises, as shares of the value, so that a very calm run is not alarmed by a
# ripple. A loss must rise by 20 % and a norm by 82 % to stand far out, and a level by 28 % to be
# gone.
_LOSS_FLOOR = 0.03
_NORM_FLOOR = 0.1
_ODD_RISE = 0.1
_LEAST_RISE = 0.25
# Share of what the run has gained that must be lost: 1e-6 and 1e-4 are both fully trained
_LEAST_LOSS = 0.1


class Level(Enum):
    """How far a step stands out."""

    CALM = "calm"
    HARD = "hard"
    DIVERGED = "diverged"


class SpikeDetector:
    """Judges each step by its loss and its gradient norm, before it is committed.

    It says nothing about the first 96 values of a key. A `Level.DIVERGED` is returned once; then
    either `return_to` is called, after a rollback, or the new level becomes the usual one. So no
    regime is suspected for ever. For any objective but ``"minimize"`` the loss means nothing by its
    level, and every step is calm.

    Cost: about 3 microseconds a step. No sync: it takes numbers that are on the host already.
    """

    def __init__(self, *, objective: Objective) -> None:
        self._minimizes = objective == "minimize"
        self._tracks: dict[str, _Track] = {}
        self.steps = 0
        """Steps judged so far, of all keys and with finite values; `return_to` goes back in it."""

    def judge(self, key: str, loss: float, norm: float) -> Level:
        """Return how far a step stands out, by its mean loss and the L2 norm of all gradients
        before clipping.

        Losses of different meaning need different keys. A NaN or an Inf is not judged: it is no
        matter of degree.
        """
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return Level.CALM
        self.steps += 1
        track = self._tracks.get(key) or self._tracks.setdefault(key, _Track())
        if not self._minimizes:
            return Level.CALM
        return track.judge(loss, norm, self.steps)

    def accepted(self, key: str, loss: float, norm: float) -> None:
        """Take the step that was judged last into the statistics: it was committed."""
        if math.isfinite(loss) and math.isfinite(norm):
            self._tracks[key].accept(loss, norm, self.steps)

    def usual_norm(self, key: str) -> float | None:
        """Return the upper end of the usual norms, 2.5 scatters above the middle.

        None while it is unknown.
        """
        track = self._tracks.get(key)
        return None if track is None or track.norm is None else track.norm.above(_USUAL)

    def is_calm(self) -> bool:
        """Return whether nothing is suspected at present, so that a checkpoint may be called
        good.
        """
        return self.suspicious_since() is None

    def suspicious_since(self) -> int | None:
        """Return the steps judged since the first sign of what is suspected now, that one
        included; else None.
        """
        first = min(
            (track.began for track in self._tracks.values() if track.began is not None),
            default=None,
        )
        return None if first is None else self.steps - first + 1

    def return_to(self, state_dict: Mapping[str, Any]) -> None:
        """Return to the statistics of an earlier `state_dict`: the run was rolled back."""
        self.load_state_dict(state_dict)
        for track in self._tracks.values():
            track.begin_again()

    def state_dict(self) -> dict[str, Any]:
        """Return all statistics as JSON values."""
        return {
            "steps": self.steps,
            "tracks": {key: track.state_dict() for key, track in self._tracks.items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Put back what `state_dict` returned."""
        self.steps = count(state_dict["steps"])
        self._tracks = {key: _Track.of(state) for key, state in state_dict["tracks"].items()}


def decide_after_spike(
    level: Level,
    *,
    action: SpikeAction,
    hard_in_a_row: int,
    patience: int | None,
    rollbacks_in_a_row: int,
    max_rollbacks: int,
    reason: str,
) -> Decision | None:
    """Return what to do about a step that stands out; None: make it like any other.

    No answer is stronger than `action`. After `patience` hard steps in a row it is no matter of
    single batches: ``"roll_back"`` then does, and ``"skip"`` makes the step; None: hard steps are
    skipped until they turn out to be a divergence. A run that diverges again after `max_rollbacks`
    rollbacks in a row stops.
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


class _Usual:
    """The middle and the upward scatter of some values.

    Logarithmic while all of them are positive.
    """

    __slots__ = ("middle", "upper", "scatter", "unit")  # noqa: RUF023 - the order of the arguments

    def __init__(self, middle: float, upper: float, scatter: float, unit: float | None) -> None:
        self.middle = middle
        self.upper = upper  # quartile
        self.scatter = scatter
        self.unit = unit  # mean magnitude, which the linear scale is relative to; None: logarithmic

    @classmethod
    def of(cls, values: list[float], floor: float) -> _Usual:
        # Quantiles of the upper half stand for MAD: they need one sort, and logarithms of three
        # values only.
        ordered = sorted(values)
        count = len(ordered)
        middle, upper, high = (
            ordered[count // 2],
            ordered[count * 3 // 4],
            ordered[count * 19 // 20],
        )
        if ordered[0] > 0:
            upward = max(_logarithm(upper / middle) / 0.6745, _logarithm(high / middle) / 1.645)
            return cls(middle, upper, max(upward, floor), None)
        unit = sum(abs(value) / count for value in ordered)
        upward = max(
            (upper - middle) / 0.6745, (high - middle) / 1.645, (ordered[-2] - middle) / 2.4
        )
        # Nearly all are equal, as zeros of a hinge loss: only the largest shows a scatter
        if high == middle:
            upward = ordered[-1] - middle
        return cls(middle, upper, min(max(upward, floor * unit, 1e-300), 1e300), unit)

    def above(self, times: float, least: float = 0.0) -> float:
        """Return the value that lies so many scatters, and at least such a share of the value,
        above the middle.
        """
        if self.unit is None:
            return self.middle * math.exp(min(max(times * self.scatter, least), 700.0))
        # All zero: nothing is known about how far a value can stand out.
        return self.middle + max(times * self.scatter, least * self.unit) if self.unit else math.inf

    def distance(self, value: float) -> float:
        """Return how many scatters above the middle a value lies that is larger than the middle."""
        rise = value - self.middle if self.unit is not None else _logarithm(value / self.middle)
        return min(rise / self.scatter, 1e300)


def _logarithm(ratio: float) -> float:
    return math.log(min(ratio, 1e300))  # a ratio of finite numbers may be Inf


class _Track:
    """The statistics of one key."""

    def __init__(self) -> None:
        self.kept: list[list[float]] = []  # step, loss, norm of what was accepted and not suspected
        self.held: list[list[float]] = []  # the same while there is a suspicion
        self.spikes: list[list[float]] = []  # step, distance of the spikes that came to nothing
        self.held_spikes: list[list[float]] = []
        self.recent: deque[float] = deque(maxlen=_RECENT)
        self.unseen = 0  # values kept since the last look at the window
        self.start = 0  # only values from after this step are usual
        self.calm_steps: int | None = None  # since the last rollback
        self.first_back = 0.0  # loss of the first step after it
        self.began: int | None = None  # step of the first sign of what is suspected now
        self.age = 0  # steps of this key, which the next two count
        self.last_sign = 0
        self.odd_since: int | None = None
        self.drift = 0.0  # CUSUM of the losses in the upper quarter
        self.hard = False  # the step judged last stood far out
        self.loss: _Usual | None = None
        self.norm: _Usual | None = None
        self.first: float | None = None  # the level that the run began with
        self.best: _Usual | None = None
        self._set_bounds()

    def _set_bounds(self) -> None:
        self.loss_far = self.norm_far = self.short_odd = self.odd = self.raised = self.gone = (
            math.inf
        )
        if self.loss is None or self.norm is None or self.best is None or self.first is None:
            return
        self.loss_far = self.loss.above(_FAR if self.loss.unit is None else _FAR_LINEAR)
        self.norm_far = self.norm.above(_FAR if self.norm.unit is None else _FAR_LINEAR)
        self.short_odd = self.loss.above(_SHORT_ODD)
        matters = self.best.middle + _LEAST_LOSS * max(0.0, self.first - self.best.middle)
        self.odd = max(self.loss.upper, self.loss.above(0.0, _ODD_RISE), matters)
        self.raised = max(self.loss.above(_RAISED, _LEAST_RISE), matters)
        gone = min(self.loss.above(_GONE, _LEAST_RISE), self.best.above(_DRIFTED, _LEAST_RISE))
        self.gone = max(gone, matters)

    def _look_at_window(self) -> None:
        self.unseen = 0
        del self.kept[:-_KEPT]
        window = [values for values in self.kept[-_WINDOW - _LAG : -_LAG] if values[0] > self.start]
        if len(window) < _ENOUGH:
            return
        if self.loss is None:
            self.began = None  # the new level is known by now
        self.loss = _Usual.of([values[1] for values in window], _LOSS_FLOOR)
        self.norm = _Usual.of([values[2] for values in window], _NORM_FLOOR)
        self.first = self.loss.middle if self.first is None else self.first
        if self.best is None or self.loss.middle < self.best.middle:
            self.best = self.loss
        self._set_bounds()

    def accept(self, loss: float, norm: float, now: int) -> None:
        if self.hard:
            return
        suspected = self.began is not None and self.loss is not None
        (self.held if suspected else self.kept).append([now, loss, norm])
        self.unseen += not suspected
        if self.unseen >= _REFRESH or len(self.held) >= _HOLD:
            self._merge_held()

    def judge(self, loss: float, norm: float, now: int) -> Level:
        self.hard = False
        self.age += 1
        self.recent.append(loss)
        if self.loss is None:
            return Level.CALM
        self.first_back = (
            loss if self.calm_steps == 0 and len(self.recent) == 1 else self.first_back
        )
        self.drift = min(
            max(self.drift + (1.0 if loss > self.odd else -_DRIFT_BACK), 0.0), _DRIFT_FULL
        )
        if loss > self.loss_far:
            self._sign(now)
            self.hard = norm > self.norm_far and self._beyond_tail(loss, norm, now)
        if (self.age % _LOOK == 0 or self.began is not None) and self._has_diverged(now):
            return self._left_level(now)
        if self.hard:
            return Level.HARD
        if self.calm_steps is not None and self.began is None:
            self.calm_steps += 1
        return Level.CALM

    def _sign(self, now: int) -> None:
        self.last_sign = self.age
        self.began = now if self.began is None else self.began

    def _beyond_tail(self, loss: float, norm: float, now: int) -> bool:
        """Say whether a spike is larger than those that this run is known to survive."""
        assert self.loss is not None
        assert self.norm is not None
        distance = min(self.loss.distance(loss), self.norm.distance(norm))
        self.held_spikes.append([now, distance])
        self.spikes = [spike for spike in self.spikes if spike[0] > now - _TAIL_STEPS]
        known = sorted(spike[1] for spike in self.spikes)
        return len(known) < 2 or distance > _TAIL * known[-2]

    def _has_diverged(self, now: int) -> bool:
        newest = list(self.recent)
        if len(newest) < _RECENT:
            return False
        ordered = sorted(newest)
        if self.drift < _DRIFT_OVER:
            self.odd_since = None
        elif self.odd_since is None and self.drift > _DRIFT_FULL - 1.0:
            self.odd_since = self.age
        odd_for = 0 if self.odd_since is None else self.age - self.odd_since + 1
        if odd_for or sorted(newest[-_SHORT:])[_SHORT // 2] > self.short_odd:
            self._sign(now)
        elif self.began is not None and self.age - self.last_sign >= _CALM_AFTER:
            self.began = None
            self.spikes += self.held_spikes
            self.held_spikes = []
            self._merge_held()
        level = ordered[_RECENT // 2]
        return level > self.gone or (odd_for > _ODD_FOR and level > self.raised)

    def _merge_held(self) -> None:
        self.kept += self.held
        self.held = []
        self._look_at_window()

    def _left_level(self, now: int) -> Level:
        """Start anew at this level, and report it.

        Not so if good weights give it too, directly after a rollback.
        """
        newest = sorted(self.recent)[len(self.recent) // 2]
        began_well = self.loss is not None and 2 * self.first_back < newest + self.loss.middle
        reported = self.calm_steps is None or self.calm_steps >= _RETURNED or began_well
        self.start, self.began = now, self.began or now
        self._start_anew()
        return Level.DIVERGED if reported else Level.CALM

    def _start_anew(self) -> None:
        self.held, self.held_spikes, self.odd_since, self.hard = [], [], None, False
        self.recent.clear()
        self.drift = 0.0
        self.loss = self.norm = self.best = None
        self._set_bounds()

    def begin_again(self) -> None:
        self._start_anew()
        self.began, self.calm_steps = None, 0
        self._look_at_window()

    def state_dict(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if name not in _BOUNDS}
        usuals = {
            name: state[name] and [getattr(state[name], slot) for slot in _Usual.__slots__]
            for name in _USUALS
        }
        columns = {
            name: [list(column) for column in zip(*state.pop(name), strict=True)] for name in _LISTS
        }
        return state | usuals | {"columns": columns, "recent": list(self.recent)}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> _Track:
        track = cls()
        columns = state["columns"]
        for name in _LISTS:
            setattr(
                track,
                name,
                [[number(each) for each in row] for row in zip(*columns[name], strict=True)],
            )
        for name in state.keys() - {"columns", "recent", *_USUALS}:
            setattr(track, name, number(state[name], or_none=vars(track)[name] is None))
        track.recent = deque(map(number, state["recent"]), maxlen=_RECENT)
        for name in _USUALS:
            setattr(
                track,
                name,
                state[name] and _Usual(*(number(each, or_none=True) for each in state[name])),
            )
        track._set_bounds()
        return track


_USUALS = ("loss", "norm", "best")
_LISTS = ("kept", "held", "spikes", "held_spikes")
# They follow from the rest
_BOUNDS = ("loss_far", "norm_far", "short_odd", "odd", "raised", "gone")


# --- NaN and Inf


def decide_after_nonfinite(
    *, reason: str, in_a_row: int, patience: int | None, rollbacks_in_a_row: int, max_rollbacks: int
) -> Decision:
    """Return the decision about a non-finite step.

    So many as `patience` in a row, this one included, lead to a rollback (None: never), and the run
    stops after `max_rollbacks` in a row that did not get beyond the place where they came from.
    """
    if patience is None or in_a_row < patience:
        return SkipStep(reason=reason, promise="changes training")
    if rollbacks_in_a_row < max_rollbacks:
        return RollBack(
            reason=reason if patience == 1 else f"{in_a_row} non-finite steps in a row: {reason}",
            promise="changes training",
            rewind_data=False,
        )
    return Stop(
        reason=f"after {rollbacks_in_a_row} rollback(s) again: {reason}", promise="changes training"
    )


def describe_nonfinite(loss: float, culprits: Sequence[str], count: int) -> str:
    """Return one line that names the loss and the first parameters with bad gradients."""
    if not culprits:
        return f"non-finite loss ({loss:g})"
    more = f" and {count - len(culprits)} more parameter(s)" if count > len(culprits) else ""
    return f"non-finite gradient (loss {loss:g}) in {', '.join(culprits)}{more}"
