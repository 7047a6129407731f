"""What makes splitting a batch more than a matter of rounding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd

from holdfast.core.events import Promise
from holdfast.core.policy import SplitHazard
from holdfast.run.verdict import Verdict


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
