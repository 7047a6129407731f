"""Draw events as marks on a figure, with one trace per severity and one for resumes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from holdfast.report.page.figures.plotly_values import Figure, label
from holdfast.report.severity import severity
from holdfast.report.sources import RecordedEvent

# Color and symbol of each kind of mark, the same in both themes. The most severe kind is drawn
# last, so that it is on top.
_STYLES = {
    "info": ("#8c8c8c", "circle"),
    "resumed": ("#4e8fd0", "triangle-right"),
    "warning": ("#e08a1e", "triangle-up"),
    "error": ("#d64545", "x"),
}
_MAX_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """An event and its position in a figure. A coordinate is a number, a date or a row name."""

    recorded: RecordedEvent
    x: str | float
    y: str | float


def mark_traces(marks: Iterable[Mark], **options: Any) -> list[Figure]:
    """Return the plotly traces that draw marks, one for each kind of mark.

    Args:
        marks: The events to mark, and their positions.
        **options: Additional attributes of each trace.
    """
    by_style: dict[str, list[Mark]] = {style: [] for style in _STYLES}
    for mark in marks:
        event = mark.recorded.event
        style = "resumed" if event.kind == "resumed" else severity(event)
        by_style[style].append(mark)
    return [
        _trace(style, marks_of_style) | options
        for style, marks_of_style in by_style.items()
        if marks_of_style
    ]


def _trace(style: str, marks: list[Mark]) -> Figure:
    colour, symbol = _STYLES[style]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "event" if style == "info" else style,
        "legendgroup": style,
        "x": [mark.x for mark in marks],
        "y": [mark.y for mark in marks],
        "marker": {"symbol": symbol, "size": 10, "color": colour},
        "hovertext": [
            label(f"{mark.recorded.source}, {mark.recorded.event}", _MAX_CHARACTERS)
            for mark in marks
        ],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }
