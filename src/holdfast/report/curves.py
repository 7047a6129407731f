"""Draw loss curves with marks where something happened."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path


def draw_losses(
    path: Path, reference: Sequence[float], curve: Sequence[tuple[int, float]], marks: Sequence[tuple[int, str]]
) -> None:
    """Write a picture of two loss curves.

    Args:
        path: A file that ends in .png, .svg or .pdf.
        reference: Loss of each step of the undisturbed run, from step 1.
        curve: ``(step, loss)`` of the disturbed run, in the order in which the steps were made.
        marks: ``(steps made before it, what)``; one label for each kind.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    axes.plot(range(1, len(reference) + 1), reference, color="0.55", linewidth=5, label="undisturbed, plain PyTorch")
    axes.plot(
        *zip(*_broken_at_restarts(curve), strict=True),
        color="tab:blue",
        linewidth=1.3,
        label="with all faults, under holdfast",
    )
    for number, what in enumerate(dict.fromkeys(what for _, what in marks)):
        steps = [step for step, kind in marks if kind == what]
        axes.plot(steps, [0.0] * len(steps), "v", color=f"C{number + 1}", markersize=9, label=what, clip_on=False)
        for step in steps:
            axes.axvline(step, color=f"C{number + 1}", linewidth=0.8, alpha=0.6)
    axes.set(xlabel="optimizer steps in the weights", ylabel="training loss", ylim=(0, None))
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _broken_at_restarts(curve: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """Return the curve with a gap wherever it goes back, where a line would be drawn that nobody trained."""
    points: list[tuple[float, float]] = [(math.nan, math.nan)]
    for step, loss in curve:
        if step <= points[-1][0]:
            points.append((math.nan, math.nan))
        points.append((step, loss))
    return points
