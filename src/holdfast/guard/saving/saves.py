"""Save the checkpoints of an open run, and decide when and in which thread to do so.

When the interval set by the policy has passed, a save is due (`Saving.is_due`). At the next
boundary, the state is copied into host buffers. While training continues, a thread checks the
copies for NaN and Inf, writes the files and reads them back, commits the checkpoint, and removes
old ones.

A save runs in the training thread instead if it must be complete when the call returns (the first
save, the last one, and requested saves), or if there is no memory for the buffers. Only one save
runs at a time. Code that reads checkpoints first waits until no save is running.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from holdfast.checkpoint.background import BackgroundJob, nonfinite_copies
from holdfast.checkpoint.buffers import HostBuffers, needed_bytes
from holdfast.checkpoint.health import nonfinite_tensors
from holdfast.checkpoint.interval import IntervalChooser
from holdfast.checkpoint.saver import Snapshot, Writers, encode, snapshot, write
from holdfast.checkpoint.store import Entry, Store
from holdfast.core.clock import Clock
from holdfast.core.errors import HoldfastError, NonFiniteError, RunDirectoryError
from holdfast.core.events import run_events
from holdfast.core.policy.policy import Policy
from holdfast.core.text import counted, size
from holdfast.guard.directory import RunDirectory
from holdfast.guard.phase import RunState
from holdfast.guard.record import RunRecord, describe_error
from holdfast.guard.saving.unsaved import note_left_steps, note_saved, note_unsaved
from holdfast.loader.signalled import let_through
from holdfast.memory.host_memory import available_bytes

# The largest share of the available memory that the buffers may take. The rest is left for
# activations, loaders and the script.
_MOST_MEMORY = 0.25
# Buffers up to this size are allocated and touched in the training thread, which takes about 10 ms
# (1.8 s per GiB, measured in a virtual machine). A thread prepares larger ones.
_SMALL_BYTES = 4 * 2**20
# The buffers are prepared this many seconds before the first save is due.
_AHEAD_SECONDS = 3.0
# The shortest time between two checks whether the run still holds its lock, in seconds. The lock is
# checked at step boundaries, which takes a few microseconds, or perhaps a millisecond on a network
# disk. Each save checks the lock too.
_HOLD_SECONDS = 5.0
# The buffers are allocated larger than the state by this factor, because strings and positions grow
# slightly from one save to the next.
_SPARE = 1.02

Named = Iterable[tuple[str, torch.Tensor]]


@dataclass(slots=True, kw_only=True)
class _Save:
    """A save and its result."""

    # The state to write.
    shot: Snapshot
    # The tensors to check for NaN and Inf before writing.
    must_be_finite: Named
    # The names of some tensors in which NaN or Inf was found, and the number of such tensors.
    bad: tuple[list[str], int] = ([], 0)
    # The position of the run; see `Session._position`.
    position: tuple[int, int]
    # The time when the save started.
    started: float
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


class Saving:
    """Saves the checkpoints of one run.

    Args:
        directory: The run directory.
        store: The checkpoints in the run directory.
        record: The record that receives events.
        policy: The run's policy.
        chooser: The object that chooses when to save.
        clock: The source of time.
        run_state: The phase of the run, which determines whether the state may be saved.
        state: Function that returns the state to save, by component.
        must_be_finite: Function that returns the tensors in which NaN or Inf prevents a save.
        position: Function that returns two numbers that change with every step or batch.
        cuda: The run's CUDA device, or None.
        writers: The ranks that write. None if another rank writes for this one.
    """

    def __init__(
        self,
        *,
        directory: RunDirectory,
        store: Store,
        record: RunRecord,
        policy: Policy,
        chooser: IntervalChooser,
        clock: Clock,
        run_state: RunState,
        state: Callable[[], Mapping[str, Any]],
        must_be_finite: Callable[[], Named],
        position: Callable[[], tuple[int, int]],
        cuda: torch.device | None,
        writers: Writers | None,
    ) -> None:
        self._directory = directory
        self.chooser = chooser
        self._store = store
        self._record = record
        # The interval in steps, or "auto". None if this process saves nothing.
        self._interval = policy.save_interval_steps if writers is not None else None
        self._writers = writers or Writers()
        self._keep_latest_k = policy.keep_latest_k
        self._clock = clock
        self._run_state = run_state
        self._state = state
        self._must_be_finite = must_be_finite
        self._position = position
        self._cuda = cuda
        # The position of the newest checkpoint.
        self._saved_at: tuple[int, int] | None = None
        # The newest checkpoint of this run.
        self.saved_as: Entry | None = None
        # The step at which the newest save was attempted.
        self._tried_at_step: int | None = None
        # When the directory's lock was last checked.
        self._held_at = clock.monotonic_seconds()
        self._job: BackgroundJob[_Save | None] | None = None
        self._buffers: HostBuffers | None = None
        self._in_background = policy.async_save and self._interval is not None
        # Whether the buffers were prepared before the first save was due.
        self._buffers_prepared = False
        self._refused: str | None = None
        # The numbers of saves in this process that succeeded and that failed.
        self.saved = 0
        self.failed = 0
        # Why the newest save failed. None if it succeeded.
        self._newest_failure: str | None = None

    # --- facts

    def is_due(self, after_steps: int = 0, saved_after: int | None = None) -> bool:
        """Return whether a save is due.

        The first save is due immediately. Later saves are due after `save_interval_steps`, or when
        enough time has passed since the last attempt, according to `IntervalChooser`.

        Args:
            after_steps: If not 0, return whether a save will be due after this many more steps.
            saved_after: If not None, assume that a save will be made after this many more steps.
        """
        interval = self._interval
        if interval is None:
            return False
        step = self._record.global_step + after_steps
        last_step = self._tried_at_step
        if saved_after is not None:
            last_step = self._record.global_step + saved_after
        if last_step is None:
            return True
        now = self._clock.monotonic_seconds()
        is_overdue = saved_after is None and self.chooser.is_overdue(now, auto=interval == "auto")
        if step > last_step and is_overdue:
            return True
        # A multiple of the interval has been reached since the last attempt.
        return isinstance(interval, int) and step // interval > last_step // interval

    def take_due(self) -> bool:
        """Return whether a save is due now; see `Saves`."""
        return self.is_due()

    @property
    def has_unsaved(self) -> bool:
        """Return whether there are unsaved steps that may be saved now."""
        return self.may_save_more and self._saved_at != self._position()

    @property
    def may_save_more(self) -> bool:
        """Return whether this run saves, has attempted its first save, and may save again now."""
        return (
            self._interval is not None
            and self._tried_at_step is not None
            and self._run_state.may_be_saved
        )

    @property
    def global_step(self) -> int:
        """Return the number of optimizer steps that have updated the weights."""
        return self._record.global_step

    @property
    def has_refusal(self) -> bool:
        """Return whether a save was refused since the last call to `take_refusal`."""
        return self._refused is not None

    def take_refusal(self) -> str | None:
        """Return why a save has been refused since the last call, or None."""
        refused = self._refused
        self._refused = None
        return refused

    def report_loss(self, *, left: bool) -> None:
        """When a run ends, report that its newest state is unsaved because saves have failed.

        The process then exits with a special code (see ``unsaved``), unless a later save succeeds.

        Args:
            left: Whether the loop was left early. In that case, `note_left_steps` reports the steps
                since the newest checkpoint, unless the last save failed.
        """
        error = self._newest_failure
        newest = None if self.saved_as is None else self.saved_as.global_step
        steps_are_lost = self.has_unsaved and (error is not None or not left)
        if not self.failed or (newest is not None and not steps_are_lost):
            return
        self._record.emit(
            run_events.NotSaved(newest_checkpoint=newest, failed_saves=self.failed, error=error)
        )
        note_unsaved(self._directory.path, error or "saves have failed")

    def note_left_steps(self) -> None:
        """Record the steps since the newest checkpoint, and report them when the process exits.

        This does nothing if the last save failed, since `report_loss` reports that case.
        """
        if self.saved_as is None or self._newest_failure is not None or not self.has_unsaved:
            return
        if self._writers.rank:
            # Rank 0 reports this for all ranks.
            return
        from_step = self.saved_as.global_step + 1
        to_step = self._record.global_step
        if from_step <= to_step:
            self._record.emit(run_events.StepsNotSaved(from_step=from_step, to_step=to_step))
            note_left_steps(self._directory.path, from_step, to_step)

    # --- save

    def save_first(self) -> None:
        """Save a checkpoint before the first step, so that the run can roll back to it."""
        if self._tried_at_step is None:
            self.save()

    def save(self) -> None:
        """Save a checkpoint of the current state, and wait until it is written.

        This does nothing while the state is incomplete, or if it is already saved. A state with NaN
        or Inf is refused. Failures are recorded and do not stop training, unless the first save
        fails for a reason that would make every later save fail too.

        Raises:
            NonFiniteError: H502 if the initial state contains NaN or Inf.
            RunDirectoryError: H301 if another run has taken the directory, H302 if the first
                checkpoint cannot be written.
        """
        started = self._clock.monotonic_seconds()
        self.finish()
        if self._is_pointless():
            return
        first = self._tried_at_step is None
        if first:
            bad, count = nonfinite_tensors(self._must_be_finite())
            if count:
                raise _unhealthy_start(bad, count)
        try:
            self._hold_directory()
        except OSError as error:
            if first and (lasting := _lasting_error(error)) is not None:
                raise lasting from error
            self._record_early_failure(error, started)
            return
        self._note_attempt()
        try:
            shot = snapshot(self._state(), self._record.global_step)
        except Exception as error:
            let_through(error)
            if first:
                self._tried_at_step = None
                # A state that can never be saved must be reported before training starts.
                raise
            self._record_early_failure(error, started)
            return
        named = () if first else self._must_be_finite()
        save = _Save(shot=shot, must_be_finite=named, position=self._position(), started=started)
        self._carry_out(save, nonfinite_tensors)
        if first and (lasting := _lasting_error(save.error)) is not None:
            self._tried_at_step = None
            raise lasting from save.error
        self._process_result(save, first=first)

    def save_again(self) -> None:
        """Save state that the script has changed, even if this step already has a checkpoint."""
        self.finish()
        self._saved_at = None
        self.save()

    @property
    def is_busy(self) -> bool:
        """Return whether a save is running."""
        return self.collected()._job is not None

    def save_when_due(self, *, busy: bool = False) -> None:
        """Start saving the current state in the background.

        If a save is still running, this does nothing. The next boundary tries again.

        Args:
            busy: Whether another rank is still writing its part of the previous checkpoint.
        """
        if not busy and (self._tried_at_step is None or not self._in_background):
            self.save()
        else:
            self.collected()
            if not busy and self._is_pointless():
                return
            self._save_in_background(busy=busy)

    def _save_in_background(self, *, busy: bool) -> None:
        """Start a save in a thread. If this is not possible, save in the current thread.

        Args:
            busy: Whether another rank is still writing its part of the previous checkpoint.
        """
        if busy:
            return
        started = self._clock.monotonic_seconds()
        try:
            is_started: bool | None = False
            if self._job is None:
                is_started = self._start_in_background(started)
            if is_started is False and self._writers.are_several:
                # The other ranks have started to write their parts, so this rank must wait for its
                # writer instead of trying again at the next boundary.
                self.finish()
                is_started = self._start_in_background(started)
        except RunDirectoryError:
            raise
        except Exception as error:  # noqa: BLE001 - the user's state_dict may raise anything
            let_through(error)
            self._record_early_failure(error, started)
            return
        if is_started is None:
            # Saving in the background is not possible.
            self.save()

    def _is_pointless(self) -> bool:
        """Return whether there is nothing to save, or the state must not be saved."""
        return (
            self._interval is None
            or not self._run_state.may_be_saved
            or self._saved_at == self._position()
        )

    def _hold_directory(self) -> None:
        """Check that no other run writes into this run's directory.

        Raises:
            RunDirectoryError: H301 if another run has taken the directory.
            OSError: If the disk does not respond.
        """
        if self._directory.hold():
            what = (
                f"{self._directory.path} was removed or moved during the run, and has been created"
                " again"
            )
            self._record.emit(run_events.RecordingMovedAside(what=what))

    def _note_attempt(self) -> None:
        """Record the time of a save attempt, at which the next interval starts."""
        self._tried_at_step = self._record.global_step
        self.chooser.tried(self._clock.monotonic_seconds())

    def _record_early_failure(self, error: Exception, started: float) -> None:
        """Record that a save has failed before any file was written.

        Args:
            error: The error.
            started: The time when the save started.
        """
        self._note_attempt()
        self.failed += 1
        self._newest_failure = describe_error(error)
        # The other ranks are waiting for the result of this rank's part.
        with contextlib.suppress(Exception):
            self._writers.all(partial(_raised, error))
        self._record_failure(
            self._record.global_step, error, self._clock.monotonic_seconds() - started
        )

    def _start_in_background(self, started: float) -> bool | None:
        """Copy the state, and start a thread that writes it.

        Returns:
            True if the save has started or was refused, False if the buffers are not ready yet,
            None if saving in the background is not possible.
        """
        encoded = encode(self._state())
        buffers = self._buffers_for(needed_bytes(encoded.tensors))
        if buffers is None:
            return False if self._job is not None else None
        self._hold_directory()
        self._note_attempt()
        shot = snapshot(encoded, self._record.global_step, buffers)
        copies: list[tuple[str, torch.Tensor]] = []
        not_copied: list[tuple[str, torch.Tensor]] = []
        for name, tensor in self._must_be_finite():
            copy = shot.copy_of(tensor)
            if copy is None:
                not_copied.append((name, tensor))
            else:
                copies.append((name, copy))
        # Some tensors have no copy, because the checkpoint stores them in another form or not at
        # all. They are checked now, before training changes them.
        bad = nonfinite_tensors(not_copied)
        stall = self._clock.monotonic_seconds() - started
        save = _Save(
            shot=shot,
            must_be_finite=copies,
            bad=bad,
            position=self._position(),
            started=started,
            stall_seconds=stall,
        )
        if bad[1] and not self._writers.are_several:
            self._refuse(save, *bad)
            self._process_result(save)
        else:
            try:
                self._job = BackgroundJob(
                    lambda: self._carry_out(save, nonfinite_copies), self._directory.path
                )
            except (MemoryError, RuntimeError) as error:
                if self._writers.are_several:
                    raise
                self._stop_background(f"no thread could be started ({error})")
                return None
        return True

    # --- one save, in either thread

    def _carry_out(
        self, save: _Save, find_nonfinite: Callable[[Named], tuple[list[str], int]]
    ) -> _Save:
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
                return self._refuse(save, bad, count)
            now = self._clock.unix_seconds()
            entry = write(self._store, save.shot, unix_seconds=now, writers=self._writers)
        except Exception as error:  # noqa: BLE001 - recorded, and handled by the caller
            save.error = error
            self._end(save)
            self._record_failure(step, error, save.seconds)
            return save
        removed = self._remove_old_checkpoints(entry)
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
        return save

    def _remove_old_checkpoints(self, newest: Entry) -> list[str]:
        """Remove old checkpoints on the first rank, and return their names."""
        if self._writers.rank:
            return []
        try:
            removed = self._store.prune(self._keep_latest_k, known_good=newest)
        except (OSError, HoldfastError) as error:
            # The new checkpoint is good, even if old ones could not be removed.
            event = run_events.PruneFailed(error=str(error))
            self._record.emit(event, global_step=newest.global_step)
            return []
        return [path.name for path in removed]

    def _refuse(self, save: _Save, bad: list[str], count: int) -> _Save:
        """Record that a state with NaN or Inf was not saved."""
        why = f"NaN or Inf in {counted(count, 'tensor')}: {', '.join(bad)}"
        save.refused = why
        refused = run_events.SaveRefused(why=why, nonfinite=tuple(bad), count=count)
        self._record.emit(refused, global_step=save.shot.global_step)
        self._end(save)
        return save

    def _record_failure(self, global_step: int, error: Exception, seconds: float) -> None:
        failed = run_events.SaveFailed(error=describe_error(error), seconds=round(seconds, 4))
        self._record.emit(failed, global_step=global_step)

    def _end(self, save: _Save) -> float:
        """Record the duration of a save, and return how long the loop waited for it, in seconds."""
        save.seconds = self._clock.monotonic_seconds() - save.started
        if save.stall_seconds is None:
            save.stall_seconds = save.seconds
        return save.stall_seconds

    # --- the writer thread

    def at_boundary(self) -> None:
        """Process a finished save, check the lock, and prepare the buffers.

        Raises:
            RunDirectoryError: H301 if another run has taken the directory.
        """
        now = self._clock.monotonic_seconds()
        self.chooser.boundary(now)
        if now - self._held_at > _HOLD_SECONDS:
            self._held_at = now
            # If this fails, the next save will fail with the same error and report it.
            with contextlib.suppress(OSError):
                self._hold_directory()
        if self._job is not None:
            self.collected()
        if (
            self._in_background
            and not self._buffers_prepared
            and self._record.global_step > (self._tried_at_step or 0)
        ):
            # The optimizers have created their state, so its size is known. With "auto", buffers
            # are prepared shortly before a save is due, since a run that ends earlier needs none.
            self._buffers_prepared = self._interval != "auto" or self.chooser.is_overdue(
                now + _AHEAD_SECONDS, auto=True
            )
            if self._buffers_prepared and self._job is None:
                # When the save is due, the same error will be raised again and handled.
                with contextlib.suppress(Exception):
                    self._buffers_for(needed_bytes(encode(self._state()).tensors))

    def finish(self) -> None:
        """Wait for the running save, if there is one, and process its result."""
        job = self._job
        try:
            save = None if job is None else job.result()
            # The job is cleared only after the wait, since it is still running if the wait is
            # interrupted.
            self._job = None
        except Exception as error:  # noqa: BLE001 - training continues without a writer
            self._job = None
            self._buffers = None
            self._stop_background(f"the writer thread failed: {describe_error(error)}")
        else:
            if save is not None:
                self._process_result(save)

    def collected(self) -> Saving:
        """Process a finished save, if there is one, and return this object."""
        if self._job is not None and not self._job.is_running:
            self.finish()
        return self

    def _process_result(self, save: _Save, *, first: bool = False) -> None:
        """Process the result of a save that has ended. This runs in the training thread."""
        if save.entry is None:
            self.failed += 1
            self._newest_failure = (
                save.refused if save.error is None else describe_error(save.error)
            )
            self._refused = save.refused or self._refused
            return
        self.saved += 1
        self._newest_failure = None
        self._directory.note_saved()
        note_saved(self._directory.path)
        self._saved_at = save.position
        self.saved_as = save.entry
        computed = save.cpu_seconds if self._cuda is None else 0.0
        if first:
            self.chooser.first_save_took(save.seconds, cpu_seconds=computed)
        else:
            stall = save.stall_seconds or 0.0
            self.chooser.save_took(stall_seconds=stall, seconds=save.seconds, cpu_seconds=computed)

    # --- memory for the copies

    def _buffers_for(self, needed: int) -> HostBuffers | None:
        """Return host buffers that are large enough for copies of the state.

        Returns None if a thread is still preparing the buffers, or if there is no memory for them.

        Args:
            needed: The size of the state in bytes.
        """
        if self._buffers is not None and self._buffers.size_bytes >= needed:
            return self._buffers
        self._buffers = None
        size_bytes = int(_SPARE * needed)
        available = None if size_bytes <= _SMALL_BYTES else available_bytes()
        if available is not None and size_bytes > _MOST_MEMORY * available:
            self._stop_background(
                f"copies of the state would take {size(size_bytes)}, and"
                f" {size(available)} are available"
            )
            return None
        try:
            buffers = HostBuffers(size_bytes, cuda=self._cuda)
            if size_bytes > _SMALL_BYTES:
                self._job = BackgroundJob(buffers.touch, self._directory.path)
        except (OSError, RuntimeError) as error:
            # There was not enough memory, or the thread could not be started.
            self._stop_background(
                f"{size(size_bytes)} for copies of the state could not be allocated ({error})"
            )
            return None
        self._buffers = buffers
        if size_bytes <= _SMALL_BYTES:
            buffers.touch()
        return buffers if self._job is None else None

    def _stop_background(self, why: str) -> None:
        """Make all later saves run in the training thread, and record why."""
        self._in_background = False
        self._record.emit(run_events.SavesSynchronous(why=why))

    def give_up_buffers(self) -> None:
        """Free the buffers permanently, because memory is short.

        From now on, saves run in the training thread.
        """
        wanted = not self._buffers_prepared and self._record.global_step > (
            self._tried_at_step or 0
        )
        if self._in_background and (self._buffers is not None or wanted):
            self.finish()
            self._buffers = None
            self._stop_background("the memory for copies was freed after an out-of-memory error")

    # --- after a resume or a rollback

    def resumed(self, entry: Entry) -> None:
        """Record that the state was just restored from a checkpoint."""
        self._note_attempt()
        self._saved_at = self._position()
        self.saved_as = entry

    def returned(self, *, to_checkpoint: bool) -> None:
        """Record that the run has rolled back to an earlier step.

        Args:
            to_checkpoint: Whether the run has rolled back to a checkpoint rather than to a snapshot
                in host memory.
        """
        step = self._record.global_step
        self._tried_at_step = step if to_checkpoint else min(self._tried_at_step or 0, step)
        # The state that was refused no longer exists.
        self._refused = None


def chooser_of(policy: Policy) -> IntervalChooser:
    """Return an `IntervalChooser`, which chooses when to save, with the limits of a policy."""
    return IntervalChooser(
        mean_seconds_between_failures=3600 * policy.mean_time_between_failures_hours,
        most_overhead=policy.save_overhead,
        most_minutes=policy.save_interval_minutes,
    )


def _raised(error: Exception) -> Any:
    """Raise an error. This function can be passed to `Writers.all`."""
    raise error


def _lasting_error(error: Exception | None) -> Exception | None:
    """Return the error to raise after the first save, if later saves cannot succeed either.

    Returns None for errors that may go away, such as a full disk.
    """
    if not isinstance(error, OSError):
        return error
    if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
        return None
    return RunDirectoryError(
        f"the first checkpoint cannot be written ({error})",
        limit="the run could not save any progress",
        fix=(
            "make the folder writable, choose another run directory, or set"
            " save_interval_steps=None."
        ),
        rule="H302",
    )


def _unhealthy_start(bad: list[str], count: int) -> NonFiniteError:
    return NonFiniteError(
        f"NaN or Inf in {counted(count, 'tensor')} before the first step: {', '.join(bad)}",
        limit="training cannot recover from weights that are not finite",
        fix="check the initialization or the loaded weights.",
        rule="H502",
    )
