"""The directory of a supervised run, with its lock and its description (``supervised.json``).

Only one supervisor at a time may use a run directory. The description is written before the command
starts, so that it exists even if everything else fails.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from holdfast.core.durable import replace_file
from holdfast.core.errors import RunDirectoryError
from holdfast.core.files import make_folder, make_run_directory, read_file
from holdfast.core.lock import FileLock, LockHeldError
from holdfast.recorder.reader import read_events
from holdfast.recorder.run_files import (
    LOST_FILE,
    SUPERVISED_FILE,
    SUPERVISOR_FOLDER,
    read_processes,
)
from holdfast.recorder.start import facts_of_start

# Format version of `SUPERVISED_FILE`.
FORMAT = 1
_RUNS_FOLDER = "runs"
_LAST_LINK = "last"
_MAX_NAME_LENGTH = 60
# These options prevent git from taking locks and from running programs that are configured in the
# repository. Untracked files, such as those in runs/, do not count as changes.
_GIT_STATUS = (
    "git",
    "--no-optional-locks",
    "-c",
    "core.fsmonitor=false",
    "status",
    "--porcelain=v2",
    "--branch",
    "--untracked-files=no",
)
_GIT_SECONDS = 60.0
# How long to wait for git at the end of a run. Only a very short command ends before git does.
_GIT_LAST_SECONDS = 1.0
_MAX_CHANGED_FILES = 20
_GIT_HEADER = "# branch."


def choose_folder(
    command: Sequence[str], started: float | None, parent: Path = Path(_RUNS_FOLDER)
) -> Path:
    """Return a path for the directory of a run.

    Args:
        command: The command. Its script, module or program becomes the first part of the name.
        started: Unix time in seconds; the second part of the name is this time in UTC, and the
            directory does not exist yet. None for a path that is the same for each run of this
            command.
        parent: The directory of all runs.
    """
    name = re.sub(r"[^\w.-]", "_", _name_of_command(command))[:_MAX_NAME_LENGTH] or "run"
    if started is None:
        return parent / name
    name = f"{name}-{datetime.fromtimestamp(started, UTC):%Y%m%d-%H%M%S}"
    path = parent / name
    for number in itertools.count(2):
        if not path.exists():
            break
        path = parent / f"{name}-{number}"
    return path


def _name_of_command(command: Sequence[str]) -> str:
    for word in command:
        if word.endswith((".py", ".sh")):
            return Path(word).stem
    for word, next_word in itertools.pairwise(command):
        if word == "-m":
            return next_word
    return Path(command[0]).name


def is_complete(path: Path, command: Sequence[str]) -> bool:
    """Return whether a run of an unchanged script has ended with exit code 0 in a directory.

    Args:
        path: The run directory, which may not exist yet.
        command: The command that is about to be started there.

    Raises:
        RunDirectoryError: H737 if another command has started the run.
    """
    description: Any = None
    # If the description is missing or damaged, the run is started.
    with suppress(OSError, ValueError, RecursionError):
        description = json.loads(read_file(path.expanduser() / SUPERVISED_FILE))
    if not isinstance(description, dict):
        return False
    before = description.get("argv")
    now = facts_of_start(command, 0.0)["argv"]
    if before != now:
        raise RunDirectoryError(
            f"{path} belongs to the command {shlex.join(map(str, before or []))!r}",
            limit=f"it cannot be resumed with {shlex.join(now)!r}",
            fix="use the same command, or another --run-dir.",
            rule="H737",
        )
    return bool(description.get("complete"))


class RunFolder:
    """A run directory, which is created if it does not exist, and locked until `close` is called.

    The kernel releases the lock when the process ends for any reason. An existing run directory is
    continued, because schedulers restart a job with the same command.

    Args:
        path: The run directory.

    Raises:
        RunDirectoryError: H722 if the directory cannot be created or written, H723 if another
            supervisor is using it, H724 if it was written by a newer version of holdfast.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        # Directory of the supervisor's own recording.
        self.supervisor = self.path / SUPERVISOR_FOLDER
        self._file = self.path / SUPERVISED_FILE
        self._description: dict[str, Any] = {}
        self._git_thread: threading.Thread | None = None
        try:
            make_run_directory(self.path)
            make_folder(self.path, SUPERVISOR_FOLDER)
            self._check_format()
            self._lock = FileLock(self.supervisor / "lock")
            self._lock.acquire()
        except LockHeldError as error:
            raise RunDirectoryError(
                f"run directory {self.path} is in use by {error.holder}",
                limit="only one supervisor at a time may use a run directory",
                fix="stop the other supervisor, or choose another --run-dir.",
                rule="H723",
            ) from error
        except OSError as error:
            raise self.unusable(error) from error

    def _check_format(self) -> None:
        # A damaged description is rewritten, so treat it as the current format.
        file_format = FORMAT
        with suppress(OSError, ValueError, RecursionError, AttributeError):
            file_format = json.loads(read_file(self._file)).get("format", FORMAT)
        if not isinstance(file_format, int) or file_format > FORMAT:
            raise RunDirectoryError(
                f"{self._file} has format {file_format!r}",
                limit=f"this version of holdfast writes format {FORMAT}",
                fix="upgrade holdfast, or choose another --run-dir.",
                rule="H724",
            )

    def unusable(self, error: OSError) -> RunDirectoryError:
        """Return the error (H722) for a directory that cannot be created or written."""
        return RunDirectoryError(
            f"run directory {self.path} cannot be written ({error.strerror or error})",
            limit="holdfast run stores the command's output, the recordings and the verdict there",
            fix="pass a writable --run-dir, on a disk with at least 10 MiB of free space.",
            rule="H722",
        )

    def next_attempt(self) -> int:
        """Return the number of the next attempt, which follows the last attempt recorded here."""
        return max([-1, *self._recorded_attempts()]) + 1

    def _recorded_attempts(self) -> Iterator[int]:
        # Read events of all kinds: the ring buffer is finite, so the event that records the newest
        # start may have been overwritten. Skip restart events, because they name an attempt that
        # may never have started.
        with suppress(OSError, RunDirectoryError):
            for event in read_events(self.supervisor):
                attempt = event.data.get("attempt")
                if event.kind != "restart" and isinstance(attempt, int):
                    yield attempt
        for _, process in read_processes(self.path):
            yield process.attempt

    def note_complete(self) -> None:
        """Record that the command has ended with exit code 0, so that it is not started again."""
        if self._git_thread is not None:
            self._git_thread.join(_GIT_LAST_SECONDS)
        # The run has ended well, even if this cannot be written.
        with suppress(OSError):
            self._write({**self._description, "complete": True})

    def write_description(self, command: Sequence[str], started: float) -> None:
        """Write the description of the run before its command starts.

        Args:
            command: The words of the command.
            started: Unix time in seconds.

        Raises:
            RunDirectoryError: H722 if the description cannot be written.
        """
        description = {
            "format": FORMAT,
            **facts_of_start(command, started),
            "supervisor_pid": os.getpid(),
        }
        try:
            (self.supervisor / LOST_FILE).unlink(missing_ok=True)
            self._write(description)
        except OSError as error:
            raise self.unusable(error) from error

    def _write(self, description: dict[str, Any]) -> None:
        replace_file(self._file, json.dumps(description, indent=1).encode())
        self._description = description

    def add_git_state(self) -> None:
        """Add the git commit and the changed files to the description, in a background thread."""
        self._git_thread = threading.Thread(target=self._add_git_state, daemon=True)
        self._git_thread.start()

    def _add_git_state(self) -> None:
        # Git may be missing or too slow, or the directory may not be a repository.
        with suppress(OSError, subprocess.SubprocessError):
            status = subprocess.run(  # noqa: S603 - a fixed command line
                _GIT_STATUS, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True
            )
            self._write({**self._description, "git": parse_git_status(status.stdout)})

    def update_last_link(self, run_path: Path) -> None:
        """Point ``runs/last`` to the run if its directory is in a directory called ``runs``.

        If ``last`` exists and is not a symbolic link, it is not changed.
        """
        parent = run_path.parent
        link = parent / _LAST_LINK
        if parent.name != _RUNS_FOLDER or (link.exists() and not link.is_symlink()):
            return
        temporary = parent / f".tmp-{_LAST_LINK}-{os.getpid()}"
        # Some file systems do not support symbolic links. The link is only a convenience, because
        # the path of the run is printed too.
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(run_path.name)
            temporary.replace(link)

    def close(self) -> None:
        """Release the lock."""
        if self._git_thread is not None:
            self._git_thread.join(_GIT_LAST_SECONDS)
        self._lock.release()


def parse_git_status(text: str) -> dict[str, Any]:
    """Return the commit, branch and changed files from ``git status --porcelain=v2 --branch``."""
    headers = {}
    changed = []
    for line in text.splitlines():
        if line.startswith(_GIT_HEADER):
            name, _, value = line.removeprefix(_GIT_HEADER).partition(" ")
            headers[name] = value
        elif not line.startswith("#"):
            # The path is the ninth field of the line.
            changed.append(line.split(" ", 8)[-1])
    return {
        "commit": headers.get("oid"),
        "branch": headers.get("head"),
        "changed": changed[:_MAX_CHANGED_FILES],
        "dirty": bool(changed),
    }
