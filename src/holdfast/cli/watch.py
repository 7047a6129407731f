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
from holdfast.recorder.progress import Phase

if TYPE_CHECKING:
    from holdfast.report.watching import Glance


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


def _facts(glance: Glance) -> Any:
    from holdfast.core.text import as_json_value

    facts = dataclasses.asdict(glance)
    for process in facts["processes"]:
        del process["losses"]
        phase = process["phase"]
        process["phase"] = phase.name.lower() if isinstance(phase, Phase) else None
    facts["verdict"] = glance.verdict.as_json() if glance.verdict else None
    return as_json_value(facts)
