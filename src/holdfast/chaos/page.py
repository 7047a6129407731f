"""The page of a campaign: one HTML file that opens offline, loads nothing and runs no script."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from holdfast.chaos.trying import Report
from holdfast.core.text import sanitise

_MOST_POINTS = 200


def render(report: Report, command: str, verdict: str, *, now: datetime | None = None) -> str:
    """Return the page of a report; `command` is shown, so no secret may be in it."""
    made = Environment(
        autoescape=True, finalize=sanitise, undefined=StrictUndefined, trim_blocks=True
    )
    return made.from_string(
        Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    ).render(
        report=report,
        command=command,
        verdict=verdict,
        written=f"{now or datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        curves=[_curves(report.losses, row.comparison.get("losses", [])) for row in report.rows],
    )


def _curves(*losses: Sequence[float | None]) -> list[str]:
    """Return the points of curves in one square of 100, nothing if one has no loss.

    A smaller loss lies lower.
    """
    known = [[loss for loss in each if loss is not None] for each in losses]
    if not all(known):
        return []
    low, high, count = min(map(min, known)), max(map(max, known)), max(map(len, losses))
    found = []
    for each in losses:
        points = list(enumerate(each))[:: -(-count // _MOST_POINTS)]
        places = [
            (100 * at / count, 100 * (high - y) / ((high - low) or 1))
            for at, y in points
            if y is not None
        ]
        found.append(" ".join(f"{x:.1f},{y:.1f}" for x, y in places))
    return found
