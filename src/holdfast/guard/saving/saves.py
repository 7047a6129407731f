"""The saving half of an open run: when, in which thread, and what is said about it.

At a boundary the state is copied into host buffers; a thread then looks for NaN and Inf in the copies, writes, reads
back, commits and prunes, while training goes on. Saves are made in the training thread where one must be finished
when the call returns (the first, the last, one that was asked for), and where there is no memory for the buffers.
There is one writer at a time, and whoever looks at the checkpoints waits for it first.

Does not: restore (see ``session``), or know what the bytes on the disk look like
(``checkpoint.saver``).
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.checkpoint.background import Job, nonfinite_copies
from holdfast.checkpoint.buffers import HostBuffers, needed_bytes
from holdfast.checkpoint.health import nonfinite_tensors
from holdfast.checkpoint.interval import IntervalChooser
from holdfast.checkpoint.saver import Snapshot, encode, snapshot, write
from holdfast.checkpoint.store import Entry, Store
from holdfast.core.clock import Clock
from holdfast.core.errors import HoldfastError, NonFiniteError, RunDirectoryError
from holdfast.core.policy import Policy
from holdfast.guard.directory import RunDirectory
from holdfast.guard.phase import RunState
from holdfast.guard.record import RunRecord
from holdfast.loader.signalled import let_through
from holdfast.memory.host_memory import available_bytes

# Of the memory that is available, as for the copies that rollbacks return to: the rest belongs to activations,
# loaders and the caller.
_MOST_MEMORY = 0.25
# Made and touched where the loop stands: 10 ms (measured: 1.8 s for a GiB in a virtual machine). Larger ones are made
# ready by a thread.
_SMALL_BYTES = 4 * 2**20
_SPARE = 1.02  # of the size: text and positions grow a little from save to save

Named = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A save that was begun.

    Args:
        shot: What is written.
        must_be_finite: Tensors to look through before.
        position: Where the run stood.
        started: When, by the clock.
        stall_seconds: How long the loop was held; None if it is until the end.
    """

    shot: Snapshot
    must_be_finite: Named
    position: tuple[int, int]
    started: float
    stall_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """What came of a save: saved, refused, or failed.

    Args:
        position: Where the run stood.
        seconds: It took.
        stall_seconds: How long the loop was held.
        entry: The checkpoint, if it was saved.
        refused: Why, if it was refused.
        error: What was raised, if it failed.
    """

    position: tuple[int, int]
    seconds: float
    stall_seconds: float
    entry: Entry | None = None
    refused: str | None = None
    error: Exception | None = None


