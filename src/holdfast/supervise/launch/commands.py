"""How a supervised command is started.

What is executed, in which environment, with which streams.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from holdfast.core.errors import PolicyError
from holdfast.recorder.run_files import ATTEMPT_VARIABLE, OBSERVE_VARIABLE
from holdfast.supervise import process_tree
from holdfast.supervise.launch import child_start
from holdfast.supervise.launch.output import Streams
from holdfast.supervise.process_tree import MARK_VARIABLE

_INJECTED = Path(__file__).parents[1] / "injected"
_MINIMAL = (sys.executable, "-I", "-S")  # no site-packages, no sitecustomize: 15 ms


class CommandError(PolicyError):
    """A command cannot be executed.

    `status` is what a shell would exit with: 127 if there is none, else 126.
    """

    status = child_start.NOT_FOUND


def find_program(command: Sequence[str]) -> str:
    """Return the file that the first word of a command means.

    H720 if there is none, H721 if it is not executable; with the exit status of shells.
    """
    found = shutil.which(command[0])
    if found is not None:
        return str(Path(found).absolute())
    path = Path(command[0])
    if path.exists():
        error = CommandError(
            f"{command[0]!r} is not executable",
            limit="the first word after -- is executed as it is, without a shell",
            fix=(
                "write `python` before a script, or name a program, such as ./a.out after `chmod"
                " +x`."
            ),
            rule="H721",
        )
        error.status = child_start.NOT_EXECUTABLE
        raise error
    raise CommandError(
        f"there is no command {command[0]!r}",
        limit="the first word after -- is a program in PATH or a path",
        fix="correct its name, or activate the environment that it belongs to.",
        rule="H720",
    )


def make_environment(
    environment: Mapping[str, str], run: Path, attempt: int, mark: str, *, observe: bool
) -> dict[str, str]:
    """Return the environment of the command."""
    found = dict(environment)
    if observe:
        found = observing(found, run, attempt)
    else:
        # Or what it printed last would be lost when it is killed
        found.setdefault("PYTHONUNBUFFERED", "1")
    above = found.get(MARK_VARIABLE)
    found[MARK_VARIABLE] = f"{above},{mark}" if above else mark
    return found


def observing(environment: Mapping[str, str], run: Path, attempt: int) -> dict[str, str]:
    """Return an environment in which every Python process, children included, records into a run
    directory.

    That exists. A ``PYTHONPATH`` of the command's comes after ours.
    """
    # If empty nothing, whereas an empty entry is the current directory
    theirs = environment.get("PYTHONPATH", "")
    entries = (
        [entry for entry in theirs.split(os.pathsep) if entry != str(_INJECTED)] if theirs else []
    )
    path = os.pathsep.join([str(_INJECTED), *entries])
    ours = {
        "PYTHONPATH": path,
        OBSERVE_VARIABLE: str(run.absolute()),
        ATTEMPT_VARIABLE: str(attempt),
    }
    return {**environment, **ours}


def start(
    program: str, command: Sequence[str], environment: Mapping[str, str], streams: Streams
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own.

    It is killed when the thread that calls this ends.
    """
    out, err = streams.theirs
    return subprocess.Popen(  # noqa: S603 - the user's own command is the point
        [*_MINIMAL, child_start.__file__, str(os.getpid()), program, *command],
        stdin=None if _may_read_stdin() else subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        env=dict(environment),
        start_new_session=True,
    )


def _may_read_stdin() -> bool:
    """Return whether our stdin may be the command's.

    A job in the background must not read what is typed.
    """
    try:
        fcntl.fcntl(0, fcntl.F_GETFD)
        return not os.isatty(0) or os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # no stdin at all, or a terminal that is not the one of our session
        return os.isatty(0)


class Sentinel:
    """The process that ends the command's processes if this one is killed."""

    def __init__(self, mark: str, note: Path) -> None:
        reading, self._pipe = os.pipe()
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                [*_MINIMAL, process_tree.__file__, str(reading), mark, str(note.absolute())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={name: value for name, value in os.environ.items() if name != MARK_VARIABLE},
                cwd="/",
                pass_fds=[reading],
                process_group=0,
            )
        finally:
            os.close(reading)
        os.set_blocking(self._pipe, False)

    def guard_session(self, session: int) -> None:
        """Name the session of the newest command."""
        self._write(b"%d\n" % session)

    def release(self) -> None:
        """End it: the supervisor ends by itself, and has ended everything."""
        self._write(b"done\n")
        os.close(self._pipe)
        self._process.wait()

    def _write(self, line: bytes) -> None:
        with suppress(OSError):  # somebody has killed it
            os.write(self._pipe, line)
