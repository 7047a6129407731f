"""The figure of curves over steps: stacked panels that share one axis, so they zoom together.

Each quantity has a panel, and each lane a colour. Panels whose steps are not optimizer steps come
last and have their own axes. Events are marked at the top of the first panel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from holdfast.report.curves import LOGGED, MOST_LOGGED, Band, Curve, Numbers
from holdfast.report.page.figures.event_marks import Mark, mark_traces
from holdfast.report.page.figures.plotly_values import Figure, json_numbers, label
from holdfast.report.run_snapshot import Lane
from holdfast.report.severity import severity
from holdfast.report.sources import RecordedEvent

# Ten colours that can be told apart on white and on near-black (Tableau 10, slightly lighter than
# its default).
_COLOURS = (
    "#4e8fd0",
    "#f28e2b",
    "#45a95a",
    "#e15759",
    "#9d78c9",
    "#b8860b",
    "#2aa8a8",
    "#d973a8",
    "#8c8c8c",
    "#a5785a",
)
_NONFINITE_COLOUR = "#e15759"
# Opacity of a band, as the last two hexadecimal digits of its colour.
_BAND_OPACITY = "30"

_PANEL_PIXELS = 170
_TOP_PIXELS = 50
_BOTTOM_PIXELS = 44
_LEGEND_PIXELS = 84
# The total share of the figure's height that is used for gaps between panels.
_GAPS_SHARE = 0.22
# Panels with their own axis are this much lower, to leave room for the tick labels above them.
_SHARE_BELOW_AN_AXIS = 0.72

# If values differ by more than this factor, a linear axis would show only the large ones.
_FACTOR_FOR_LOGARITHMIC_AXIS = 100.0
# If values differ by more than this factor, a logarithmic axis has too many decades to mark each
# one.
_FACTOR_FOR_FEW_TICKS = 1e8
# Values with a smaller relative difference count as constant.
_CONSTANT = 1e-9
_MOST_MARKS = 200
# A line through fewer points than this is hardly visible, so its points are marked.
_FEWEST_POINTS_OF_A_LINE = 3

_EVENTS_AXIS = "y99"
# Kinds of harmless events that are marked nevertheless.
_MILESTONES = frozenset(
    {"checkpoint_saved", "saved", "resumed", "attempt_started", "validated", "note"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    """One panel.

    Args:
        curves: Names of the curves in it.
        title: Text above it, as `label` returns it.
        unit: "" for a plain number, "B" for bytes, "%" for a share between 0 and 1.
        may_be_logarithmic: Whether to use a logarithmic axis if values span orders of magnitude.
        own_scale: Whether its steps are not optimizer steps, so that it needs its own axis.
    """

    curves: tuple[str, ...]
    title: str
    unit: str = ""
    may_be_logarithmic: bool = False
    own_scale: bool = False


# From top to bottom; a panel without a curve is left out.
_PANELS = (
    _Panel(curves=("loss",), title="loss", may_be_logarithmic=True),
    _Panel(curves=("grad_norm",), title="gradient norm", may_be_logarithmic=True),
    _Panel(curves=("learning_rate",), title="learning rate"),
    _Panel(
        curves=("device_allocated_bytes", "device_reserved_bytes"),
        title="device memory",
        unit="B",
    ),
    _Panel(curves=("host_bytes",), title="host memory", unit="B"),
    _Panel(curves=("wait_share",), title="waiting for data", unit="%"),
    _Panel(curves=("seconds",), title="seconds per step", may_be_logarithmic=True),
)
# Values that the script logs under one of these names are drawn in the same way.
_LOGARITHMIC_TITLES = frozenset(panel.title for panel in _PANELS if panel.may_be_logarithmic)
# Names of curves that share a panel, and how their lines are told apart.
_NAMES_IN_PANEL = {"device_allocated_bytes": "allocated", "device_reserved_bytes": "reserved"}
_DASHES = {"device_reserved_bytes": "dot"}


def step_figure(lanes: Sequence[Lane], events: Sequence[RecordedEvent] = ()) -> Figure | None:
    """Return the curves of lanes over steps, or None if there are none.

    Args:
        lanes: Lanes in the order of their colours.
        events: Events to mark; only warnings, errors and milestones are drawn.
    """
    panels = [*_present_panels(lanes), *_logged_panels(lanes)]
    if not panels:
        return None
    data: list[Figure] = []
    layout = _layout(len(panels), has_legend=len(lanes) > 1)
    lowest_shared_axis = "y"
    for number, panel in enumerate(panels):
        drawing = _PanelDrawing(panel, lanes, place=_place(number, len(panels)))
        data += drawing.traces()
        layout |= drawing.axes()
        layout["annotations"].append(drawing.title())
        if not panel.own_scale:
            lowest_shared_axis = drawing.y_axis
    layout["xaxis"] = {
        "title": {"text": "optimizer steps", "standoff": 6},
        "anchor": lowest_shared_axis,
        "showspikes": True,
    }
    data += _event_traces(lanes, events)
    return {"data": data, "layout": layout}


def share_equal_curves(lanes: Sequence[Lane]) -> Sequence[Lane]:
    """Return lanes in which curves that are identical in all lanes are drawn only once.

    For example, the learning rate is often the same on all ranks. Such curves move to an additional
    lane, labelled "all alike".
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


