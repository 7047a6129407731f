"""Draw snapshots of runs in a terminal, with Rich.

Text from a run is sanitized and inserted as `Text`, never as markup. It therefore cannot change
colors, add links, clear the screen or move the cursor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from holdfast.core.text import counted, duration, sanitise
from holdfast.explain.speed_finding import SpeedFinding
from holdfast.report.live.live_run import LiveRun
from holdfast.report.live.tables import (
    EVENT_COLUMNS,
    PROCESS_COLUMNS,
    RUN_COLUMNS,
    SCALAR_COLUMNS,
    SHORT_EVENT_COLUMNS,
    STATE_STYLES,
    make_table,
    training_columns,
)
from holdfast.report.live.watching import Runs, Watched
from holdfast.report.run_snapshot import ProcessSnapshot
from holdfast.report.verdicts import tone

# A snapshot of one run, or the snapshots of several runs.
LiveRuns: TypeAlias = LiveRun | tuple[LiveRun, ...]

# The panels between which the user switches by pressing keys. "all" shows a few rows of each table,
# and each of the other panels shows all rows of one table.
PANELS = ("all", "processes", "training", "events")
REFRESH_SECONDS = 0.5

# Maximum number of rows per table, so that everything fits on a screen.
_MAX_PROCESSES = 16
_MAX_EVENTS = 8
_MAX_SCALARS = 6
_MAX_PROBLEMS = 3
# Measurements that are recorded all the time. Only the events panel shows them.
_ROUTINE_EVENTS = frozenset({"resources_used", "stacks_sampled", "torch_imported"})
_TONE_STYLES = {"well": "green", "unjudged": "bright_black", "unknown": "yellow", "failed": "red"}


def follow(watched: Watched | Runs, console: Console, wait: Callable[[float], object]) -> LiveRuns:
    """Show runs in a terminal until all of them have ended, and return the last snapshots.

    Args:
        watched: One run, or all runs in a directory.
        console: The terminal.
        wait: Waits for a key for at most the given number of seconds, and returns the key, if any.
            The key "q" quits, and any other key switches to the next panel.
    """
    snapshots = watched.look()
    keys_pressed = 0
    first = draw(snapshots, console.width, PANELS[0])
    with Live(first, console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while not _has_ended(snapshots):
            key = wait(REFRESH_SECONDS)
            if key == "q":
                break
            if key:
                keys_pressed += 1
            snapshots = watched.look()
            panel = PANELS[keys_pressed % len(PANELS)]
            live.update(draw(snapshots, console.width, panel), refresh=True)
    return snapshots


def _has_ended(snapshots: LiveRuns) -> bool:
    if isinstance(snapshots, tuple):
        return all(run.state == "ended" for run in snapshots)
    return snapshots.state == "ended"


def draw(snapshots: LiveRuns, width: int, panel: str = "") -> RenderableType:
    """Return the view of a single run, or a table of several runs.

    Args:
        snapshots: The run or runs to draw.
        width: Width of the terminal in columns.
        panel: One of `PANELS`. If it is empty, the view shows all tables but no hint about keys,
            because it is printed only once.
    """
    if isinstance(snapshots, tuple):
        return make_table(snapshots, RUN_COLUMNS)
    view = _View(run=snapshots, width=width, panel=panel)
    return Group(*(part for section in _SECTIONS for part in section(view)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """A run to draw, the width of the terminal, and the selected panel."""

    run: LiveRun
    width: int
    panel: str

    def shows(self, panel: str) -> bool:
        """Return whether the current view includes the table of a panel."""
        return self.panel in ("", "all", panel)

    @property
    def present_processes(self) -> Sequence[ProcessSnapshot]:
        """Return all processes except helpers that have ended. If none remain, return all of them.

        Helpers are left out because most processes in a run of many epochs are loader workers that
        have ended.
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
        """Return the processes to show, limited in number if all tables are shown."""
        if self.panel in ("", "all"):
            return self.present_processes[:_MAX_PROCESSES]
        return self.present_processes


# --- sections of the view of one run


