"""The run directory: its layout, its format, and the lock that keeps other runs out.

run.json      the format of the directory, the run's id, and where it has saved checkpoints
lock          held while a guard is open; the second rank holds lock.rank1, and so on
recorder/     the recordings, one for each rank
checkpoints/  see ``checkpoint.store``
images/       see ``images``
requests/     see ``core.run_requests``
"""

from __future__ import annotations

import gc
import json
import os
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.core.durable import replace_file
from holdfast.core.errors import CheckpointError, PolicyError, RunDirectoryError
from holdfast.core.files import make_folder, make_run_directory, read_file
from holdfast.core.lock import FileLock, LockHeldError
from holdfast.recorder.reader import read_events

FORMAT = 1
CHECKPOINTS = "checkpoints"
_RUN_FILE = "run.json"

# Exceptions that reading a damaged ``run.json`` may raise.
_DAMAGED = (ValueError, KeyError, TypeError, RecursionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """The contents of ``run.json``."""

    # The unique id of this run, or None if the file was damaged.
    run: str | None
    # Where the run has saved checkpoints: ``"checkpoints"``, or the path of a framework's folder.
    # None if it has saved none.
    saved_in: str | None

    def to_json(self) -> bytes:
        """Return the contents encoded as JSON."""
        return json.dumps({"format": FORMAT, "run": self.run, "saved_in": self.saved_in}).encode()


class RunDirectory:
    """A run directory, which is created if it is missing. Call `acquire` before writing to it.

    Args:
        path: The path of the directory.
        rank: The rank of this process.

    Raises:
        PolicyError: H105 if `path` is not a path.
        RunDirectoryError: H302 if the directory is not writable, H303 if it was written by a newer
            version of holdfast.
    """

    def __init__(self, path: str | os.PathLike[str], rank: int = 0) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise PolicyError(
                f"run_dir={path!r}",
                limit="run_dir must be a path",
                fix='pass a directory such as "runs/a".',
                rule="H105",
            )
        self.path = Path(path).expanduser().absolute()
        self._rank = rank
        try:
            make_run_directory(self.path)
            make_folder(self.path, "recorder")
            self._run_file = self._read()
            if rank == 0:
                self._write(self._run_file)
        except OSError as error:
            raise self._unusable(error) from error
        self._lock = FileLock(self.path / (f"lock.rank{rank}" if rank else "lock"))

    @property
    def checkpoints(self) -> Path:
        """Return the checkpoint folder."""
        return self.path / CHECKPOINTS

    @property
    def recorder(self) -> Path:
        """Return the folder of this rank's recording."""
        return self.path / "recorder" / f"rank{self._rank}"

    # --- the run's id and checkpoint folder

    def _read(self) -> RunFile:
        """Return the contents of ``run.json``, or initial contents if the file is missing.

        If the file is damaged, the recording determines whether the run has saved checkpoints.
        """
        try:
            contents = json.loads(read_file(self.path / _RUN_FILE))
            version = contents["format"]
        except FileNotFoundError:
            return RunFile(run=uuid.uuid4().hex, saved_in=None)
        except _DAMAGED:
            return RunFile(run=None, saved_in=self._recorded_saves())
        if not isinstance(version, int) or version > FORMAT:
            raise RunDirectoryError(
                f"run directory {self.path} has format {version!r}",
                limit=f"this version of holdfast reads formats up to {FORMAT}",
                fix="upgrade holdfast, or start in a new run directory.",
                rule="H303",
            )
        saved_in = contents["saved_in"] if "saved_in" in contents else self._recorded_saves()
        return RunFile(run=contents.get("run"), saved_in=saved_in)

    def _recorded_saves(self) -> str | None:
        """Return `CHECKPOINTS` if the recording contains a completed save, otherwise None."""
        try:
            events = read_events(self.recorder)
        except RunDirectoryError:
            # A damaged recording is no evidence of a save.
            return None
        if any(event.kind == "checkpoint_saved" for event in events):
            return CHECKPOINTS
        return None

    def _write(self, run_file: RunFile) -> None:
        replace_file(self.path / _RUN_FILE, run_file.to_json())

    @property
    def run_id(self) -> str:
        """Return the unique id of this run. A copy of the directory has the same id."""
        if not self._run_file.run:
            self._run_file = replace(self._run_file, run=uuid.uuid4().hex)
        return str(self._run_file.run)

    @property
    def saved_in(self) -> str | None:
        """Return where this run has saved checkpoints; see `RunFile.saved_in`."""
        return self._run_file.saved_in

    def note_saved(self, folder: str | None = CHECKPOINTS) -> None:
        """Store the folder of the run's checkpoints, so that a later start can detect its loss.

        Args:
            folder: The folder, or None if the next start should not expect a checkpoint.
        """
        if folder == self.saved_in or self._rank != 0:
            return
        run_file = RunFile(run=self.run_id, saved_in=folder)
        try:
            self._write(run_file)
        except OSError:
            # The disk may be full. The next save tries again.
            return
        self._run_file = run_file

    def check_not_lost(self) -> None:
        """Raise H312 if this run has saved checkpoints. Call this when none were found."""
        if self.saved_in == CHECKPOINTS:
            raise self._lost("contains no checkpoint")

    def note_resumed_from(self, run_id: str) -> None:
        """Adopt the id of the run whose checkpoint this run continues from.

        Raises:
            CheckpointError: H312 if the checkpoint belongs to another run although this run has
                saved checkpoints of its own, which must have been lost.
        """
        own_id = self._run_file.run
        if run_id != own_id:
            if self.saved_in == CHECKPOINTS and own_id is not None:
                raise self._lost("contains those of another run")
            self._run_file = replace(self._run_file, run=run_id)
        self.note_saved()

    def _lost(self, problem: str) -> CheckpointError:
        return _checkpoints_lost(
            self.path,
            where=f", but {self.checkpoints} {problem}",
            new_start="choose another run directory ",
        )

    # --- the lock

    def acquire(self) -> None:
        """Take the lock. It is held until `release` is called or the process ends.

        Raises:
            RunDirectoryError: H301 if another run holds the lock, H302 if the lock file cannot be
                written.
        """
        if self._lock.is_held_here:
            # The lock may belong to an unreachable guard that has not been garbage collected yet.
            gc.collect()
        if self._lock.is_held_here:
            raise self._locked(f"this process ({os.getpid()}), by a guard that is still open")
        try:
            self._lock.acquire()
        except LockHeldError as error:
            raise self._locked(error.holder) from None
        except OSError as error:
            # For example, the lock file may be a directory, or the disk may be full.
            raise self._unusable(error) from error

    def hold(self) -> bool:
        """Check that no other run holds the lock, and take it again if it was lost.

        Returns:
            Whether the directory was missing and has been created again.

        Raises:
            RunDirectoryError: H301 if another run holds the lock now.
            OSError: If the file system does not respond.
        """
        try:
            return self._hold_or_make_again()
        except LockHeldError as error:
            raise self._locked(f"{error.holder}, or was in use during this run") from None

    def _hold_or_make_again(self) -> bool:
        try:
            self._lock.hold()
        except FileNotFoundError:
            # The directory was removed or moved. Create it again, so that the run can still save.
            make_run_directory(self.path)
            self._lock.hold()
            return True
        return False

    @property
    def holder(self) -> str:
        """Return the name of this process in the lock, once the lock was taken."""
        return self._lock.own_text

    def release(self) -> None:
        """Release the lock, if this process holds it."""
        self._lock.release()

    # --- errors

    def _unusable(self, error: OSError) -> RunDirectoryError:
        at_file = f" at {error.filename}" if error.filename else ""
        return RunDirectoryError(
            f"run directory {self.path} cannot be written ({error.strerror or error}{at_file})",
            limit="holdfast writes checkpoints and its recording there",
            fix="choose another directory, or make this one writable.",
            rule="H302",
        )

    def _locked(self, holder: str) -> RunDirectoryError:
        return RunDirectoryError(
            f"run directory {self.path} is in use by {holder}",
            limit="only one run at a time may write to it",
            fix="stop that run, call close() on its guard, or choose another directory.",
            rule="H301",
        )


def check_checkpoints_found(run_dir: Path, *, new_start: str) -> None:
    """Raise H312 if the run has saved a checkpoint. Call this when a framework found none.

    Args:
        run_dir: The run directory.
        new_start: How to start from scratch on purpose in this framework, such as
            ``"ask for a new start, "``. The error message appends ``"or delete ..."`` to it.
    """
    try:
        saved_in = json.loads(read_file(run_dir / _RUN_FILE))["saved_in"]
    except (OSError, *_DAMAGED):
        return
    if saved_in is not None:
        raise _checkpoints_lost(
            run_dir, where=f" in {saved_in}, but none were found", new_start=new_start
        )


def _checkpoints_lost(run_dir: Path, *, where: str, new_start: str) -> CheckpointError:
    return CheckpointError(
        f"this run has saved checkpoints{where}",
        limit="silently starting from scratch would hide the loss",
        fix=(
            "mount the disk or restore a copy. To start from scratch on purpose,"
            f" {new_start}or delete {run_dir / _RUN_FILE}."
        ),
        rule="H312",
    )
