"""The panels of the step figure, each of which has its own value axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from holdfast.report.curves import LOGGED, MAX_LOGGED, Band, Curve, FloatArray
from holdfast.report.page.figures.plotly_values import Figure, json_numbers, label
from holdfast.report.run_snapshot import Lane

# Ten colors that are easy to distinguish on white and on near-black (Tableau 10, slightly lighter).
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
# Opacity of a band, as the last two hexadecimal digits of its color.
_BAND_OPACITY = "30"

# The share of the figure's height that all gaps between panels take up together.
_GAPS_SHARE = 0.22
# A panel with its own step axis is reduced to this share of its height, to leave room for the tick
# labels above it.
_SHARE_BELOW_AN_AXIS = 0.72

# Above this ratio of the largest to the smallest value, a linear axis would show only large values.
_FACTOR_FOR_LOGARITHMIC_AXIS = 100.0
# Above this ratio, a logarithmic axis has too many decades for a tick at each of them.
_FACTOR_FOR_FEW_TICKS = 1e8
# Relative difference below which values count as constant.
_CONSTANT = 1e-9
_MAX_MARKS = 200
# A line through fewer points than this is hardly visible, so its points are marked.
_MIN_POINTS_OF_A_LINE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A panel for one or more curves.

    Args:
        curves: Names of the curves in the panel.
        title: Title above the panel, as returned by `label`.
        unit: "" for a plain number, "B" for bytes, "%" for a share between 0 and 1.
        may_be_logarithmic: Whether to use a logarithmic axis if values span orders of magnitude.
        own_scale: Whether the steps are not optimizer steps, so that the panel needs its own step
            axis.
        size: Height of the panel, as a multiple of the height of the smallest ones.
    """

    curves: tuple[str, ...]
    title: str
    unit: str = ""
    may_be_logarithmic: bool = False
    own_scale: bool = False
    size: int = 1


