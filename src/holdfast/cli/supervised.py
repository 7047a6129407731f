"""What `holdfast run` does, without the command line's own parser, which takes longer to import
than all of this.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from holdfast.core.errors import HoldfastError
from holdfast.supervise.launch.commands import CommandError, find_program
from holdfast.supervise.launch.run_folder import choose_folder
from holdfast.supervise.launch.supervisor import Plan, Supervisor

if TYPE_CHECKING:
    from holdfast.supervise.launch.supervisor import Outcome


def run_if_called_plainly(words: list[str]) -> None:
    """Supervise what follows ``--`` if nothing but --run-dir and --quiet is before it.

    Return if anything else is.
    """
    if "--" in words:
        before, command = words[: words.index("--")], words[words.index("--") + 1 :]
        run_dir = Path(before.pop(1)) if len(before) > 1 and before[0] == "--run-dir" else None
        quiet = before[-1:] in (["--quiet"], ["-q"])
        if command and len(before) == (run_dir is not None) + quiet:
            supervise(command, run_dir, quiet=quiet)


def supervise(
    command: list[str],
    run_dir: Path | None,
    *,
    quiet: bool = False,
    as_json: bool = False,
    **settings: Any,
) -> NoReturn:
    """Run a command, print how it went, and exit as it did; `settings` are those of `Plan`."""
    stdout = 1
    try:
        if as_json:
            stdout = os.dup(1)
            os.dup2(2, 1)  # what the command prints
        plan = Plan(
            command=tuple(command),
            program=find_program(command),
            run=run_dir or choose_folder(command, time.time()),
            shared=run_dir is not None,
            **settings,
        )
        supervisor = Supervisor(plan, quiet=quiet)
        outcome = supervisor.run()
    except (HoldfastError, OSError) as error:
        from holdfast.cli.output import print_error

        os.dup2(stdout, 1)
        print_error(error, as_json=as_json)
        sys.exit(error.status if isinstance(error, CommandError) else 2)
    if not quiet:
        supervisor.begin_line(2)
        _print_end(outcome)
    if as_json:
        os.dup2(stdout, 1)
        _echo(json.dumps(_summary(outcome)), 1)
    sys.exit(outcome.status)


def _print_end(outcome: Outcome) -> None:
    from holdfast.core.text import duration, sanitise
    from holdfast.report.verdicts import how_sure

    verdict, times = (
        outcome.verdict,
        "1 attempt" if outcome.attempts == 1 else f"{outcome.attempts} attempts",
    )
    where = f", {sanitise(verdict.where)}" if verdict.where else ""
    sure = "" if verdict.family == "ended well" and verdict.confidence > 0.9 else how_sure(verdict)
    run = str(outcome.run)
    with contextlib.suppress(ValueError, OSError):  # as it is shortest from here
        run = str(outcome.run.relative_to(Path.cwd()))
    _echo(
        f"holdfast: {sanitise(verdict.title)} [{verdict.cause}]{', ' if sure else ''}{sure}{where}",
        2,
    )
    _echo(f"holdfast: {times} in {duration(outcome.seconds)}; {outcome.why}; recorded in {run}", 2)
    _echo(f"holdfast: holdfast explain {shlex.quote(run)}", 2)


def _echo(text: str, stream: int) -> None:
    """Print a line to stdout or stderr.

    That nobody reads any more does not change the exit code.
    """
    try:
        print(text, file=sys.stderr if stream == 2 else sys.stdout, flush=True)
    except (OSError, SystemExit):
        # Nor does Python's own attempt at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


def _summary(outcome: Outcome) -> dict[str, Any]:
    return {
        "run": str(outcome.run),
        "exit_code": outcome.status,
        "attempts": outcome.attempts,
        "seconds": round(outcome.seconds, 3),
        "why_stopped": outcome.why,
        "verdict": outcome.verdict.as_json(),
    }
