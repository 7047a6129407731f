"""The directory of a supervised run: where it lies, that one supervisor at a time writes to it, and its first file.

Does not: know what is in the other files (``recorder.run_files`` names them).
"""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from holdfast.core.durable import replace_file
from holdfast.core.errors import RunDirectoryError
from holdfast.core.lock import FileLock, LockHeldError
from holdfast.core.version import __version__
from holdfast.recorder.reader import read_events
from holdfast.recorder.run_files import LOST_FILE, SUPERVISED_FILE, SUPERVISOR_FOLDER, read_processes
from holdfast.supervise.kernel import memory_limits

FORMAT = 1
_RUNS, _LAST = "runs", "last"
_VERSIONS_OF = ("torch", "numpy", "transformers", "accelerate", "lightning")


def choose_folder(command: Sequence[str], started: float, folder: Path = Path(_RUNS)) -> Path:
    """Return a path that does not exist yet, named after the script and the time in UTC."""
    name = f"{_name_of(command)}-{datetime.fromtimestamp(started, UTC):%Y%m%d-%H%M%S}"
    candidates = (folder / (name if number == 1 else f"{name}-{number}") for number in range(1, 10_000))
    return next(path for path in candidates if not path.exists())


def _name_of(command: Sequence[str]) -> str:
    """Return the name of the script or module that is run, else that of the program."""
    module = next((after for word, after in itertools.pairwise(command) if word == "-m"), None)
    script = next((word for word in command if word.endswith((".py", ".sh"))), None)
    name = Path(script).stem if script else (module or Path(command[0]).name)
    return re.sub(r"[^\w.-]", "_", name)[:60] or "run"


class RunFolder:
    """A run directory, made if missing and locked until `close` or the end of the process, however it ends.

    Args:
        path: The directory. One that was used before is continued: a scheduler starts the same command again.

    Raises:
        RunDirectoryError: H722 if it cannot be made or written, H723 if another supervisor uses it, H724 if a newer
            holdfast wrote it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        try:
            self.supervisor.mkdir(parents=True, exist_ok=True)
            _check_format(self.path / SUPERVISED_FILE)
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
            raise unusable(self.path, error) from error

    @property
    def supervisor(self) -> Path:
        """Return the folder of the supervisor's own recording."""
        return self.path / SUPERVISOR_FOLDER

    def next_attempt(self) -> int:
        """Return the number of the next attempt: 0, or one more than the last that left anything here."""
        numbers: list[Any] = []
        with suppress(OSError, RunDirectoryError):
            # Any event: the ring is finite, and the start of the last attempt may be gone.
            numbers += [
                event.data.get("attempt") for event in read_events(self.supervisor) if event.kind != "restart"
            ]
        with suppress(OSError):
            numbers += [info.attempt for _, info in read_processes(self.path)]
        return max((number for number in numbers if isinstance(number, int)), default=-1) + 1

    def command_before(self) -> tuple[str, ...] | None:
        """Return the words of the command that was run here before; None if there was none, or it cannot be read."""
        try:
            words = json.loads((self.path / SUPERVISED_FILE).read_bytes())["argv"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return tuple(map(str, words)) if isinstance(words, list) else None

    def describe(
        self, command: Sequence[str], started: float, limits: Mapping[str, float] | None = None
    ) -> dict[str, Any]:
        """Write what is known before the start, and return it.

        Args:
            command: Its words.
            started: Unix time.
            limits: How long each phase may stand still at least, in seconds; infinite ones are left out.

        Raises:
            RunDirectoryError: H722.
        """
        facts = {
            "format": FORMAT,
            "argv": list(command),
            "cwd": str(Path.cwd()),
            "python": sys.executable,
            "hostname": socket.gethostname(),
            "started": started,
            "supervisor_pid": os.getpid(),
            "versions": {"holdfast": __version__, "python": platform.python_version(), **_versions()},
            "cgroup_limits": memory_limits(),
            "limits": {name: seconds for name, seconds in (limits or {}).items() if math.isfinite(seconds)},
        }
        try:
            (self.supervisor / LOST_FILE).unlink(missing_ok=True)
            replace_file(self.path / SUPERVISED_FILE, json.dumps(facts, indent=1).encode())
        except OSError as error:
            raise unusable(self.path, error) from error
        return facts

    def point_to(self) -> None:
        """Let ``runs/last`` lead here, where the directory lies in one called runs; a file of that name is kept."""
        folder = self.path.parent
        link = folder / _LAST
        if folder.name != _RUNS or (link.exists() and not link.is_symlink()):
            return
        temporary = folder / f".tmp-{_LAST}-{os.getpid()}"
        with suppress(OSError):  # a file system without links: the path is printed anyway
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(self.path.name)
            temporary.replace(link)

    def close(self) -> None:
        """Let others use it."""
        self._lock.release()


def _check_format(file: Path) -> None:
    try:
        found = json.loads(file.read_bytes())["format"]
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return  # new, or damaged: written again
    if not isinstance(found, int) or found > FORMAT:
        raise RunDirectoryError(
            f"{file} has format {found!r}",
            limit=f"this holdfast writes run directories of format {FORMAT}",
            fix="upgrade holdfast, or choose another --run-dir.",
            rule="H724",
        )


def unusable(path: Path, error: OSError) -> RunDirectoryError:
    """Return the error for a directory that cannot be made or written."""
    return RunDirectoryError(
        f"run directory {path} cannot be written ({error.strerror or error})",
        limit="holdfast run keeps the output, the recordings and the verdict there",
        fix="pass a --run-dir that this user may write to, on a disk with 10 MiB free.",
        rule="H722",
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in _VERSIONS_OF:  # of this environment, which is nearly always the command's; read, not imported
        with suppress(metadata.PackageNotFoundError, OSError):
            found[name] = metadata.version(name)
    return found