# --- panels


def _present_panels(lanes: Sequence[Lane]) -> list[_Panel]:
    """Return the panels for which at least one lane has a curve."""
    names = {name for lane in lanes for name in lane.curves}
    return [panel for panel in _PANELS if not names.isdisjoint(panel.curves)]


def _logged_panels(lanes: Sequence[Lane]) -> list[_Panel]:
    """Return a panel for each of the first names that the script logged.

    Those whose steps are not optimizer steps come last.
    """
    names = dict.fromkeys(name for lane in lanes for name in lane.curves if name.startswith(LOGGED))
    panels = []
    for name in list(names)[:MOST_LOGGED]:
        curves = [lane.curves[name] for lane in lanes if name in lane.curves]
        own_scale = any(curve.own_scale for curve in curves)
        title = label(name.removeprefix(LOGGED))
        if own_scale:
            title += " (over its own steps)"
        panels.append(
            _Panel(
                curves=(name,),
                title=title,
                may_be_logarithmic=title in _LOGARITHMIC_TITLES,
                own_scale=own_scale,
            )
        )
    return sorted(panels, key=lambda panel: panel.own_scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """The position of a panel.

    Args:
        axis: Suffix of its axes in plotly's layout: "", "2", "3", ...
        bottom: Its lower edge, as a share of the height of all panels.
        height: Its height, as a share of the height of all panels.
    """

    axis: str
    bottom: float
    height: float


def _place(number: int, panels: int) -> _Place:
    """Return the place of a panel, counted from 0 at the top."""
    gap = _GAPS_SHARE / panels if panels > 1 else 0.0
    height = (1 - gap * (panels - 1)) / panels
    return _Place(
        axis="" if number == 0 else str(number + 1),
        bottom=1 - number * (height + gap) - height,
        height=height,
    )


def _layout(panels: int, *, has_legend: bool) -> Figure:
    """Return the layout of the whole figure; each panel adds its axes and its title."""
    pixels = _PANEL_PIXELS * panels
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
        _EVENTS_AXIS.replace("y", "yaxis"): {
            "overlaying": "y",
            "range": [0, 1],
            "visible": False,
            "fixedrange": True,
        },
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _DrawnCurve:
    """A curve of a lane, in the unit of its panel, and the colour of the lane."""

    lane: Lane
    name: str
    curve: Curve
    colour: str

    def divided_by(self, divisor: float) -> _DrawnCurve:
        """Return the curve with all values divided."""
        band = self.curve.band
        if band is not None:
            band = Band(steps=band.steps, low=band.low / divisor, high=band.high / divisor)
        return replace(
            self, curve=replace(self.curve, values=self.curve.values / divisor, band=band)
        )


class _PanelDrawing:
    """A panel with its curves, in plotly's terms.

    Args:
        panel: What it shows.
        lanes: All lanes, in the order of their colours.
        place: Its position.

    Attributes:
        y_axis: The axis of its values, as traces name it.
    """

    def __init__(self, panel: _Panel, lanes: Sequence[Lane], *, place: _Place) -> None:
        self._panel = panel
        self._place = place
        self.y_axis = f"y{place.axis}"
        curves = [
            _DrawnCurve(
                lane=lane,
                name=name,
                curve=lane.curves[name],
                colour=_COLOURS[number % len(_COLOURS)],
            )
            for number, lane in enumerate(lanes)
            for name in panel.curves
            if name in lane.curves
        ]
        self._finite = np.concatenate([drawn.curve.finite for drawn in curves])
        self._unit = panel.unit
        if panel.unit == "B":
            self._unit, bytes_per_unit = _byte_unit(self._finite)
            curves = [drawn.divided_by(bytes_per_unit) for drawn in curves]
            self._finite = self._finite / bytes_per_unit
        self._curves = curves

    @property
    def _top(self) -> float:
        share = _SHARE_BELOW_AN_AXIS if self._panel.own_scale else 1.0
        return self._place.bottom + share * self._place.height

    def title(self) -> Figure:
        """Return the title of the panel, as an annotation."""
        return {
            "text": f"<b>{self._panel.title}</b>",
            "xref": "paper",
            "yref": "paper",
            "x": 0,
            "y": self._top,
            "xanchor": "left",
            "yanchor": "bottom",
            "showarrow": False,
            "font": {"size": 12},
        }

    def axes(self) -> Figure:
        """Return the axes of the panel, as parts of the layout."""
        axis = self._place.axis
        value_axis = {
            "zeroline": False,
            "exponentformat": "power",
            **self._value_range(),
            "domain": [max(self._place.bottom, 0.0), self._top],
        }
        axes: Figure = {f"yaxis{axis}": value_axis}
        if self._panel.own_scale:
            axes[f"xaxis{axis}"] = {"anchor": self.y_axis, "showspikes": True}
        return axes

    def _value_range(self) -> Figure:
        """Return the attributes of the value axis that depend on the unit and the values."""
        finite = self._finite
        if self._unit == "%":
            return {"tickformat": ".0%", "range": [-0.02, 1.02]}
        if self._panel.unit == "B":
            return {"ticksuffix": f" {self._unit}", "rangemode": "tozero"}
        if not len(finite):
            return {}
        if self._panel.may_be_logarithmic and _spans_decades(finite):
            has_few_decades = finite.max() / finite.min() < _FACTOR_FOR_FEW_TICKS
            return {"type": "log", "dtick": 1 if has_few_decades else None}
        if np.ptp(finite) <= _CONSTANT * abs(finite[0]):
            return {"range": _range_around(float(finite[0]))}
        return {}

    def traces(self) -> list[Figure]:
        """Return the curves of the panel, with bands and marks for non-finite values."""
        traces: list[Figure] = []
        for drawn in self._curves:
            line = self._line(drawn)
            if drawn.curve.band is not None:
                traces.append(_band_trace(line, drawn.curve.band))
            traces.append(line)
            if len(drawn.curve.nonfinite):
                traces.append(self._nonfinite_marks(drawn))
        if self._panel.own_scale:
            traces = [{**trace, "xaxis": f"x{self._place.axis}"} for trace in traces]
        return traces

    def _line(self, drawn: _DrawnCurve) -> Figure:
        finite_points = int(np.isfinite(drawn.curve.values).sum())
        name_in_panel = _NAMES_IN_PANEL.get(drawn.name)
        trace_name = label(drawn.lane.label)
        if name_in_panel is not None:
            trace_name += f" {name_in_panel}"
        return {
            "type": "scatter",
            "mode": "lines" if finite_points >= _FEWEST_POINTS_OF_A_LINE else "lines+markers",
            "x": json_numbers(drawn.curve.steps),
            "y": json_numbers(drawn.curve.values),
            "yaxis": self.y_axis,
            "name": trace_name,
            "legendgroup": label(drawn.lane.label),
            "showlegend": drawn.name == _curve_in_legend(drawn.lane),
            "connectgaps": False,
            "line": {
                "color": drawn.colour,
                "width": 1.6,
                "dash": _DASHES.get(drawn.name, "solid"),
            },
            "hovertemplate": (
                f"{self._hover_value(name_in_panel)}<extra>%{{fullData.legendgroup}}</extra>"
            ),
        }

    def _hover_value(self, name_in_panel: str | None) -> str:
        if self._unit == "%":
            return "%{y:.1%}"
        parts = ["%{y:.6~g}", self._unit, name_in_panel]
        return " ".join(part for part in parts if part)

    def _nonfinite_marks(self, drawn: _DrawnCurve) -> Figure:
        """Return crosses at the panel's least finite value, since an axis has no place for NaN."""
        steps = drawn.curve.nonfinite
        steps = steps[:: len(steps) // _MOST_MARKS + 1]
        least = float(self._finite.min()) if len(self._finite) else 0.0
        return {
            "type": "scatter",
            "mode": "markers",
            "x": json_numbers(steps),
            "y": [least] * len(steps),
            "yaxis": self.y_axis,
            "name": "not finite",
            "legendgroup": label(drawn.lane.label),
            "showlegend": False,
            "marker": {
                "symbol": "x-thin",
                "size": 7,
                "line": {"width": 1.5, "color": _NONFINITE_COLOUR},
            },
            "hovertemplate": "NaN or infinite<extra>%{fullData.legendgroup}</extra>",
        }


def _byte_unit(finite: Numbers) -> tuple[str, float]:
    """Return the binary unit for the values of a panel, and its size in bytes."""
    if finite.max(initial=0.0) >= 2**30:
        return "GiB", 2.0**30
    return "MiB", 2.0**20


def _spans_decades(finite: Numbers) -> bool:
    """Return whether a linear axis would hide the smaller ones of positive values."""
    return bool(0 < finite.min() < finite.max() / _FACTOR_FOR_LOGARITHMIC_AXIS)


def _range_around(value: float) -> list[float]:
    """Return the axis range for a constant.

    Plotly's default range is 2 wide, which would make any learning rate look like 0.
    """
    if value == 0:
        return [-1.0, 1.0]
    half = 0.5 * abs(value)
    return [value - half, value + half]


def _band_trace(line: Figure, band: Band) -> Figure:
    """Return the area of a band, as a closed polygon in the colour of its line."""
    return {
        "type": "scatter",
        "mode": "none",
        "fill": "toself",
        "fillcolor": line["line"]["color"] + _BAND_OPACITY,
        "x": json_numbers(np.concatenate([band.steps, band.steps[::-1]])),
        "y": json_numbers(np.concatenate([band.high, band.low[::-1]])),
        "yaxis": line["yaxis"],
        "legendgroup": line["legendgroup"],
        "showlegend": False,
        "hoverinfo": "skip",
    }


def _curve_in_legend(lane: Lane) -> str:
    """Return the name of the curve that stands for all curves of a lane in the legend."""
    for panel in _PANELS:
        for name in panel.curves:
            if name in lane.curves:
                return name
    return next(iter(lane.curves), "")


# --- events


def _event_traces(lanes: Sequence[Lane], events: Sequence[RecordedEvent]) -> list[Figure]:
    """Return events as marks at the top of the first panel, each with a vertical line below it."""
    marks = []
    for recorded in events:
        is_shown = severity(recorded.event) != "info" or recorded.event.kind in _MILESTONES
        step = _step_at(lanes, recorded) if is_shown else None
        if step is not None:
            marks.append(Mark(recorded=recorded, x=step, y=1.0))
    return [_with_line_down(trace) for trace in mark_traces(marks)]


def _step_at(lanes: Sequence[Lane], recorded: RecordedEvent) -> float | None:
    """Return the step that training had reached at the time of an event, or None before it began.

    The step of the event itself is not used: its source may count steps differently, or not at all.
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
    """Return marks on the event axis, with error bars that draw lines over the panel's height."""
    line = {
        "type": "data",
        "symmetric": False,
        "array": [0],
        "arrayminus": [1.0] * len(trace["x"]),
        "width": 0,
        "thickness": 0.7,
        "color": trace["marker"]["color"],
    }
    return {
        **trace,
        "yaxis": _EVENTS_AXIS,
        "error_y": line,
        "showlegend": False,
        "cliponaxis": False,
    }
