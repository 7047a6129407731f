"""`holdfast save RUN_DIR` and `holdfast stop RUN_DIR`: ask a running guard to save or to stop.

The request is a file in the run directory; see ``core.run_requests``.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from holdfast.cli.guard_directory import GuardDirectory, open_store
from holdfast.cli.output import CHECK_FAILED, Json, failing_clearly, print_json, working
from holdfast.core.errors import RunDirectoryError
from holdfast.core.lock import find_holder, is_locked, last_holder
from holdfast.core.run_requests import Action, Answer, Request, RequestFolder
from holdfast.core.text import sanitise

# How often to look for the answer, in seconds.
_POLL_SECONDS = 0.1

_Timeout = Annotated[
    float,
    typer.Option(
        min=0, metavar="SECONDS", help="Seconds to wait for the end of the batch and for the save."
    ),
]


def save(run_dir: GuardDirectory, timeout: _Timeout = 60.0, as_json: Json = False) -> None:
    """Ask a running guard to save a checkpoint, and wait until it is written.

    The guard saves at the end of the current batch. Exit code 1: it could not save, or not in time.
    2: no process holds the run directory.
    """
    _ask("save", run_dir, timeout, as_json=as_json)


def stop(run_dir: GuardDirectory, timeout: _Timeout = 60.0, as_json: Json = False) -> None:
    """Ask a running guard to save a checkpoint and stop, and wait until it has stopped.

    The guard stops at the end of the current batch, as it does after SIGTERM, and then releases the
    run directory. Exit code 1: it could not save or stop, or not in time. 2: no process holds the
    run directory.
    """
    _ask("stop", run_dir, timeout, as_json=as_json)


def _ask(action: Action, run_dir: Path, timeout_seconds: float, *, as_json: bool) -> NoReturn:
    """Send a request, wait for the answer, print it, and exit."""
    with failing_clearly(as_json=as_json):
        open_store(run_dir)
        holder = _holder_of(run_dir)
        folder = RequestFolder(run_dir)
        try:
            request = folder.send(action, holder)
        except FileNotFoundError:
            raise _takes_no_requests(run_dir, holder) from None
        try:
            with working(f"waiting for {holder}"):
                answer = _wait(folder, request, run_dir / "lock", timeout_seconds)
            if answer is None:
                answer = _give_up(folder, request, timeout_seconds)
        finally:
            folder.remove(request)
    _print_answer(action, run_dir, answer, as_json=as_json)
    raise typer.Exit(0 if answer.problem is None else CHECK_FAILED)


def _wait(
    folder: RequestFolder, request: Request, lock: Path, timeout_seconds: float
) -> Answer | None:
    """Return the answer to a request, or None if the time is up.

    The answer to a stop counts only once the process has released the run directory.

    Args:
        folder: The requests to the process.
        request: The request.
        lock: The lock of the run directory.
        timeout_seconds: How long to wait.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        # The process writes its answers before it releases the lock.
        is_released = find_holder(lock) != request.holder
        answer = folder.answer_to(request)
        if answer is not None and (request.action == "save" or is_released):
            return answer
        if is_released:
            return Answer(
                checkpoint=None,
                global_step=None,
                problem=f"{request.holder} has released the run directory without an answer",
            )
        if time.monotonic() >= deadline:
            return None
        time.sleep(_POLL_SECONDS)


def _give_up(folder: RequestFolder, request: Request, timeout_seconds: float) -> Answer:
    """Withdraw a request because the time is up, and return what to report."""
    problem = f"{request.holder} did not {request.action} within {timeout_seconds:g} s; "
    if folder.withdraw(request):
        problem += "the request was withdrawn"
    else:
        problem += f"it has accepted the request, and will {request.action} as soon as it can"
    return Answer(checkpoint=None, global_step=None, problem=problem)


def _print_answer(action: Action, run_dir: Path, answer: Answer, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "run_dir": str(run_dir),
                "action": action,
                "checkpoint": answer.checkpoint,
                "global_step": answer.global_step,
                "problem": answer.problem,
            }
        )
        return
    if answer.problem is not None:
        typer.echo(sanitise(f"holdfast {action}: {answer.problem}"), err=True)
        return
    checkpoint = f"{answer.checkpoint} (step {answer.global_step})"
    if action == "save":
        text = f"saved {checkpoint}"
    elif answer.checkpoint is not None:
        text = f"stopped; newest checkpoint: {checkpoint}"
    else:
        text = "stopped; this guard saves no checkpoints"
    typer.echo(sanitise(text))


# --- Who holds the run ----------------------------------------------------------------------------


def _holder_of(run_dir: Path) -> str:
    """Return the name of the process that holds a run directory.

    Raises:
        RunDirectoryError: H736 if no process holds it, as far as this machine can know.
    """
    lock = run_dir / "lock"
    holder = find_holder(lock)
    if holder is not None:
        return holder
    problem = f"no process holds the run directory {run_dir}"
    fix = f"start training. `holdfast explain {run_dir}` shows how the run ended."
    if is_locked(lock) is None:
        problem = f"it is unknown whether a process holds the run directory {run_dir}"
        fix = f"run the command as the user who owns {lock}."
    elif lock.exists():
        name = last_holder(lock)
        _, _, host = name.rpartition(" on ")
        problem += f"; the last one was {name}"
        if host not in (name, socket.gethostname()):
            fix = (
                f"if the run is still training on {host}, run the command there, because this file"
                " system may not show the locks of other hosts."
            )
    raise RunDirectoryError(
        problem,
        limit="only a process that trains can save or stop the run",
        fix=fix,
        rule="H736",
    )


def _takes_no_requests(run_dir: Path, holder: str) -> RunDirectoryError:
    return RunDirectoryError(
        f"{holder}, which holds the run directory {run_dir}, takes no requests",
        limit=(
            "a guard takes requests only if it could create the folder requests in the run"
            " directory, and its version of holdfast is not too old"
        ),
        fix="send SIGTERM to the process, which saves and stops.",
        rule="H736",
    )
