"""From a snapshot of a run to figures for plotly.js, as plain JSON values.

Colours are left to the page's two themes.

Every text that enters a figure passes `label`: plotly.js draws some HTML in texts, and a run may
    have any name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from holdfast.core.text import duration, moment, sanitise
from holdfast.report.goodput import breaks
from holdfast.report.run_snapshot import Lane, ProcessSnapshot, RunSnapshot
from holdfast.report.series import LOGGED, MOST_LOGGED, Numbers, Series
from holdfast.report.severity import severity
from holdfast.report.sources import EventSeen

Figure = dict[str, Any]

# Ten colours that can be told apart on white and on near-black (Tableau 10, slightly lighter than
# its default).
COLOURS = (
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
# What a stretch of time was spent on: one colour each, the same in both themes.
STRETCHES = {"starting": "#8fa3b8", "training": "#45a95a", "ending": "#b8a26b"}
# What an event is, on curves and in the timeline: colour and symbol. The worst is drawn last, above
# the others.
_MARKS = {
    "info": ("#8c8c8c", "circle"),
    "resumed": ("#4e8fd0", "triangle-right"),
    "warning": ("#e08a1e", "triangle-up"),
    "error": ("#d64545", "x"),
}
# What is no trouble and worth a mark on the curves.
_MILESTONES = frozenset(
    {"checkpoint_saved", "saved", "resumed", "attempt_started", "validated", "note"}
)
# One panel for each, top to bottom: columns, title, unit.
_PANELS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("loss",), "loss", ""),
    (("grad_norm",), "gradient norm", ""),
    (("learning_rate",), "learning rate", ""),
    (("device_allocated_bytes", "device_reserved_bytes"), "device memory", "B"),
    (("host_bytes",), "host memory", "B"),
    (("wait_share",), "waiting for data", "%"),
    (("seconds",), "seconds a step", ""),
)
_NAMES = {"device_allocated_bytes": "allocated", "device_reserved_bytes": "reserved"}
_DASHES = {"device_reserved_bytes": "dot"}
_EVENTS_AXIS = "y99"
_PANEL_PIXELS = 170
_TOP_PIXELS = 50
_ROW_PIXELS = 34
_MOST_ROWS = 40
# Beyond a factor of 100 between the smallest and largest value a linear axis shows only the large
# ones.
_DECADES_FOR_LOG = 100.0
_LOGARITHMIC = frozenset({"loss", "gradient norm", "seconds a step"})
_MOST_MARKS = 200


def label(value: object, most: int = 120) -> str:
    """Return text that plotly.js draws as it stands: no tag, no entity, no control character."""
    return (
        sanitise(value, most=most).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    )


def figures(run: RunSnapshot) -> dict[str, Figure]:
    """Return the figures of a page by the id of their place.

    What has nothing to show is left out.
    """
    found = {"timeline": timeline(run), "steps": steps(_agreed(run.lanes), run.events)}
    return {name: figure for name, figure in found.items() if figure is not None}


def _agreed(lanes: Sequence[Lane]) -> Sequence[Lane]:
    """Return lanes with each curve that several have, and all alike, in one of its own."""
    by_name: dict[str, list[Series]] = {}
    for lane in lanes:
        for name, curve in lane.columns.items():
            by_name.setdefault(name, []).append(curve)
    same = {
        name: curves[0] for name, curves in by_name.items() if len(curves) > 1 and _alike(*curves)
    }
    first = next((lane for lane in lanes if same.keys() & lane.columns.keys()), None)
    if first is None:
        return lanes
    apart = [
        replace(lane, columns={k: v for k, v in lane.columns.items() if k not in same})
        for lane in lanes
    ]
    return [
        *(lane for lane in apart if lane.columns),
        replace(first, label="all alike", columns=same),
    ]


def _alike(first: Series, *others: Series) -> bool:
    return all(
        np.array_equal(first.steps, each.steps)
        and np.array_equal(first.values, each.values, equal_nan=True)
        for each in others
    )


def steps(lanes: Sequence[Lane], events: Sequence[EventSeen] = ()) -> Figure | None:
    """Return the curves over steps.

    Panels below each other that share one axis, so that a zoom holds for all.
    """
    panels = [
        panel
        for panel in _PANELS
        if any(name in lane.columns for lane in lanes for name in panel[0])
    ]
    logged = dict.fromkeys(
        name for lane in lanes for name in lane.columns if name.startswith(LOGGED)
    )
    own = {
        name
        for name in logged
        if any(name in each.columns and each.columns[name].own_scale for each in lanes)
    }
    panels += [
        ((name,), label(name.removeprefix(LOGGED)) + " (over steps of its own)" * (name in own), "")
        for name in sorted(list(logged)[:MOST_LOGGED], key=own.__contains__)
    ]
    if not panels:
        return None
    data: list[Figure] = []
    pixels = _PANEL_PIXELS * len(panels)
    layout: Figure = {
        "height": _TOP_PIXELS + 44 + pixels,
        "hovermode": "x",
        "hoversubplots": "axis",
        "showlegend": len(lanes) > 1,
        "legend": {"orientation": "h", "y": -84 / pixels, "yanchor": "top", "x": 0},
        "margin": {"l": 74, "r": 18, "t": _TOP_PIXELS, "b": 44},
        "annotations": [],
    }
    gap, lowest = 0.22 / len(panels) if len(panels) > 1 else 0.0, ""
    share = (1 - gap * (len(panels) - 1)) / len(panels)
    for number, (columns, title, unit) in enumerate(panels):
        axis = "" if number == 0 else str(number + 1)
        foot_at = 1 - number * (share + gap) - share
        # Below the numbers of the axis above
        top = foot_at + share * (0.72 if columns[0] in own else 1.0)
        drawn = [
            (at, name, s)
            for at, each in enumerate(lanes)
            for name in columns
            if (s := each.columns.get(name))
        ]
        finite = np.concatenate([series.finite for *_, series in drawn])
        unit, scale = _byte_unit(finite) if unit == "B" else (unit, 1.0)
        layout[f"yaxis{axis}"] = {
            **_value_axis(finite, title, unit),
            "domain": [max(foot_at, 0.0), top],
        }
        layout["annotations"].append(_panel_title(title, top))
        foot = float(finite.min()) / scale if len(finite) else 0.0
        if columns[0] in own:
            layout[f"xaxis{axis}"] = {"anchor": f"y{axis}", "showspikes": True}
        else:
            lowest = axis
        for at, name, series in drawn:
            colour = COLOURS[at % len(COLOURS)]
            traces = _curve(lanes[at], name, _scaled(series, scale), f"y{axis}", colour, unit, foot)
            data += [{**each, "xaxis": f"x{axis}"} for each in traces] if name in own else traces
    data += _events_on_curves(lanes, events)
    overlay = {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True}
    layout[_EVENTS_AXIS.replace("y", "yaxis")] = overlay
    layout["xaxis"] = {
        "title": {"text": "optimizer steps", "standoff": 6},
        "anchor": f"y{lowest}",
        "showspikes": True,
    }
    return {"data": data, "layout": layout}


def _panel_title(title: str, top: float) -> Figure:
    return {
        "text": f"<b>{title}</b>",
        "xref": "paper",
        "yref": "paper",
        "x": 0,
        "y": top,
        "xanchor": "left",
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"size": 12},
    }


def _scaled(series: Series, scale: float) -> Series:
    band = series.band and (series.band[0], series.band[1] / scale, series.band[2] / scale)
    return replace(series, values=series.values / scale, band=band)


def _byte_unit(values: Numbers) -> tuple[str, float]:
    """Return the binary unit for a panel and its bytes."""
    most = values.max() if len(values) else 0.0
    return ("GiB", 2.0**30) if most >= 2**30 else ("MiB", 2.0**20)


def _value_axis(finite: Numbers, title: str, unit: str) -> Figure:
    axis: Figure = {"zeroline": False, "exponentformat": "power"}
    if unit == "%":
        return {**axis, "tickformat": ".0%", "range": [-0.02, 1.02]}
    if unit in ("MiB", "GiB"):
        return {**axis, "ticksuffix": f" {unit}", "rangemode": "tozero"}
    if title in _LOGARITHMIC and len(finite) and 0 < finite.min() < finite.max() / _DECADES_FOR_LOG:
        return {**axis, "type": "log", "dtick": 1 if finite.max() / finite.min() < 1e8 else None}
    # Else the axis is 2 wide, and any rate looks like 0
    if len(finite) and np.ptp(finite) <= 1e-9 * abs(finite[0]):
        value = float(finite[0])
        return {
            **axis,
            "range": [value - 0.5 * abs(value), value + 0.5 * abs(value)] if value else [-1.0, 1.0],
        }
    return axis


def _curve(
    lane: Lane, name: str, series: Series, axis: str, colour: str, unit: str, foot: float
) -> list[Figure]:
    """Return a curve and its marks.

    ``foot`` is the panel's least finite value, where marks stand.
    """
    what = _NAMES.get(name)
    known = label(lane.label) + (f" {what}" if what else "")
    shown = (
        "%{y:.1%}"
        if unit == "%"
        else "%{y:.6~g}" + (f" {unit}" if unit else "") + (f" {what}" if what else "")
    )
    alone = int(np.isfinite(series.values).sum()) < 3
    line: Figure = {
        "type": "scatter",
        "mode": "lines+markers" if alone else "lines",
        "x": _values(series.steps),
        "y": _values(series.values),
        "yaxis": axis,
        "name": known,
        "legendgroup": label(lane.label),
        "showlegend": name == _first_column(lane),
        "connectgaps": False,
        "line": {"color": colour, "width": 1.6, "dash": _DASHES.get(name, "solid")},
        "hovertemplate": f"{shown}<extra>%{{fullData.legendgroup}}</extra>",
    }
    lines = [line] if series.band is None else [_band(line, *series.band), line]
    bad = series.nonfinite
    if not len(bad):
        return lines
    bad = bad[:: len(bad) // _MOST_MARKS + 1]
    marks: Figure = {
        "type": "scatter",
        "mode": "markers",
        "x": _values(bad),
        "y": [foot] * len(bad),
        "yaxis": axis,
        "name": "not finite",
        "legendgroup": label(lane.label),
        "showlegend": False,
        "marker": {"symbol": "x-thin", "size": 7, "line": {"width": 1.5, "color": "#e15759"}},
        "hovertemplate": "NaN or infinite<extra>%{fullData.legendgroup}</extra>",
    }
    return [*lines, marks]


def _band(line: Figure, steps: Numbers, low: Numbers, high: Numbers) -> Figure:
    """Return the area between the least and the most of steps of which the line shows the mean."""
    return {
        "type": "scatter",
        "mode": "none",
        "fill": "toself",
        "fillcolor": line["line"]["color"] + "30",
        "x": _values(np.concatenate([steps, steps[::-1]])),
        "y": _values(np.concatenate([high, low[::-1]])),
        "yaxis": line["yaxis"],
        "legendgroup": line["legendgroup"],
        "showlegend": False,
        "hoverinfo": "skip",
    }


def _first_column(lane: Lane) -> str:
    ours = (name for columns, *_ in _PANELS for name in columns if name in lane.columns)
    return next(ours, next(iter(lane.columns), ""))


def _values(numbers: Numbers) -> list[float | int | None]:
    """Return JSON numbers with 7 digits, which is what float32 holds; None in gaps."""
    return [
        (
            (int(number) if number == int(number) else float(f"{number:.7g}"))
            if np.isfinite(number)
            else None
        )
        for number in numbers.tolist()
    ]


def timeline(run: RunSnapshot) -> Figure | None:
    """Return when each process started, trained and ended, with events as marks, over time in
    UTC.
    """
    rows = _rows(run)
    marks = [
        (seen, _date(seen.event.unix_seconds), label(seen.source))
        for seen in run.events
        if seen.source in rows
    ]
    data = _stretch_traces(run, rows) + _event_traces(marks)
    if not data:
        return None
    margin = min(8 * max(len(row) for row in rows), 230)
    layout: Figure = {
        "height": 144 + _ROW_PIXELS * len(rows),
        "barmode": "overlay",
        "bargap": 0.35,
        "hovermode": "closest",
        "dragmode": "zoom",
        "margin": {"l": 30 + margin, "r": 18, "t": 40, "b": 64},
        # Below the dates
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
        "xaxis": {"type": "date", "tickangle": 0},
        "yaxis": {
            "type": "category",
            "categoryorder": "array",
            "categoryarray": [label(row) for row in reversed(rows)],
            "fixedrange": True,
            "automargin": False,
            "range": [-0.6, len(rows) - 0.4],
        },
    }
    return {"data": data, "layout": layout}


def _rows(run: RunSnapshot) -> list[str]:
    """Return the rows: the supervisor, trainers, then the others, as many as can be read.

    Loader workers only if they recorded something: when they ended is not known, and each epoch has
        its own.
    """
    order = {"trainer": 0, "launcher": 1, "other": 2, "loader worker": 3}
    processes = sorted(run.processes, key=lambda seen: order.get(seen.role, 2))
    rows = [seen.source for seen in run.events if seen.source == "supervisor"][:1]
    recording = {seen.source for seen in run.events}
    rows += [
        seen.label for seen in processes if seen.role != "loader worker" or seen.label in recording
    ]
    rows += [lane.label for lane in run.lanes if lane.begun is not None] + [
        seen.source for seen in run.events
    ]
    return list(dict.fromkeys(rows))[:_MOST_ROWS]


def _stretch_traces(run: RunSnapshot, rows: list[str]) -> list[Figure]:
    bars: list[tuple[str, str, float, float, str]] = []
    for seen in run.processes:
        bars += _stretches(seen)
    observed = {seen.label for seen in run.processes}
    for lane in run.lanes:
        if lane.label not in observed and lane.begun is not None and lane.ended is not None:
            gaps, text = breaks(run, lane), f"to step {lane.last_step}"
            begins, ends = (
                [lane.begun, *(at for _, at in gaps)],
                [*(at for at, _ in gaps), lane.ended],
            )
            bars += [("training", lane.label, *its, text) for its in zip(begins, ends, strict=True)]
    by_kind: dict[str, list[tuple[str, float, float, str]]] = {}
    for kind, row, begin, end, text in bars:
        if row in rows:
            by_kind.setdefault(kind, []).append((row, begin, end, text))
    return [
        {
            "type": "bar",
            "orientation": "h",
            "name": kind,
            "opacity": 0.85,
            "y": [label(row) for row, *_ in group],
            "base": [_date(begin) for _, begin, *_ in group],
            "x": [max(1.0, (end - begin) * 1000) for _, begin, end, _ in group],
            "marker": {"color": STRETCHES[kind], "line": {"width": 0}},
            "hovertext": [label(text, 300) for *_, text in group],
            "hovertemplate": "%{hovertext}<extra>" + kind + "</extra>",
        }
        for kind, group in by_kind.items()
    ]


def _stretches(seen: ProcessSnapshot) -> list[tuple[str, str, float, float, str]]:
    """Return what a process spent its time on, as far as it shows: kind, row, begin, end, text."""
    begin, lane = seen.info.started if seen.info else 0.0, seen.lane
    end = seen.ended if seen.ended is not None else begin
    if not 0 < begin <= end:
        return []
    phase = (
        ""
        if seen.phase is None
        else f", last seen in phase {seen.phase.name.lower().replace('_', ' ')}"
    )
    if lane is None or lane.begun is None or lane.ended is None:
        return [
            ("starting", seen.label, begin, end, f"{seen.role}, {duration(end - begin)}{phase}")
        ]
    first = max(begin, lane.begun)
    found = [
        ("starting", seen.label, begin, first, f"{duration(first - begin)} to the first step"),
        (
            "training",
            seen.label,
            first,
            lane.ended,
            f"to step {lane.last_step}, {duration(lane.ended - first)}",
        ),
    ]
    if end > lane.ended:
        found.append(
            (
                "ending",
                seen.label,
                lane.ended,
                end,
                f"{duration(end - lane.ended)} after the last step{phase}",
            )
        )
    return found


def _event_traces(
    placed: Iterable[tuple[EventSeen, str | float, str | float]], **drawn: Any
) -> list[Figure]:
    """Return marks of events at their x and y, in a trace for each severity, and one for the
    starts that went on.
    """
    by_mark: dict[str, list[tuple[EventSeen, str | float, str | float]]] = {
        name: [] for name in _MARKS
    }
    for each in placed:
        by_mark["resumed" if each[0].event.kind == "resumed" else severity(each[0].event)].append(
            each
        )
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "legendgroup": name,
            "x": [x for _, x, _ in group],
            "y": [y for *_, y in group],
            "marker": {"symbol": _MARKS[name][1], "size": 10, "color": _MARKS[name][0]},
            "hovertext": [label(f"{at.source}, {at.event}", 300) for at, *_ in group],
            "hovertemplate": "%{hovertext}<extra></extra>",
            **drawn,
        }
        for name, group in by_mark.items()
        if group
    ]


def _events_on_curves(lanes: Sequence[Lane], events: Sequence[EventSeen]) -> list[Figure]:
    """Return marks at the top of the first panel, on an axis of their own, with a line down to
    its foot.
    """
    shown = [
        seen for seen in events if severity(seen.event) != "info" or seen.event.kind in _MILESTONES
    ]
    found = _event_traces(
        (seen, step, 1.0) for seen in shown if (step := _step_of(lanes, seen)) is not None
    )
    for trace in found:
        line = {
            "type": "data",
            "symmetric": False,
            "array": [0],
            "arrayminus": [1.0] * len(trace["x"]),
            "width": 0,
            "thickness": 0.7,
            "color": trace["marker"]["color"],
        }
        trace |= {"yaxis": _EVENTS_AXIS, "error_y": line, "showlegend": False, "cliponaxis": False}
    return found


def _step_of(lanes: Sequence[Lane], seen: EventSeen) -> float | None:
    """Return where a process stood when something happened.

    Who records it may count steps otherwise, or none.
    """
    begun = [
        lane for lane in lanes if lane.begun is not None and lane.begun <= seen.event.unix_seconds
    ]
    own = [lane for lane in begun if lane.label == seen.source] or begun
    lane = max(own, key=lambda lane: lane.begun or 0.0, default=None)
    if lane is None:
        return None
    times, steps = lane.moments
    return float(
        steps[max(int(np.searchsorted(times, seen.event.unix_seconds, side="right")) - 1, 0)]
    )


def _date(unix_seconds: float) -> str:
    return moment(unix_seconds, "%Y-%m-%d %H:%M:%S.%f")[:-3]
