"""`holdfast watch`, `report` and `metrics`: a run in the terminal, as a page, and in other tools."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
import time
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.output import CHECK_FAILED, Json, console, failing_clearly, print_json
from holdfast.core.clock import SystemClock
from holdfast.core.durable import replace_file
from holdfast.core.errors import PolicyError

_Run = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, such as runs/last.")]


def watch(
    run_dir: _Run,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and exit.")] = False,
) -> None:
    """Show what every process of a run does right now, until the run ends; in a file or a pipe, one picture."""
    from holdfast.report.live import draw, follow  # here: `holdfast run` starts without them
    from holdfast.report.sources import check_run
    from holdfast.report.watching import Watched

    with failing_clearly(as_json=False):
        watched = Watched(check_run(run_dir), SystemClock())
        screen = console()
        if once or not screen.is_terminal:
            screen.print(draw(watched.look(), screen.width))
        else:
            with contextlib.suppress(KeyboardInterrupt):  # the usual way to leave
                follow(watched, screen, time.sleep)


def report(
    run_dir: _Run,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The page; else report.html in RUN.")] = None,
    as_json: Json = False,
) -> None:
    """Write one page that says why a run ended and how it went; it needs no network."""
    with failing_clearly(as_json=as_json):
        from holdfast.report.gathering import gather  # here, since numpy takes a tenth of a second to import
        from holdfast.report.page import render
        from holdfast.report.sources import check_run

        picture = gather(check_run(run_dir))
        page = (out or picture.path / "report.html").absolute()
        data = render(picture).encode()
        try:
            replace_file(page, data)
        except OSError as error:
            why = f"the page cannot be written here ({error.strerror}); --out FILE takes another place"
            raise OSError(error.errno, why, str(page)) from error
    if as_json:
        print_json(
            {
                "page": str(page),
                "bytes": len(data),
                "processes": len(picture.processes),
                "curves": len(picture.lanes),
                "events": len(picture.events),
                "problems": list(picture.problems),
            }
        )
        return
    typer.echo(f"wrote {page} ({len(data) / 2**20:.1f} MiB)")
    for problem in picture.problems:
        typer.echo(f"note: {problem}", err=True)


def metrics(
    run_dir: _Run,
    tensorboard: Annotated[str | None, typer.Option(metavar="DIR", help="Event files.")] = None,
    jsonl: Annotated[str | None, typer.Option(metavar="FILE|-", help="Lines of JSON, appended.")] = None,
    wandb: Annotated[str | None, typer.Option(metavar="PROJECT", help="Weights & Biases.")] = None,
    mlflow: Annotated[str | None, typer.Option(metavar="URI", help="MLflow.")] = None,
    follow_run: Annotated[bool, typer.Option("--follow", help="Go on until the run ends.")] = False,
    as_json: Json = False,
) -> None:
    """Copy steps and events of a run to TensorBoard, JSON lines, Weights & Biases or MLflow.

    Exit code 1: some sink failed on the way.
    """
    from holdfast.report.metrics.copying import follow
    from holdfast.report.metrics.sinks import open_sinks
    from holdfast.report.sources import check_run

    given = {"tensorboard": tensorboard, "jsonl": jsonl, "wandb": wandb, "mlflow": mlflow}
    wanted = {name: target for name, target in given.items() if target is not None}
    with failing_clearly(as_json=as_json):
        path = check_run(run_dir)
        if not wanted:
            raise PolicyError(
                "no target for the metrics",
                limit="somebody must be able to read them",
                fix="pass one such as --tensorboard DIR or --jsonl -.",
                rule="H743",
            )
        sinks = open_sinks(wanted, path)
        stop = threading.Event()
        if follow_run:
            signal.signal(signal.SIGINT, lambda *_: stop.set())  # the usual way to leave
        else:
            stop.set()
        copied = follow(path, sinks, stop)
    if as_json:
        print_json(dataclasses.asdict(copied))
    else:
        typer.echo(f"{copied.points} steps and {copied.events} events", err=jsonl == "-")
        for sentence in copied.gone:
            typer.echo(f"note: {sentence}", err=True)
        for failure in copied.failures:
            typer.echo(f"failed: {failure}", err=True)
    if copied.failures:
        raise typer.Exit(CHECK_FAILED)
