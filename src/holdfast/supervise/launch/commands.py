"""Start a supervised command: find the file to execute, build its environment, start it.

Also starts the sentinel, which ends the command's processes if the supervisor itself is killed.
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
from holdfast.supervise.launch.output import CommandStreams
from holdfast.supervise.process_tree import MARK_VARIABLE

_INJECTED_FOLDER = Path(__file__).parents[1] / "injected"
# Without site-packages and sitecustomize, Python starts in 15 ms.
_MINIMAL_PYTHON = (sys.executable, "-I", "-S")


class CommandError(PolicyError):
    """A command cannot be executed.

    `status` is a shell's exit code: 127 if there is no such command, otherwise 126.
    """

    status = child_start.NOT_FOUND


def find_program(command: Sequence[str]) -> str:
    """Return the path of the file that the first word of a command names.

    Raises:
        CommandError: H720 if there is none, H721 if it is not executable.
    """
    program = shutil.which(command[0])
    if program is not None:
        return str(Path(program).absolute())
    if Path(command[0]).exists():
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
    environment: Mapping[str, str], run_path: Path, attempt: int, mark: str, *, observe: bool
) -> dict[str, str]:
    """Return the environment of a supervised command.

    Args:
        environment: The environment to start from.
        run_path: The run directory.
        attempt: Number of the attempt.
        mark: Identifies the supervisor; every process of the command inherits it.
        observe: Whether its Python processes record themselves.
    """
    command_environment = dict(environment)
    if observe:
        command_environment = make_observed_environment(environment, run_path, attempt)
    else:
        # Without this, the last output would be lost when the command is killed.
        command_environment.setdefault("PYTHONUNBUFFERED", "1")
    # A supervisor that is itself supervised keeps the marks of the supervisors above it.
    outer_marks = command_environment.get(MARK_VARIABLE)
    command_environment[MARK_VARIABLE] = f"{outer_marks},{mark}" if outer_marks else mark
    return command_environment


def make_observed_environment(
    environment: Mapping[str, str], run_path: Path, attempt: int
) -> dict[str, str]:
    """Return an environment in which all Python processes record into a run directory.

    This includes the processes that they start. Entries of an existing ``PYTHONPATH`` follow ours.
    The run directory must exist.
    """
    path_entries = [str(_INJECTED_FOLDER)]
    own_path = environment.get("PYTHONPATH", "")
    # An empty variable has no entries, whereas an empty entry means the current directory.
    if own_path:
        path_entries += [
            entry for entry in own_path.split(os.pathsep) if entry != str(_INJECTED_FOLDER)
        ]
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join(path_entries),
        OBSERVE_VARIABLE: str(run_path.absolute()),
        ATTEMPT_VARIABLE: str(attempt),
    }


def start_command(
    program: str, command: Sequence[str], environment: Mapping[str, str], streams: CommandStreams
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own.

    The kernel kills it when the thread that calls this ends.

    Args:
        program: Path of the file to execute.
        command: Its words; the first is the name it is called by.
        environment: Its environment.
        streams: Its output streams.
    """
    stdout, stderr = streams.command_ends
    return subprocess.Popen(  # noqa: S603 - the user's own command is the point
        [*_MINIMAL_PYTHON, child_start.__file__, str(os.getpid()), program, *command],
        stdin=None if _may_share_stdin() else subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=dict(environment),
        start_new_session=True,
    )


def _may_share_stdin() -> bool:
    """Return whether the command may inherit our stdin.

    A background job must not read what is typed in the foreground.
    """
    try:
        fcntl.fcntl(0, fcntl.F_GETFD)
        return not os.isatty(0) or os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        # There is no stdin, or it is not the terminal of our session.
        return os.isatty(0)


class Sentinel:
    """A helper process that ends the command's processes if the supervisor is killed.

    See ``process_tree``, which is its program.

    Args:
        mark: Identifies the supervisor in the environment of the command's processes.
        note: File that the sentinel writes if it finds the supervisor killed.
    """

    def __init__(self, mark: str, note: Path) -> None:
        reading_end, self._pipe = os.pipe()
        arguments = [process_tree.__file__, str(reading_end), mark, str(note.absolute())]
        # The sentinel carries no mark, or it would count as a process of the command.
        environment = {name: text for name, text in os.environ.items() if name != MARK_VARIABLE}
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                [*_MINIMAL_PYTHON, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                cwd="/",
                pass_fds=[reading_end],
                process_group=0,
            )
        finally:
            os.close(reading_end)
        os.set_blocking(self._pipe, False)

    def guard_session(self, session: int) -> None:
        """Tell the sentinel the session ID of the newest command, or 0 if there is none."""
        self._write(b"%d\n" % session)

    def release(self) -> None:
        """Dismiss the sentinel: the supervisor has ended all processes itself."""
        self._write(b"done\n")
        os.close(self._pipe)
        self._process.wait()

    def _write(self, line: bytes) -> None:
        # The sentinel may have been killed.
        with suppress(OSError):
            os.write(self._pipe, line)
