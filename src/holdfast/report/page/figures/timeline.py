"""Draw the timeline: when each process started, trained and ended, and when events occurred."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.core.text import duration
from holdfast.report.page.figures.event_marks import Mark, mark_traces
from holdfast.report.page.figures.plotly_values import Figure, date, label
from holdfast.report.page.gathered_run import GatheredRun
from holdfast.report.page.goodput import breaks
from holdfast.report.run_snapshot import Lane, ProcessSnapshot, role_order

# Color of each kind of bar, the same in both themes.
_COLOURS = {"starting": "#8fa3b8", "training": "#45a95a", "ending": "#b8a26b"}
_MAX_ROWS = 40
_ROW_PIXELS = 34
_MARGIN_PIXELS = 144
# Width of the space for row names, in pixels: the width of a character, and the maximum width.
_CHARACTER_PIXELS = 8
_MAX_NAME_PIXELS = 230


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bar:
    """A period of a process, from one Unix time to another. `kind` is a key of `_COLOURS`."""

    kind: str
    row: str
    begin: float
    end: float
    text: str


def timeline_figure(run: GatheredRun) -> Figure | None:
    """Return the timeline of a run, or None if nothing was recorded."""
    rows = _rows(run)
    bars = [bar for bar in _bars(run) if bar.row in rows]
    marks = [
        Mark(recorded=recorded, x=date(recorded.event.unix_seconds), y=label(recorded.source))
        for recorded in run.events
        if recorded.source in rows
    ]
    data = _bar_traces(bars) + mark_traces(marks)
    return {"data": data, "layout": _layout(rows)} if data else None


def _rows(run: GatheredRun) -> list[str]:
    """Return the names of at most `_MAX_ROWS` rows, from top to bottom.

    A loader worker gets a row only if it recorded an event, because each epoch starts new workers,
    and it is not known when they ended.
    """
    sources = dict.fromkeys(recorded.source for recorded in run.events)
    processes = sorted(run.processes, key=lambda process: role_order(process.role))
    rows = ["supervisor"] if "supervisor" in sources else []
    rows += [
        process.label
        for process in processes
        if process.role != "loader worker" or process.label in sources
    ]
    rows += [lane.label for lane in run.lanes if lane.begun is not None]
    rows += sources
    return list(dict.fromkeys(rows))[:_MAX_ROWS]


def _bars(run: GatheredRun) -> Iterator[_Bar]:
    for process in run.processes:
        yield from _bars_of_process(process)
    observed = {process.label for process in run.processes}
    for lane in run.lanes:
        if lane.label not in observed:
            yield from _bars_of_guard(run, lane)


def _bars_of_process(process: ProcessSnapshot) -> Iterator[_Bar]:
    """Yield bars for the start, the training and the end of a process, as far as they are known."""
    started = 0.0 if process.info is None else process.info.started
    ended = started if process.ended is None else process.ended
    if not 0 < started <= ended:
        return

    lane = process.lane
    row = process.label
    if lane is None or lane.begun is None or lane.ended is None:
        text = f"{process.role}, {duration(ended - started)}{_last_phase(process)}"
        yield _Bar(kind="starting", row=row, begin=started, end=ended, text=text)
        return
    first_step = max(started, lane.begun)
    text = f"{duration(first_step - started)} to the first step"
    yield _Bar(kind="starting", row=row, begin=started, end=first_step, text=text)
    text = f"to step {lane.last_step}, {duration(lane.ended - first_step)}"
    yield _Bar(kind="training", row=row, begin=first_step, end=lane.ended, text=text)
    if ended > lane.ended:
        text = f"{duration(ended - lane.ended)} after the last step{_last_phase(process)}"
        yield _Bar(kind="ending", row=row, begin=lane.ended, end=ended, text=text)


def _last_phase(process: ProcessSnapshot) -> str:
    if process.phase is None:
        return ""
    return f", last seen in phase {process.phase.name.lower().replace('_', ' ')}"


def _bars_of_guard(run: GatheredRun, lane: Lane) -> Iterator[_Bar]:
    """Yield a bar for each process in which a guard trained: the first one, and each resume."""
    if lane.begun is None or lane.ended is None:
        return
    gaps = breaks(run, lane)
    begins = [lane.begun, *(resumed for _, resumed in gaps)]
    ends = [*(last_sign for last_sign, _ in gaps), lane.ended]
    for begin, end in zip(begins, ends, strict=True):
        yield _Bar(
            kind="training",
            row=lane.label,
            begin=begin,
            end=end,
            text=f"to step {lane.last_step}",
        )


def _bar_traces(bars: list[_Bar]) -> list[Figure]:
    by_kind: dict[str, list[_Bar]] = {}
    for bar in bars:
        by_kind.setdefault(bar.kind, []).append(bar)
    return [_bar_trace(kind, bars_of_kind) for kind, bars_of_kind in by_kind.items()]


def _bar_trace(kind: str, bars: list[_Bar]) -> Figure:
    return {
        "type": "bar",
        "orientation": "h",
        "name": kind,
        "opacity": 0.85,
        "y": [label(bar.row) for bar in bars],
        "base": [date(bar.begin) for bar in bars],
        # Lengths are in milliseconds. They are at least 1, so that every bar is visible.
        "x": [max(1.0, (bar.end - bar.begin) * 1000) for bar in bars],
        "marker": {"color": _COLOURS[kind], "line": {"width": 0}},
        "hovertext": [label(bar.text, 300) for bar in bars],
        "hovertemplate": "%{hovertext}<extra>" + kind + "</extra>",
    }


def _layout(rows: list[str]) -> Figure:
    longest = max((len(row) for row in rows), default=0)
    return {
        "height": _MARGIN_PIXELS + _ROW_PIXELS * len(rows),
        "barmode": "overlay",
        "bargap": 0.35,
        "hovermode": "closest",
        "dragmode": "zoom",
        "margin": {
            "l": 30 + min(_CHARACTER_PIXELS * longest, _MAX_NAME_PIXELS),
            "r": 18,
            "t": 40,
            "b": 64,
        },
        # Place the legend below the dates.
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
        "xaxis": {"type": "date", "tickangle": 0},
        "yaxis": {
            "type": "category",
            "categoryorder": "array",
            # Reverse the rows, because plotly draws the first category at the bottom.
            "categoryarray": [label(row) for row in reversed(rows)],
            "fixedrange": True,
            "automargin": False,
            "range": [-0.6, len(rows) - 0.4],
        },
    }
