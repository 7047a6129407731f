"""The directory of a supervised run.

Where it lies, its lock for one supervisor at a time, and its first file.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import threading
from collections.abc import Sequence
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

FORMAT = 1
_RUNS, _LAST = "runs", "last"
# It takes no lock and runs nothing of the repository's; files that git does not know, such as
# runs/, are no change.
_GIT = (
    "git",
    "--no-optional-locks",
    "-c",
    "core.fsmonitor=false",
    "status",
    "--porcelain=v2",
    "--branch",
    "--untracked-files=no",
)
_GIT_SECONDS, _LAST_SECONDS, _MOST_CHANGED = 60.0, 1.0, 20


def choose_folder(command: Sequence[str], started: float, folder: Path = Path(_RUNS)) -> Path:
    """Return a path that does not exist yet, named after the script, module or program and the
    time in UTC.
    """
    module = next((after for word, after in itertools.pairwise(command) if word == "-m"), None)
    script = next((word for word in command if word.endswith((".py", ".sh"))), None)
    name = Path(script).stem if script else (module or Path(command[0]).name)
    name = re.sub(r"[^\w.-]", "_", name)[:60] or "run"
    name = f"{name}-{datetime.fromtimestamp(started, UTC):%Y%m%d-%H%M%S}"
    candidates = (
        folder / (name if number == 1 else f"{name}-{number}") for number in itertools.count(1)
    )
    return next(path for path in candidates if not path.exists())


class RunFolder:
    """A run directory, made if missing and locked until `close` or the end of the process, however
    it ends.

    One that was used before is continued: a scheduler starts the same command again. H722 if it
        cannot be made or
    written, H723 if another supervisor uses it, H724 if a newer holdfast wrote it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        self.supervisor = self.path / SUPERVISOR_FOLDER
        """The folder of the supervisor's own recording."""
        self._file = self.path / SUPERVISED_FILE
        self._facts: dict[str, Any] = {}
        self._looking: threading.Thread | None = None
        try:
            make_run_directory(self.path)
            make_folder(self.path, SUPERVISOR_FOLDER)
            self._check_format()
            self._lock = FileLock(self.supervisor / "lock")
            self._lock.acquire()
        except LockHeldError as error:
            raise RunDirectoryError(
                f"run directory {self.path} is in use by {error.holder}",
                limit="one supervisor at a time may write to it",
                fix="stop that one, or choose another --run-dir.",
                rule="H723",
            ) from error
        except OSError as error:
            raise self.unusable(error) from error

    def _check_format(self) -> None:
        found = FORMAT  # of a damaged description, which is written again
        with suppress(OSError, ValueError, RecursionError, AttributeError):
            found = json.loads(read_file(self._file)).get("format", FORMAT)
        if not isinstance(found, int) or found > FORMAT:
            raise RunDirectoryError(
                f"{self._file} has format {found!r}",
                limit=f"this holdfast writes run directories of format {FORMAT}",
                fix="upgrade holdfast, or choose another --run-dir.",
                rule="H724",
            )

    def unusable(self, error: OSError) -> RunDirectoryError:
        """Return the error for a directory that cannot be made or written."""
        return RunDirectoryError(
            f"run directory {self.path} cannot be written ({error.strerror or error})",
            limit="holdfast run keeps the output, the recordings and the verdict there",
            fix="pass a --run-dir that this user may write to, on a disk with 10 MiB free.",
            rule="H722",
        )

    def next_attempt(self) -> int:
        """Return the number of the next attempt.

        0, or one more than the last that left anything here.
        """
        numbers: list[Any] = [-1]
        # Any event: the ring is finite, and the last start may be gone
        with suppress(OSError, RunDirectoryError):
            numbers += [
                each.data.get("attempt")
                for each in read_events(self.supervisor)
                if each.kind != "restart"
            ]
        numbers += [info.attempt for _, info in read_processes(self.path)]
        return max(number for number in numbers if isinstance(number, int)) + 1

    def describe(self, command: Sequence[str], started: float) -> None:
        """Write what is known before the start (H722)."""
        facts = {
            "format": FORMAT,
            **facts_of_start(command, started),
            "supervisor_pid": os.getpid(),
        }
        try:
            (self.supervisor / LOST_FILE).unlink(missing_ok=True)
            replace_file(self._file, json.dumps(facts, indent=1).encode())
        except OSError as error:
            raise self.unusable(error) from error
        self._facts = facts

    def look_at_git(self) -> None:
        """Add the commit of the working directory, and what is changed there, as soon as git has
        said so.
        """
        self._looking = threading.Thread(target=self._add_git, daemon=True)
        self._looking.start()

    def _add_git(self) -> None:
        # No git, no repository, or one that takes too long
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(  # noqa: S603
                _GIT, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True
            )
            lines = done.stdout.splitlines()
            said = dict(
                line.removeprefix("# branch.").split(" ", 1)
                for line in lines
                if line.startswith("# branch.")
            )
            changed = [line.split(" ", 8)[-1] for line in lines if not line.startswith("#")]
            git = {
                "commit": said.get("oid"),
                "branch": said.get("head"),
                "changed": changed[:_MOST_CHANGED],
            }
            self._facts |= {"git": {**git, "dirty": bool(changed)}}
            replace_file(self._file, json.dumps(self._facts, indent=1).encode())

    def point_to(self, run: Path) -> None:
        """Let ``runs/last`` lead to a run that lies in a directory called runs.

        A file of that name is kept.
        """
        folder = run.parent
        link = folder / _LAST
        if folder.name != _RUNS or (link.exists() and not link.is_symlink()):
            return
        temporary = folder / f".tmp-{_LAST}-{os.getpid()}"
        with suppress(OSError):  # a file system without links: the path is printed anyway
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(run.name)
            temporary.replace(link)

    def close(self) -> None:
        """Let others use it."""
        if self._looking is not None:
            self._looking.join(_LAST_SECONDS)  # of a command that took no longer than git
        self._lock.release()
