"""The implementation of `holdfast run`, without the command-line parser.

Importing the parser (typer) takes longer than everything else, so simple command lines bypass it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from holdfast.core.errors import HoldfastError
from holdfast.core.standard_streams import write_to_stderr_within
from holdfast.recorder.run_files import GUARD_FOLDER, PROCESSES_FOLDER
from holdfast.supervise.launch.commands import CommandError, find_program
from holdfast.supervise.launch.run_folder import choose_folder, is_complete
from holdfast.supervise.launch.supervisor import RunOptions, Supervisor

if TYPE_CHECKING:
    from holdfast.supervise.launch.supervisor import RunOutcome

_STDERR = 2
_WRONG_USE = 2
# A shell adds this number to that of the signal that has ended a command.
_FIRST_SIGNAL_STATUS = 128
# The rule for a script that `--resume` does not support.
_REFUSED_SCRIPT = "H738"
# How long the verdict waits for a reader of stderr. The supervisor has already waited longer for
# the output of the command to be read.
_PATIENCE_SECONDS = 5.0
# The variable that sets `Policy.notify`.
_NOTIFY_VARIABLE = "HOLDFAST_NOTIFY"
_NOTHING_MIRRORED = (
    "holdfast: nothing was copied to the mirror, because the command has no Guard; to save a script"
    " that does not import holdfast, add --resume\n"
)


def run_if_called_plainly(words: list[str]) -> None:
    """Run the command and exit, if the only options before ``--`` are --run-dir and --quiet.

    With any other option, return without doing anything.

    Args:
        words: The command line after ``holdfast run``.
    """
    if "--" not in words:
        return
    separator = words.index("--")
    options = words[:separator]
    command = words[separator + 1 :]
    run_dir = None
    if len(options) > 1 and options[0] == "--run-dir":
        run_dir = Path(options[1])
        del options[:2]
    quiet = False
    if options and options[-1] in ("--quiet", "-q"):
        quiet = True
        options.pop()
    if command and not options:
        supervise(command, run_dir, quiet=quiet)


def supervise(
    command: list[str],
    run_dir: Path | None,
    *,
    quiet: bool = False,
    as_json: bool = False,
    resume: bool = False,
    notify: str | None = None,
    mirror: str | None = None,
    **options: Any,
) -> NoReturn:
    """Run a command under supervision, print the outcome, and exit with the command's exit code.

    Args:
        command: The words of the command.
        run_dir: The run directory; by default a new directory in ``runs``.
        quiet: Whether to print only the command's output.
        as_json: Whether to print a JSON summary on stdout; see `output.keep_stdout_for_json`.
        resume: Whether to save and resume an unchanged script. The run directory is then the same
            for each call with the same script.
        notify: Where to send messages about the run. If None, the variable HOLDFAST_NOTIFY decides.
            With the variable, a webhook's URL is not on a command line, which other users can read.
        mirror: Where the script's guard copies its checkpoints, or None.
        options: Other fields of `RunOptions`.
    """
    try:
        run_path = run_dir or choose_folder(command, None if resume else time.time())
        if resume and is_complete(run_path, command):
            _print_complete(run_path, quiet=quiet, as_json=as_json)
            sys.exit(0)
        run_options = RunOptions(
            command=tuple(command),
            program=find_program(command),
            run_path=run_path,
            is_run_path_shared=run_dir is not None,
            resume=resume,
            notify=_receiver_or_none(notify),
            mirror=mirror,
            **options,
        )
        supervisor = Supervisor(run_options, quiet=quiet)
        outcome = supervisor.run()
    except (HoldfastError, OSError) as error:
        from holdfast.cli.output import print_error

        print_error(error, as_json=as_json)
        sys.exit(error.status if isinstance(error, CommandError) else _WRONG_USE)
    if not quiet:
        supervisor.begin_line(_STDERR)
        _print_outcome(outcome, resume=resume)
        is_observed = options.get("observe", True)
        if mirror is not None and is_observed and not (resume or _had_a_guard(outcome)):
            write_to_stderr_within(_NOTHING_MIRRORED, _PATIENCE_SECONDS)
    if as_json:
        _print_summary(outcome, resume=resume)
    sys.exit(outcome.exit_code)


def _receiver_or_none(notify: str | None) -> str | None:
    """Return where to send messages, from the option or the variable, or None for nowhere."""
    if notify is None:
        notify = os.environ.get(_NOTIFY_VARIABLE, "")
    notify = notify.strip()
    return None if notify.lower() in ("", "none") else notify


def _print_complete(run_path: Path, *, quiet: bool, as_json: bool) -> None:
    """Report that the run in a directory is complete, so that nothing is left to do."""
    if not quiet:
        print(
            f"holdfast: the run in {run_path} is complete; to train again, use another --run-dir",
            file=sys.stderr,
        )
    if as_json:
        from holdfast.cli.output import print_json

        why = "the run is complete"
        summary = {"run": str(run_path), "exit_code": 0, "attempts": 0, "why_stopped": why}
        print_json(summary, indent=None)


def _print_summary(outcome: RunOutcome, *, resume: bool) -> None:
    """Print the outcome of a run as JSON.

    Args:
        outcome: The outcome of the run.
        resume: Whether the script was to be saved.
    """
    from holdfast.cli.output import print_json

    summary: dict[str, Any] = {
        "run": str(outcome.run_path),
        "exit_code": outcome.exit_code,
        "attempts": outcome.attempts,
        "seconds": round(outcome.seconds, 3),
        "why_stopped": outcome.why,
        "verdict": outcome.verdict.as_json(),
    }
    if resume:
        summary["saved"] = _was_saved(outcome)
    # A closed pipe must not change the exit code.
    with contextlib.suppress(OSError, SystemExit):
        print_json(summary, indent=None)


def _print_outcome(outcome: RunOutcome, *, resume: bool) -> None:
    """Print what happened, what to do, and where to look.

    Args:
        outcome: The outcome of the run.
        resume: Whether the script was to be saved.
    """
    from holdfast.core.text import counted, duration

    lines = [_describe_verdict(outcome)]
    if outcome.verdict.needs_action and outcome.verdict.fix:
        advice = outcome.verdict.first_advice
        if resume and outcome.exit_code > _FIRST_SIGNAL_STATUS and _was_saved(outcome):
            advice = f"Run the same command again to continue from the newest checkpoint. {advice}"
        lines.append(f"what to do: {advice}")
    attempts = counted(outcome.attempts, "attempt")
    command = f"holdfast explain {shlex.quote(_shorten(outcome.run_path))}"
    lines.append(f"{attempts} in {duration(outcome.seconds)}; {outcome.why}; details: {command}")
    is_refused = outcome.verdict.cause == _REFUSED_SCRIPT
    if resume and not is_refused and not _was_saved(outcome):
        lines.append("nothing was saved, because the script has not stepped a torch optimizer")
    # A pipe that is closed, or that nobody reads, must neither change the exit code nor delay it
    # for long. The verdict is also in the run directory.
    text = "".join(f"holdfast: {line}\n" for line in lines)
    if not write_to_stderr_within(text, _PATIENCE_SECONDS):
        # Python flushes stderr again at exit, which must not fail or block either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), _STDERR)


def _had_a_guard(outcome: RunOutcome) -> bool:
    """Return whether an observed process of the command has opened a guard."""
    from holdfast.core.errors import RunDirectoryError
    from holdfast.recorder.reader import read_events

    for folder in (outcome.run_path / PROCESSES_FOLDER).glob("*"):
        # A damaged recording tells nothing.
        with contextlib.suppress(RunDirectoryError):
            if any(event.kind == "guard" for event in read_events(folder)):
                return True
    return False


def _was_saved(outcome: RunOutcome) -> bool:
    """Return whether a guard has saved the script, at least in an earlier attempt."""
    return (outcome.run_path / GUARD_FOLDER).exists()


def _describe_verdict(outcome: RunOutcome) -> str:
    from holdfast.core.text import sanitise

    verdict = outcome.verdict
    parts = [f"{sanitise(verdict.title)} [{verdict.cause}]"]
    if verdict.certainty is not None:
        parts.append(verdict.certainty)
    if verdict.where:
        parts.append(sanitise(verdict.where))
    return ", ".join(parts)


def _shorten(path: Path) -> str:
    """Return a path relative to the working directory if it is inside that directory."""
    with contextlib.suppress(ValueError, OSError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
