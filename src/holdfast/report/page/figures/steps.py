"""Draw curves over steps in stacked panels that share a step axis, so they zoom together.

Each quantity has its own panel (see ``panels``), and each lane has its own color. Panels whose
steps are not optimizer steps come last and have their own step axes. Events are marked at the top
of the first panel.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from holdfast.report.curves import Curve
from holdfast.report.page.figures.event_marks import Mark, mark_traces
from holdfast.report.page.figures.panels import PanelDrawing, panel_areas, present_panels
from holdfast.report.page.figures.plotly_values import Figure
from holdfast.report.run_snapshot import Lane
from holdfast.report.severity import severity
from holdfast.report.sources import RecordedEvent

_PANEL_PIXELS = 170
_TOP_PIXELS = 50
_BOTTOM_PIXELS = 44
_LEGEND_PIXELS = 84
_EVENTS_AXIS = "y99"
# Height of the marks of events on that axis, just below the panel's title.
_MARK_HEIGHT = 0.94
# Matches the process ID in a label such as "trainer 4711, attempt 0".
_PROCESS = re.compile(r"^trainer \d+, ")
# Kinds of events that are marked although they are harmless.
_MILESTONES = frozenset(
    {"checkpoint_saved", "saved", "resumed", "attempt_started", "validated", "note"}
)


def step_figure(lanes: Sequence[Lane], events: Sequence[RecordedEvent] = ()) -> Figure | None:
    """Return the figure of all curves over steps, or None if there are no curves.

    Args:
        lanes: The lanes to draw, in the order of their colors.
        events: Events to mark, of which only warnings, errors and milestones are drawn.
    """
    panels = present_panels(lanes)
    if not panels:
        return None
    marks = _event_traces(lanes, events)
    named_lanes = _with_short_names(lanes)
    data: list[Figure] = []
    total_size = sum(panel.size for panel in panels)
    layout = _layout(total_size, has_legend=len(lanes) > 1 or bool(marks))
    lowest_shared_axis = "y"
    for panel, area in zip(panels, panel_areas(panels), strict=True):
        drawing = PanelDrawing(panel, named_lanes, area=area)
        data += drawing.traces()
        layout |= drawing.axes()
        layout["annotations"].append(drawing.title())
        step_axis = f"x{area.axis}" if panel.own_scale else "x"
        for stop in drawing.stops():
            layout["shapes"].append(stop.area(step_axis, _middle_step(lanes)))
        if not panel.own_scale:
            lowest_shared_axis = drawing.y_axis
    layout["xaxis"] = {
        "title": {"text": "optimizer steps", "standoff": 6},
        "anchor": lowest_shared_axis,
        "showspikes": True,
    }
    data += marks
    return {"data": data, "layout": layout}


def _with_short_names(lanes: Sequence[Lane]) -> list[Lane]:
    """Return lanes without the process IDs in their labels, if the labels stay different.

    What tells the lanes apart is the attempt or the optimizer.
    """
    names = [_PROCESS.sub("", lane.label) for lane in lanes]
    if len(set(names)) < len({lane.label for lane in lanes}):
        return list(lanes)
    return [replace(lane, label=name) for lane, name in zip(lanes, names, strict=True)]


def _middle_step(lanes: Sequence[Lane]) -> float:
    """Return half of the largest step of all curves."""
    largest = [
        float(np.nanmax(curve.steps))
        for lane in lanes
        for curve in lane.curves.values()
        if np.isfinite(curve.steps).any()
    ]
    return max(largest, default=0.0) / 2


def share_equal_curves(lanes: Sequence[Lane]) -> Sequence[Lane]:
    """Return lanes in which curves that are the same in several lanes are drawn only once.

    If all curves of a name are identical, they are moved to an additional lane with the label "all
    alike". For example, the learning rate is often the same on all ranks.
    """
    curves_by_name: dict[str, list[Curve]] = {}
    for lane in lanes:
        for name, curve in lane.curves.items():
            curves_by_name.setdefault(name, []).append(curve)
    shared = {
        name: curves[0]
        for name, curves in curves_by_name.items()
        if len(curves) > 1 and all(_is_equal(curves[0], curve) for curve in curves[1:])
    }
    if not shared:
        return lanes

    own_lanes = []
    for lane in lanes:
        own_curves = {name: curve for name, curve in lane.curves.items() if name not in shared}
        if own_curves:
            own_lanes.append(replace(lane, curves=own_curves))
    first = next(lane for lane in lanes if shared.keys() & lane.curves.keys())
    return [*own_lanes, replace(first, label="all alike", curves=shared)]


def _is_equal(curve: Curve, other: Curve) -> bool:
    return np.array_equal(curve.steps, other.steps) and np.array_equal(
        curve.values, other.values, equal_nan=True
    )


def _layout(total_size: int, *, has_legend: bool) -> Figure:
    """Return the initial layout of the figure, to which each panel adds its axes and its title.

    Args:
        total_size: The sum of the panels' sizes.
        has_legend: Whether the figure has a legend below the panels.
    """
    pixels = _PANEL_PIXELS * total_size
    return {
        "height": _TOP_PIXELS + _BOTTOM_PIXELS + pixels,
        "hovermode": "x",
        "hoversubplots": "axis",
        "showlegend": has_legend,
        "legend": {
            "orientation": "h",
            "y": -_LEGEND_PIXELS / pixels,
            "yanchor": "top",
            "x": 0,
        },
        "margin": {"l": 74, "r": 18, "t": _TOP_PIXELS, "b": _BOTTOM_PIXELS},
        "annotations": [],
        "shapes": [],
        _EVENTS_AXIS.replace("y", "yaxis"): {
            "overlaying": "y",
            "range": [0, 1],
            "visible": False,
            "fixedrange": True,
        },
    }


def _event_traces(lanes: Sequence[Lane], events: Sequence[RecordedEvent]) -> list[Figure]:
    """Return the traces that mark events at the top of the first panel, with lines below them."""
    marks = []
    for recorded in events:
        is_shown = severity(recorded.event) != "info" or recorded.event.kind in _MILESTONES
        step = _step_at(lanes, recorded) if is_shown else None
        if step is not None:
            marks.append(Mark(recorded=recorded, x=step, y=_MARK_HEIGHT))
    return [_with_line_down(trace) for trace in mark_traces(marks)]


def _step_at(lanes: Sequence[Lane], recorded: RecordedEvent) -> float | None:
    """Return the training step at the time of an event, or None before the first step.

    The step that the event contains is not used, because its source may count steps differently or
    not count them at all.
    """
    now = recorded.event.unix_seconds
    begun = [lane for lane in lanes if lane.begun is not None and lane.begun <= now]
    own = [lane for lane in begun if lane.label == recorded.source]
    lane = max(own or begun, key=lambda lane: lane.begun or 0.0, default=None)
    if lane is None:
        return None
    newest = int(np.searchsorted(lane.times.unix_seconds, now, side="right")) - 1
    return float(lane.times.steps[max(newest, 0)])


def _with_line_down(trace: Figure) -> Figure:
    """Return a trace on the event axis, with error bars that draw lines across the panel."""
    line = {
        "type": "data",
        "symmetric": False,
        "array": [0],
        "arrayminus": [_MARK_HEIGHT] * len(trace["x"]),
        "width": 0,
        "thickness": 0.7,
        "color": trace["marker"]["color"],
    }
    return {
        **trace,
        "yaxis": _EVENTS_AXIS,
        "error_y": line,
        "cliponaxis": False,
    }
