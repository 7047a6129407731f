"""The live view: a snapshot of a run, drawn in a terminal with Rich.

Every text that a run chose is put in as `Text` after `sanitise`, never as markup, so that it cannot colour, link,
clear or move anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from holdfast.core.text import duration, moment, sanitise, size
from holdfast.recorder.progress import Phase
from holdfast.report.run_snapshot import ProcessSnapshot, RunSnapshot
from holdfast.report.verdicts import how_sure
from holdfast.report.watching import Watched

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
_ALARMING = frozenset({"exception", "hang", "stop", "stopped", "out_of_memory", "leak", "spike", "save_failed",
                       "process_stopped", "output_lost"})  # fmt: skip


def follow(watched: Watched, console: Console, wait: Callable[[float], object]) -> RunSnapshot:
    """Show a run in a terminal until it ends or the user interrupts it, twice a second; return the last snapshot."""
    run = watched.look()
    with Live(draw(run, console.width), console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while run.state != "ended":
            wait(REFRESH_SECONDS)
            run = watched.look()
            live.update(draw(run, console.width), refresh=True)
    return run


def draw(run: RunSnapshot, width: int) -> RenderableType:
    """Return the picture of a run, for a terminal of so many columns."""
    present = [each for each in run.processes if each.alive is not False or each.role in ("trainer", "guard")]
    processes = present or run.processes  # workers of epochs that are over are many
    shown = processes[:_MOST_PROCESSES]
    parts: list[RenderableType] = [_head(run)]
    if shown:
        parts.append(_standings(shown))
        trained = [process for process in shown if process.losses or process.host_bytes]
        if trained:
            parts.append(_training(trained, width))
    else:
        parts.append(Text("no Python process was seen yet", style="dim"))
    if len(processes) > len(shown):
        parts.append(Text(f"and {len(processes) - len(shown)} more processes", style="dim"))
    if run.scalars:
        parts.append(_scalars(run))
    if run.events:
        parts.append(_events(run))
    if run.verdict is not None:
        parts.append(_verdict(run))
    parts += [Text(f"note: {sanitise(problem, most=200)}", style="yellow") for problem in run.problems[:3]]
    return Group(*parts)


def _head(run: RunSnapshot) -> Panel:
    style = {"running": "green", "ended": "bold", "waits to restart": "yellow"}[run.state]
    attempts = "1 attempt" if run.attempt == 0 else f"{run.attempt + 1} attempts"
    line = Text.assemble((run.state, style), f", {attempts}")
    if run.began is not None and run.state == "ended" and run.newest is not None:
        line.append(f", after {duration(max(0.0, run.newest - run.began))}")
    elif run.began is not None:
        line.append(f", since {duration(max(0.0, run.now - run.began))}")
    lines = [line]
    if run.command:
        lines.insert(0, Text(sanitise(run.command, most=300), no_wrap=True, overflow="ellipsis"))
    title = Text(sanitise(run.path.name, most=60))
    return Panel(Group(*lines), title=title, title_align="left", box=box.ROUNDED)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        numeric = name in {"since", "step", "steps/s", "value", "wait", "loss", "grad norm", "lr", "host", "device"}
        table.add_column(
            name, justify="right" if numeric else "left", no_wrap=True, overflow="ellipsis",
            ratio=1 if name in {"process", "what", "logged"} else None,
        )  # fmt: skip
    return table


def _standings(processes: Sequence[ProcessSnapshot]) -> Table:
    table = _table("process", "phase", "since", "step", "steps/s", "wait")
    for process in processes:
        table.add_row(
            Text(sanitise(process.label, most=40)),
            _phase(process),
            Text("" if process.since_seconds is None else duration(process.since_seconds)),
            Text(f"{process.step:,}" if process.step else ""),
            Text("" if math.isnan(process.steps_per_second) else f"{process.steps_per_second:.3g}"),
            Text("" if math.isnan(process.wait_share) else f"{process.wait_share:.0%}"),
        )
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


def _training(processes: Sequence[ProcessSnapshot], width: int) -> Table:
    table = _table("process", "loss", "lately", "grad norm", "lr", "host", "device")
    bars = 30 if width >= _WIDE else 10
    devices = any(process.device_bytes for process in processes)
    if not devices:
        table.columns.pop()
    for process in processes:
        loss = process.loss
        cells = [
            Text(sanitise(process.label, most=40)),
            _value(loss, 4),
            Text("" if loss is None else sparkline(process.losses, bars), style="cyan"),
            _value(process.grad_norm, 3),
            _value(process.learning_rate, 3),
            _memory(process.host_bytes),
        ]
        if devices:
            cells.append(_memory(process.device_bytes))
        table.add_row(*cells)
    return table


def _memory(count: int) -> Text:
    return Text(size(count) if count else "")


def _scalars(run: RunSnapshot) -> Table:
    table = _table("logged", "value", "step")
    for scalar in run.scalars[: -_MOST_SCALARS - 1 : -1]:
        table.add_row(Text(sanitise(scalar.name, most=70)), _value(scalar.value, 6), Text(f"{scalar.step:,}"))
    return table


def _events(run: RunSnapshot) -> Table:
    table = _table("UTC", "by", "event", "what")
    for seen in run.events[-_MOST_EVENTS:]:
        facts = ", ".join(f"{key}={value!r}"[:200] for key, value in list(seen.event.data.items())[:12])
        table.add_row(
            Text(moment(seen.event.unix_seconds, "%H:%M:%S")),
            Text(sanitise(seen.source, most=20)),
            Text(sanitise(seen.event.kind, most=24), style="red" if seen.event.kind in _ALARMING else ""),
            Text(sanitise(facts, most=300), no_wrap=True, overflow="ellipsis"),
        )
    return table


def _verdict(run: RunSnapshot) -> Panel:
    verdict = run.verdict
    assert verdict is not None
    lines = [Text(sanitise(verdict.summary, most=1000))]
    if verdict.fix:
        lines.append(Text.assemble(("Fix: ", "bold"), sanitise(verdict.fix, most=1000)))
    if sure := how_sure(verdict):
        lines.append(Text(f"How sure: {sure}", style="dim"))
    style = "green" if verdict.family == "ended well" else "red"
    title = Text(f"{sanitise(verdict.title, most=60)} [{sanitise(verdict.cause, most=10)}]")
    return Panel(Group(*lines), title=title, title_align="left", border_style=style, box=box.ROUNDED)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a curve of at most so many characters, the mean of each stretch; "x" where none of it is finite."""
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
    return "".join("x" if math.isnan(mean) else _BARS[round((mean - low) * scale) if scale else 0] for mean in means)


def _value(value: float | None, digits: int) -> Text:
    if value is None:
        return Text("")
    return Text(f"{value:.{digits}g}", style="" if math.isfinite(value) else "bold red")
