"""The checkpoints of an open run.

When they are written, in which thread, and what is said about them.

At a boundary the state is copied into host buffers; a thread then looks for NaN and Inf in the
copies, writes, reads back, commits and prunes, while training goes on. Saves are made in the
training thread where one must be finished when the call returns (the first, the last, one that was
asked for), and where there is no memory for the buffers. There is one writer at a time, and whoever
looks at the checkpoints waits for it first.
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
from holdfast.guard.directory import RunDirectory
from holdfast.guard.phase import RunState
from holdfast.guard.record import RunRecord, describe_error
from holdfast.guard.saving.unsaved import note_left_steps, note_saved, note_unsaved
from holdfast.loader.signalled import let_through
from holdfast.memory.host_memory import available_bytes

# Of the memory that is available, as for the copies that rollbacks return to: the rest belongs to
# activations, loaders and the caller.
_MOST_MEMORY = 0.25
# Made and touched where the loop stands: 10 ms (measured: 1.8 s for a GiB in a virtual machine).
# Larger ones are made ready by a thread.
_SMALL_BYTES = 4 * 2**20
_AHEAD_SECONDS = 3.0  # before the first save is due, its memory is made ready
# Time between two checks at boundaries of whether the lock is still held. A check takes a few
# microseconds, on a network disk perhaps a millisecond. Before each save the lock is checked as
# well.
_HOLD_SECONDS = 5.0
_SPARE = 1.02  # of the size: text and positions grow a little from save to save

Named = Iterable[tuple[str, torch.Tensor]]


@dataclass(slots=True, kw_only=True)
class _Save:
    """A save that was begun, and what came of it."""

    shot: Snapshot  # what is written
    must_be_finite: Named  # tensors to look through before
    # What was seen of others: names that are not finite, and how many
    bad: tuple[list[str], int] = ([], 0)
    position: tuple[int, int]  # where the run stood
    started: float  # when, by the clock
    stall_seconds: float | None = None  # how long the loop was held; None if it is until the end
    seconds: float = 0.0  # how long it took, once it is over
    cpu_seconds: float = 0.0  # what the thread that wrote it computed
    entry: Entry | None = None  # the checkpoint, if it was saved
    refused: str | None = None  # why, if it was refused
    error: Exception | None = None  # what was raised, if it failed


class Saving:
    """Writes the checkpoints of one run."""

    def __init__(
        self,
        *,
        directory: RunDirectory,
        store: Store,
        record: RunRecord,
        policy: Policy,
        clock: Clock,
        run_state: RunState,
        state: Callable[[], Mapping[str, Any]],
        must_be_finite: Callable[[], Named],
        position: Callable[[], tuple[int, int]],
        cuda: torch.device | None,
        writers: Writers | None,
    ) -> None:
        self._directory = directory
        self.chooser = IntervalChooser(
            mean_seconds_between_failures=3600 * policy.mean_time_between_failures_hours,
            most_overhead=policy.save_overhead,
            most_minutes=policy.save_interval_minutes,
        )
        self._store = store
        self._record = record
        # None: another rank writes
        self._every = policy.save_interval_steps if writers is not None else None
        self._writers = writers or Writers()
        self._keep_latest_k = policy.keep_latest_k
        self._clock = clock
        self._run_state = run_state
        self._state = state
        self._must_be_finite = must_be_finite
        self._position = position
        self._cuda = cuda
        self._saved_at: tuple[int, int] | None = None
        self.saved_as: Entry | None = None  # the checkpoint that holds what is saved
        self._tried_at_step: int | None = None
        # When it was last looked whether the directory is still ours
        self._held_at = clock.monotonic_seconds()
        self._job: BackgroundJob[_Save | None] | None = None
        self._buffers: HostBuffers | None = None
        self._in_background = policy.async_save and self._every is not None
        self._made_ready = False  # memory was asked for ahead
        self._refused: str | None = None
        self.saved = 0
        self.failed = 0
        # Why the newest save came to nothing; None: it did not
        self._newest_failure: str | None = None

    # --- facts

    def is_due(self, after_steps: int = 0) -> bool:
        """Return whether an interval was passed since the last attempt to save, now or after
        some more steps.
        """
        every, step, tried = (
            self._every,
            self._record.global_step + after_steps,
            self._tried_at_step,
        )
        if every is None or tried is None:
            return every is not None
        if step > tried and self.chooser.is_overdue(
            self._clock.monotonic_seconds(), auto=every == "auto"
        ):
            return True
        return isinstance(every, int) and step // every > tried // every

    @property
    def has_unsaved(self) -> bool:
        """Return whether steps were made that no finished checkpoint holds, and that may be
        saved.
        """
        return self.may_save_more and self._saved_at != self._position()

    @property
    def may_save_more(self) -> bool:
        """Return whether this run saves, has begun to, and stands where it may."""
        return (
            self._every is not None
            and self._tried_at_step is not None
            and self._run_state.may_be_saved
        )

    @property
    def global_step(self) -> int:
        """Return the optimizer steps in the weights."""
        return self._record.global_step

    @property
    def has_refusal(self) -> bool:
        """Return whether a save was refused since that was last asked."""
        return self._refused is not None

    def take_refusal(self) -> str | None:
        """Return why a save was refused since this was last asked, or None."""
        refused, self._refused = self._refused, None
        return refused

    def report_loss(self, *, left: bool) -> None:
        """Report at the end of a run that saves have failed, if its newest state is in no
        checkpoint.

        The process then ends with an exit code of its own, see `unsaved`, unless a later save
        works. Steps since the newest checkpoint of a loop that was left early count only if a save
        has failed since; otherwise they are named when the process ends, see `note_left_steps`.
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
        """Record the steps since the newest checkpoint, and have them named when the process ends.

        Does nothing after a save that has failed, which `report_loss` reports.
        """
        if self.saved_as is None or self._newest_failure is not None or not self.has_unsaved:
            return
        if self._writers.rank:
            return  # one rank speaks for all
        from_step, to_step = self.saved_as.global_step + 1, self._record.global_step
        if from_step <= to_step:
            self._record.emit(run_events.StepsNotSaved(from_step=from_step, to_step=to_step))
            note_left_steps(self._directory.path, from_step, to_step)

    # --- save

    def save_first(self) -> None:
        """Have a state to return to before the first step."""
        if self._tried_at_step is None:
            self.save()

    def save(self) -> None:
        """Have a checkpoint of this very state when this returns, unless the state is not whole.

        A save that fails is an event and does not stop training. One of weights that are not finite
        is refused.
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
            if first and (lasting := _for_good(error)) is not None:
                raise lasting from error
            self._failed_at_once(error, started)
            return
        self._tried()
        try:
            shot = snapshot(self._state(), self._record.global_step)
        except Exception as error:
            let_through(error)
            if first:
                self._tried_at_step = None
                # A state that can never be saved is the caller's to know before any work is done
                raise
            self._failed_at_once(error, started)
            return
        named = () if first else self._must_be_finite()
        save = _Save(shot=shot, must_be_finite=named, position=self._position(), started=started)
        self._carry_out(save, nonfinite_tensors)
        if first and (lasting := _for_good(save.error)) is not None:
            self._tried_at_step = None
            raise lasting from save.error
        self._take_in(save, first=first)

    def save_again(self) -> None:
        """Save a state that was changed on purpose, also if there is a checkpoint of this step."""
        self.finish()
        self._saved_at = None
        self.save()

    @property
    def is_busy(self) -> bool:
        """Return whether a save that is due now would have to wait."""
        return self.collected()._job is not None

    def save_when_due(self, *, busy: bool = False) -> None:
        """Begin a save of this state; the writer goes on beside the training.

        While one is under way, wait a step.

        So does one whose share another process cannot save yet: `busy`.
        """
        if not busy and (self._tried_at_step is None or not self._in_background):
            self.save()
        else:
            self.collected()
            if not busy and self._is_pointless():
                return
            self._save_in_background(busy=busy)

    def _save_in_background(self, *, busy: bool) -> None:
        started = self._clock.monotonic_seconds()
        try:
            begun = False if busy or self._job is not None else self._hand_over(started)
            # The others have begun theirs
            if begun is False and self._writers.are_several and not busy:
                self.finish()
                begun = self._hand_over(started)
        except RunDirectoryError:
            raise
        except Exception as error:  # noqa: BLE001 - such as a part of the caller's that cannot give its state
            let_through(error)
            self._failed_at_once(error, started)
            begun = True
        if begun is None:
            self.save()

    def _is_pointless(self) -> bool:
        return (
            self._every is None
            or not self._run_state.may_be_saved
            or self._saved_at == self._position()
        )

    def _hold_directory(self) -> None:
        """Check that only this run writes into its directory.

        Raises:
            RunDirectoryError: H301, if another run has taken the directory.
            OSError: If the disk does not answer.
        """
        if self._directory.hold():
            what = (
                f"{self._directory.path} was removed or moved while the run wrote into it; it is"
                " made again"
            )
            self._record.emit(run_events.RecordingMovedAside(what=what))

    def _tried(self) -> None:
        self._tried_at_step = self._record.global_step
        self.chooser.tried(self._clock.monotonic_seconds())

    def _failed_at_once(self, error: Exception, started: float) -> None:
        self._tried()
        self.failed += 1
        self._newest_failure = describe_error(error)
        with contextlib.suppress(Exception):
            self._writers.all(partial(_raised, error))  # the others wait for what was found here
        self._record_failure(
            self._record.global_step, error, self._clock.monotonic_seconds() - started
        )

    def _hand_over(self, started: float) -> bool | None:
        """Copy the state and let a thread do the rest.

        False: its memory is not ready, None: there is none.
        """
        encoded = encode(self._state())
        buffers = self._buffers_for(needed_bytes(encoded.tensors))
        if buffers is None:
            return False if self._job is not None else None
        self._hold_directory()
        self._tried()
        shot = snapshot(encoded, self._record.global_step, buffers)
        copies: list[tuple[str, torch.Tensor]] = []
        others: list[tuple[str, torch.Tensor]] = []
        for name, tensor in self._must_be_finite():
            copy = shot.copy_of(tensor)
            (others if copy is None else copies).append((name, tensor if copy is None else copy))
        # What no checkpoint holds, or in another form: now or never
        bad = nonfinite_tensors(others)
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
            self._take_in(save)
        else:
            try:
                self._job = BackgroundJob(
                    lambda: self._carry_out(save, nonfinite_copies), self._directory.path
                )
            except (MemoryError, RuntimeError) as error:
                if self._writers.are_several:
                    raise
                self._stop_background(f"no thread can be started ({error})")
                return None
        return True

    # --- one save, in either thread

    def _carry_out(
        self, save: _Save, find_nonfinite: Callable[[Named], tuple[list[str], int]]
    ) -> _Save:
        """Look through the state, write it and prune.

        Nothing is raised: errors are in what is returned.
        """
        step, cpu_began = save.shot.global_step, time.thread_time()
        try:
            found = self._writers.all(lambda: [save.bad, find_nonfinite(save.must_be_finite)])
            bad = [name for share in found for names, _ in share for name in names]
            count = sum(count for share in found for _, count in share)
            if count:
                return self._refuse(save, bad, count)
            now = self._clock.unix_seconds()
            entry = write(self._store, save.shot, unix_seconds=now, writers=self._writers)
        except Exception as error:  # noqa: BLE001 - an event, and the caller's to judge
            save.error = error
            self._end(save)
            self._record_failure(step, error, save.seconds)
            return save
        try:
            removed = (
                []
                if self._writers.rank
                else self._store.prune(self._keep_latest_k, known_good=entry)
            )
        except (OSError, HoldfastError) as error:
            removed = []  # the checkpoint is good all the same
            self._record.emit(run_events.PruneFailed(error=str(error)), global_step=step)
        save.entry, save.cpu_seconds = entry, time.thread_time() - cpu_began
        stall = self._end(save)
        self._record.emit(
            run_events.CheckpointSaved(
                checkpoint=entry.path.name,
                size_bytes=save.shot.size_bytes(),
                seconds=round(save.seconds, 4),
                stall_seconds=round(stall, 4),
                removed=tuple(path.name for path in removed),
            ),
            global_step=step,
        )
        return save

    def _refuse(self, save: _Save, bad: list[str], count: int) -> _Save:
        """Record that a state is not finite, so that no checkpoint appears."""
        save.refused = why = f"{count} tensor(s) hold NaN or Inf: {', '.join(bad)}"
        refused = run_events.SaveRefused(why=why, nonfinite=tuple(bad), count=count)
        self._record.emit(refused, global_step=save.shot.global_step)
        self._end(save)
        return save

    def _record_failure(self, global_step: int, error: Exception, seconds: float) -> None:
        failed = run_events.SaveFailed(error=describe_error(error), seconds=round(seconds, 4))
        self._record.emit(failed, global_step=global_step)

    def _end(self, save: _Save) -> float:
        """Note how long a save took, and return how long the loop was held."""
        save.seconds = self._clock.monotonic_seconds() - save.started
        save.stall_seconds = save.seconds if save.stall_seconds is None else save.stall_seconds
        return save.stall_seconds

    # --- the writer

    def at_boundary(self) -> None:
        """Take in what the writer has finished.

        H301 if another run has taken the run directory meanwhile.
        """
        now = self._clock.monotonic_seconds()
        self.chooser.boundary(now)
        if now - self._held_at > _HOLD_SECONDS:
            self._held_at = now
            with contextlib.suppress(OSError):  # the next save finds out, and says so
                self._hold_directory()
        if self._job is not None:
            self.collected()
        if (
            self._in_background
            and not self._made_ready
            and self._record.global_step > (self._tried_at_step or 0)
        ):
            # Optimizers have their state now. A run that ends before a save is due needs none of
            # this.
            self._made_ready = self._every != "auto" or self.chooser.is_overdue(
                now + _AHEAD_SECONDS, auto=True
            )
            if self._made_ready and self._job is None:
                # It will come again when a save is due, and be judged there
                with contextlib.suppress(Exception):
                    self._buffers_for(needed_bytes(encode(self._state()).tensors))

    def finish(self) -> None:
        """Wait until nothing is being written, and take in what came of it."""
        job = self._job
        try:
            save = None if job is None else job.result()  # interrupted here, it is still under way
            self._job = None
        except Exception as error:  # noqa: BLE001 - whatever it was, training goes on without a writer
            self._job = self._buffers = None
            self._stop_background(f"the writer has failed: {describe_error(error)}")
        else:
            if save is not None:
                self._take_in(save)

    def collected(self) -> Saving:
        """Take in what the writer has finished by now, and return this object."""
        if self._job is not None and not self._job.is_running:
            self.finish()
        return self

    def _take_in(self, save: _Save, *, first: bool = False) -> None:
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
        self._saved_at, self.saved_as = save.position, save.entry
        computed = save.cpu_seconds if self._cuda is None else 0.0
        if first:
            self.chooser.first_save_took(save.seconds, cpu_seconds=computed)
        else:
            stall = save.stall_seconds or 0.0
            self.chooser.save_took(stall_seconds=stall, seconds=save.seconds, cpu_seconds=computed)

    # --- its memory

    def _buffers_for(self, needed: int) -> HostBuffers | None:
        """Return memory for copies of so many bytes, or None while it is made ready or where
        there is none.
        """
        if self._buffers is not None and self._buffers.size_bytes >= needed:
            return self._buffers
        self._buffers = None
        size = int(_SPARE * needed)
        available = None if size <= _SMALL_BYTES else available_bytes()
        if available is not None and size > _MOST_MEMORY * available:
            self._stop_background(
                f"copies of the state take {size} bytes and {available} are available"
            )
            return None
        try:
            buffers = HostBuffers(size, cuda=self._cuda)
            if size > _SMALL_BYTES:
                self._job = BackgroundJob(buffers.touch, self._directory.path)
        except (OSError, RuntimeError) as error:  # no memory, no thread
            self._stop_background(f"{size} bytes for copies of the state were refused ({error})")
            return None
        self._buffers = buffers
        if size <= _SMALL_BYTES:
            buffers.touch()
        return buffers if self._job is None else None

    def _stop_background(self, why: str) -> None:
        self._in_background = False
        self._record.emit(run_events.SavesSynchronous(why=why))

    def give_up_buffers(self) -> None:
        """Give the memory back for good, since it is needed elsewhere.

        From now on the loop waits for its saves.
        """
        wanted = not self._made_ready and self._record.global_step > (self._tried_at_step or 0)
        if self._in_background and (self._buffers is not None or wanted):
            self.finish()
            self._buffers = None
            self._stop_background("the memory of the copies was given back after out-of-memory")

    # --- the run went elsewhere

    def resumed(self, entry: Entry) -> None:
        """Note that this state was just read from a checkpoint."""
        self._tried()
        self._saved_at, self.saved_as = self._position(), entry

    def returned(self, *, to_checkpoint: bool) -> None:
        """Note that the run is at an earlier step again.

        What was refused was of a state that is gone.
        """
        step = self._record.global_step
        self._tried_at_step = step if to_checkpoint else min(self._tried_at_step or 0, step)
        self._refused = None


def _raised(error: Exception) -> Any:
    raise error


def _for_good(error: Exception | None) -> Exception | None:
    """Return what the caller must know before any work.

    No later save could succeed, unlike on a full disk.
    """
    if not isinstance(error, OSError):
        return error
    if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
        return None
    return RunDirectoryError(
        f"the first checkpoint cannot be written ({error})",
        limit="nothing of this run could be saved",
        fix=(
            "make the folder writable, choose another run directory, or set"
            " save_interval_steps=None."
        ),
        rule="H302",
    )


def _unhealthy_start(bad: list[str], count: int) -> NonFiniteError:
    return NonFiniteError(
        f"{count} tensor(s) hold NaN or Inf before the first step: {', '.join(bad)}",
        limit="training cannot recover from weights that are not finite",
        fix="check the initialisation or the weights that were loaded.",
        rule="H502",
    )
