"""`holdfast run -- COMMAND`: supervise any command, start it again when that can help, and say why it ended."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.output import failing_clearly

if TYPE_CHECKING:
    from holdfast.supervise.launch.supervisor import Outcome

_RunDir = Annotated[
    Path | None, typer.Option(help="Where to record. Default: runs/<script>-<UTC time>.", show_default=False)
]
_Delay = Annotated[float, typer.Option(min=0, help="Seconds before the first restart; doubled up to 5 minutes.")]
_Limits = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PHASE=SECONDS",
        help="Longest stand-still of a phase, or of all of them (all=SECONDS); may be repeated. floor=SECONDS: the "
        "least for the phases of a step. moving=SECONDS: how long a process "
        "that still computes is left alone. SECONDS may be 'off'.",
    ),
]
_Blind = Annotated[bool, typer.Option("--no-observe", help="Record nothing inside Python processes; nor watch them.")]
_Grace = Annotated[float, typer.Option(min=0, help="From SIGINT or SIGTERM to SIGKILL. Schedulers leave 30 s.")]
_LogBytes = Annotated[
    int, typer.Option(min=1 << 20, help="Size of output.log; of more, the head and the newest part are kept.")
]


def run(
    command: Annotated[list[str], typer.Argument(help="What to run, such as: -- python train.py --lr 0.1")],
    run_dir: _RunDir = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="Restarts in all, not counting preemptions.")] = 3,
    max_preemptions: Annotated[int, typer.Option(min=0, help="Restarts after the command was taken back.")] = 10,
    restart_delay: _Delay = 10.0,
    hang_limit: _Limits = None,
    no_watchdog: Annotated[bool, typer.Option("--no-watchdog", help="Do not look for hangs and leaks.")] = False,
    no_observe: _Blind = False,
    grace_seconds: _Grace = 25.0,
    max_log_bytes: _LogBytes = 256 << 20,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but what the command prints.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary as JSON, in the last line.")] = False,
) -> None:
    """Run a command, watch it, start it again when that can help, and say why it ended.

    Exit code: that of the command; 128 + the number of the signal that ended it. 127 or 126: it cannot be executed.
    2: wrong use.
    """
    from holdfast.supervise.launch.restarts import Budgets
    from holdfast.supervise.launch.run_folder import choose_folder
    from holdfast.supervise.launch.supervisor import Plan, Supervisor
    from holdfast.supervise.watch.limits import HangLimits

    with failing_clearly(as_json=False):
        limits, program = HangLimits.parse(hang_limit or []), _find_program(command)
        budgets = Budgets(
            max_restarts=max_restarts, max_preemptions=max_preemptions, first_delay_seconds=restart_delay
        )
        plan = Plan(
            command=tuple(command), program=program, run=run_dir or choose_folder(command, time.time()),
            budgets=budgets, limits=None if no_watchdog or no_observe else limits, observe=not no_observe,
            grace_seconds=grace_seconds, most_log_bytes=max_log_bytes,
        )  # fmt: skip
        supervisor = Supervisor(plan, quiet=quiet)
        outcome = supervisor.run()
    if not quiet:
        supervisor.begin_line(2)
        _print_end(outcome)
    if as_json:
        supervisor.begin_line(1)
        _echo(json.dumps(_summary(outcome)), 1)
    raise typer.Exit(outcome.status)


def _find_program(command: list[str]) -> str:
    from holdfast.supervise.launch.commands import CommandError, find_program

    try:
        return find_program(command)
    except CommandError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(error.status) from error


def _print_end(outcome: Outcome) -> None:
    from holdfast.core.text import duration, sanitise
    from holdfast.report.verdicts import how_sure

    verdict, times = outcome.verdict, "1 attempt" if outcome.attempts == 1 else f"{outcome.attempts} attempts"
    where = f", {sanitise(verdict.where)}" if verdict.where else ""
    sure = "" if verdict.family == "ended well" and verdict.confidence > 0.9 else how_sure(verdict)
    run = str(outcome.run)
    with contextlib.suppress(ValueError, OSError):  # as it is shortest from here
        run = str(outcome.run.relative_to(Path.cwd()))
    _echo(f"holdfast: {sanitise(verdict.title)} [{verdict.cause}]{', ' if sure else ''}{sure}{where}", 2)
    _echo(f"holdfast: {times} in {duration(outcome.seconds)}; {outcome.why}; recorded in {run}", 2)
    _echo(f"holdfast: holdfast explain {shlex.quote(run)}", 2)


def _echo(text: str, stream: int) -> None:
    """Print a line to stdout or stderr; that nobody reads any more does not change the exit code."""
    try:
        typer.echo(text, err=stream == 2)
    except (OSError, SystemExit):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)  # nor does Python's own attempt at its end


def _summary(outcome: Outcome) -> dict[str, Any]:
    return {
        "run": str(outcome.run),
        "exit_code": outcome.status,
        "attempts": outcome.attempts,
        "seconds": round(outcome.seconds, 3),
        "why_stopped": outcome.why,
        "verdict": outcome.verdict.as_json(),
    }
