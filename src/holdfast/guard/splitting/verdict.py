"""What a rehearsal has shown, what several have shown together, and what splitting a batch would change.

Does not: rehearse (see ``rehearsal``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd

from holdfast.core.events import Promise
from holdfast.core.policy import SplitHazard
from holdfast.guard.splitting.closure import Called
from holdfast.guard.splitting.weighting import SAMPLES, Weighting

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


def find_hazards(
    models: Iterable[nn.Module], mutable_buffers: Sequence[str], verdict: Verdict | None
) -> dict[SplitHazard, str]:
    """Return what a split would change, by the name under which a policy can allow it.

    Args:
        models: As they are now: a BatchNorm layer in evaluation is no hazard.
        mutable_buffers: Names of buffers, other than running statistics, that a forward pass changes.
        verdict: Of the rehearsal, if there was one.
    """
    found: dict[SplitHazard, str] = {}
    norms = mixing_layers(models)
    if norms:
        found["batch_norm"] = (
            f"{len(norms)} {type(norms[0]).__name__} layer(s) in training mode take statistics over the samples "
            "of one forward pass"
        )
    changed = [*mutable_buffers, *([verdict.changed_buffer] if verdict and verdict.changed_buffer else [])]
    if changed:
        found["buffers"] = f"each forward pass changes the buffer {changed[0]!r}"
    if verdict is not None and verdict.outcome == "unknown":
        found["coupled_loss"] = (
            f"it could not be found out whether that keeps the gradient ({verdict.why}; check_split=False says that "
            "it does)"
        )
    if verdict is not None and verdict.outcome == "coupled":
        found["coupled_loss"] = _coupling(verdict)
    return found


def _coupling(verdict: Verdict) -> str:
    """Return by how much the parts miss the whole, and what was tried."""
    differs = f"differs from that over 3 + 1 of them by {verdict.difference:.1%}"
    if math.isinf(verdict.difference):
        differs = "is finite, and that over 3 + 1 of them is not"
    others = [str(weighting) for weighting in verdict.failed if weighting.kind not in ("samples", "sum")]
    tried = ", as a mean over samples" if verdict.failed else ""
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        tried += f"; nor is it a sum, or a mean over {', '.join(others[:3])}{more}"
    return f"the gradient over 4 samples {differs}{tried}"


def mixing_layers(models: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the layers that take statistics over the samples of one forward pass, as the models are now."""
    return [module for model in models for module in model.modules() if _mixes_samples(module)]


def _mixes_samples(module: nn.Module) -> bool:
    if not isinstance(module, _NormBase) or not module.training:
        return False
    return isinstance(module, _BatchNorm) or module.track_running_stats


def split_promise(models: Iterable[nn.Module], hazards: Sequence[SplitHazard], verdict: Verdict | None) -> Promise:
    """Return what splitting promises, given the hazards that are there and that the policy allows."""
    if hazards:
        return "changes training"
    random = verdict is not None and verdict.outcome == "random"
    dropout = any(module.training and _drops(module) for model in models for module in model.modules())
    return "equal in distribution" if random or dropout else "equal up to rounding"


def _drops(module: nn.Module) -> bool:
    rate = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0.0)
    return isinstance(rate, float) and rate > 0
