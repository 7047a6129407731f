"""`holdfast chaos -- COMMAND`: inject faults into a training run and check that it recovers."""

from __future__ import annotations

import re
import shlex
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from holdfast.chaos.campaign import INTERRUPTS, Campaign
from holdfast.chaos.fault_plans import KINDS
from holdfast.chaos.page import render
from holdfast.chaos.results import CampaignReport, FaultResult, TrialResult
from holdfast.chaos.trials import adopt_orphans
from holdfast.cli.output import (
    CHECK_FAILED,
    Json,
    check_writable,
    console,
    failing_clearly,
    print_json,
)
from holdfast.core.durable import replace_file
from holdfast.core.errors import PolicyError, did_you_mean
from holdfast.core.files import SHARED
from holdfast.core.secrets import without_secrets
from holdfast.core.text import sanitise

# A duration without a unit is in seconds.
SECONDS_PER_UNIT = {"": 1, "s": 1, "m": 60, "h": 3600}
# By shell convention, the exit code of a process that is terminated by signal n is this value + n.
SIGNAL_EXIT_CODE = 128
# Maximum number of leftover files to show per fault.
MAX_SHOWN_FILES = 3


def run(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND", help="The training command, such as: -- python train.py --lr 0.1"
        ),
    ],
    writes: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help=(
                "A path that the script writes to. Needed if the working directory is too large"
                " to copy. May be repeated."
            ),
        ),
    ] = None,
    only: Annotated[
        str,
        typer.Option(
            metavar="KINDS",
            help=f"Kinds of faults to try, separated by commas: any of {', '.join(KINDS)}.",
        ),
    ] = "",
    seed: Annotated[
        int,
        typer.Option(
            metavar="N", help="Random seed: selects the steps of faults and the bits to flip."
        ),
    ] = 0,
    budget: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="Time limit for the whole campaign, such as 90s, 10m or 2h."
        ),
    ] = "10m",
    restarts: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Maximum number of restarts per fault."),
    ] = 3,
    exhaustive_saves: Annotated[
        bool,
        typer.Option(
            "--exhaustive-saves",
            help=(
                "Also kill the process before each write, rename or removal of a save. Give it a"
                " large --budget."
            ),
        ),
    ] = False,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write the results as an HTML page.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Inject faults into a training run, restart it, and check that it is still the same run.

    The command runs twice without faults, then once for each fault, each time in a copy of the
    working directory. The directory itself is not changed. Exit code: 0 if the run survives every
    fault and is still the same run, 1 if not, 2 if it cannot be tested.
    """
    received: list[int] = []
    handlers = _raise_keyboard_interrupt(received)
    with failing_clearly(as_json=as_json):
        if page is not None:
            check_writable(page)
        adopt_orphans()
        try:
            report = Campaign(
                command,
                origin=Path.cwd(),
                writes=writes or (),
                only=_parse_kinds(only),
                seed=seed,
                budget_seconds=_parse_seconds(budget),
                restarts=restarts,
                exhaustive_saves=exhaustive_saves,
                say=_print_progress,
            ).run()
        except KeyboardInterrupt:
            _print_progress("interrupted before any fault was tried")
            raise typer.Exit(SIGNAL_EXIT_CODE + received[0]) from None
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if as_json:
        print_json(as_values(report))
    else:
        _print_report(report)
    if page is not None:
        # Even with --json, print an error as plain text, because stdout already contains a complete
        # JSON document.
        with failing_clearly(as_json=False):
            command_words = shlex.join(without_secrets(report.command))
            text = render(report, command_words, verdict(report))
            replace_file(page, text.encode(), SHARED)
    if received:
        raise typer.Exit(SIGNAL_EXIT_CODE + received[0])
    if not report.passed:
        raise typer.Exit(CHECK_FAILED)


def _raise_keyboard_interrupt(received: list[int]) -> dict[int, Any]:
    """Install signal handlers that raise KeyboardInterrupt on the first termination signal.

    Further signals are ignored, so that they cannot interrupt the cleanup of processes and copies.

    Args:
        received: A list to which the handler appends the signal number.

    Returns:
        The previous handlers, keyed by signal number. Signals that are already ignored, as under
        nohup, stay ignored and are not included.
    """

    def interrupt(number: int, _frame: object) -> None:
        received.append(number)
        for other in INTERRUPTS:
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt

    return {
        number: signal.signal(number, interrupt)
        for number in INTERRUPTS
        if signal.getsignal(number) != signal.SIG_IGN
    }


def _parse_kinds(only: str) -> list[str]:
    kinds = [kind.strip() for kind in only.split(",") if kind.strip()]
    for kind in kinds:
        if kind not in KINDS:
            raise PolicyError(
                f"{kind!r} is not a kind of fault",
                limit=f"the kinds are {', '.join(KINDS)}",
                fix=did_you_mean(kind, KINDS, otherwise="use one of these."),
                rule="H729",
            )
    return kinds


def _parse_seconds(budget: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", budget.strip())
    if match is None or float(match[1]) == 0:
        raise PolicyError(
            f"--budget {budget!r} is not a duration",
            limit="a duration is a number followed by s, m or h",
            fix="write 10m, for example.",
            rule="H729",
        )
    return float(match[1]) * SECONDS_PER_UNIT[match[2]]


def _print_progress(line: str) -> None:
    print(f"chaos: {line}", file=sys.stderr, flush=True)


def as_values(report: CampaignReport) -> dict[str, Any]:
    """Return a report as JSON-serializable values, with secrets removed from the command."""
    return {
        **asdict(report),
        "command": without_secrets(report.command),
        "passed": report.passed,
        "verdict": verdict(report),
    }


# --- the verdict --------------------------------------------------------------------------------


def verdict(report: CampaignReport) -> str:
    """Return a one-sentence summary of a campaign, without the final period."""
    sentence = _describe_tried(report)
    for result in (TrialResult.DID_NOT_OCCUR, TrialResult.NOT_TRIED):
        reasons = [row.detail for row in report.rows if row.result == result]
        if reasons:
            sentence += f"; {len(reasons)} {result}: {reasons[0]}"
    return sentence


def _describe_tried(report: CampaignReport) -> str:
    """Return a sentence that says how many of the tried faults the run survives.

    It also says after how many of them the run is still the same run.
    """
    tried = [row for row in report.rows if row.tried]
    if not tried:
        return "No fault could be tried"
    survivals = sum(1 for row in tried if not row.lost)
    survived = f"The run survives {survivals} of {len(tried)} faults"
    if report.unsteady is not None:
        return (
            f"{survived}. Whether it is still the same run cannot be determined: even two"
            f" undisturbed runs differ, first in {report.unsteady}"
        )
    passed = sum(1 for row in tried if row.passed)
    if passed == len(tried):
        sentence = f"{survived} and is the same run after each, bit for bit"
        if any(row.result == TrialResult.SURVIVES for row in tried):
            sentence += ", apart from the NaN in its data"
        return sentence
    repeating = sum(1 for row in tried if row.result == TrialResult.WORK_LOST)
    same = passed + repeating
    sentence = f"{survived} and is the same run after {same or 'none'} of them"
    if repeating:
        sentence += f", but repeats work that was already saved after {repeating}"
    return sentence


# --- the terminal -------------------------------------------------------------------------------


def _print_report(report: CampaignReport) -> None:
    table = Table("fault", "result", "what happened", "starts", "lost", "left behind", box=SIMPLE)
    for row in report.rows:
        # Leave these cells empty for a fault that was not tried.
        starts = str(row.attempts) if row.attempts else ""
        lost = f"{row.seconds_lost:.1f} s" if row.attempts else ""
        left_behind = row.left_files[:MAX_SHOWN_FILES]
        if row.left_processes:
            left_behind = [f"processes: {row.left_processes}", *left_behind]
        table.add_row(
            row.fault,
            _colored_result(row),
            _plain(row.detail),
            starts,
            lost,
            _plain(", ".join(left_behind)),
        )
    out = console()
    out.print(table)
    out.print("Does the run survive, and is it still the same run?", style="bold")
    out.print(_plain(f"{verdict(report)}."))
    for remark in report.remarks:
        out.print(_plain(f"Note: {remark}."))
    out.print(f"{report.seconds:.0f} s; repeat with --seed {report.seed}", style="dim")


def _colored_result(row: FaultResult) -> str:
    if not row.tried:
        return f"[dim]{row.result}[/]"
    if row.passed:
        return f"[green]{row.result}[/]"
    return f"[red]{row.result.upper()}[/]"


def _plain(text: str) -> Text:
    """Return a rich `Text` without control characters, in which markup is not interpreted."""
    return Text(sanitise(text))