def _for_good(error: Exception | None) -> Exception | None:
    """Return what the caller must know before any work is done: no later save could succeed, as on a full disk."""
    if not isinstance(error, OSError):
        return error
    if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
        return None
    return RunDirectoryError(
        f"the first checkpoint cannot be written ({error})",
        limit="nothing of this run could be saved",
        fix="make the folder writable, choose another run directory, or set save_interval_steps=None.",
        rule="H302",
    )


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
    ) -> None:
        self._directory = directory
        self.chooser = IntervalChooser(
            mean_seconds_between_failures=3600 * policy.mean_time_between_failures_hours,
            most_overhead=policy.save_overhead,
            most_minutes=policy.save_interval_minutes,
        )
        self._store = store
        self._record = record
        self._policy = policy
        self._clock = clock
        self._run_state = run_state
        self._state = state
        self._must_be_finite = must_be_finite
        self._position = position
        self._cuda = cuda
        self._saved_at: tuple[int, int] | None = None
        self.saved_as: Entry | None = None  # the checkpoint that holds what is saved
        self._tried_at_step: int | None = None
        self._job: Job[End | None] | None = None
        self._buffers: HostBuffers | None = None
        self._in_background = policy.async_save and policy.save_interval_steps is not None
        self._puts_off = False  # the save that is due waits for the writer
        self._said_waiting = False  # so it is known that saves wait
        self._made_ready = False  # memory was asked for ahead
        self._refused: str | None = None
        self.saved = 0
        self.failed = 0

    # --- facts ----------------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Return whether an interval was passed since the last attempt to save."""
        every, step, tried = self._policy.save_interval_steps, self._record.global_step, self._tried_at_step
        if every is None or tried is None:
            return every is not None
        if step > tried and self.chooser.is_overdue(self._clock.monotonic_seconds(), early=every == "auto"):
            return True
        return step // every > tried // every if isinstance(every, int) else step - tried >= self.chooser.steps

    @property
    def has_unsaved(self) -> bool:
        """Return whether steps were made that no finished checkpoint holds, and that may be saved."""
        return self.may_save_more and self._saved_at != self._position()

    @property
    def may_save_more(self) -> bool:
        """Return whether this run saves, has begun to, and stands where it may."""
        begun = self._policy.save_interval_steps is not None and self._tried_at_step is not None
        return begun and self._run_state.may_be_saved

    def take_refusal(self) -> str | None:
        """Return why a save was refused since this was last asked, or None."""
        refused, self._refused = self._refused, None
        return refused

    def report_loss(self, *, left: bool) -> None:
        """Say at the end of a run that saves have failed, if what they were to hold is in no checkpoint.

        Args:
            left: Whether the loop was left early, so that the steps since the newest checkpoint are not missed.
        """
        if self.failed and (self.saved_as is None or (self.has_unsaved and not left)):
            newest = None if self.saved_as is None else self.saved_as.global_step
            self._record.happened("not_saved", newest_checkpoint=newest, failed_saves=self.failed)

    # --- save -----------------------------------------------------------------------------------------------

    def save_first(self) -> None:
        """Have a state to return to before the first step.

        Raises:
            CheckpointError: H310, if some state cannot be stored without pickle.
            NonFiniteError: H502, if the weights hold NaN or Inf already.
            RunDirectoryError: H302, if the folder cannot be written for good.
        """
        if self._tried_at_step is None:
            self.save()

    def save(self) -> None:
        """Have a checkpoint of this very state when this returns, unless the state is not whole.

        A save that fails is an event and does not stop training. One of weights that are not finite is refused.

        Raises:
            RunDirectoryError: H301, if the lock was lost and another run has the directory.
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
        self._directory.hold()
        self._tried()
        try:
            shot = snapshot(self._state(), self._record.global_step)
        except Exception as error:
            let_through(error)
            if first:
                self._tried_at_step = None
                raise  # a state that can never be saved is the caller's to know before any work is done
            self._failed_at_once(error, started)
            return
        named = () if first else self._must_be_finite()
        attempt = Attempt(shot=shot, must_be_finite=named, position=self._position(), started=started)
        end = self._carry_out(attempt, nonfinite_tensors)
        if first and (lasting := _for_good(end.error)) is not None:
            self._tried_at_step = None
            raise lasting from end.error
        self._take_in(end, first=first)

    def save_again(self) -> bool:
        """Save a state that was changed on purpose, also if there is a checkpoint of this step.

        Returns:
            Whether it was saved.

        Raises:
            RunDirectoryError: H301, if the lock was lost and another run has the directory.
        """
        self.finish()
        before, self._saved_at = self.saved, None
        self.save()
        return self.saved > before

    def save_when_due(self) -> None:
        """Begin a save of this state; the writer goes on beside the training. While one is under way, wait a step.

        Raises:
            RunDirectoryError: H301, if the lock was lost and another run has the directory.
        """
        if self._tried_at_step is None or not self._in_background:
            self.save()
            self.chooser.resumes(self._clock.monotonic_seconds())
            return
        self.collected()
        if self._is_pointless():
            return
        started = self._clock.monotonic_seconds()
        try:
            handed_over = False if self._job is not None else self._hand_over(started)
        except RunDirectoryError:
            raise
        except Exception as error:  # noqa: BLE001 - such as a part of the caller's that cannot give its state
            let_through(error)
            self._failed_at_once(error, started)
            handed_over = True
        if handed_over is None:
            self.save()
        elif handed_over:
            self._said_waiting, self._puts_off = self._said_waiting and self._puts_off, False
        else:
            self._puts_off = True
            if not self._said_waiting:  # once, and again only after a save that did not have to wait
                self._said_waiting = True
                self._record.happened("save_put_off", why="the last one is still written, or memory is made ready")
        self.chooser.resumes(self._clock.monotonic_seconds())

    def _is_pointless(self) -> bool:
        none = self._policy.save_interval_steps is None
        return none or not self._run_state.may_be_saved or self._saved_at == self._position()

    def _tried(self) -> None:
        self._tried_at_step = self._record.global_step
        self.chooser.tried(self._clock.monotonic_seconds())

    def _failed_at_once(self, error: Exception, started: float) -> None:
        self._tried()
        self.failed += 1
        self._record_failure(self._record.global_step, error, self._clock.monotonic_seconds() - started)

    def _hand_over(self, started: float) -> bool | None:
        """Copy the state and let a thread do the rest; False: its memory is not ready, None: there is none."""
        encoded = encode(self._state())
        buffers = self._buffers_for(needed_bytes(encoded.tensors))
        if buffers is None:
            return False if self._job is not None else None
        self._directory.hold()
        self._tried()
        shot = snapshot(encoded, self._record.global_step, buffers)
        copies: list[tuple[str, torch.Tensor]] = []
        others: list[tuple[str, torch.Tensor]] = []
        for name, tensor in self._must_be_finite():
            copy = shot.copy_of(tensor)
            (others if copy is None else copies).append((name, tensor if copy is None else copy))
        bad, count = nonfinite_tensors(others)  # what no checkpoint holds, or in another form: now or never
        stall = self._clock.monotonic_seconds() - started
        attempt = Attempt(
            shot=shot, must_be_finite=copies, position=self._position(), started=started, stall_seconds=stall
        )
        if count:
            self._take_in(self._refuse(attempt, bad, count))
        else:
            self._job = Job(lambda: self._carry_out(attempt, nonfinite_copies), self._directory.path)
        return True

    # --- one save ---------------------------------------------------------------------------------------------

    def _carry_out(self, attempt: Attempt, find_nonfinite: Callable[[Named], tuple[list[str], int]]) -> End:
        """Look through the state, write it and prune. Nothing is raised: errors are in what is returned."""
        shot = attempt.shot
        try:
            bad, count = find_nonfinite(attempt.must_be_finite)
            if count:
                return self._refuse(attempt, bad, count)
            entry = write(self._store, shot, unix_seconds=self._clock.unix_seconds())
        except Exception as error:  # noqa: BLE001 - an event, and the caller's to judge
            end = self._end(attempt, error=error)
            self._record_failure(shot.global_step, error, end.seconds)
            return end
        try:
            removed = self._store.prune(self._policy.keep_latest_k, known_good=entry)
        except (OSError, HoldfastError) as error:
            removed = []  # the checkpoint is good all the same
            self._record.happened_at(shot.global_step, "prune_failed", error=str(error))
        end = self._end(attempt, entry=entry)
        # Of the saves before: what this one takes is known when the step that goes on beside it is over, and an event
        # that waited for that would be lost with a kill.
        costs = self.chooser.save_costs_seconds()
        self._record.happened_at(
            shot.global_step,
            "checkpoint_saved",
            checkpoint=entry.path.name,
            size_bytes=shot.size_bytes(),
            seconds=round(end.seconds, 4),
            stall_seconds=round(end.stall_seconds, 4),
            **({} if costs is None else {"save_costs_seconds": round(costs, 4)}),
            removed=[path.name for path in removed],
        )
        return end

    def _refuse(self, attempt: Attempt, bad: list[str], count: int) -> End:
        """Record that a state is not finite, so that no checkpoint appears."""
        self._record.happened_at(attempt.shot.global_step, "save_refused", nonfinite=bad, count=count)
        return self._end(attempt, refused=f"{count} tensor(s) hold NaN or Inf: {', '.join(bad)}")

    def _record_failure(self, global_step: int, error: Exception, seconds: float) -> None:
        """Record that a save has failed."""
        text = f"{type(error).__name__}: {error}"[:500]
        self._record.happened_at(global_step, "save_failed", error=text, seconds=round(seconds, 4))

    def _end(self, attempt: Attempt, **came_of_it: Any) -> End:
        seconds = self._clock.monotonic_seconds() - attempt.started
        stall = seconds if attempt.stall_seconds is None else attempt.stall_seconds
        return End(position=attempt.position, seconds=seconds, stall_seconds=stall, **came_of_it)

    # --- the writer -----------------------------------------------------------------------------------------

    def at_boundary(self) -> None:
        """Take in what the writer has finished, and look at the interval again."""
        every = self._policy.save_interval_steps
        if every is not None:  # with an interval that was given too: the recording says what its saves cost
            self.chooser.boundary(self._clock.monotonic_seconds(), writing=self._job is not None)
        self.collected()
        if every == "auto":
            decision = self.chooser.decide()
            if decision is not None:
                self._record.decided(decision)
        if self._in_background and not self._made_ready and self._record.global_step > (self._tried_at_step or 0):
            self._made_ready = True  # optimizers have their state now
            if self._job is None:
                self._make_ready()

    def _make_ready(self) -> None:
        try:
            self._buffers_for(needed_bytes(encode(self._state()).tensors))
        except Exception as error:  # noqa: BLE001 - it will come again when a save is due, and be judged there
            self._record.happened("save_put_off", why=_described(error))

    def finish(self) -> None:
        """Wait until nothing is being written, and take in what came of it."""
        job = self._job
        try:
            end = None if job is None else job.result()  # interrupted here, it is still under way
            self._job = None
        except Exception as error:  # noqa: BLE001 - whatever it was, training goes on without a writer
            self._job = self._buffers = None
            self._stop_background(f"the writer has failed: {_described(error)}")
        else:
            if end is not None:
                self._take_in(end)

    def collected(self) -> Saving:
        """Take in what the writer has finished by now, and return this object."""
        if self._job is not None and not self._job.is_running:
            self.finish()
        return self

    def _take_in(self, end: End, *, first: bool = False) -> None:
        if end.refused is not None or end.error is not None:
            self.failed += 1
            self._refused = end.refused or self._refused
            return
        self.saved += 1
        self._directory.note_saved()
        self._saved_at, self.saved_as = end.position, end.entry
        if first:
            self.chooser.first_save_took(end.seconds)
        else:
            self.chooser.save_took(stall_seconds=end.stall_seconds, seconds=end.seconds)

    # --- its memory -----------------------------------------------------------------------------------------

    def _buffers_for(self, needed: int) -> HostBuffers | None:
        """Return memory for copies of so many bytes, or None while it is made ready or where there is none."""
        if self._buffers is not None and self._buffers.size_bytes >= needed:
            return self._buffers
        self._buffers = None
        size, available = int(_SPARE * needed), available_bytes()
        if available is not None and size > _MOST_MEMORY * available:
            self._stop_background(f"copies of the state take {size} bytes and {available} are available")
            return None
        try:
            buffers = HostBuffers(size, cuda=self._cuda)
            if size > _SMALL_BYTES:
                self._job = Job(buffers.touch, self._directory.path)
        except (OSError, RuntimeError) as error:  # no memory, no thread
            self._stop_background(f"{size} bytes for copies of the state were refused ({error})")
            return None
        self._buffers = buffers
        if size <= _SMALL_BYTES:
            buffers.touch()
        return buffers if self._job is None else None

    def _stop_background(self, why: str) -> None:
        self._in_background = False
        self._record.happened("saves_synchronous", why=why)

    def give_up_buffers(self) -> None:
        """Give the memory back for good, since it is needed elsewhere: from now on the loop waits for its saves."""
        if self._in_background and self._buffers is not None:
            self.finish()
            self._buffers = None
            self._stop_background("the memory of the copies was given back after out-of-memory")

    # --- the run went elsewhere -----------------------------------------------------------------------------

    def resumed(self, entry: Entry) -> None:
        """Note that this state was just read from a checkpoint."""
        self._tried()
        self._saved_at, self.saved_as = self._position(), entry

    def returned(self, *, to_checkpoint: bool) -> None:
        """Note that the run is at an earlier step again; what was refused was of a state that is gone."""
        step = self._record.global_step
        self._tried_at_step = step if to_checkpoint else min(self._tried_at_step or 0, step)
        self._refused = None


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def _unhealthy_start(bad: list[str], count: int) -> NonFiniteError:
    return NonFiniteError(
        f"{count} tensor(s) hold NaN or Inf before the first step: {', '.join(bad)}",
        limit="training cannot recover from weights that are not finite",
        fix="check the initialisation or the weights that were loaded.",
        rule="H502",
    )
