"""`holdfast watch RUN`: a run in the terminal while it goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.output import Json, console, failing_clearly, print_json
from holdfast.core.clock import SystemClock
from holdfast.core.text import as_json_value

if TYPE_CHECKING:
    from holdfast.report.run_snapshot import RunSnapshot


def run(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, such as runs/last.")],
    once: Annotated[bool, typer.Option("--once", help="Print one picture and exit.")] = False,
    as_json: Json = False,
) -> None:
    """Show what every process of a run does right now, until the run ends; in a file or a pipe, one picture."""
    from holdfast.report.live import draw, follow  # here: `holdfast run` starts without them
    from holdfast.report.sources import check_run
    from holdfast.report.watching import Watched

    with failing_clearly(as_json=as_json):
        watched = Watched(check_run(run_dir), SystemClock())
        screen = console()
        if as_json:
            print_json(_facts(watched.look()))
        elif once or not screen.is_terminal:
            screen.print(draw(watched.look(), screen.width))
        else:
            with contextlib.suppress(KeyboardInterrupt):  # the usual way to leave
                follow(watched, screen, time.sleep)


def _facts(run: RunSnapshot) -> Any:
    processes = [dataclasses.asdict(process) for process in run.processes]
    for process in processes:
        for name in ("info", "lane", "ended", "losses"):
            del process[name]
        process["phase"] = process["phase"].name.lower() if process["phase"] else None
    facts = {name: getattr(run, name) for name in ("command", "state", "attempt", "began", "now", "newest")}
    return as_json_value(
        {
            "name": run.path.name,
            **facts,
            "processes": processes,
            "events": [dataclasses.asdict(seen) for seen in run.events],
            "verdict": run.verdict.as_json() if run.verdict else None,
            "problems": run.problems,
        }
    )
