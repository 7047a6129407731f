"""`holdfast watch`, `report` and `metrics`.

A run in the terminal, as a page, and in other tools.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from holdfast.cli.output import (
    CHECK_FAILED,
    Json,
    RunDirectory,
    console,
    failing_clearly,
    print_json,
    working,
)
from holdfast.core.clock import SystemClock
from holdfast.core.durable import replace_file
from holdfast.core.errors import PolicyError, RunDirectoryError
from holdfast.core.text import as_json_value, sanitise

if TYPE_CHECKING:
    from holdfast.report.watching import Runs, Watched

_MOST_COMPARED = 10  # colours


def watch(
    run_dir: RunDirectory,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and exit.")] = False,
    as_json: Json = False,
) -> None:
    """Show what every process of a run does right now, until the run ends.

    In a file or a pipe, one picture.

    Of a directory of runs, such as runs/, one line for each run. Any key shows more of one thing, q
    quits.
    """
    from holdfast.report.live import draw, follow  # here: `holdfast run` starts without them

    with failing_clearly(as_json=as_json):
        watched = _watched(run_dir)
        screen = console()
        if as_json:
            seen = watched.look()
            print_json(
                as_json_value(
                    [each.as_json() for each in (seen if isinstance(seen, tuple) else [seen])]
                )
            )
        elif once or not screen.is_terminal:
            screen.print(draw(watched.look(), screen.width))
        else:
            with contextlib.suppress(KeyboardInterrupt), _keys() as wait:
                follow(watched, screen, wait)


def _watched(path: Path) -> Watched | Runs:
    """Return one run to watch, or all that are in a directory."""
    from holdfast.report.sources import check_run, runs_in
    from holdfast.report.watching import Runs, Watched

    try:
        return Watched(check_run(path), SystemClock())
    except RunDirectoryError:
        if path.is_dir() and runs_in(path):
            return Runs(path, SystemClock())
        raise


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], object]]:
    """Yield what waits so many seconds for a key, and returns it if there was one."""
    if not sys.stdin.isatty():
        yield time.sleep
        return
    before = termios.tcgetattr(0)
    try:
        tty.setcbreak(0)
        yield (
            lambda seconds: (
                os.read(0, 64).decode("latin-1") if select.select([0], [], [], seconds)[0] else ""
            )
        )
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


def report(
    run_dir: RunDirectory,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The page; else report.html in RUN.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write one page that says why a run ended and how it went; it needs no network."""
    with failing_clearly(as_json=as_json):
        # Here, since numpy takes a tenth of a second to import
        from holdfast.report.gathering import gather
        from holdfast.report.page import render
        from holdfast.report.sources import check_run

        with working("reading the run"):
            picture = gather(check_run(run_dir))
            data = render(picture).encode()
        page = _write(out or picture.path / "report.html", data)
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


def _write(path: Path, data: bytes) -> Path:
    page = path.absolute()
    if page.exists() and not page.is_file():
        raise OSError(
            errno.EINVAL,
            "it is a device, a pipe or a folder; --out FILE takes another place",
            str(page),
        )
    try:
        replace_file(page, data)
    except OSError as error:
        why = f"the page cannot be written here ({error.strerror}); --out FILE takes another place"
        raise OSError(error.errno, why, str(page)) from error
    return page


def compare(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN RUN ...", help="Run directories.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("compare.html"),
    as_json: Json = False,
) -> None:
    """Write one page with several runs side by side.

    Curves over each other, what differs, and what came of each.
    """
    with failing_clearly(as_json=as_json):
        from holdfast.report.comparing import Comparison
        from holdfast.report.gathering import gather
        from holdfast.report.sources import check_run

        paths = list(dict.fromkeys(check_run(each) for each in run_dirs))
        if not 2 <= len(paths) <= _MOST_COMPARED:
            what, limit = (
                f"{len(paths)} of them to compare",
                f"2 to {_MOST_COMPARED} different runs fit on a page",
            )
            raise PolicyError(
                what,
                limit=limit,
                fix="pass runs/a runs/b; `holdfast report` shows one.",
                rule="H105",
            )
        with working(f"reading {len(paths)} runs"):
            found = Comparison([gather(path) for path in paths])
            data = found.page().encode()
        page = _write(out, data)
    if as_json:
        print_json(as_json_value({"page": str(page), "bytes": len(data), **found.as_json()}))
        return
    for title, rows in (("", found.facts), ("what differs", found.differs)):
        table = Table(title, box=box.SIMPLE_HEAD)
        for name in found.names:
            table.add_column(Text(sanitise(name, most=60)))
        for name, values in rows.items():
            table.add_row(*(Text(sanitise(each, most=200)) for each in (name, *values)))
        console().print(table)
    typer.echo(f"wrote {page} ({len(data) / 2**20:.1f} MiB)")


def metrics(
    run_dir: RunDirectory,
    tensorboard: Annotated[str | None, typer.Option(metavar="DIR", help="Event files.")] = None,
    jsonl: Annotated[
        str | None, typer.Option(metavar="FILE|-", help="Lines of JSON, appended.")
    ] = None,
    wandb: Annotated[str | None, typer.Option(metavar="PROJECT", help="Weights & Biases.")] = None,
    follow_run: Annotated[bool, typer.Option("--follow", help="Go on until the run ends.")] = False,
    as_json: Json = False,
) -> None:
    """Copy steps and events of a run to TensorBoard, JSON lines or Weights & Biases.

    Exit code 1: some sink failed on the way.
    """
    from holdfast.report.metrics.copying import follow
    from holdfast.report.metrics.sinks import open_sinks
    from holdfast.report.sources import check_run

    given = {"tensorboard": tensorboard, "jsonl": jsonl, "wandb": wandb}
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
