"""The run directory: its layout, its format, and the lock that keeps a second run out.

run.json      format of the directory, which run this is, and where it has saved, once it has
lock          held while a guard is open; lock.rank1 by the second of several ranks, and so on
recorder/     the black boxes, of each rank one
checkpoints/  see ``checkpoint.store``
images/       see ``images``
"""

from __future__ import annotations

import gc
import json
import os
import uuid
from pathlib import Path
from typing import Any

from holdfast.core.durable import replace_file
from holdfast.core.errors import CheckpointError, PolicyError, RunDirectoryError
from holdfast.core.files import make_folder, make_run_directory, read_file
from holdfast.core.lock import FileLock, LockHeldError
from holdfast.recorder.reader import read_events

FORMAT = 1
CHECKPOINTS = "checkpoints"
_RUN_FILE = "run.json"


class RunDirectory:
    """One run directory, made if missing; `acquire` before writing into it."""

    def __init__(self, path: str | os.PathLike[str], rank: int = 0) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise PolicyError(
                f"run_dir={path!r}",
                limit="a path is needed",
                fix='pass a directory such as "runs/a".',
                rule="H105",
            )
        self.path = Path(path).expanduser().absolute()
        self._rank = rank
        try:
            make_run_directory(self.path)
            make_folder(self.path, "recorder")
            self._says = self._read()
            if rank == 0:
                self._write()
        except OSError as error:
            raise self._unusable(error) from error
        self._lock = FileLock(self.path / (f"lock.rank{rank}" if rank else "lock"))

    @property
    def checkpoints(self) -> Path:
        """Return the folder of checkpoints."""
        return self.path / CHECKPOINTS

    @property
    def recorder(self) -> Path:
        """Return the folder of this process's recording."""
        return self.path / "recorder" / f"rank{self._rank}"

    def _read(self) -> dict[str, Any]:
        """Return what ``run.json`` says.

        Where it is damaged, the recording says where the run has saved.
        """
        try:
            found = json.loads(read_file(self.path / _RUN_FILE))
            version = found["format"]
        except FileNotFoundError:
            return {"format": FORMAT, "run": uuid.uuid4().hex, "saved_in": None}
        except (ValueError, KeyError, TypeError, RecursionError):
            found, version = {}, FORMAT
        if not isinstance(version, int) or version > FORMAT:
            raise RunDirectoryError(
                f"run directory {self.path} has format {version!r}",
                limit=f"this holdfast reads formats up to {FORMAT}",
                fix="upgrade holdfast, or start in a new run directory.",
                rule="H303",
            )
        saved_in = found["saved_in"] if "saved_in" in found else self._recorded_saves()
        return {"format": FORMAT, "run": found.get("run"), "saved_in": saved_in}

    def _recorded_saves(self) -> str | None:
        try:
            saved = any(event.kind == "checkpoint_saved" for event in read_events(self.recorder))
        except RunDirectoryError:  # a damaged recording is no statement
            saved = False
        return CHECKPOINTS if saved else None

    def _write(self) -> None:
        replace_file(self.path / _RUN_FILE, json.dumps(self._says).encode())

    @property
    def run_id(self) -> str:
        """Return what distinguishes this run from every other.

        A copy of the directory is the same run.
        """
        self._says["run"] = found = self._says["run"] or uuid.uuid4().hex
        return str(found)

    @property
    def saved_in(self) -> str | None:
        """Return where this run has saved.

        ``"checkpoints"``, or the path of a framework's folder; else None.
        """
        found: str | None = self._says["saved_in"]
        return found

    def note_saved(self, folder: str | None = CHECKPOINTS) -> None:
        """Keep for later restarts where there is a checkpoint, so that its loss is seen.

        None: none is missed.
        """
        if folder != self.saved_in and self._rank == 0:
            before, self._says = self._says, {**self._says, "saved_in": folder, "run": self.run_id}
            try:
                self._write()
            except OSError:  # a full disk: with the next save
                self._says = before

    def check_not_lost(self) -> None:
        """Raise H312 if a run that finds no checkpoint has made one."""
        if self.saved_in == CHECKPOINTS:
            raise self._lost("holds no checkpoint")

    def resumed_from(self, run_id: str) -> None:
        """Take note of the run whose checkpoint this one goes on from.

        One without its own takes another's.
        """
        if run_id != self._says["run"]:
            if self.saved_in == CHECKPOINTS and self._says["run"] is not None:
                raise self._lost("holds those of another run")
            self._says["run"] = run_id
        self.note_saved()

    def _lost(self, what: str) -> CheckpointError:
        return _lost(f", and {self.checkpoints} {what}", "choose another run directory ", self.path)

    def acquire(self) -> None:
        """Take the lock; it is released by `release` or by the end of the process, however it
        ends.
        """
        if self._lock.is_held_here:
            gc.collect()  # an abandoned guard may only wait to be collected
        if self._lock.is_held_here:
            raise self._locked(f"this process ({os.getpid()}), by a guard that is still open")
        try:
            self._lock.acquire()
        except LockHeldError as error:
            raise self._locked(error.holder) from None
        except OSError as error:  # a directory lies there, or files may not be made any more
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> RunDirectoryError:
        at = f" at {error.filename}" if error.filename else ""
        return RunDirectoryError(
            f"run directory {self.path} cannot be written ({error.strerror or error}{at})",
            limit="holdfast keeps checkpoints and its recording there",
            fix="choose another directory, or make this one writable.",
            rule="H302",
        )

    def _locked(self, holder: str) -> RunDirectoryError:
        return RunDirectoryError(
            f"run directory {self.path} is in use by {holder}",
            limit="one run at a time may write to it",
            fix="stop that run, call close() on its guard, or choose another directory.",
            rule="H301",
        )

    def hold(self) -> bool:
        """Raise H301 if another run has the lock by now; take it again if it was lost.

        Return whether the directory itself was gone, and had to be made again. OSError if the disk
        does not say.
        """
        try:
            return self._hold_or_make_again()
        except LockHeldError as error:
            raise self._locked(
                f"{error.holder}, or has been since this run took its lock"
            ) from None

    def _hold_or_make_again(self) -> bool:
        try:
            self._lock.hold()
        # The directory was removed or moved; what was trained is worth saving all the same
        except FileNotFoundError:
            make_run_directory(self.path)
            self._lock.hold()
            return True
        return False

    def release(self) -> None:
        """Give the lock back. Without effect if it is not held."""
        self._lock.release()


def check_found(run_dir: Path, *, anew: str) -> None:
    """Raise H312 if a run of a framework, which looked for its newest checkpoint and found none,
    has made one.
    """
    try:
        saved_in = json.loads(read_file(run_dir / _RUN_FILE))["saved_in"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return
    if saved_in is not None:
        raise _lost(f" in {saved_in}, and none is found", anew, run_dir)


def _lost(what: str, anew: str, run_dir: Path) -> CheckpointError:
    return CheckpointError(
        f"this run has saved checkpoints{what}",
        limit="a new start without a word would hide the loss",
        fix=(
            f"mount the disk or bring back a copy; to begin anew on purpose, {anew}or delete"
            f" {run_dir / _RUN_FILE}."
        ),
        rule="H312",
    )