# The panels from top to bottom. A panel without curves is omitted.
_PANELS = (
    Panel(curves=("loss",), title="loss", may_be_logarithmic=True, size=2),
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
# Values that the script logs under one of these names may have a logarithmic axis too.
_LOGARITHMIC_TITLES = frozenset(panel.title for panel in _PANELS if panel.may_be_logarithmic)
# Names and line styles of curves that share a panel.
_NAMES_IN_PANEL = {"device_allocated_bytes": "allocated", "device_reserved_bytes": "reserved"}
_DASHES = {"device_reserved_bytes": "dot"}
# Curves that jump from step to step. They are drawn as stairs, because a slanted line would show
# values that never were.
_STAIRS = frozenset({"wait_share", "seconds"})
# A curve has diverged if it rose to this factor above its first values. It is cut off at the second
# factor above them, because otherwise nothing else in the panel could be seen.
_FACTOR_OF_DIVERGENCE = 1000.0
_FACTOR_SHOWN = 10.0
# The share of a curve, and the least number of points, that its first values are.
_FIRST_SHARE = 0.1
_MIN_FIRST_POINTS = 3
# Above these, the key beside a panel's title would not fit into a line.
_MAX_LANES_IN_KEY = 6
_MAX_CHARACTERS_IN_KEY = 90
_KEY_SEPARATOR = "&nbsp;&nbsp; "


def present_panels(lanes: Sequence[Lane]) -> list[Panel]:
    """Return the panels for which any lane has a curve. Panels of logged values come last."""
    names = {name for lane in lanes for name in lane.curves}
    recorded = [panel for panel in _PANELS if not names.isdisjoint(panel.curves)]
    return [*recorded, *_logged_panels(lanes)]


def _logged_panels(lanes: Sequence[Lane]) -> list[Panel]:
    """Return a panel for each of the first `MAX_LOGGED` names that the script logged.

    Panels whose steps are not optimizer steps come last.
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
    """Position of a panel in the figure.

    Args:
        axis: Suffix of the panel's axes in plotly's layout: "", "2", "3", ...
        bottom: Lower edge, as a share of the total height.
        height: Height of the panel, as a share of the total height.
    """

    axis: str
    bottom: float
    height: float


def panel_areas(panels: Sequence[Panel]) -> list[PanelArea]:
    """Return the positions of the panels in the figure, which are given from top to bottom."""
    total_size = sum(panel.size for panel in panels)
    gap = _GAPS_SHARE / total_size
    unit = (1 - gap * (len(panels) - 1)) / total_size
    areas = []
    top = 1.0
    for number, panel in enumerate(panels, start=1):
        height = unit * panel.size
        # Plotly numbers axes from 1, but omits the number of the first one.
        axis = "" if number == 1 else str(number)
        areas.append(PanelArea(axis=axis, bottom=top - height, height=height))
        top -= height + gap
    return areas


@dataclass(frozen=True, slots=True, kw_only=True)
class _DrawnCurve:
    """A curve to draw, in the unit of its panel, with its lane and the lane's color."""

    lane: Lane
    name: str
    curve: Curve
    colour: str

    def divided_by(self, divisor: float) -> _DrawnCurve:
        """Return a copy of the curve with all values divided by `divisor`."""
        band = self.curve.band
        if band is not None:
            band = Band(steps=band.steps, low=band.low / divisor, high=band.high / divisor)
        return replace(
            self, curve=replace(self.curve, values=self.curve.values / divisor, band=band)
        )


class PanelDrawing:
    """Draws a panel and its curves as JSON values for plotly.js.

    Args:
        panel: The panel to draw.
        lanes: All lanes, in the order of their colors.
        area: Position of the panel.

    Attributes:
        y_axis: The name by which traces refer to the panel's value axis.
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
        self._limit = _limit_of_diverged([drawn.curve for drawn in curves])

    @property
    def _top(self) -> float:
        share = _SHARE_BELOW_AN_AXIS if self._panel.own_scale else 1.0
        return self._area.bottom + share * self._area.height

    def title(self) -> Figure:
        """Return the panel's title as an annotation, with a key if it shows several lanes."""
        text = f"<b>{self._panel.title}</b>"
        if self._is_cut_off:
            text += f" (cut off, reaches {self._finite.max():.1e})"
        return {
            "text": text + self._key(),
            "xref": "paper",
            "yref": "paper",
            "x": 0,
            "y": self._top,
            "xanchor": "left",
            "yanchor": "bottom",
            "align": "left",
            "showarrow": False,
            "font": {"size": 12},
        }

    @property
    def _is_cut_off(self) -> bool:
        if not self._panel.may_be_logarithmic or self._limit is None:
            return False
        return bool(self._finite.max() > self._limit)

    def _key(self) -> str:
        """Return the names and colors of the panel's lanes, or "" if they would not help."""
        colours = {drawn.lane.label: drawn.colour for drawn in self._curves}
        characters = sum(len(name) for name in colours)
        if not 1 < len(colours) <= _MAX_LANES_IN_KEY or characters > _MAX_CHARACTERS_IN_KEY:
            return ""
        names = [
            f'<span style="color:{colour}">&#9632;</span> {label(name)}'
            for name, colour in colours.items()
        ]
        return _KEY_SEPARATOR + "&nbsp; ".join(names)

    def stops(self) -> list[_Stop]:
        """Return where curves stopped having finite values, at most once for each step."""
        stops = {}
        for drawn in self._curves:
            steps = _trailing_nonfinite(drawn.curve)
            if len(steps) > 1:
                stops[float(steps[0])] = _Stop(
                    lane=label(drawn.lane.label) if len(self._curves) > 1 else "",
                    first=float(steps[0]),
                    last=float(steps[-1]),
                    axis=self._area.axis,
                )
        return list(stops.values())

    def axes(self) -> Figure:
        """Return the panel's axes as entries of the figure's layout."""
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
            # There is nothing to read off this axis.
            return {"range": [0.0, 1.0], "showticklabels": False}
        if self._is_cut_off:
            return _range_up_to(finite[finite <= self._limit])
        if self._panel.may_be_logarithmic and _spans_decades(finite):
            has_few_decades = finite.max() / finite.min() < _FACTOR_FOR_FEW_TICKS
            return {"type": "log", "dtick": 1 if has_few_decades else None}
        if np.ptp(finite) <= _CONSTANT * abs(finite[0]):
            return {"range": _range_around(float(finite[0]))}
        return {}

    def traces(self) -> list[Figure]:
        """Return the traces of all curves, with bands and with marks for non-finite values."""
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
        """Return the trace of a curve's line, without its band."""
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
                "shape": "hvh" if drawn.name in _STAIRS else "linear",
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
        """Return the trace that marks non-finite values of a curve with crosses.

        The crosses are at the panel's lowest finite value, because no axis can show NaN.
        """
        # Keep every n-th step, so that there are at most `_MAX_MARKS` crosses.
        steps = drawn.curve.nonfinite
        trailing = _trailing_nonfinite(drawn.curve)
        if len(trailing) > 1:
            # The steps at the end are shaded instead.
            steps = np.setdiff1d(steps, trailing)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stop:
    """The steps from which on all values of a curve are NaN or infinite.

    Args:
        lane: Label of the curve's lane; empty if the panel shows no other curve.
        first: The first of these steps.
        last: The last one.
        axis: Suffix of the panel's axes; see `PanelArea`.
    """

    lane: str
    first: float
    last: float
    axis: str

    def area(self, step_axis: str, middle: float) -> Figure:
        """Return the shape that shades these steps, with a label that says what they are.

        Args:
            step_axis: Name of the step axis.
            middle: The step in the middle of the panel, which decides on which side of the first
                step there is room for the label.
        """
        text = f"not finite from step {self.first:,.0f}"
        if self.lane:
            text = f"{self.lane}: {text}"
        return {
            "type": "rect",
            "layer": "below",
            "xref": step_axis,
            "yref": f"y{self.axis} domain",
            "x0": self.first,
            "x1": self.last,
            "y0": 0,
            "y1": 1,
            "fillcolor": _NONFINITE_COLOUR + _BAND_OPACITY,
            "line": {"width": 0},
            # An annotation would widen the step axis until the text fits.
            "label": {
                "text": text,
                "textposition": "top left",
                "xanchor": "right" if self.first > middle else "left",
                "font": {"size": 11},
            },
        }


def _trailing_nonfinite(curve: Curve) -> FloatArray:
    """Return the steps after the last finite value, all of which have NaN or infinite values."""
    is_finite = np.flatnonzero(np.isfinite(curve.values))
    begin = int(is_finite[-1]) + 1 if len(is_finite) else 0
    steps = curve.steps[begin:]
    steps = steps[np.isfinite(steps)]
    return steps if len(curve.nonfinite) else steps[:0]


def _limit_of_diverged(curves: Sequence[Curve]) -> float | None:
    """Return the value above which diverged curves are cut off, or None if no curve diverged."""
    highest_shown = 0.0
    has_diverged = False
    for curve in curves:
        values = curve.values[np.isfinite(curve.values)]
        if not len(values):
            continue
        first_points = max(_MIN_FIRST_POINTS, int(_FIRST_SHARE * len(values)))
        start = float(np.abs(values[:first_points]).max())
        if 0 < start * _FACTOR_OF_DIVERGENCE < curve.finite.max():
            has_diverged = True
            highest_shown = max(highest_shown, start * _FACTOR_SHOWN)
        else:
            highest_shown = max(highest_shown, float(curve.finite.max()))
    return highest_shown if has_diverged else None


def _range_up_to(shown: FloatArray) -> Figure:
    """Return the attributes of a value axis for these values, which are not all of a panel's."""
    low = float(shown.min())
    high = float(shown.max())
    if _spans_decades(shown):
        return {"type": "log", "dtick": 1, "range": [np.log10(low) - 0.1, np.log10(high) + 0.1]}
    margin = 0.06 * (high - low)
    return {"range": [low - margin, high + margin]}


def _byte_unit(finite: FloatArray) -> tuple[str, float]:
    """Return the binary unit in which to show these sizes, and the number of bytes in it."""
    if finite.max(initial=0.0) >= 2**30:
        return "GiB", 2.0**30
    return "MiB", 2.0**20


def _spans_decades(finite: FloatArray) -> bool:
    """Return whether all values are positive and a linear axis would hide the smaller ones."""
    return bool(0 < finite.min() < finite.max() / _FACTOR_FOR_LOGARITHMIC_AXIS)


def _range_around(value: float) -> list[float]:
    """Return the range of an axis that shows a constant value.

    Plotly's default range has a width of 2, which would make any learning rate look like 0.
    """
    if value == 0:
        return [-1.0, 1.0]
    half = 0.5 * abs(value)
    return [value - half, value + half]


def _band_trace(line: Figure, band: Band) -> Figure:
    """Return the trace of a band: a closed polygon in the color of the curve's line."""
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
    """Return the name of the curve that represents a lane in the legend."""
    for panel in _PANELS:
        for name in panel.curves:
            if name in lane.curves:
                return name
    return next(iter(lane.curves), "")
