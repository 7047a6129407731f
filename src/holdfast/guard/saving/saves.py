"""Save the checkpoints of an open run, in the training thread or in the background.

When the interval set by the policy has passed, a save is due (`Saving.is_due`). At the next
boundary, the state is copied into host buffers. While training continues, a thread checks the
copies for NaN and Inf, writes the files and reads them back, commits the checkpoint, and removes
old ones.

A save runs in the training thread instead if it must be complete when the call returns (the first
save, the last one, and requested saves), or if there is no memory for the buffers. Only one save
runs at a time. Code that reads checkpoints first waits until no save is running.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from holdfast.checkpoint.background import nonfinite_copies
from holdfast.checkpoint.buffers import needed_bytes
from holdfast.checkpoint.health import nonfinite_tensors
from holdfast.checkpoint.interval import SaveCost
from holdfast.checkpoint.saver import Snapshot, encode, snapshot
from holdfast.checkpoint.store import Entry
from holdfast.core.clock import Clock
from holdfast.core.errors import NonFiniteError, RunDirectoryError
from holdfast.core.text import counted
from holdfast.guard.phase import RunState
from holdfast.guard.record import describe_error
from holdfast.guard.saving.directory_check import DirectoryCheck
from holdfast.guard.saving.requested_saves import OnEnd, RequestedSaves
from holdfast.guard.saving.save_results import SaveResults
from holdfast.guard.saving.save_schedule import SaveSchedule
from holdfast.guard.saving.save_writer import NamedTensors, NonFinite, Save, SaveWriter
from holdfast.guard.saving.writer_thread import WriterThread
from holdfast.loader.signalled import let_through


@dataclass(frozen=True, slots=True, kw_only=True)
class StateToSave:
    """The state of a run, as its checkpoints hold it."""

    # Function that returns the state to save, by component.
    components: Callable[[], Mapping[str, Any]]
    # Function that returns the tensors in which NaN or Inf prevents a save.
    must_be_finite: Callable[[], NamedTensors]
    # Function that returns two numbers that change with every step or batch.
    position: Callable[[], tuple[int, int]]
    # The phase of the run, which determines whether the state may be saved.
    run_state: RunState


class _Start(Enum):
    """What came of the attempt to start a save in the writer thread."""

    # The save has started, or was refused because of NaN or Inf.
    STARTED = "started"
    # The thread is writing the previous checkpoint, or is still preparing the buffers.
    NOT_READY = "not ready"
    # There is no memory for the buffers, or no thread could be started.
    IMPOSSIBLE = "impossible"


class Saving:
    """Saves the checkpoints of one run.

    Args:
        state: The state to save.
        schedule: Decides when a save is due.
        writer: Carries out one save.
        thread: The thread that writes checkpoints while training continues.
        results: Receives the result of each save.
        directory_check: Checks that the run still holds the lock of its directory.
        clock: The source of time.
    """

    def __init__(
        self,
        *,
        state: StateToSave,
        schedule: SaveSchedule,
        writer: SaveWriter,
        thread: WriterThread,
        results: SaveResults,
        directory_check: DirectoryCheck,
        clock: Clock,
    ) -> None:
        self._state = state
        self._schedule = schedule
        self._writer = writer
        self._thread = thread
        self._results = results
        self._directory_check = directory_check
        self._clock = clock
        self._requested = RequestedSaves()

    # --- facts

    def is_due(self, after_steps: int = 0, saved_after: int | None = None) -> bool:
        """Return whether a save is due, on request or according to `SaveSchedule`.

        Args:
            after_steps: If not 0, return whether a save will be due after this many more steps.
            saved_after: If not None, assume that a save will be made after this many more steps.
        """
        if self._requested.are_waiting and saved_after is None:
            return True
        return self._schedule.is_due(after_steps, saved_after)

    @property
    def global_step(self) -> int:
        """Return the number of optimizer steps that have updated the weights."""
        return self._schedule.global_step

    def longest_save_seconds(self) -> float | None:
        """Return how long the longest recent save took in total, or None if none was measured."""
        return self._schedule.longest_save_seconds()

    def take_due(self) -> bool:
        """Return whether a save is due now; see `Saves`."""
        return self.is_due()

    @property
    def has_unsaved(self) -> bool:
        """Return whether there are unsaved steps that may be saved now."""
        return self.may_save_more and not self._results.is_saved(self._state.position())

    @property
    def may_save_more(self) -> bool:
        """Return whether this run saves, has attempted its first save, and may save again now."""
        return (
            self._schedule.is_enabled
            and self._schedule.has_tried
            and self._state.run_state.may_be_saved
        )

    @property
    def is_busy(self) -> bool:
        """Return whether a save is running."""
        self.collect()
        return self._thread.has_job

    @property
    def has_refusal(self) -> bool:
        """Return whether a save was refused since the last call to `take_refusal`."""
        return self._results.has_refusal

    def take_refusal(self) -> str | None:
        """Return why a save has been refused since the last call, or None."""
        return self._results.take_refusal()

    # --- save on request

    def request(self, on_end: OnEnd) -> None:
        """Make a save due at the next boundary.

        Args:
            on_end: Function that is called with the result, perhaps in another thread. If the
                current state is already saved, it is called at once.
        """
        if not self._schedule.is_enabled:
            on_end(
                None,
                "this guard saves no checkpoints (save_interval_steps is None, or a framework"
                " saves them)",
            )
            return
        self.collect()
        if self._results.is_saved(self._state.position()):
            on_end(self._results.newest, None)
            return
        self._requested.add(on_end)

    def end_requests(self) -> None:
        """End all requests that no save has answered, because the run is closed."""
        self._requested.end_all("the run has ended without saving its state")

    @property
    def newest(self) -> Entry | None:
        """Return the newest checkpoint that was saved or loaded."""
        return self._results.newest

    @property
    def newest_failure(self) -> str | None:
        """Return why the newest save has failed. None if it succeeded."""
        return self._results.newest_failure

    # --- save in the training thread

    def save_first(self) -> None:
        """Save a checkpoint before the first step, so that the run can roll back to it."""
        if not self._schedule.has_tried:
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
        if self._schedule.has_tried:
            self._save_current(started)
        else:
            self._save_initial(started)

    def save_again(self) -> None:
        """Save state that the script has changed, even if this step already has a checkpoint."""
        self.finish()
        self._results.note_changes()
        self.save()

    def _is_pointless(self) -> bool:
        """Return whether there is nothing to save, or the state must not be saved."""
        return (
            not self._schedule.is_enabled
            or not self._state.run_state.may_be_saved
            or self._results.is_saved(self._state.position())
        )

    def _save_initial(self, started: float) -> None:
        """Save the state before the first step, and raise any error that later saves would repeat.

        Args:
            started: The time when the save started.
        """
        bad, count = nonfinite_tensors(self._state.must_be_finite())
        if count:
            raise _unhealthy_start(bad, count)
        try:
            self._directory_check.check()
        except OSError as error:
            if _is_lasting(error):
                raise _first_save_error(error) from error
            self._record_early_failure(error, started)
            return
        self._note_attempt()
        try:
            shot = snapshot(self._state.components(), self.global_step)
        except Exception as error:
            let_through(error)
            # A state that can never be saved must be reported before training starts.
            self._schedule.forget_attempt()
            raise
        save = Save(
            shot=shot,
            must_be_finite=(),
            position=self._state.position(),
            started=started,
            is_first=True,
        )
        self._carry_out(save, nonfinite_tensors)
        if save.error is not None and _is_lasting(save.error):
            self._schedule.forget_attempt()
            raise _first_save_error(save.error) from save.error
        self._process_result(save)

    def _save_current(self, started: float) -> None:
        """Save the state after a step, and record any error.

        Args:
            started: The time when the save started.
        """
        try:
            self._directory_check.check()
        except OSError as error:
            self._record_early_failure(error, started)
            return
        self._note_attempt()
        try:
            shot = snapshot(self._state.components(), self.global_step)
        except Exception as error:  # noqa: BLE001 - the user's state_dict may raise anything
            let_through(error)
            self._record_early_failure(error, started)
            return
        save = Save(
            shot=shot,
            must_be_finite=self._state.must_be_finite(),
            position=self._state.position(),
            started=started,
        )
        self._carry_out(save, nonfinite_tensors)
        self._process_result(save)

    def _record_early_failure(self, error: Exception, started: float) -> None:
        """Record that a save has failed before any file was written.

        Args:
            error: The error.
            started: The time when the save started.
        """
        self._note_attempt()
        self._results.add_failure(error)
        self._writer.fail_early(error, started)
        self._requested.note_end(None, describe_error(error))

    def _note_attempt(self) -> None:
        """Record that a save is attempted now."""
        self._schedule.note_attempt()
        self._requested.note_attempt()

    def _carry_out(self, save: Save, find_nonfinite: Callable[[NamedTensors], NonFinite]) -> Save:
        """Carry out a save, in the training thread or in the writer thread."""
        self._writer.carry_out(save, find_nonfinite)
        self._end_requests_of(save)
        return save

    def _end_requests_of(self, save: Save) -> None:
        """Pass the result of a save on to those who have requested it.

        This does not wait until the training thread processes the result, which may take as long as
        a step.
        """
        problem = save.refused
        if save.error is not None:
            problem = describe_error(save.error)
        self._requested.note_end(save.entry, problem)

    # --- save in the background

    def save_when_due(self, *, busy: bool = False) -> None:
        """Start saving the current state in the background.

        If a save is still running, this does nothing. The next boundary tries again.

        Args:
            busy: Whether another rank is still writing its part of the previous checkpoint.
        """
        if busy:
            self.collect()
            return
        if not self._schedule.has_tried or not self._thread.is_enabled:
            self.save()
            return
        self.collect()
        if not self._is_pointless():
            self._save_in_background()

    def _save_in_background(self) -> None:
        """Start a save in a thread. If this is not possible, save in the current thread."""
        started = self._clock.monotonic_seconds()
        try:
            start = _Start.NOT_READY
            if not self._thread.has_job:
                start = self._start_in_background(started)
            if start is _Start.NOT_READY and self._writer.are_several:
                # The other ranks have started to write their parts, so this rank must wait for its
                # writer instead of trying again at the next boundary.
                self.finish()
                start = self._start_in_background(started)
        except RunDirectoryError:
            raise
        except Exception as error:  # noqa: BLE001 - the user's state_dict may raise anything
            let_through(error)
            self._record_early_failure(error, started)
            return
        if start is _Start.IMPOSSIBLE:
            self.save()

    def _start_in_background(self, started: float) -> _Start:
        """Copy the state, and start a thread that writes it.

        Args:
            started: The time when the save started.
        """
        encoded = encode(self._state.components())
        buffers = self._thread.buffers_for(needed_bytes(encoded.tensors))
        if buffers is None:
            return _Start.NOT_READY if self._thread.has_job else _Start.IMPOSSIBLE
        self._directory_check.check()
        self._note_attempt()
        shot = snapshot(encoded, self.global_step, buffers)
        copies, not_copied = _copies_in(shot, self._state.must_be_finite())
        # Some tensors have no copy, because the checkpoint stores them in another form or not at
        # all. They are checked now, before training changes them.
        bad = nonfinite_tensors(not_copied)
        stall = self._clock.monotonic_seconds() - started
        save = Save(
            shot=shot,
            must_be_finite=copies,
            bad=bad,
            position=self._state.position(),
            started=started,
            stall_seconds=stall,
        )
        if bad[1] and not self._writer.are_several:
            self._writer.refuse(save, bad)
            self._end_requests_of(save)
            self._process_result(save)
            return _Start.STARTED
        try:
            self._thread.start(lambda: self._carry_out(save, nonfinite_copies))
        except (MemoryError, RuntimeError) as error:
            if self._writer.are_several:
                raise
            self._thread.disable(f"no thread could be started ({error})")
            return _Start.IMPOSSIBLE
        return _Start.STARTED

    def at_boundary(self) -> None:
        """Process a finished save, check the lock, and prepare the buffers.

        Raises:
            RunDirectoryError: H301 if another run has taken the directory.
        """
        now = self._clock.monotonic_seconds()
        self._schedule.note_boundary(now)
        self._directory_check.at_boundary(now)
        self.collect()
        # After new steps, the optimizers have created their state, so its size is known.
        if (
            self._thread.needs_buffers
            and self._schedule.has_new_steps
            and self._schedule.is_soon(now)
        ):
            self._thread.prepare_buffers(
                lambda: needed_bytes(encode(self._state.components()).tensors)
            )

    def give_up_buffers(self) -> None:
        """Free the buffers permanently, because memory is short.

        From now on, saves run in the training thread.
        """
        thread = self._thread
        are_buffers_wanted = thread.needs_buffers and self._schedule.has_new_steps
        if thread.is_enabled and (thread.has_buffers or are_buffers_wanted):
            self.finish()
            thread.free_buffers()

    # --- results

    def finish(self) -> None:
        """Wait for the running save, if there is one, and process its result."""
        save = self._thread.take_result()
        if save is not None:
            self._process_result(save)

    def collect(self) -> None:
        """Process a finished save, if there is one."""
        if self._thread.has_ended_job:
            self.finish()

    def _process_result(self, save: Save) -> None:
        """Process the result of a save that has ended. This runs in the training thread."""
        self._results.add(save)
        if save.entry is not None:
            self._schedule.note_cost(save)

    # --- after a resume or a rollback

    def note_resumed(self, entry: Entry, costs: Iterable[SaveCost]) -> None:
        """Record that the state was just restored from a checkpoint.

        Args:
            entry: The checkpoint.
            costs: The costs of earlier saves, which the checkpoint contains.
        """
        self._schedule.note_resumed(costs)
        self._results.note_resumed(entry, self._state.position())

    def note_rollback(self, *, to_checkpoint: bool) -> None:
        """Record that the run has rolled back to an earlier step.

        Args:
            to_checkpoint: Whether the run has rolled back to a checkpoint rather than to a snapshot
                in host memory.
        """
        self._schedule.note_rollback(to_checkpoint=to_checkpoint)
        # The state that was refused no longer exists.
        self._results.take_refusal()


def _copies_in(
    shot: Snapshot, named: NamedTensors
) -> tuple[list[tuple[str, torch.Tensor]], list[tuple[str, torch.Tensor]]]:
    """Return the snapshot's copies of some live tensors, and the tensors that have no copy.

    Args:
        shot: The snapshot.
        named: The names and the live tensors.
    """
    copies: list[tuple[str, torch.Tensor]] = []
    not_copied: list[tuple[str, torch.Tensor]] = []
    for name, tensor in named:
        copy = shot.copy_of(tensor)
        if copy is None:
            not_copied.append((name, tensor))
        else:
            copies.append((name, copy))
    return copies, not_copied


def _is_lasting(error: Exception) -> bool:
    """Return whether an error of the first save means that later saves cannot succeed either.

    Some errors of the disk may go away, for example if it is full.
    """
    if isinstance(error, OSError):
        return error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
    return True


def _first_save_error(error: Exception) -> Exception:
    """Return the exception to raise for an error of the first save."""
    if not isinstance(error, OSError):
        return error
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
