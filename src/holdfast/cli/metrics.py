"""`holdfast metrics RUN --tensorboard DIR`: copy what a run recorded to where people look at metrics."""

from __future__ import annotations

import dataclasses
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.output import CHECK_FAILED, Json, failing_clearly, print_json
from holdfast.core.errors import PolicyError


def run(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, such as runs/last.")],
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
    from holdfast.report.metrics import follow, open_sinks  # here: `holdfast run` starts without it
    from holdfast.report.sources import check_run

    given = {"tensorboard": tensorboard, "jsonl": jsonl, "wandb": wandb, "mlflow": mlflow}
    wanted = [f"{name}={target}" for name, target in given.items() if target is not None]
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
        copied = follow(path, sinks, stop, until_ended=True)
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