def _head(view: _View) -> list[RenderableType]:
    """Return the panel at the top: command, state, attempts and progress."""
    run = view.run
    lines: list[RenderableType] = []
    if run.command:
        lines.append(Text(sanitise(run.command, most=300), no_wrap=True, overflow="ellipsis"))
    # Attempts are numbered from 0, so add 1 for the count.
    attempts = counted(run.attempt + 1, "attempt")
    state = (run.state, STATE_STYLES[run.state])
    lines.append(Text.assemble(state, f", {attempts}{_elapsed(run)}"))
    if run.outlook:
        lines.append(Text(run.outlook))
    lines += [_speed_line(finding) for finding in run.speed]
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


def _speed_line(finding: SpeedFinding) -> Text:
    """Return a finding about the speed with its fix; a plain statement needs no fix here."""
    if not finding.is_problem:
        return Text(f"speed: {finding.title} ({finding.cause})", style="dim")
    return Text(f"slow: {finding.title} ({finding.cause}). {finding.fix}", style="yellow")


def _elapsed(run: LiveRun) -> str:
    """Return how long a run has been running, or how long it ran if it has ended."""
    if run.began is None:
        return ""
    if run.state == "ended" and run.newest is not None:
        return f", after {duration(max(0.0, run.newest - run.began))}"
    return f", for {duration(max(0.0, run.now - run.began))}"


def _process_table(view: _View) -> list[RenderableType]:
    if not view.processes or not view.shows("processes"):
        return []
    return [make_table(view.processes, PROCESS_COLUMNS)]


def _training_table(view: _View) -> list[RenderableType]:
    if not view.shows("training"):
        return []
    rows: list[ProcessSnapshot] = []
    for process in view.processes:
        rows += process.optimizers or (process,)
    trained = [row for row in rows if row.losses or row.host_bytes]
    return [make_table(trained, training_columns(trained, view.width))] if trained else []


def _hidden_processes(view: _View) -> list[RenderableType]:
    if not view.processes:
        return [Text("no Python process has started recording yet", style="dim")]
    hidden = len(view.present_processes) - len(view.processes)
    return [Text(f"and {hidden} more processes", style="dim")] if hidden else []


def _scalar_table(view: _View) -> list[RenderableType]:
    if not view.run.scalars or not view.shows("training"):
        return []
    newest_first = view.run.scalars[::-1]
    if view.panel != "training":
        newest_first = newest_first[:_MAX_SCALARS]
    return [make_table(newest_first, SCALAR_COLUMNS)]


def _event_table(view: _View) -> list[RenderableType]:
    events = [recorded for recorded in view.run.events if recorded.event.kind != "verdict"]
    if not events or not view.shows("events"):
        return []
    if view.panel == "events":
        # The newest events come first, because the screen may cut off the end of the table.
        return [make_table(events[::-1], EVENT_COLUMNS)]
    notable = [recorded for recorded in events if recorded.event.kind not in _ROUTINE_EVENTS]
    return [make_table(notable[-_MAX_EVENTS:], SHORT_EVENT_COLUMNS)] if notable else []


def _verdict_panel(view: _View) -> list[RenderableType]:
    verdict = view.run.verdict
    if verdict is None:
        return []
    lines = [Text(sanitise(verdict.summary, most=1000))]
    if verdict.fix:
        lines.append(Text.assemble(("Fix: ", "bold"), sanitise(verdict.fix, most=1000)))
    if verdict.certainty is not None:
        lines.append(Text(f"Cause: {verdict.certainty}", style="dim"))
    panel = Panel(
        Group(*lines),
        title=Text(f"{sanitise(verdict.title, most=60)} [{sanitise(verdict.cause, most=10)}]"),
        title_align="left",
        border_style=_TONE_STYLES[tone(verdict)],
        box=box.ROUNDED,
    )
    return [panel]


def _problem_lines(view: _View) -> list[RenderableType]:
    return [
        Text(f"note: {sanitise(problem, most=200)}", style="yellow")
        for problem in view.run.problems[:_MAX_PROBLEMS]
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
