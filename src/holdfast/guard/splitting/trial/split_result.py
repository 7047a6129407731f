"""`SplitCheckResult`: the result of a trial split, and `combine` for the results of several."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

from holdfast.guard.splitting.loss_functions import Called
from holdfast.guard.splitting.trial.selection import MASK
from holdfast.guard.splitting.weighting import SAMPLES, Weighting

# The kinds of random numbers that a loss may draw: none, separate numbers for each sample, numbers
# that all samples share (after a split, each part would draw its own), or numbers that could not be
# repeated for the parts.
Draw: TypeAlias = Literal["none", "own", "shared", "unknown"]
# The kinds of random numbers, from best to worst.
_DRAWS: tuple[Draw, ...] = ("none", "own", "shared", "unknown")
CheckOutcome: TypeAlias = Literal["exact", "coupled", "random", "trusted", "unknown"]
# When results are combined, the worst outcome wins. Every other outcome wins over "unknown", since
# a check that failed shows nothing. "trusted" comes next: it does not result from a comparison.
_FROM_BEST_TO_WORST: tuple[CheckOutcome, ...] = (
    "unknown",
    "trusted",
    "exact",
    "random",
    "coupled",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCheckResult:
    """The result of a trial split.

    The outcome is one of these:

    - ``"exact"``: splitting keeps the gradient.
    - ``"random"``: apart from random numbers, splitting keeps the gradient, or the numbers could
      not be repeated but the loss function declares its items.
    - ``"coupled"``: splitting changes the gradient, or the check could not rule this out.
    - ``"trusted"``: there was no comparison, for example because the policy turns it off.
    - ``"unknown"``: the check failed.
    """

    outcome: CheckOutcome
    # The relative L2 difference between the gradients, with the weights used in training.
    difference: float = float("nan")
    # Whether the loss function declares what its mean is taken over, or is a `TwoPass`.
    declared: bool = False
    # Whether the loss function changes the tensors of its batch in place.
    changes_batch: bool = False
    # The name of a buffer, other than running statistics, that a forward pass changes.
    changed_buffer: str = ""
    # For "unknown", the reason why the check failed. For "coupled", the reason why the check could
    # not show that splitting is safe, if that is the case.
    why: str = ""
    # The kind of random numbers drawn in training.
    draws: Draw = "none"
    # For "unknown", whether the reason is, or may be, a lack of memory.
    short_of_memory: bool = False
    # The weightings that reproduce the gradient, most common first.
    held: tuple[Weighting, ...] = ()
    # The weightings that do not reproduce the gradient.
    failed: tuple[Weighting, ...] = ()
    # The names of attributes and variables that each forward pass changes. None if this is unknown,
    # because the check was not run in a forked copy of the process.
    side_effects: tuple[str, ...] | None = None
    # The function with which the loss selects samples, such as "topk". Empty if it does not select.
    selects: str = ""
    # The forbidden call that the loss function has made, if any.
    called: Called | None = None
    # For "unknown", whether the reason is that the process could not be forked.
    fork_failed: bool = False

    def keeps_gradient(self) -> bool:
        """Return whether a comparison has shown that splitting keeps the gradient."""
        return self.outcome in ("exact", "random")

    def weighting(self) -> Weighting:
        """Return the most common weighting that reproduces the gradient, or `SAMPLES`."""
        return self.held[0] if self.held else SAMPLES

    def may_change_gradient_later(self) -> bool:
        """Return whether splitting may change the gradient later, though it has not so far.

        This is the case for a loss that selects samples, since it may have selected all of them so
        far. Sums are an exception: in a sum over the samples above a threshold, each part adds its
        own samples.
        """
        is_sum = not self.declared and self.weighting().kind == "sum"
        return bool(self.selects) and not (is_sum and self.selects == MASK)

    def event_fields(self) -> dict[str, Any]:
        """Return the fields to record in an event, as JSON values."""
        fields = asdict(self)
        fields["held"] = [str(weighting) for weighting in self.held]
        for name in ("failed", "side_effects", "called", "fork_failed"):
            del fields[name]
        return fields

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SplitCheckResult:
        """Restore a result that was converted with ``asdict`` and sent as JSON."""
        restored = dict(values)
        for name in ("held", "failed"):
            restored[name] = tuple(
                Weighting(**{**weighting, "keys": tuple(weighting["keys"])})
                for weighting in values[name]
            )
        if values["side_effects"] is not None:
            restored["side_effects"] = tuple(values["side_effects"])
        return cls(**restored)


def combine(results: Sequence[SplitCheckResult]) -> SplitCheckResult:
    """Combine the results of several checks of one loss function. The worst outcome wins.

    A weighting holds if it held in at least one check and failed in none. If every weighting that
    held in one check failed in another, no weighting is right, so the combined outcome is
    ``"coupled"``.

    Args:
        results: The results, at least one.
    """
    worst = max(results, key=lambda result: _FROM_BEST_TO_WORST.index(result.outcome))
    failed = tuple(dict.fromkeys(weighting for result in results for weighting in result.failed))
    held = _weightings_that_hold(results, failed)
    outcome = worst.outcome
    difference = worst.difference
    if worst.keeps_gradient() and failed and not held:
        outcome = "coupled"
        difference = math.nan
    elif outcome == "exact":
        difference = max(result.difference for result in results if result.outcome == "exact")
    return replace(
        worst,
        outcome=outcome,
        difference=difference,
        held=held,
        failed=failed,
        changes_batch=any(result.changes_batch for result in results),
        draws=max((result.draws for result in results), key=_DRAWS.index),
        changed_buffer=_first_name(result.changed_buffer for result in results),
        selects=_first_name(result.selects for result in results),
        side_effects=_all_side_effects(results),
    )


def _weightings_that_hold(
    results: Sequence[SplitCheckResult], failed: Sequence[Weighting]
) -> tuple[Weighting, ...]:
    """Return the weightings that held in a check and failed in none, most common first."""
    all_held = dict.fromkeys(weighting for result in results for weighting in result.held)
    remaining = [weighting for weighting in all_held if weighting not in failed]
    return tuple(sorted(remaining, key=Weighting.rank))


def _all_side_effects(results: Sequence[SplitCheckResult]) -> tuple[str, ...] | None:
    """Return the side effects of all results, or None if they are unknown in all of them."""
    known = [result.side_effects for result in results if result.side_effects is not None]
    if not known:
        return None
    return tuple(dict.fromkeys(name for names in known for name in names))


def _first_name(names: Iterable[str]) -> str:
    """Return the first name that is not empty, or an empty string."""
    return next(filter(None, names), "")
