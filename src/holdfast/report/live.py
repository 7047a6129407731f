"""The live view: a snapshot of a run, drawn in a terminal with Rich.

All text from a run is sanitised and inserted as `Text`, never as markup, so it cannot change
colours, add links, clear the screen or move the cursor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from holdfast.core.text import duration, moment, sanitise, size
from holdfast.explain.verdict import Verdict
from holdfast.recorder.progress import ProcessPhase
from holdfast.recorder.scalars import Scalar
from holdfast.report.run_snapshot import ProcessSnapshot, RunSnapshot
from holdfast.report.severity import severity
from holdfast.report.sources import RecordedEvent
from holdfast.report.verdicts import how_sure, tone
from holdfast.report.watching import Runs, Watched

# One run, or several.
Snapshots: TypeAlias = RunSnapshot | tuple[RunSnapshot, ...]

# The panels that keys switch between: "all" shows a few rows of each kind, the others all rows of
# one.
PANELS = ("all", "processes", "training", "events")
REFRESH_SECONDS = 0.5

# The maximum number of rows of each table, so that everything fits on a screen.
_MOST_PROCESSES = 16
_MOST_EVENTS = 8
_MOST_SCALARS = 6
_MOST_PROBLEMS = 3
# A terminal with at least this many columns has room for long curves.
_WIDE = 110
_LONG_CURVE = 30
_SHORT_CURVE = 10
_BARS = "▁▂▃▄▅▆▇█"
_PHASE_STYLES = {
    ProcessPhase.DATA_WAIT: "yellow",
    ProcessPhase.FORWARD_BACKWARD: "green",
    ProcessPhase.OPTIMIZER: "green",
    ProcessPhase.EVALUATION: "cyan",
    ProcessPhase.SAVING: "blue",
}
_SEVERITY_STYLES = {"error": "red", "warning": "yellow", "info": ""}
_STATE_STYLES = {"running": "green", "ended": "bold", "waits to restart": "yellow"}
_TONE_STYLES = {"well": "green", "unjudged": "bright_black", "unknown": "yellow", "failed": "red"}


def follow(watched: Watched | Runs, console: Console, wait: Callable[[float], object]) -> Snapshots:
    """Show runs in a terminal, twice a second, until they end; return the last snapshots.

    Args:
        watched: One run, or all runs in a directory.
        console: The terminal.
        wait: Waits for the given number of seconds or for a key, and returns the key if there was
            one: "q" quits, any other switches to the next of `PANELS`.
    """
    snapshots = watched.look()
    keys_pressed = 0
    first = draw(snapshots, console.width, PANELS[0])
    with Live(first, console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while not _have_ended(snapshots):
            key = wait(REFRESH_SECONDS)
            if key == "q":
                break
            if key:
                keys_pressed += 1
            snapshots = watched.look()
            panel = PANELS[keys_pressed % len(PANELS)]
            live.update(draw(snapshots, console.width, panel), refresh=True)
    return snapshots


def _have_ended(snapshots: Snapshots) -> bool:
    runs = snapshots if isinstance(snapshots, tuple) else (snapshots,)
    return all(run.state == "ended" for run in runs)


def draw(snapshots: Snapshots, width: int, panel: str = "") -> RenderableType:
    """Return the view of one run, or a table of several runs, for a terminal.

    Args:
        snapshots: What to draw.
        width: Columns of the terminal.
        panel: One of `PANELS`; empty for a view that is printed once, without a hint about keys.
    """
    if isinstance(snapshots, tuple):
        return _table(snapshots, _RUN_COLUMNS)
    view = _View(run=snapshots, width=width, panel=panel)
    return Group(*(part for section in _SECTIONS for part in section(view)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """What to draw: the run, the width of the terminal, and the selected panel."""

    run: RunSnapshot
    width: int
    panel: str

    def shows(self, panel: str) -> bool:
        """Return whether any rows of a panel are shown."""
        return self.panel in ("", "all", panel)

    @property
    def present_processes(self) -> Sequence[ProcessSnapshot]:
        """Return the processes without helpers that have ended; all of them if none would be left.

        A run of many epochs has many finished loader workers.
        """
        processes = self.run.processes
        present = [
            process
            for process in processes
            if process.alive is not False or process.role in ("trainer", "guard")
        ]
        return present or processes

    @property
    def processes(self) -> Sequence[ProcessSnapshot]:
        """Return the processes that are shown."""
        if self.panel in ("", "all"):
            return self.present_processes[:_MOST_PROCESSES]
        return self.present_processes


# --- sections of the view of one run


def _head(view: _View) -> list[RenderableType]:
    run = view.run
    lines: list[RenderableType] = []
    if run.command:
        lines.append(Text(sanitise(run.command, most=300), no_wrap=True, overflow="ellipsis"))
    attempts = "1 attempt" if run.attempt == 0 else f"{run.attempt + 1} attempts"
    lines.append(
        Text.assemble((run.state, _STATE_STYLES[run.state]), f", {attempts}{_elapsed(run)}")
    )
    if run.outlook:
        lines.append(Text(run.outlook))
    keys = f"showing {view.panel}; any key shows more, q quits" if view.panel else None
    return [
        Panel(
            Group(*lines),
            title=Text(sanitise(run.path.name, most=60)),
            title_align="left",
            box=box.ROUNDED,
            subtitle=keys,
        )
    ]


def _elapsed(run: RunSnapshot) -> str:
    """Return how long a run has been going or, if it has ended, how long it lasted."""
    if run.began is None:
        return ""
    if run.state == "ended" and run.newest is not None:
        return f", after {duration(max(0.0, run.newest - run.began))}"
    return f", since {duration(max(0.0, run.now - run.began))}"


def _process_table(view: _View) -> list[RenderableType]:
    if not view.processes or not view.shows("processes"):
        return []
    return [_table(view.processes, _PROCESS_COLUMNS)]


def _training_table(view: _View) -> list[RenderableType]:
    if not view.shows("training"):
        return []
    rows: list[ProcessSnapshot] = []
    for process in view.processes:
        rows += process.optimizers or (process,)
    trained = [row for row in rows if row.losses or row.host_bytes]
    return [_table(trained, _training_columns(trained, view.width))] if trained else []


def _hidden_processes(view: _View) -> list[RenderableType]:
    if not view.processes:
        return [Text("no Python process has been seen yet", style="dim")]
    hidden = len(view.present_processes) - len(view.processes)
    return [Text(f"and {hidden} more processes", style="dim")] if hidden else []


def _scalar_table(view: _View) -> list[RenderableType]:
    if not view.run.scalars or not view.shows("training"):
        return []
    newest_first = view.run.scalars[::-1]
    if view.panel != "training":
        newest_first = newest_first[:_MOST_SCALARS]
    return [_table(newest_first, _SCALAR_COLUMNS)]


def _event_table(view: _View) -> list[RenderableType]:
    events = [recorded for recorded in view.run.events if recorded.event.kind != "verdict"]
    if not events or not view.shows("events"):
        return []
    # In their own panel, whose end the screen may cut off, the newest events come first.
    shown = events[::-1] if view.panel == "events" else events[-_MOST_EVENTS:]
    return [_table(shown, _EVENT_COLUMNS)]


def _verdict_panel(view: _View) -> list[RenderableType]:
    return [] if view.run.verdict is None else [_panel_of_verdict(view.run.verdict)]


def _problem_lines(view: _View) -> list[RenderableType]:
    return [
        Text(f"note: {sanitise(problem, most=200)}", style="yellow")
        for problem in view.run.problems[:_MOST_PROBLEMS]
    ]


_SECTIONS: tuple[Callable[[_View], list[RenderableType]], ...] = (
    _head,
    _process_table,
    _training_table,
    _hidden_processes,
    _scalar_table,
    _event_table,
    _verdict_panel,
    _problem_lines,
)


def _panel_of_verdict(verdict: Verdict) -> Panel:
    lines = [Text(sanitise(verdict.summary, most=1000))]
    if verdict.fix:
        lines.append(Text.assemble(("Fix: ", "bold"), sanitise(verdict.fix, most=1000)))
    sure = how_sure(verdict)
    if sure:
        lines.append(Text(f"How sure: {sure}", style="dim"))
    return Panel(
        Group(*lines),
        title=Text(f"{sanitise(verdict.title, most=60)} [{sanitise(verdict.cause, most=10)}]"),
        title_align="left",
        border_style=_TONE_STYLES[tone(verdict)],
        box=box.ROUNDED,
    )


# --- tables

_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class _Column(Generic[_Row]):
    """One column of a table.

    Args:
        title: Its head.
        cell: Returns the cell of a row.
        is_number: Whether its cells are aligned to the right.
        takes_space: Whether it takes the space left over by other columns.
    """

    title: str
    cell: Callable[[_Row], Text]
    is_number: bool = False
    takes_space: bool = False


def _table(rows: Sequence[_Row], columns: Sequence[_Column[_Row]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(
            column.title,
            justify="right" if column.is_number else "left",
            no_wrap=True,
            overflow="ellipsis",
            ratio=1 if column.takes_space else None,
        )
    for row in rows:
        table.add_row(*(column.cell(row) for column in columns))
    return table


def _label(process: ProcessSnapshot) -> Text:
    return Text(sanitise(process.label, most=40))


def _phase(process: ProcessSnapshot) -> Text:
    phase = process.phase
    name = "" if phase is None else phase.name.lower().replace("_", " ")
    if process.alive is False:
        ended_normally = phase in (None, ProcessPhase.ENDING)
        return Text("ended" if ended_normally else f"ended in {name}", style="dim")
    if process.stopped:
        return Text(f"stopped in {name}" if name else "stopped", style="bold red")
    if phase is None:
        return Text("running" if process.alive else "unknown", style="dim")
    return Text(name, style=_PHASE_STYLES.get(phase, ""))


def _since(process: ProcessSnapshot) -> Text:
    return Text("" if process.since_seconds is None else duration(process.since_seconds))


def _step(step: int) -> Text:
    return Text(f"{step:,}" if step else "")


def _rate(process: ProcessSnapshot) -> Text:
    rate = process.steps_per_second
    return Text("" if math.isnan(rate) or not rate else f"{rate:.3g}")


def _wait(process: ProcessSnapshot) -> Text:
    share = process.wait_share
    return Text("" if math.isnan(share) else f"{share:.0%}")


def _size(size_bytes: int) -> Text:
    return Text(size(size_bytes) if size_bytes else "")


def _number(value: float | None, digits: int) -> Text:
    """Return a number as text; empty if it was not read, and red if it is not finite."""
    if value is None:
        return Text("")
    return Text(f"{value:.{digits}g}", style="" if math.isfinite(value) else "bold red")


def _recent_losses(process: ProcessSnapshot, width: int) -> Text:
    losses = () if process.loss is None else process.losses
    return Text(sparkline(losses, width), style="cyan")


def _event_text(recorded: RecordedEvent) -> Text:
    text = sanitise(recorded.event.sentence(), most=300)
    return Text(text, no_wrap=True, overflow="ellipsis")


def _event_kind(recorded: RecordedEvent) -> Text:
    style = _SEVERITY_STYLES[severity(recorded.event)]
    return Text(sanitise(recorded.event.kind, most=24), style)


def _phase_of_run(run: RunSnapshot) -> Text:
    if not run.processes or run.state == "ended":
        return Text()
    return _phase(run.processes[0])


def _newest_step(run: RunSnapshot) -> Text:
    return _step(max((process.step for process in run.processes), default=0))


def _loss_of_run(run: RunSnapshot) -> Text:
    losses = [process.loss for process in run.processes if process.loss is not None]
    return _number(losses[0] if losses else None, 4)


def _summary_of_run(run: RunSnapshot) -> Text:
    text = run.outlook or run.command
    if run.verdict is not None:
        text = run.verdict.title
    return Text(sanitise(text, most=200))


_PROCESS_COLUMNS: tuple[_Column[ProcessSnapshot], ...] = (
    _Column("process", _label, takes_space=True),
    _Column("phase", _phase),
    _Column("since", _since, is_number=True),
    _Column("step", lambda process: _step(process.step), is_number=True),
    _Column("steps/s", _rate, is_number=True),
    _Column("wait", _wait, is_number=True),
)
_EVENT_COLUMNS: tuple[_Column[RecordedEvent], ...] = (
    _Column("UTC", lambda recorded: Text(moment(recorded.event.unix_seconds, "%H:%M:%S"))),
    _Column("by", lambda recorded: Text(sanitise(recorded.source, most=20))),
    _Column("event", _event_kind),
    _Column("what", _event_text, takes_space=True),
)
_SCALAR_COLUMNS: tuple[_Column[Scalar], ...] = (
    _Column("logged", lambda scalar: Text(sanitise(scalar.name, most=70)), takes_space=True),
    _Column("value", lambda scalar: _number(scalar.value, 6), is_number=True),
    _Column("step", lambda scalar: Text(f"{scalar.step:,}"), is_number=True),
)
_RUN_COLUMNS: tuple[_Column[RunSnapshot], ...] = (
    _Column("run", lambda run: Text(sanitise(run.path.name, most=60)), takes_space=True),
    _Column("state", lambda run: Text(run.state, style=_STATE_STYLES[run.state])),
    _Column("phase", _phase_of_run),
    _Column("began (UTC)", lambda run: Text("" if run.began is None else moment(run.began))),
    _Column("step", _newest_step, is_number=True),
    _Column("loss", _loss_of_run, is_number=True),
    _Column("what", _summary_of_run, takes_space=True),
)


def _training_columns(
    trained: Sequence[ProcessSnapshot], width: int
) -> list[_Column[ProcessSnapshot]]:
    """Return the columns of the training table; device memory only if a device is used."""
    curve_width = _LONG_CURVE if width >= _WIDE else _SHORT_CURVE
    columns: list[_Column[ProcessSnapshot]] = [
        _Column("process", _label, takes_space=True),
        _Column("loss", lambda process: _number(process.loss, 4), is_number=True),
        _Column("lately", lambda process: _recent_losses(process, curve_width)),
        _Column("grad norm", lambda process: _number(process.grad_norm, 3), is_number=True),
        _Column("lr", lambda process: _number(process.learning_rate, 3), is_number=True),
        _Column("host", lambda process: _size(process.host_bytes), is_number=True),
    ]
    if any(process.device_bytes for process in trained):
        columns.append(
            _Column("device", lambda process: _size(process.device_bytes), is_number=True)
        )
    return columns


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a curve of at most `width` characters, each the mean of a stretch of values.

    "x" stands for a stretch without a finite value.
    """
    means = _means_of_stretches(values, min(width, len(values)))
    finite = [mean for mean in means if math.isfinite(mean)]
    low = min(finite, default=0.0)
    height = max(finite, default=0.0) - low
    scale = 0.0
    if height > 0 and math.isfinite(height):
        scale = (len(_BARS) - 1) / height
    return "".join(
        "x" if math.isnan(mean) else _BARS[round((mean - low) * scale) if scale else 0]
        for mean in means
    )


def _means_of_stretches(values: Sequence[float], stretches: int) -> list[float]:
    """Return the mean of the finite values of each stretch; NaN if it has none."""
    means = []
    for number in range(stretches):
        begin = number * len(values) // stretches
        end = (number + 1) * len(values) // stretches
        finite = [value for value in values[begin:end] if math.isfinite(value)]
        means.append(math.fsum(finite) / len(finite) if finite else math.nan)
    return means
