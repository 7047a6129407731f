"""`holdfast metrics RUN --tensorboard DIR`: copy what a run recorded to where people look at metrics."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.output import CHECK_FAILED, READER_GONE, Json, failing_clearly, print_json
from holdfast.core.clock import SystemClock
from holdfast.core.errors import PolicyError

if TYPE_CHECKING:
    from holdfast.report.metrics import Copied
    from holdfast.report.metrics.points import Sink

_LOOK_SECONDS = 2.0


def run(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, such as runs/last.")],
    tensorboard: Annotated[str | None, typer.Option(metavar="DIR", help="Event files.")] = None,
    prometheus: Annotated[
        str | None, typer.Option(metavar="FILE|:PORT", help="A text file, or an endpoint while --follow.")
    ] = None,
    jsonl: Annotated[str | None, typer.Option(metavar="FILE|-", help="Lines of JSON, appended.")] = None,
    wandb: Annotated[str | None, typer.Option(metavar="PROJECT", help="Weights & Biases.")] = None,
    mlflow: Annotated[str | None, typer.Option(metavar="URI", help="MLflow.")] = None,
    follow_run: Annotated[bool, typer.Option("--follow", help="Go on until the run ends.")] = False,
    as_json: Json = False,
) -> None:
    """Copy steps and events of a run to TensorBoard, Prometheus, JSON lines, Weights & Biases or MLflow.

    Exit code 1: some sink failed on the way.
    """
    from holdfast.report.metrics import open_sinks  # here: `holdfast run` starts without it
    from holdfast.report.sources import check_run

    given = {"tensorboard": tensorboard, "prometheus": prometheus, "jsonl": jsonl, "wandb": wandb, "mlflow": mlflow}
    wanted = [f"{name}={target}" for name, target in given.items() if target is not None]
    with failing_clearly(as_json=as_json):
        path = check_run(run_dir)
        _check(wanted, prometheus, follow_run=follow_run)
        sinks = open_sinks(wanted, path)
        copied = _follow(path, sinks) if follow_run else _copy(path, sinks)
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


def _check(wanted: list[str], prometheus: str | None, *, follow_run: bool) -> None:
    endpoint = prometheus is not None and ":" in prometheus and "/" not in prometheus
    if not wanted or (endpoint and not follow_run):
        raise PolicyError(
            "no target for the metrics" if not wanted else f"an endpoint at {prometheus} without --follow",
            limit="somebody must be able to read them",
            fix="pass one such as --tensorboard DIR or --jsonl -." if not wanted else "add --follow.",
            rule="H743",
        )


def _copy(path: Path, sinks: list[Sink]) -> Copied:
    from holdfast.report.metrics import follow

    at_once = threading.Event()
    at_once.set()
    return follow(path, sinks, at_once)


def _follow(path: Path, sinks: list[Sink]) -> Copied:
    from holdfast.report.metrics import follow
    from holdfast.report.watching import Watched

    stop = threading.Event()
    found: list[Copied] = []
    thread = threading.Thread(target=lambda: found.append(follow(path, sinks, stop)), name="metrics")
    thread.start()
    try:
        watched = Watched(path, SystemClock())
        with contextlib.suppress(KeyboardInterrupt):  # the usual way to leave
            while thread.is_alive() and watched.look().state != "ended":
                time.sleep(_LOOK_SECONDS)
    finally:
        stop.set()
        thread.join()
    if not found:
        raise typer.Exit(READER_GONE)  # which ended the thread
    return found[0]
