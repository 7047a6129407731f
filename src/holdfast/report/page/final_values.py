"""Summarize the curves of a run: the last and the best value of its loss and its metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from holdfast.report.curves import LOGGED, Curve, FloatArray
from holdfast.report.page.gathered_run import GatheredRun
from holdfast.report.run_snapshot import Lane

# Metrics whose best value is the highest or the lowest one. Of others, such as a learning rate, no
# value is the best.
_IS_BETTER_HIGH = re.compile(
    r"(?<![a-z])(?:acc(?:uracy)?|f1|auc|auroc|bleu|rouge\w*|m?ap\d*|iou|miou|precision|recall|psnr"
    r"|ssim|r2|reward)(?![a-z])",
    re.IGNORECASE,
)
_IS_BETTER_LOW = re.compile(
    r"loss|(?<![a-z])(?:err(?:or)?|wer|cer|ppl|perplexity|mae|mse|rmse|nll|bpb|fid)(?![a-z])",
    re.IGNORECASE,
)


def last_and_best_values(run: GatheredRun) -> dict[str, str]:
    """Return the last and the best loss, and those of each logged or validated metric, as text."""
    numbers = {}
    for lane in joined_lanes(run, ""):
        for name, curve in lane.curves.items():
            if not len(curve.finite) or not (name == "loss" or name.startswith(LOGGED)):
                continue
            metric = name.removeprefix(LOGGED)
            numbers[f"last {metric}{lane.label}"] = _last(curve)
            if _IS_BETTER_HIGH.search(metric):
                numbers[f"highest {metric}{lane.label}"] = f"{curve.finite.max():.6g}"
            elif _IS_BETTER_LOW.search(metric):
                numbers[f"lowest {metric}{lane.label}"] = f"{curve.finite.min():.6g}"
    return numbers


def _last(curve: Curve) -> str:
    """Return the last value of a curve that has a finite value."""
    is_finite = np.isfinite(curve.values)
    last_step = curve.steps[is_finite][-1]
    if len(curve.nonfinite) and curve.nonfinite[-1] > last_step:
        return "not finite"
    return f"{curve.values[is_finite][-1]:.6g}"


def joined_lanes(run: GatheredRun, name: str) -> Iterator[Lane]:
    """Yield the lanes of the first rank, with the curves of all attempts joined.

    If there are several optimizers, each of them has an additional lane.

    Args:
        run: The run.
        name: Label of the lanes. In the lane of an optimizer, the optimizer's name is appended.
    """
    of_first_rank = [lane for lane in run.lanes if not lane.rank]
    for optimizer in dict.fromkeys(lane.optimizer for lane in of_first_rank):
        attempts = [lane for lane in of_first_rank if lane.optimizer == optimizer]
        label = f"{name}, {optimizer}" if optimizer else name
        yield replace(attempts[0], label=label, curves=_joined_curves(attempts))


def _joined_curves(lanes: Sequence[Lane]) -> dict[str, Curve]:
    names = dict.fromkeys(name for lane in lanes for name in lane.curves)
    return {
        name: _joined_curve([lane.curves[name] for lane in lanes if name in lane.curves])
        for name in names
    }


def _joined_curve(curves: Sequence[Curve]) -> Curve:
    """Return several curves joined into one, without bands and with a gap after each part."""
    if len(curves) == 1:
        return curves[0]
    return Curve(
        steps=_concatenate_with_gaps([curve.steps for curve in curves]),
        values=_concatenate_with_gaps([curve.values for curve in curves]),
        nonfinite=np.concatenate([curve.nonfinite for curve in curves]),
        band=None,
        own_scale=curves[0].own_scale,
    )


def _concatenate_with_gaps(parts: Sequence[FloatArray]) -> FloatArray:
    return np.concatenate([np.append(part, np.nan) for part in parts])
