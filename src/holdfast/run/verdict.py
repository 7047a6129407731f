"""What a rehearsal has shown, and what several have shown together.

Does not: rehearse (see ``rehearsal``), or say what follows from a verdict (see ``hazards``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

from holdfast.run.closure import Called
from holdfast.run.weighting import SAMPLES, Weighting

Outcome: TypeAlias = Literal["exact", "coupled", "random", "trusted", "unknown"]
_FROM_BEST_TO_WORST: tuple[Outcome, ...] = ("unknown", "exact", "random", "coupled")  # unknown yields to any other


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a rehearsal has shown.

    Args:
        outcome: ``"exact"``: splitting keeps the gradient. ``"coupled"``: it does not. ``"random"``: the loss
            draws random numbers, so splitting is equal in distribution at best. ``"trusted"``: the caller says
            that it is exact. ``"unknown"``: it could not be tried.
        difference: Relative L2 difference of the gradients, weighted as they will be; NaN if unknown.
        by_samples: The same, weighted by samples.
        declared: The loss function says how many items its mean is over, or takes the outputs of all samples.
        changes_batch: The loss function changes the tensors of its batch.
        changed_buffer: Name of a buffer, other than running statistics, that a forward pass changes.
        why: For ``"unknown"``, what went wrong.
        short_of_memory: For ``"unknown"``, whether that was, or may have been, a lack of memory.
        held: Weightings by which the parts make up the whole, the most usual first.
        failed: Weightings by which they do not.
        side_effects: Attributes of modules that each forward pass changes.
        called: What the loss function called that is the guard's to call.
    """

    outcome: Outcome
    difference: float = float("nan")
    by_samples: float = float("nan")
    declared: bool = False
    changes_batch: bool = False
    changed_buffer: str = ""
    why: str = ""
    short_of_memory: bool = False
    held: tuple[Weighting, ...] = ()
    failed: tuple[Weighting, ...] = ()
    side_effects: tuple[str, ...] = ()
    called: Called | None = None

    def weighting(self) -> Weighting:
        """Return what the parts of a batch are weighted by, where the loss function does not say it."""
        return self.held[0] if self.held else SAMPLES

    def facts(self) -> dict[str, Any]:
        """Return what is worth recording, as JSON values."""
        found = asdict(self)
        found["held"] = [str(weighting) for weighting in self.held]
        return {name: value for name, value in found.items() if name not in ("failed", "side_effects", "called")}

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Verdict:
        """Rebuild a verdict from `to_json`."""
        lists = {
            name: tuple(Weighting(**{**each, "keys": tuple(each["keys"])}) for each in values[name])
            for name in ("held", "failed")
        }
        return cls(**{**values, **lists, "side_effects": tuple(values["side_effects"])})


def merged(verdicts: Sequence[Verdict], **facts: Any) -> Verdict:
    """Return what verdicts promise together: the least. A weighting holds if it never failed."""
    chosen = max(verdicts, key=lambda verdict: _FROM_BEST_TO_WORST.index(verdict.outcome))
    failed = tuple(dict.fromkeys(weighting for verdict in verdicts for weighting in verdict.failed))
    every = dict.fromkeys(weighting for verdict in verdicts for weighting in verdict.held)
    held = tuple(sorted((weighting for weighting in every if weighting not in failed), key=Weighting.rank))
    by_samples = max((v.by_samples for v in verdicts if v.by_samples >= 0), default=float("nan"))
    together: dict[str, Any] = {
        "by_samples": by_samples,
        "changes_batch": any(verdict.changes_batch for verdict in verdicts),
        "changed_buffer": next((verdict.changed_buffer for verdict in verdicts if verdict.changed_buffer), ""),
        "side_effects": tuple(dict.fromkeys(name for verdict in verdicts for name in verdict.side_effects)),
    }
    if chosen.outcome == "exact" and failed and not held:
        together |= {"outcome": "coupled", "difference": by_samples}
    elif chosen.outcome == "exact":
        together["difference"] = max(verdict.difference for verdict in verdicts if verdict.outcome == "exact")
    return replace(chosen, held=held, failed=failed, **{**together, **facts})
