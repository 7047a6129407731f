"""The run directory: its layout, its format, and the lock that keeps a second run out.

run.json               format of the directory
lock                   held while a guard is open
micro_batch_size.json  what the memory ladder has learned, for a run without checkpoints
recorder/              the black box
checkpoints/           see ``checkpoint.store``
images/                see ``run.images``
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import socket
import weakref
from pathlib import Path
from typing import Any

from holdfast.core.durable import replace_file
from holdfast.core.errors import PolicyError, RunDirectoryError

FORMAT = 1
_RUN_FILE = "run.json"
_LOCK_FILE = "lock"
_LADDER_FILE = "micro_batch_size.json"
# Holders in this process. A POSIX lock cannot tell two of them apart.
_held: weakref.WeakValueDictionary[str, RunDirectory] = weakref.WeakValueDictionary()


class RunDirectory:
    """One run directory, made if missing; `acquire` before writing into it.

    Args:
        path: The directory.

    Raises:
        RunDirectoryError: H302 if it cannot be made or written, H303 if a newer holdfast made it.
        PolicyError: H105, for what is no path.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise PolicyError(
                f"run_dir={path!r}", limit="a path is needed", fix='pass a directory such as "runs/a".', rule="H105"
            )
        self.path = Path(path).expanduser().absolute()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._check_format()
            replace_file(self.path / _RUN_FILE, json.dumps({"format": FORMAT}).encode())
        except OSError as error:
            raise RunDirectoryError(
                f"run directory {self.path} cannot be written ({error.strerror or error})",
                limit="holdfast keeps checkpoints and its recording there",
                fix="choose another directory, or make this one writable.",
                rule="H302",
            ) from error
        self._lock: int | None = None

    @property
    def checkpoints(self) -> Path:
        """Return the folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def recorder(self) -> Path:
        """Return the folder of this process's recording. One rank for now."""
        return self.path / "recorder" / "rank0"

    def _check_format(self) -> None:
        try:
            found = json.loads((self.path / _RUN_FILE).read_bytes())["format"]
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError):
            return  # written again below; what matters lies in the checkpoints, which verify themselves
        if not isinstance(found, int) or found > FORMAT:
            raise RunDirectoryError(
                f"run directory {self.path} has format {found!r}",
                limit=f"this holdfast reads formats up to {FORMAT}",
                fix="upgrade holdfast, or start in a new run directory.",
                rule="H303",
            )

    def acquire(self) -> None:
        """Take the lock; it is released by `release` or by the end of the process, however it ends.

        A POSIX record lock and not ``flock``: loader workers inherit the latter, so one that is stuck would
        keep the directory locked after its trainer was killed.

        Raises:
            RunDirectoryError: H301, naming the holder.
        """
        key = str(self.path.resolve())
        if key in _held:
            gc.collect()  # an abandoned guard may only wait to be collected
        if key in _held:
            raise self._locked(f"this process ({os.getpid()}), by a guard that is still open")
        lock = os.open(self.path / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(lock, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(lock)
            raise self._locked(holder) from error
        os.ftruncate(lock, 0)
        with contextlib.suppress(OSError):  # a full disk: the name of the holder is a courtesy
            os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        self._lock = lock
        _held[key] = self

    def _locked(self, holder: str) -> RunDirectoryError:
        return RunDirectoryError(
            f"run directory {self.path} is in use by {holder}",
            limit="one run at a time may write to it",
            fix="stop that run, call close() on its guard, or choose another directory.",
            rule="H301",
        )

    def hold(self) -> None:
        """Make sure that the lock is still there, before something is written.

        A POSIX lock is lost when its process closes any descriptor of the file, for instance by copying the run
        directory.

        Raises:
            RunDirectoryError: H301, if another run has it by now.
        """
        if self._lock is not None:
            try:
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = os.pread(self._lock, 200, 0).decode(errors="replace").strip() or "another process"
                raise self._locked(holder) from error

    def release(self) -> None:
        """Give the lock back. Without effect if it is not held."""
        if self._lock is not None:
            _held.pop(str(self.path.resolve()), None)
            os.close(self._lock)
            self._lock = None

    def __del__(self) -> None:
        if getattr(self, "_lock", None) is not None:
            os.close(self._lock)  # type: ignore[arg-type]
            self._lock = None  # closed twice it might be another file

    def remember_ladder(self, state: dict[str, Any]) -> None:
        """Keep what the memory ladder has learned; a disk that refuses is passed over."""
        with contextlib.suppress(OSError):
            replace_file(self.path / _LADDER_FILE, json.dumps(state).encode())

    def recall_ladder(self) -> dict[str, Any] | None:
        """Return what `remember_ladder` kept, or None if there is nothing that can be read."""
        try:
            found = json.loads((self.path / _LADDER_FILE).read_bytes())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None
