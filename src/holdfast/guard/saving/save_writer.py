"""`SaveWriter`: one save, from the check for NaN and Inf to the removal of old checkpoints.

A save runs in the training thread or in the writer thread. Its errors are recorded in the `Save`,
which the training thread reads once the save has ended.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch

from holdfast.checkpoint.saver import SPARE_BYTES, Snapshot, Writers, write
from holdfast.checkpoint.store import Entry, Store
from holdfast.core.clock import Clock
from holdfast.core.errors import HoldfastError
from holdfast.core.events import run_events
from holdfast.core.text import counted
from holdfast.guard.record import RunRecord, describe_error
from holdfast.guard.saving.mirroring import Mirroring

# Disk space is low if fewer checkpoints than this fit. The next save needs space for one, because
# it removes an old checkpoint only after it has written the new one. The second one is for whatever
# else is written to the disk until then.
_LEAST_CHECKPOINTS = 2
NamedTensors: TypeAlias = Iterable[tuple[str, torch.Tensor]]
# The names of some tensors in which NaN or Inf was found, and the number of such tensors.
NonFinite: TypeAlias = tuple[list[str], int]


@dataclass(slots=True, kw_only=True)
class Save:
    """A save and its result."""

    # The state to write.
    shot: Snapshot
    # The tensors to check for NaN and Inf before writing.
    must_be_finite: NamedTensors
    # The tensors that were checked before, and in which NaN or Inf was found.
    bad: NonFinite = ([], 0)
    # The position of the run; see `SavedState.position`.
    position: tuple[int, int]
    # The time when the save started.
    started: float
    # Whether this is the save before the first step.
    is_first: bool = False
    # How long the loop waited for the save. None while it is still waiting.
    stall_seconds: float | None = None
    # The duration of the save, once it has ended.
    seconds: float = 0.0
    # The CPU time of the thread that wrote the checkpoint.
    cpu_seconds: float = 0.0
    # The checkpoint, if it was saved.
    entry: Entry | None = None
    # Why the save was refused, if it was refused.
    refused: str | None = None
    # The error, if the save failed.
    error: Exception | None = None


class SaveWriter:
    """Carries out the saves of one run, and records the result of each.

    Args:
        store: The checkpoints in the run directory.
        record: The record that receives events.
        clock: The source of time.
        writers: The ranks that write.
        keep_latest_k: The number of checkpoints to keep.
        mirroring: Copies each new checkpoint to the mirror of the run, if it has one.
    """

    def __init__(
        self,
        store: Store,
        record: RunRecord,
        clock: Clock,
        writers: Writers,
        *,
        keep_latest_k: int,
        mirroring: Mirroring,
    ) -> None:
        self._store = store
        self._record = record
        self._clock = clock
        self._writers = writers
        self._keep_latest_k = keep_latest_k
        # Whether disk space was low after the last save.
        self._is_disk_low = False
        self._mirroring = mirroring

    @property
    def are_several(self) -> bool:
        """Return whether several ranks write each checkpoint together."""
        return self._writers.are_several

    def carry_out(self, save: Save, find_nonfinite: Callable[[NamedTensors], NonFinite]) -> Save:
        """Check the state for NaN and Inf, write it, and remove old checkpoints.

        Args:
            save: The save. Errors are stored in it rather than raised.
            find_nonfinite: Function that returns the number of tensors with NaN or Inf, and some of
                their names.
        """
        step = save.shot.global_step
        cpu_started = time.thread_time()
        try:
            shares = self._writers.all(lambda: [save.bad, find_nonfinite(save.must_be_finite)])
            bad = [name for share in shares for names, _ in share for name in names]
            count = sum(count for share in shares for _, count in share)
            if count:
                return self.refuse(save, (bad, count))
            now = self._clock.unix_seconds()
            entry = write(self._store, save.shot, unix_seconds=now, writers=self._writers)
        except Exception as error:  # noqa: BLE001 - recorded, and handled by the caller
            save.error = error
            self._end(save)
            self._record_failure(step, error, save.seconds)
            self._check_disk(save.shot)
            return save
        removed = self._remove_old_checkpoints(entry)
        self._mirroring.offer(entry)
        save.entry = entry
        save.cpu_seconds = time.thread_time() - cpu_started
        stall = self._end(save)
        self._record.emit(
            run_events.CheckpointSaved(
                checkpoint=entry.path.name,
                size_bytes=save.shot.size_bytes(),
                seconds=round(save.seconds, 4),
                stall_seconds=round(stall, 4),
                removed=tuple(removed),
            ),
            global_step=step,
        )
        self._check_disk(save.shot)
        return save

    def refuse(self, save: Save, nonfinite: NonFinite) -> Save:
        """Record that a state with NaN or Inf was not saved."""
        bad, count = nonfinite
        why = f"NaN or Inf in {counted(count, 'tensor')}: {', '.join(bad)}"
        save.refused = why
        refused = run_events.SaveRefused(why=why, nonfinite=tuple(bad), count=count)
        self._record.emit(refused, global_step=save.shot.global_step)
        self._end(save)
        return save

    def fail_early(self, error: Exception, started: float) -> None:
        """Record that a save has failed before any file was written.

        Args:
            error: The error.
            started: The time when the save started.
        """
        # The other ranks are waiting for the result of this rank's part.
        with contextlib.suppress(Exception):
            self._writers.all(partial(_raised, error))
        self._record_failure(
            self._record.global_step, error, self._clock.monotonic_seconds() - started
        )

    def _remove_old_checkpoints(self, newest: Entry) -> list[str]:
        """Remove old checkpoints on the first rank, and return their names."""
        if self._writers.rank:
            return []
        try:
            removed = self._store.prune(
                self._keep_latest_k, known_good=newest, in_use=self._mirroring.in_use()
            )
        except (OSError, HoldfastError) as error:
            # The new checkpoint is good, even if old ones could not be removed.
            event = run_events.PruneFailed(error=str(error))
            self._record.emit(event, global_step=newest.global_step)
            return []
        return [path.name for path in removed]

    def _check_disk(self, shot: Snapshot) -> None:
        """Record on the first rank that disk space has become low. Called after each save."""
        if self._writers.rank:
            return
        try:
            free_bytes = shutil.disk_usage(self._store.directory).free
        except OSError:
            # The disk does not respond, or the directory was removed. The next save reports that.
            return
        checkpoint_bytes = shot.size_bytes() + SPARE_BYTES
        was_low = self._is_disk_low
        self._is_disk_low = free_bytes < _LEAST_CHECKPOINTS * checkpoint_bytes
        if self._is_disk_low and not was_low:
            event = run_events.DiskSpaceLow(
                free_bytes=free_bytes, checkpoint_bytes=checkpoint_bytes
            )
            self._record.emit(event, global_step=shot.global_step)

    def _record_failure(self, global_step: int, error: Exception, seconds: float) -> None:
        failed = run_events.SaveFailed(error=describe_error(error), seconds=round(seconds, 4))
        self._record.emit(failed, global_step=global_step)

    def _end(self, save: Save) -> float:
        """Record the duration of a save, and return how long the loop waited for it, in seconds."""
        save.seconds = self._clock.monotonic_seconds() - save.started
        if save.stall_seconds is None:
            save.stall_seconds = save.seconds
        return save.stall_seconds


def _raised(error: Exception) -> Any:
    """Raise an error. This function can be passed to `Writers.all`."""
    raise error
