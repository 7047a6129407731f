"""`holdfast watch`, `report`, `compare` and `metrics`: show runs in a terminal or on an HTML page.

Modules of ``report`` are imported inside the commands, because several of them import numpy, which
takes 0.1 s.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
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
    check_writable,
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
    from holdfast.report.live.watching import Runs, Watched
    from holdfast.report.metrics.copying import CopySummary
    from holdfast.report.page.gathered_run import GatheredRun

SelfContained = Annotated[
    bool,
    typer.Option(
        "--self-contained",
        help=(
            "Write a single file, to send or publish. Otherwise, a page inside the folder of the"
            " runs loads the plotting script (4.6 MiB) from a file in that folder."
        ),
    ),
]
# Maximum number of runs to compare; the page has this many distinct colors for runs.
_MAX_COMPARED = 10


def watch(
    run_dir: RunDirectory,
    once: Annotated[bool, typer.Option("--once", help="Print the view once and exit.")] = False,
    as_json: Json = False,
) -> None:
    """Show what each process of a run is doing, until the run ends.

    For a directory of runs, such as runs/, show one line per run. Any key switches between the
    views: everything, processes, training and events; q quits. Without a terminal, print the view
    once and exit.
    """
    from holdfast.report.live.view import draw, follow

    with failing_clearly(as_json=as_json):
        watched = _watched(run_dir)
        screen = console()
        if as_json:
            snapshots = watched.look()
            runs = snapshots if isinstance(snapshots, tuple) else (snapshots,)
            print_json(as_json_value([run.as_json() for run in runs]))
        elif once or not screen.is_terminal:
            screen.print(draw(watched.look(), screen.width))
        else:
            with contextlib.suppress(KeyboardInterrupt), _reading_keys() as wait_for_key:
                follow(watched, screen, wait_for_key)


def _watched(path: Path) -> Watched | Runs:
    """Return the run in a run directory, or all runs in a directory of runs."""
    from holdfast.report.live.watching import Runs, Watched
    from holdfast.report.sources import check_run, runs_in

    try:
        return Watched(check_run(path), SystemClock())
    except RunDirectoryError:
        if path.is_dir() and runs_in(path):
            return Runs(path, SystemClock())
        raise


@contextlib.contextmanager
def _reading_keys() -> Iterator[Callable[[float], object]]:
    """Context manager that yields a function that waits for a key press.

    The argument of the yielded function is a timeout in seconds. If stdin is not a terminal, the
    function only sleeps.
    """
    if not sys.stdin.isatty():
        yield time.sleep
        return
    settings = termios.tcgetattr(0)
    try:
        tty.setcbreak(0)
        yield _wait_for_key
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, settings)


def _wait_for_key(seconds: float) -> str:
    readable, _, _ = select.select([0], [], [], seconds)
    return os.read(0, 64).decode("latin-1") if readable else ""


def report(
    run_dir: RunDirectory,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help="Path of the page. Default: report.html in RUN."
        ),
    ] = None,
    self_contained: SelfContained = False,
    as_json: Json = False,
) -> None:
    """Write an HTML page that shows how a run went and why it ended.

    The page opens without a network. The pages of a folder of runs share one file with the plotting
    script; --self-contained, or an --out elsewhere, writes a single file.
    """
    with failing_clearly(as_json=as_json):
        from holdfast.report.page.gathering import gather
        from holdfast.report.page.run_page import render
        from holdfast.report.page.shared_script import share_script
        from holdfast.report.sources import check_run

        run_path = check_run(run_dir)
        page = (out or run_path / "report.html").absolute()
        check_writable(page)
        with working("reading the run"):
            run = gather(run_path)
            addresses: tuple[str, ...] = ()
            if not self_contained and page.is_relative_to(run_path.parent):
                addresses = share_script(page, _folders_for_script(run_path))
            data = render(run, plotly_addresses=addresses).encode()
        replace_file(page, data)
    if as_json:
        print_json(
            {
                "page": str(page),
                "bytes": len(data),
                "processes": len(run.processes),
                "curves": len(run.lanes),
                "events": len(run.events),
                "problems": list(run.problems),
            }
        )
        return
    _print_written(page, data)
    for problem in run.problems:
        typer.echo(f"note: {problem}", err=True)


def _folders_for_script(run: Path) -> list[Path]:
    """Return the folders that may hold the plotting script of a run's page, the best one first.

    The folder of the runs is best, because all pages there share the script. If that is the current
    directory, it is probably a project and no place for such a file.
    """
    folders = [run.parent, run]
    return [folder for folder in folders if folder != Path.cwd()]


def _print_written(page: Path, data: bytes) -> None:
    size = f"{len(data) / 2**20:.1f} MiB" if len(data) >= 2**20 else f"{len(data) / 2**10:.0f} KiB"
    typer.echo(f"wrote {page} ({size})")


def compare(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help=(
                "Run directories, or what other tools recorded: trainer_state.json, a TensorBoard"
                " event file, a CSV file of Lightning, a W&B run, or the directory of one."
            ),
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help="Path of the page. Default: compare.html."
        ),
    ] = None,
    fail_on_regression: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT",
            help=(
                "Exit with code 1 if the second run is slower than the first by more than this,"
                " such as 5%."
            ),
        ),
    ] = None,
    self_contained: SelfContained = False,
    as_json: Json = False,
) -> None:
    """Write an HTML page that compares runs: their curves, settings and outcomes.

    Runs that other tools recorded have no settings. With --fail-on-regression, the wall-clock time
    of the same steps in both runs is compared.
    """
    regression = None
    with failing_clearly(as_json=as_json):
        from holdfast.report.page.comparing import Comparison
        from holdfast.report.page.regression import measure_regression

        # A run that is named twice counts only once.
        readers = dict(_reader_of(path) for path in run_dirs)
        paths = list(readers)
        if not 2 <= len(paths) <= _MAX_COMPARED:
            raise PolicyError(
                f"cannot compare {len(paths)} different runs",
                limit=f"a page compares 2 to {_MAX_COMPARED} runs",
                fix="pass at least two, such as runs/a runs/b; `holdfast report` shows a single"
                " run.",
                rule="H105",
            )
        page = (out or Path("compare.html")).absolute()
        check_writable(page)
        limit = _limit_of_regression(fail_on_regression, paths)
        with working(f"reading {len(paths)} runs"):
            comparison = Comparison([read() for read in readers.values()])
            if limit is not None:
                regression = measure_regression(
                    baseline=comparison.runs[0], other=comparison.runs[1], limit=limit
                )
            addresses = () if self_contained else _script_of_comparison(page, out, paths)
            data = comparison.page(addresses).encode()
        replace_file(page, data)
    if as_json:
        values = {"page": str(page), "bytes": len(data), **comparison.as_json()}
        if regression is not None:
            values["regression"] = regression.as_json()
        print_json(as_json_value(values))
    else:
        for title, rows in (("", comparison.facts), ("what differs", comparison.differs)):
            console().print(_comparison_table(title, comparison.names, rows))
        _print_written(page, data)
        if regression is not None:
            typer.echo(regression.sentence(*comparison.names))
    if regression is not None and regression.is_regression:
        raise typer.Exit(CHECK_FAILED)


def _script_of_comparison(page: Path, out: Path | None, runs: Sequence[Path]) -> tuple[str, ...]:
    """Return where a comparison looks for the plotting script; empty if it must contain it.

    The page shares the script of the first run's folder if it is in that folder or, without
    ``--out``, in a directory above it.
    """
    from holdfast.report.page.shared_script import share_script

    if not runs[0].is_dir():
        # What another tool recorded, whose folder is not ours to write to.
        return ()
    folder = runs[0].parent
    is_near = page.is_relative_to(folder) or (out is None and folder.is_relative_to(page.parent))
    return share_script(page, [folder]) if is_near and folder != Path.cwd() else ()


def _reader_of(path: Path) -> tuple[Path, Callable[[], GatheredRun]]:
    """Return the resolved path of a run and a function that reads it.

    Args:
        path: A run directory, or what another tool recorded.

    Raises:
        PolicyError: H105 if a directory holds several records of other tools.
        RunDirectoryError: H731 if there is nothing to read, H733 if it cannot be read.
    """
    from holdfast.explain.records.finding import find_record
    from holdfast.recorder.run_files import folder_of_first_host
    from holdfast.report.page.gathering import gather
    from holdfast.report.page.records import gather_record
    from holdfast.report.sources import check_run

    record = find_record(folder_of_first_host(path))
    if record is not None:
        return record.path.resolve(), partial(gather_record, record)
    run = check_run(path)
    return run, partial(gather, run)


def _limit_of_regression(text: str | None, runs: Sequence[Path]) -> float | None:
    """Return the value of ``--fail-on-regression`` as a fraction, or None if it is not given.

    Raises:
        PolicyError: H105 if the value is not a percentage, or if there are more than two runs.
    """
    if text is None:
        return None
    from holdfast.report.page.regression import parse_limit

    limit = parse_limit(text)
    if len(runs) != 2:
        raise PolicyError(
            f"--fail-on-regression with {len(runs)} runs",
            limit="it compares the second run with the first",
            fix="pass exactly two runs: the baseline and the run to check.",
            rule="H105",
        )
    return limit


def _comparison_table(title: str, names: Sequence[str], rows: Mapping[str, Sequence[str]]) -> Table:
    """Return a table with one column per run. `title` is the heading of the first column."""
    table = Table(title, box=box.SIMPLE_HEAD)
    for name in names:
        table.add_column(Text(sanitise(name, most=60)))
    for name, values in rows.items():
        table.add_row(*(Text(sanitise(cell, most=200)) for cell in (name, *values)))
    return table


def metrics(
    run_dir: RunDirectory,
    tensorboard: Annotated[
        str | None, typer.Option(metavar="DIR", help="Write TensorBoard event files to DIR.")
    ] = None,
    jsonl: Annotated[
        str | None,
        typer.Option(metavar="FILE|-", help="Append JSON lines to FILE, or print them (-)."),
    ] = None,
    wandb: Annotated[
        str | None, typer.Option(metavar="PROJECT", help="Log to this Weights & Biases project.")
    ] = None,
    follow_run: Annotated[
        bool, typer.Option("--follow", help="Keep copying until the run ends.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Copy steps and events of a run to TensorBoard, JSON lines or Weights & Biases.

    The exit code is 1 if any target cannot be written.
    """
    from holdfast.report.metrics.copying import follow
    from holdfast.report.metrics.sinks import open_sinks
    from holdfast.report.sources import check_run

    options = {"tensorboard": tensorboard, "jsonl": jsonl, "wandb": wandb}
    targets = {kind: target for kind, target in options.items() if target is not None}
    with failing_clearly(as_json=as_json):
        run = check_run(run_dir)
        if not targets:
            raise PolicyError(
                "no target for the metrics",
                limit="at least one target is required",
                fix="pass a target, such as --tensorboard DIR or --jsonl -.",
                rule="H743",
            )
        sinks = open_sinks(targets, run)
        stop = threading.Event()
        if follow_run:
            # Ctrl-C is the usual way to stop copying, so it must not prevent `follow` from closing
            # the sinks.
            signal.signal(signal.SIGINT, lambda *_: stop.set())
        else:
            stop.set()
        summary = follow(run, sinks, stop)
    if as_json:
        print_json(dataclasses.asdict(summary))
    else:
        _print_copied(summary, stdout_is_taken=jsonl == "-")
    if summary.failures:
        raise typer.Exit(CHECK_FAILED)


def _print_copied(summary: CopySummary, *, stdout_is_taken: bool) -> None:
    typer.echo(f"{summary.points} steps and {summary.events} events", err=stdout_is_taken)
    for sentence in summary.gone:
        typer.echo(f"note: {sentence}", err=True)
    for failure in summary.failures:
        typer.echo(f"failed: {failure}", err=True)
