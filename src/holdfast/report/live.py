"""The live view: a snapshot of a run, drawn in a terminal with Rich.

Every text that a run chose is put in as `Text` after `sanitise`, never as markup, so that it cannot
colour, link, clear or move anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from holdfast.core.text import duration, moment, sanitise, size
from holdfast.recorder.progress import Phase
from holdfast.recorder.scalars import Scalar
from holdfast.report.run_snapshot import ProcessSnapshot, RunSnapshot
from holdfast.report.severity import severity
from holdfast.report.sources import EventSeen
from holdfast.report.verdicts import how_sure, tone
from holdfast.report.watching import Runs, Watched

Seen = RunSnapshot | tuple[RunSnapshot, ...]
"""One run, or several."""
PANELS = ("all", "processes", "training", "events")

REFRESH_SECONDS = 0.5
_MOST_PROCESSES = 16
_MOST_EVENTS = 8
_MOST_SCALARS = 6
_WIDE = 110
_BARS = "▁▂▃▄▅▆▇█"
_PHASE_STYLES = {
    Phase.DATA_WAIT: "yellow",
    Phase.FORWARD_BACKWARD: "green",
    Phase.OPTIMIZER: "green",
    Phase.EVALUATION: "cyan",
    Phase.SAVING: "blue",
}
_STYLES = {"error": "red", "warning": "yellow", "info": ""}
_STATE_STYLES = {"running": "green", "ended": "bold", "waits to restart": "yellow"}


def follow(watched: Watched | Runs, console: Console, wait: Callable[[float], object]) -> Seen:
    """Show runs in a terminal, twice a second, until they end; return the last picture.

    `wait` may return a key: "q" leaves, and any other goes on to the next of `PANELS`.
    """
    seen, panel = watched.look(), 0
    first = draw(seen, console.width, PANELS[0])
    with Live(first, console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while any(run.state != "ended" for run in (seen if isinstance(seen, tuple) else [seen])):
            key = wait(REFRESH_SECONDS)
            if key == "q":
                break
            panel += bool(key)
            seen = watched.look()
            live.update(draw(seen, console.width, PANELS[panel % len(PANELS)]), refresh=True)
    return seen


def draw(run: Seen, width: int, panel: str = "") -> RenderableType:
    """Return the picture of a run, or of several, for a terminal of so many columns.

    Or one of `PANELS` with keys.
    """
    if isinstance(run, tuple):
        return _table(run, _RUNS)
    present = [
        each
        for each in run.processes
        if each.alive is not False or each.role in ("trainer", "guard")
    ]
    processes = present or run.processes  # workers of epochs that are over are many
    shown = processes[: None if panel in PANELS[1:] else _MOST_PROCESSES]
    parts: list[RenderableType] = [_head(run, panel)]
    if shown and panel in ("", "all", "processes"):
        parts.append(_table(shown, _STANDINGS))
    rows = [row for process in shown for row in process.optimizers or (process,)]
    if panel in ("", "all", "training") and (
        trained := [row for row in rows if row.losses or row.host_bytes]
    ):
        parts.append(_table(trained, _training(trained, width)))
    if not shown:
        parts.append(Text("no Python process was seen yet", style="dim"))
    if len(processes) > len(shown):
        parts.append(Text(f"and {len(processes) - len(shown)} more processes", style="dim"))
    if run.scalars and panel in ("", "all", "training"):
        most = len(run.scalars) if panel == "training" else _MOST_SCALARS
        parts.append(_table(run.scalars[::-1][:most], _SCALARS))
    if (events := [each for each in run.events if each.event.kind != "verdict"]) and panel in (
        "",
        "all",
        "events",
    ):
        parts.append(_table(events[::-1] if panel == "events" else events[-_MOST_EVENTS:], _EVENTS))
    if run.verdict is not None:
        parts.append(_verdict(run))
    parts += [
        Text(f"note: {sanitise(problem, most=200)}", style="yellow") for problem in run.problems[:3]
    ]
    return Group(*parts)


def _head(run: RunSnapshot, panel: str) -> Panel:
    style = _STATE_STYLES[run.state]
    attempts = "1 attempt" if run.attempt == 0 else f"{run.attempt + 1} attempts"
    line = Text.assemble((run.state, style), f", {attempts}")
    if run.began is not None and run.state == "ended" and run.newest is not None:
        line.append(f", after {duration(max(0.0, run.newest - run.began))}")
    elif run.began is not None:
        line.append(f", since {duration(max(0.0, run.now - run.began))}")
    lines = [line, *([Text(run.outlook)] if run.outlook else [])]
    if run.command:
        lines.insert(0, Text(sanitise(run.command, most=300), no_wrap=True, overflow="ellipsis"))
    title = Text(sanitise(run.path.name, most=60))
    keys = f"showing {panel}; a key shows more, q quits" if panel else None
    return Panel(Group(*lines), title=title, title_align="left", box=box.ROUNDED, subtitle=keys)


def _table(rows: Sequence[Any], columns: Mapping[str, Callable[[Any], Text]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        numeric = name in {
            "since",
            "step",
            "steps/s",
            "value",
            "wait",
            "loss",
            "grad norm",
            "lr",
            "host",
            "device",
        }
        table.add_column(
            name,
            justify="right" if numeric else "left",
            no_wrap=True,
            overflow="ellipsis",
            ratio=1 if name in {"process", "run", "what", "logged"} else None,
        )
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    return table


def _phase(process: ProcessSnapshot) -> Text:
    phase = process.phase
    name = "" if phase is None else phase.name.lower().replace("_", " ")
    if process.alive is False:
        return Text("ended" if phase in (None, Phase.ENDING) else f"ended in {name}", style="dim")
    if process.stopped:
        return Text(f"stopped in {name}" if name else "stopped", style="bold red")
    if phase is None:
        return Text("running" if process.alive else "unknown", style="dim")
    return Text(name, style=_PHASE_STYLES.get(phase, ""))


def _training(
    trained: Sequence[ProcessSnapshot], width: int
) -> dict[str, Callable[[ProcessSnapshot], Text]]:
    bars = 30 if width >= _WIDE else 10
    columns: dict[str, Callable[[ProcessSnapshot], Text]] = {
        "process": _STANDINGS["process"],
        "loss": lambda each: _value(each.loss, 4),
        "lately": lambda each: Text(
            "" if each.loss is None else sparkline(each.losses, bars), style="cyan"
        ),
        "grad norm": lambda each: _value(each.grad_norm, 3),
        "lr": lambda each: _value(each.learning_rate, 3),
        "host": lambda each: _known(each.host_bytes, size),
    }
    if any(each.device_bytes for each in trained):
        columns["device"] = lambda each: _known(each.device_bytes, size)
    return columns


def _known(value: float | None, form: Callable[[float], str]) -> Text:
    return Text(form(value) if value is not None and value == value and value else "")


_STANDINGS: dict[str, Callable[[ProcessSnapshot], Text]] = {
    "process": lambda each: Text(sanitise(each.label, most=40)),
    "phase": _phase,
    "since": lambda each: Text("" if each.since_seconds is None else duration(each.since_seconds)),
    "step": lambda each: _known(each.step, "{:,}".format),
    "steps/s": lambda each: _known(each.steps_per_second, "{:.3g}".format),
    "wait": lambda each: Text("" if math.isnan(each.wait_share) else f"{each.wait_share:.0%}"),
}
_EVENTS: dict[str, Callable[[EventSeen], Text]] = {
    "UTC": lambda seen: Text(moment(seen.event.unix_seconds, "%H:%M:%S")),
    "by": lambda seen: Text(sanitise(seen.source, most=20)),
    "event": lambda seen: Text(sanitise(seen.event.kind, most=24), _STYLES[severity(seen.event)]),
    "what": lambda seen: Text(
        sanitise(seen.event.sentence(), most=300), no_wrap=True, overflow="ellipsis"
    ),
}
_SCALARS: dict[str, Callable[[Scalar], Text]] = {
    "logged": lambda each: Text(sanitise(each.name, most=70)),
    "value": lambda each: _value(each.value, 6),
    "step": lambda each: Text(f"{each.step:,}"),
}
_RUNS: dict[str, Callable[[RunSnapshot], Text]] = {
    "run": lambda run: Text(sanitise(run.path.name, most=60)),
    "state": lambda run: Text(run.state, style=_STATE_STYLES[run.state]),
    "phase": lambda run: (
        _phase(run.processes[0]) if run.processes and run.state != "ended" else Text()
    ),
    "began (UTC)": lambda run: Text("" if run.began is None else moment(run.began)),
    "step": lambda run: _known(
        max((each.step for each in run.processes), default=0), "{:,}".format
    ),
    "loss": lambda run: _value(
        next((each.loss for each in run.processes if each.loss is not None), None), 4
    ),
    "what": lambda run: Text(
        sanitise(run.verdict.title if run.verdict else run.outlook or run.command, most=200)
    ),
}


def _verdict(run: RunSnapshot) -> Panel:
    verdict = run.verdict
    assert verdict is not None
    lines = [Text(sanitise(verdict.summary, most=1000))]
    if verdict.fix:
        lines.append(Text.assemble(("Fix: ", "bold"), sanitise(verdict.fix, most=1000)))
    if sure := how_sure(verdict):
        lines.append(Text(f"How sure: {sure}", style="dim"))
    style = {"well": "green", "unjudged": "bright_black", "unknown": "yellow"}.get(
        tone(verdict), "red"
    )
    title = Text(f"{sanitise(verdict.title, most=60)} [{sanitise(verdict.cause, most=10)}]")
    return Panel(
        Group(*lines), title=title, title_align="left", border_style=style, box=box.ROUNDED
    )


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a curve of at most so many characters, the mean of each stretch.

    "x" where none of it is finite.
    """
    if not values:
        return ""
    count = min(width, len(values))
    means = []
    for index in range(count):
        stretch = values[index * len(values) // count : (index + 1) * len(values) // count]
        finite = [value for value in stretch if math.isfinite(value)]
        means.append(math.fsum(finite) / len(finite) if finite else math.nan)
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low and math.isfinite(high - low) else 0.0
    return "".join(
        "x" if math.isnan(mean) else _BARS[round((mean - low) * scale) if scale else 0]
        for mean in means
    )


def _value(value: float | None, digits: int) -> Text:
    if value is None:
        return Text("")
    return Text(f"{value:.{digits}g}", style="" if math.isfinite(value) else "bold red")
