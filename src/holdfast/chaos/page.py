"""Render the HTML report of a campaign: a single file that needs no network and no scripts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from holdfast.chaos.results import CampaignReport
from holdfast.core.text import sanitise

# The maximum number of points in a curve. A curve is about 240 pixels wide, so more points would
# not be visible.
MAX_CURVE_POINTS = 200
# The side length of the square in which curves are drawn, in SVG units.
CURVE_SIZE = 100

# One loss per step; None for a step without a loss.
Losses = Sequence[float | None]


def render(
    report: CampaignReport, command: str, verdict: str, *, now: datetime | None = None
) -> str:
    """Return a campaign's report as an HTML page.

    Args:
        report: The report of the campaign.
        command: The command to display, which must not contain secrets.
        verdict: The verdict in one sentence, without the final period.
        now: The time to display as the time of the report; None for the current time.
    """
    environment = Environment(
        autoescape=True, finalize=sanitise, undefined=StrictUndefined, trim_blocks=True
    )
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    time = now or datetime.now(UTC)
    return environment.from_string(template).render(
        report=report,
        command=command,
        verdict=verdict,
        written=f"{time:%Y-%m-%d %H:%M} UTC",
        curves=[
            draw_curves(report.losses, row.comparison.get("losses", [])) for row in report.rows
        ],
    )


def draw_curves(*curves: Losses) -> list[str]:
    """Return the points of several loss curves, drawn in one square on the same scale.

    Args:
        curves: The losses of each curve.

    Returns:
        For each curve, the value of the ``points`` attribute of an SVG polyline, in which smaller
            losses are drawn below larger losses. The list is empty if any curve has no losses.
    """
    values_of_curves = [[loss for loss in curve if loss is not None] for curve in curves]
    if not all(values_of_curves):
        return []
    lowest = min(min(values) for values in values_of_curves)
    highest = max(max(values) for values in values_of_curves)
    step_count = max(len(curve) for curve in curves)
    return [_draw_curve(curve, lowest, highest, step_count) for curve in curves]


def _draw_curve(curve: Losses, lowest: float, highest: float, step_count: int) -> str:
    # Divide and round up.
    steps_per_point = -(-step_count // MAX_CURVE_POINTS)
    # If all losses are equal, use 1 to avoid dividing by zero.
    height = (highest - lowest) or 1
    points = []
    for step in range(0, len(curve), steps_per_point):
        loss = curve[step]
        if loss is not None:
            x = CURVE_SIZE * step / step_count
            y = CURVE_SIZE * (highest - loss) / height
            points.append(f"{x:.1f},{y:.1f}")
    return " ".join(points)
