"""The tables of the live view: columns and cell texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich import box
from rich.table import Table
from rich.text import Text

from holdfast.core.text import duration, moment, sanitise, size
from holdfast.recorder.progress import ProcessPhase
from holdfast.recorder.scalars import Scalar
from holdfast.report.live.live_run import LiveRun
from holdfast.report.run_snapshot import ProcessSnapshot
from holdfast.report.severity import severity
from holdfast.report.sources import RecordedEvent

# Draw long sparklines if the terminal has at least this many columns.
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
STATE_STYLES = {"running": "green", "ended": "bold", "waits to restart": "yellow"}

_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class Column(Generic[_Row]):
    """One column of a table.

    Args:
        title: Heading of the column.
        cell: Returns the cell for a row.
        is_number: Whether the cells are right-aligned.
        takes_space: Whether the column takes the remaining width of the table.
    """

    title: str
    cell: Callable[[_Row], Text]
    is_number: bool = False
    takes_space: bool = False


def make_table(rows: Sequence[_Row], columns: Sequence[Column[_Row]]) -> Table:
    """Return a table with the given columns and one line per row."""
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
    """Return a number as text, which is empty if it is unknown and red if it is not finite."""
    if value is None:
        return Text("")
    return Text(f"{value:.{digits}g}", style="" if math.isfinite(value) else "bold red")


def _recent_losses(process: ProcessSnapshot, width: int) -> Text:
    losses = () if process.loss is None else process.losses
    return Text(sparkline(losses, width), style="cyan")


def _event_text(recorded: RecordedEvent) -> Text:
    text = sanitise(recorded.event.sentence(), most=300)
    return Text(text, no_wrap=True, overflow="ellipsis")


def _colored_event_text(recorded: RecordedEvent) -> Text:
    text = _event_text(recorded)
    text.stylize(_SEVERITY_STYLES[severity(recorded.event)])
    return text


def _event_kind(recorded: RecordedEvent) -> Text:
    style = _SEVERITY_STYLES[severity(recorded.event)]
    return Text(sanitise(recorded.event.kind, most=24), style)


def _phase_of_run(run: LiveRun) -> Text:
    if not run.processes or run.state == "ended":
        return Text()
    return _phase(run.processes[0])


def _newest_step(run: LiveRun) -> Text:
    return _step(max((process.step for process in run.processes), default=0))


def _loss_of_run(run: LiveRun) -> Text:
    losses = [process.loss for process in run.processes if process.loss is not None]
    return _number(losses[0] if losses else None, 4)


def _summary_of_run(run: LiveRun) -> Text:
    text = run.outlook or run.command
    if run.verdict is not None:
        text = run.verdict.title
    return Text(sanitise(text, most=200))


PROCESS_COLUMNS: tuple[Column[ProcessSnapshot], ...] = (
    Column("process", _label, takes_space=True),
    Column("phase", _phase),
    Column("since", _since, is_number=True),
    Column("step", lambda process: _step(process.step), is_number=True),
    Column("steps/s", _rate, is_number=True),
    Column("wait", _wait, is_number=True),
)
EVENT_COLUMNS: tuple[Column[RecordedEvent], ...] = (
    Column("UTC", lambda recorded: Text(moment(recorded.event.unix_seconds, "%H:%M:%S"))),
    Column("by", lambda recorded: Text(sanitise(recorded.source, most=20))),
    Column("event", _event_kind),
    Column("what", _event_text, takes_space=True),
)
# Without the kind, because the sentence says what happened.
SHORT_EVENT_COLUMNS: tuple[Column[RecordedEvent], ...] = (
    *EVENT_COLUMNS[:2],
    Column("what", _colored_event_text, takes_space=True),
)
SCALAR_COLUMNS: tuple[Column[Scalar], ...] = (
    Column("logged", lambda scalar: Text(sanitise(scalar.name, most=70)), takes_space=True),
    Column("value", lambda scalar: _number(scalar.value, 6), is_number=True),
    Column("step", lambda scalar: Text(f"{scalar.step:,}"), is_number=True),
)
RUN_COLUMNS: tuple[Column[LiveRun], ...] = (
    Column("run", lambda run: Text(sanitise(run.path.name, most=60)), takes_space=True),
    Column("state", lambda run: Text(run.state, style=STATE_STYLES[run.state])),
    Column("phase", _phase_of_run),
    Column("began (UTC)", lambda run: Text("" if run.began is None else moment(run.began))),
    Column("step", _newest_step, is_number=True),
    Column("loss", _loss_of_run, is_number=True),
    Column("what", _summary_of_run, takes_space=True),
)


def training_columns(
    trained: Sequence[ProcessSnapshot], width: int
) -> list[Column[ProcessSnapshot]]:
    """Return the columns of the training table, with device memory only if a device is used."""
    curve_width = _LONG_CURVE if width >= _WIDE else _SHORT_CURVE
    columns: list[Column[ProcessSnapshot]] = [
        Column("process", _label, takes_space=True),
        Column("loss", lambda process: _number(process.loss, 4), is_number=True),
        Column("lately", lambda process: _recent_losses(process, curve_width)),
        Column("grad norm", lambda process: _number(process.grad_norm, 3), is_number=True),
        Column("lr", lambda process: _number(process.learning_rate, 3), is_number=True),
        Column("host", lambda process: _size(process.host_bytes), is_number=True),
    ]
    if any(process.device_bytes for process in trained):
        columns.append(
            Column("device", lambda process: _size(process.device_bytes), is_number=True)
        )
    return columns


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a sparkline of at most `width` characters, each for the mean of several values.

    The character "x" means that none of these values is finite.
    """
    means = _means_of_groups(values, min(width, len(values)))
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


def _means_of_groups(values: Sequence[float], groups: int) -> list[float]:
    """Split values into consecutive groups, and return the mean of each group's finite values.

    The mean of a group without finite values is NaN.
    """
    means = []
    for number in range(groups):
        begin = number * len(values) // groups
        end = (number + 1) * len(values) // groups
        finite = [value for value in values[begin:end] if math.isfinite(value)]
        means.append(math.fsum(finite) / len(finite) if finite else math.nan)
    return means
