"""The panels of the step figure: one for each quantity, with its curves and its own value axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from holdfast.report.curves import LOGGED, MAX_LOGGED, Band, Curve, FloatArray
from holdfast.report.page.figures.plotly_values import Figure, json_numbers, label
from holdfast.report.run_snapshot import Lane

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
_MAX_MARKS = 200
# A line through fewer points than this is hardly visible, so its points are marked.
_MIN_POINTS_OF_A_LINE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
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
    Panel(curves=("loss",), title="loss", may_be_logarithmic=True),
    Panel(curves=("grad_norm",), title="gradient norm", may_be_logarithmic=True),
    Panel(curves=("learning_rate",), title="learning rate"),
    Panel(
        curves=("device_allocated_bytes", "device_reserved_bytes"),
        title="device memory",
        unit="B",
    ),
    Panel(curves=("host_bytes",), title="host memory", unit="B"),
    Panel(curves=("wait_share",), title="waiting for data", unit="%"),
    Panel(curves=("seconds",), title="seconds per step", may_be_logarithmic=True),
)
# Values that the script logs under one of these names are drawn in the same way.
_LOGARITHMIC_TITLES = frozenset(panel.title for panel in _PANELS if panel.may_be_logarithmic)
# Names of curves that share a panel, and how their lines are told apart.
_NAMES_IN_PANEL = {"device_allocated_bytes": "allocated", "device_reserved_bytes": "reserved"}
_DASHES = {"device_reserved_bytes": "dot"}


def present_panels(lanes: Sequence[Lane]) -> list[Panel]:
    """Return the panels for which at least one lane has a curve, those of logged values last."""
    names = {name for lane in lanes for name in lane.curves}
    recorded = [panel for panel in _PANELS if not names.isdisjoint(panel.curves)]
    return [*recorded, *_logged_panels(lanes)]


def _logged_panels(lanes: Sequence[Lane]) -> list[Panel]:
    """Return a panel for each of the first names that the script logged.

    Those whose steps are not optimizer steps come last.
    """
    names = dict.fromkeys(name for lane in lanes for name in lane.curves if name.startswith(LOGGED))
    panels = []
    for name in list(names)[:MAX_LOGGED]:
        curves = [lane.curves[name] for lane in lanes if name in lane.curves]
        own_scale = any(curve.own_scale for curve in curves)
        title = label(name.removeprefix(LOGGED))
        if own_scale:
            title += " (over its own steps)"
        panels.append(
            Panel(
                curves=(name,),
                title=title,
                may_be_logarithmic=title in _LOGARITHMIC_TITLES,
                own_scale=own_scale,
            )
        )
    return sorted(panels, key=lambda panel: panel.own_scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelArea:
    """Where a panel lies.

    Args:
        axis: Suffix of its axes in plotly's layout: "", "2", "3", ...
        bottom: Its lower edge, as a share of the height of all panels.
        height: Its height, as a share of the height of all panels.
    """

    axis: str
    bottom: float
    height: float


def panel_area(number: int, panels: int) -> PanelArea:
    """Return where a panel lies, counted from 0 at the top."""
    gap = _GAPS_SHARE / panels if panels > 1 else 0.0
    height = (1 - gap * (panels - 1)) / panels
    return PanelArea(
        axis="" if number == 0 else str(number + 1),
        bottom=1 - number * (height + gap) - height,
        height=height,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _DrawnCurve:
    """A curve of a lane, in the unit of its panel, and the colour of the lane."""

    lane: Lane
    name: str
    curve: Curve
    colour: str

    def divided_by(self, divisor: float) -> _DrawnCurve:
        """Return the curve with all values divided by `divisor`."""
        band = self.curve.band
        if band is not None:
            band = Band(steps=band.steps, low=band.low / divisor, high=band.high / divisor)
        return replace(
            self, curve=replace(self.curve, values=self.curve.values / divisor, band=band)
        )


class PanelDrawing:
    """A panel with its curves, in plotly's terms.

    Args:
        panel: What it shows.
        lanes: All lanes, in the order of their colours.
        area: Where it lies.

    Attributes:
        y_axis: The axis of its values, as traces name it.
    """

    def __init__(self, panel: Panel, lanes: Sequence[Lane], *, area: PanelArea) -> None:
        self._panel = panel
        self._area = area
        self.y_axis = f"y{area.axis}"
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
        return self._area.bottom + share * self._area.height

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
        axis = self._area.axis
        value_axis = {
            "zeroline": False,
            "exponentformat": "power",
            **self._value_range(),
            "domain": [max(self._area.bottom, 0.0), self._top],
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
            traces = [{**trace, "xaxis": f"x{self._area.axis}"} for trace in traces]
        return traces

    def _line(self, drawn: _DrawnCurve) -> Figure:
        """Return the trace of a curve, without its band."""
        finite_points = int(np.isfinite(drawn.curve.values).sum())
        name_in_panel = _NAMES_IN_PANEL.get(drawn.name)
        trace_name = label(drawn.lane.label)
        if name_in_panel is not None:
            trace_name += f" {name_in_panel}"
        return {
            "type": "scatter",
            "mode": "lines" if finite_points >= _MIN_POINTS_OF_A_LINE else "lines+markers",
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
        """Return crosses at the lowest finite value of the panel, since no axis can show NaN."""
        steps = drawn.curve.nonfinite
        steps = steps[:: len(steps) // _MAX_MARKS + 1]
        lowest = float(self._finite.min()) if len(self._finite) else 0.0
        return {
            "type": "scatter",
            "mode": "markers",
            "x": json_numbers(steps),
            "y": [lowest] * len(steps),
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


def _byte_unit(finite: FloatArray) -> tuple[str, float]:
    """Return the binary unit for the values of a panel, and its size in bytes."""
    if finite.max(initial=0.0) >= 2**30:
        return "GiB", 2.0**30
    return "MiB", 2.0**20


def _spans_decades(finite: FloatArray) -> bool:
    """Return whether values are positive and a linear axis would hide the smaller ones."""
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
    """Return the name of the curve that represents the lane in the legend."""
    for panel in _PANELS:
        for name in panel.curves:
            if name in lane.curves:
                return name
    return next(iter(lane.curves), "")
