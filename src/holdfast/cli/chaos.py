"""`holdfast chaos -- COMMAND`: does this training survive, and is it still the same training?"""

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

from holdfast.chaos.page import render
from holdfast.chaos.trials import take_orphans
from holdfast.chaos.trying import KINDS, Campaign, Report, Row
from holdfast.cli.output import CHECK_FAILED, Json, console, failing_clearly, print_json
from holdfast.core.errors import PolicyError, did_you_mean
from holdfast.core.secrets import without_secrets
from holdfast.core.text import sanitise

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


def run(
    command: Annotated[
        list[str], typer.Argument(help="What trains, such as: -- python train.py --lr 0.1")
    ],
    writes: Annotated[
        list[Path] | None,
        typer.Option(
            help=(
                "What the training writes, where the working directory is too large to be copied;"
                " may be "
                "repeated."
            )
        ),
    ] = None,
    only: Annotated[
        str, typer.Option(metavar="KINDS", help=f"Kinds of faults, of {','.join(KINDS)}.")
    ] = "",
    seed: Annotated[int, typer.Option(help="Decides the steps and bits of the faults.")] = 0,
    budget: Annotated[
        str, typer.Option(help="After which all of it ends, such as 90s, 10m, 2h.")
    ] = "10m",
    restarts: Annotated[
        int, typer.Option(min=1, help="How often the command is started again, per fault.")
    ] = 3,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write a page for people there.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Disturb a training, start it again, and say whether it is still the same training.

    The command runs twice undisturbed, then once for each fault, in copies of the working
    directory; nothing in it is
    changed. Exit code: 0 if it survives all and comes out the same, 1 if not, 2 if it cannot be put
        to the test.
    """
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    met: list[int] = []

    def interrupt(number: int, _: object) -> None:
        met.append(number)
        for each in ends:  # once: the processes are ended and the copies removed
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {
        each: signal.signal(each, interrupt)
        for each in ends
        if signal.getsignal(each) != signal.SIG_IGN
    }
    with failing_clearly(as_json=as_json):
        if page is not None:  # or all of it would have been for nothing
            if page.exists() and not page.is_file():
                limit, fix = "the page is a file", "name a file that does not exist yet."
                raise PolicyError(
                    f"--page {str(page)!r} is no regular file", limit=limit, fix=fix, rule="H704"
                )
            page.open("a").close()
            if not page.stat().st_size:
                page.unlink()
        take_orphans()
        try:
            report = Campaign(
                command,
                origin=Path.cwd(),
                writes=writes or (),
                only=_kinds(only),
                seed=seed,
                budget_seconds=_seconds(budget),
                restarts=restarts,
                say=_say,
            ).run()
        except KeyboardInterrupt:
            _say("interrupted before anything was tried")
            raise typer.Exit(128 + met[0]) from None
    for each, handler in before.items():
        signal.signal(each, handler)
    if as_json:
        print_json(as_values(report))
    else:
        _print(report)
    if page is not None:
        with failing_clearly(as_json=False):  # stdout has its JSON
            html = render(report, shlex.join(without_secrets(report.command)), _verdict(report))
            page.write_text(html, encoding="utf-8")
    if met:
        raise typer.Exit(128 + met[0])
    if not report.passed:
        raise typer.Exit(CHECK_FAILED)


def _kinds(only: str) -> list[str]:
    found = [each.strip() for each in only.split(",") if each.strip()]
    for each in found:
        if each not in KINDS:
            raise PolicyError(
                f"there is no kind of faults {each!r}",
                limit=f"the kinds are {', '.join(KINDS)}",
                fix=did_you_mean(each, KINDS, otherwise="take one of these."),
                rule="H729",
            )
    return found


def _seconds(budget: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", budget.strip())
    if match is None or float(match[1]) == 0:
        limit = "it is a number with s, m or h"
        raise PolicyError(
            f"--budget {budget!r} is no time", limit=limit, fix="write 10m.", rule="H729"
        )
    return float(match[1]) * _UNITS[match[2]]


def _say(line: str) -> None:
    print(f"chaos: {line}", file=sys.stderr, flush=True)


def as_values(report: Report) -> dict[str, Any]:
    """Return a report as JSON values."""
    return {
        **asdict(report),
        "command": without_secrets(report.command),
        "passed": report.passed,
        "verdict": _verdict(report),
    }


def _verdict(report: Report) -> str:
    tried = [row for row in report.rows if row.tried]
    passed, survives = (
        sum(each) for each in ([row.passed for row in tried], [not row.lost for row in tried])
    )
    older = sum(row.result == "work is lost" for row in tried)
    found = (
        f"it survives {survives} of {len(tried)} faults, and is the same training after"
        f" {passed + older} of them"
    )
    found += f", but begins anew what was saved after {older}" if older else ""
    if not tried:
        found = "nothing could be tried"
    elif report.unsteady is not None:
        found = (
            f"it survives {survives} of {len(tried)} faults. Whether it is the same training cannot"
            " be said: two "
        )
        found += f"undisturbed runs differ already, first in {report.unsteady}"
    elif passed == len(tried):
        but = any(row.result == "survives" for row in tried)
        found = f"it survives {passed} of {passed} faults, and is the same training after each"
        found += ", bit for bit, but for the NaN in its data" if but else ", bit for bit"
    for result in ("did not occur", "not tried"):
        if missing := [row.detail for row in report.rows if row.result == result]:
            found += f"; {len(missing)} {result}: {missing[0]}"
    return f"{found[:1].upper()}{found[1:]}"


def _print(report: Report) -> None:
    table = Table("fault", "result", "what happened", "starts", "lost", "left behind", box=SIMPLE)
    for row in report.rows:
        left = [f"processes: {row.left_processes}"] if row.left_processes else []
        left += [sanitise(each) for each in row.left_files[:3]]
        table.add_row(
            row.fault,
            _coloured(row),
            _plain(row.detail),
            str(row.attempts or ""),
            f"{row.seconds_lost:.1f} s" if row.attempts else "",
            _plain(", ".join(left)),
        )
    out = console()
    out.print(table)
    out.print("Does it survive, and is it still the same training?", style="bold")
    out.print(_plain(f"{_verdict(report)}."))
    for remark in report.remarks:
        out.print(_plain(f"Note: {remark}."))
    out.print(f"{report.seconds:.0f} s; repeat it with --seed {report.seed}", style="dim")


def _coloured(row: Row) -> str:
    if not row.tried:
        return f"[dim]{row.result}[/]"
    return f"[green]{row.result}[/]" if row.passed else f"[red]{row.result.upper()}[/]"


def _plain(text: str) -> Text:
    return Text(sanitise(text))  # no markup
