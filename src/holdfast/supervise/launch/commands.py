"""Start a supervised command: find its executable, build its environment and start it.

This module also starts the sentinel, which kills the command's processes if the supervisor is
killed.
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
from holdfast.recorder.run_files import ATTEMPT_VARIABLE, OBSERVE_VARIABLE, RESUME_VARIABLE
from holdfast.supervise import process_tree
from holdfast.supervise.launch import child_start
from holdfast.supervise.launch.output import CommandStreams
from holdfast.supervise.process_tree import MARK_VARIABLE

_INJECTED_FOLDER = Path(__file__).parents[1] / "injected"
# These options skip site-packages and sitecustomize, so Python starts in 15 ms.
_MINIMAL_PYTHON = (sys.executable, "-I", "-S")


class CommandError(PolicyError):
    """Raised if a command cannot be executed.

    `status` is the exit code that a shell would return: 127 if the command does not exist, 126 if
    it is not executable.
    """

    status = child_start.NOT_FOUND


def find_program(command: Sequence[str]) -> str:
    """Return the path of a command's executable, looking it up on PATH as a shell would.

    Raises:
        CommandError: H720 if it does not exist, H721 if the file is not executable.
    """
    program = shutil.which(command[0])
    if program is not None:
        return str(Path(program).absolute())
    if Path(command[0]).exists():
        error = CommandError(
            f"{command[0]!r} is not executable",
            limit="the first word after -- is executed directly, without a shell",
            fix=("put `python` before a script, or make the file executable with `chmod +x`."),
            rule="H721",
        )
        error.status = child_start.NOT_EXECUTABLE
        raise error
    raise CommandError(
        f"command {command[0]!r} not found",
        limit="the first word after -- must be a program on PATH or a path",
        fix="correct the name, or activate the environment in which it is installed.",
        rule="H720",
    )


def make_environment(
    environment: Mapping[str, str],
    run_path: Path,
    attempt: int,
    mark: str,
    *,
    observe: bool,
    resume: bool = False,
) -> dict[str, str]:
    """Return the environment of a supervised command.

    Args:
        environment: The environment to extend.
        run_path: The run directory.
        attempt: Number of the attempt.
        mark: Identifies the supervisor; every process of the command inherits it.
        observe: Whether the command's Python processes record themselves.
        resume: Whether they save and resume their script.
    """
    command_environment = dict(environment)
    if observe:
        command_environment = make_observed_environment(environment, run_path, attempt)
        if resume:
            command_environment[RESUME_VARIABLE] = "1"
    else:
        # Otherwise, output that Python still buffers would be lost if the command were killed.
        command_environment.setdefault("PYTHONUNBUFFERED", "1")
    # If this supervisor is itself supervised, the outer supervisors must still find the command.
    outer_marks = command_environment.get(MARK_VARIABLE)
    command_environment[MARK_VARIABLE] = f"{outer_marks},{mark}" if outer_marks else mark
    return command_environment


def make_observed_environment(
    environment: Mapping[str, str], run_path: Path, attempt: int
) -> dict[str, str]:
    """Return an environment in which every Python process records itself in a run directory.

    Child processes inherit the environment. The directory of ``injected`` is prepended to
    ``PYTHONPATH``. The run directory must exist.
    """
    path_entries = [str(_INJECTED_FOLDER)]
    own_path = environment.get("PYTHONPATH", "")
    # An empty PYTHONPATH has no entries. Splitting it would produce an empty entry, which means the
    # current directory.
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
    """Start a command in its own session.

    The kernel kills the command when the thread that called this function ends.

    Args:
        program: Path of the file to execute.
        command: The words of the command; the first becomes ``argv[0]``.
        environment: The command's environment variables.
        streams: The command's output streams.
    """
    stdout, stderr = streams.command_ends
    return subprocess.Popen(  # noqa: S603 - this is the user's own command
        [*_MINIMAL_PYTHON, child_start.__file__, str(os.getpid()), program, *command],
        stdin=None if _may_share_stdin() else subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=dict(environment),
        start_new_session=True,
    )


def _may_share_stdin() -> bool:
    """Return whether the command may inherit the supervisor's stdin.

    A background job must not read input that is meant for the foreground job.
    """
    try:
        fcntl.fcntl(0, fcntl.F_GETFD)
        return not os.isatty(0) or os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        # Either stdin is closed, or it is not the controlling terminal of this session.
        return os.isatty(0)


class Sentinel:
    """A helper process that kills the command's processes if the supervisor itself is killed.

    The helper process runs the module ``process_tree`` as a script.

    Args:
        mark: Identifies the supervisor in the environment of the command's processes.
        note: File that the sentinel writes if the supervisor was killed.
    """

    def __init__(self, mark: str, note: Path) -> None:
        reading_end, self._pipe = os.pipe()
        arguments = [process_tree.__file__, str(reading_end), mark, str(note.absolute())]
        # With the mark of an outer supervisor, the sentinel would count as a process of the outer
        # supervisor's command.
        environment = {name: text for name, text in os.environ.items() if name != MARK_VARIABLE}
        try:
            self._process = subprocess.Popen(  # noqa: S603 - holdfast's own program
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
        """Send the sentinel the session ID of the running command, or 0 if no command runs."""
        self._write(b"%d\n" % session)

    def release(self) -> None:
        """Let the sentinel exit, because the supervisor has ended all processes itself."""
        self._write(b"done\n")
        os.close(self._pipe)
        self._process.wait()

    def _write(self, line: bytes) -> None:
        # The sentinel itself may have been killed.
        with suppress(OSError):
            os.write(self._pipe, line)
