"""`LossHistory`: what trials have shown about one loss function; `LossHistories`: all of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast.guard.splitting.hazards import Hazard
from holdfast.guard.splitting.loss_identity import description_of
from holdfast.guard.splitting.trial.split_result import SplitCheckResult, combine
from holdfast.guard.splitting.weighting import SAMPLES, Weighting

# At most this many loss functions are distinguished by the strings that are bound to them. If there
# are more, a string probably changes in every step.
_MAX_HISTORIES = 64
# Comparing micro-batches with their halves may take at most this share of the time that split steps
# take, which is within the usual variation between two runs of the same script. With this share, a
# loss that starts to couple samples is detected after a few hundred steps.
_MAX_CHECK_SHARE = 0.01
# The first interval, in split steps, between comparisons of a micro-batch with its halves, and the
# minimum once their cost is known. Before the first comparison, the trials at the 2nd, 4th, ...,
# 64th split step serve the same purpose.
_MIN_STEPS_BETWEEN = 64
# The maximum number of steps between two comparisons, in case the clock does not advance.
_MAX_STEPS_BETWEEN = 2**16
# After a comparison has failed, this many of the next split steps are checked too. A single failure
# may be due to rounding that moves a value across a threshold, but a loss that selects samples
# fails in more than half of the steps.
_STEPS_IN_DOUBT = 4


def choose_interval(check_seconds: float, step_seconds: float) -> int:
    """Return the number of split steps until a micro-batch is compared with its halves again.

    With this number, comparisons take at most `_MAX_CHECK_SHARE` of the time. The number is a power
    of two, so that ranks whose timings differ slightly still check in the same steps.

    Args:
        check_seconds: How long the last comparison took, in seconds.
        step_seconds: How long the attempts of a split step take, in seconds.
    """
    steps = _MIN_STEPS_BETWEEN
    while check_seconds > _MAX_CHECK_SHARE * step_seconds * steps and steps < _MAX_STEPS_BETWEEN:
        steps *= 2
    return steps


@dataclass(frozen=True, slots=True)
class Report:
    """What was last reported about a loss function. It is reported again only if it changes."""

    # The hazard that forbids splitting, if any.
    blocking_hazard: Hazard | None
    weighting: Weighting
    may_change_later: bool


@dataclass(slots=True)
class LossHistory:
    """The trial results and step counts of one loss function."""

    # The combined result of all trials so far. None before the first trial.
    result: SplitCheckResult | None = None
    # Whether the loss function changes the tensors of its batch. None if this is unknown.
    changes_batch: bool | None = None
    # The number of steps in which a check was needed.
    steps: int = 0
    # The number of split steps.
    split_steps: int = 0
    # The number of split steps whose batch distinguished weightings.
    distinguishing_steps: int = 0
    # Whether a trial has included a part without items, over which no mean can be taken.
    tried_empty: bool = False
    # The last report, or None before the first one.
    reported: Report | None = None
    # The last step in which a check passed.
    last_passed_step: int | None = None
    # The number of comparisons of a micro-batch with its halves.
    num_comparisons: int = 0
    # The number of split steps after which a micro-batch is compared with its halves again.
    steps_between_checks: int = _MIN_STEPS_BETWEEN
    # How many of the next split steps to check because a micro-batch differed from its halves.
    steps_in_doubt: int = 0
    # The number of split steps since the last comparison.
    timed_steps: int = 0
    # The total time of the attempts of these steps, in seconds.
    timed_seconds: float = 0.0
    # The names of attributes and variables that a forward pass changes, or None if unknown.
    side_effects: tuple[str, ...] | None = None
    # The time after which to search for side effects, in seconds on the monotonic clock. None
    # before the first step.
    search_after: float | None = None
    # Whether that search has been done.
    has_searched: bool = False
    # Whether `side_effects` has been reported.
    warned: bool = False

    def has_result(self) -> bool:
        """Return whether a trial has succeeded."""
        return self.result is not None and self.result.outcome != "unknown"

    def weighting_of_parts(self) -> Weighting:
        """Return how to weight the parts of a batch, according to the trials so far."""
        return SAMPLES if self.result is None else self.result.weighting()

    def may_change_gradient_later(self) -> bool:
        """Return whether splitting may change the gradient later, though it has not so far."""
        return self.steps_in_doubt > 0 or (
            self.result is not None and self.result.may_change_gradient_later()
        )

    def count_step(self, *, is_split: bool) -> None:
        """Count a step in which a check is needed.

        Args:
            is_split: Whether the step splits its batch.
        """
        self.steps += 1
        if is_split:
            self.split_steps += 1

    def note_passed_check(self, global_step: int) -> None:
        """Record the step of a check that has passed, unless an earlier failure is in doubt."""
        if not self.steps_in_doubt:
            self.last_passed_step = global_step

    def add_trial(self, result: SplitCheckResult) -> None:
        """Add the result of a trial split."""
        combined = result if self.result is None else combine([self.result, result])
        self.result = combined
        if combined.changes_batch or combined.outcome != "unknown":
            self.changes_batch = combined.changes_batch or bool(self.changes_batch)

    def add_side_effects(self, names: tuple[str, ...]) -> None:
        """Add the names of side effects that a check has found, which may be none."""
        self.side_effects = tuple(dict.fromkeys((*(self.side_effects or ()), *names)))

    def add_comparison(self, comparison: SplitCheckResult) -> None:
        """Add the result of comparing a micro-batch with its halves.

        A failure counts only if a second one follows in the next few split steps, which are checked
        because of the first failure. If a comparison was impossible, for example because memory was
        short, the result does not change.
        """
        assert self.result is not None
        if comparison.outcome == "coupled" and not self.steps_in_doubt:
            self.steps_in_doubt = _STEPS_IN_DOUBT
            return
        self.steps_in_doubt = max(0, self.steps_in_doubt - 1)
        if comparison.outcome != "unknown":
            self.result = combine([self.result, comparison])

    def schedule_next_comparison(self, check_seconds: float) -> None:
        """Choose when to compare a micro-batch with its halves again.

        Args:
            check_seconds: How long the last comparison took, in seconds.
        """
        if self.timed_steps:
            step_seconds = self.timed_seconds / self.timed_steps
            self.steps_between_checks = choose_interval(check_seconds, step_seconds)
        self.timed_steps = 0
        self.timed_seconds = 0.0


class LossHistories:
    """The histories of all loss functions of a run, keyed by function description."""

    def __init__(self) -> None:
        self._by_description: dict[str, LossHistory] = {}
        # A weak reference to the last loss function. None if there is no such function, or if it
        # does not support weak references.
        self._last_function: weakref.ref[Callable[[Any], Any]] | None = None
        # The history of the last loss function.
        self._last_history = LossHistory()

    def __len__(self) -> int:
        return len(self._by_description)

    def history_of(self, loss_fn: Callable[[Any], Any]) -> LossHistory:
        """Return the history of a loss function.

        If it is the function of the last call, its history stays the same even if its flags have
        changed since: all parts of a step must use the same history, although the loss function may
        set its own flags while it runs.
        """
        if self._last_function is None or self._last_function() is not loss_fn:
            self.identify(loss_fn)
        return self._last_history

    def current_history_of(self, loss_fn: Callable[[Any], Any]) -> LossHistory:
        """Return the history of a loss function with its current flags."""
        self.identify(loss_fn)
        return self._last_history

    def identify(self, loss_fn: Callable[[Any], Any]) -> str:
        """Return the text that identifies a loss function with its current flags.

        A function that is new in this run gets a new history.
        """
        text = description_of(loss_fn)
        key = text
        if key not in self._by_description and len(self._by_description) >= _MAX_HISTORIES:
            key = description_of(loss_fn, 0)
        history = self._by_description.get(key)
        if history is None:
            history = self._by_description[key] = LossHistory()
        self._last_history = history
        try:
            self._last_function = weakref.ref(loss_fn)
        except TypeError:
            # Without a weak reference, the function must be identified again in the next call.
            self._last_function = None
        return text
