"""The loop over batches behind `Guard.batches`: when it saves, when it stops, and how it rewinds.

A *boundary* is the moment at which the body of the user's loop has finished with a batch. Only then
is the work for the batch complete, including what the script does after ``step``. Checkpoints are
saved at boundaries.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import PolicyError, RunDirectoryError
from holdfast.core.events import run_events
from holdfast.core.interactive import is_interactive
from holdfast.guard.cursor import Cursor
from holdfast.guard.ranks.interface import PLACE, Saves
from holdfast.guard.record import End
from holdfast.guard.run.own_steps import OwnSteps
from holdfast.guard.run.session import Session
from holdfast.guard.run.steps import Steps
from holdfast.guard.run.time_limit import TimeLimit
from holdfast.guard.saving.unkept import UnkeptNumbers, optimizer_of_unkept_scheduler
from holdfast.guard.saving.unsaved import watch
from holdfast.guard.stop import Interrupted, StopRequest
from holdfast.loader.epoch import take_unkept_loaders
from holdfast.loader.loader import DataLoader
from holdfast.memory.oom import naming_lack_of_memory

# A scheduler that needs a metric is reported if it has received none in the first
# `_EPOCHS_WITHOUT_METRIC` epochs. It is reported at the end of the loop or, once the run has made
# `_STEPS_WITHOUT_METRIC` steps, at the end of an epoch. By default, Lightning evaluates after each
# epoch, and the Hugging Face Trainer every 500 steps.
_EPOCHS_WITHOUT_METRIC = 3
_STEPS_WITHOUT_METRIC = 1000
_NOTHING = contextlib.nullcontext()
# The end of every epoch up to this one is recorded as an event. After that, only some ends of
# epochs are recorded, so that these events never fill the recorder's ring buffer.
_EPOCHS_WITH_EVENTS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The numbers of epochs and steps at which a loop ends, counted over all restarts of the run.

    A limit of None never ends the loop.

    Raises:
        PolicyError: H105 if a limit is not a whole number.
    """

    epochs: int | None
    steps: int | None

    def __post_init__(self) -> None:
        for name, limit in (("max_epochs", self.epochs), ("max_steps", self.steps)):
            if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool)):
                raise PolicyError(
                    f"{name}={limit!r}",
                    limit=f"{name} must be a whole number",
                    fix="pass a whole number.",
                    rule="H105",
                )

    def are_reached(self, *, epochs: int, steps: int) -> bool:
        """Return whether a run with these numbers of completed epochs and steps is at a limit."""
        if self.epochs is not None and epochs >= self.epochs:
            return True
        return self.steps is not None and steps >= self.steps

    def are_passed(self, *, epochs_begun: int, steps: int) -> bool:
        """Return whether a run with these numbers has continued after a loop with these limits."""
        if self.epochs is not None and epochs_begun > self.epochs:
            return True
        return self.steps is not None and steps > self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class _EpochBegin:
    """The progress of the run at the time a loop began to read an epoch."""

    # The return value of `Loop._progress`, which shows later whether a step was run.
    progress: tuple[int, int]
    # Whether the loop reads the epoch from its first batch.
    is_whole: bool
    global_step: int


class Loop:
    """Iterates over the loader of one run, and saves, reports and stops at the boundaries.

    Args:
        session: The session of the run.
        stop: The stop request that all ranks agree on.
        saves: Decides for all ranks when a save is due.
        steps: The steps of the run, of which the last one may be undecided.
        own_steps: The optimizer steps that the script takes without `Guard.step`.
        time_limit: Asks for a stop before the time of the run is over.
    """

    def __init__(
        self,
        session: Session,
        stop: StopRequest,
        saves: Saves,
        steps: Steps,
        own_steps: OwnSteps,
        time_limit: TimeLimit,
    ) -> None:
        self._session = session
        self._record = session.record
        self._ranks = session.ranks
        self._stop = stop
        self._saves = saves
        # Rolls back when a save is refused.
        self._recovery = steps.recovery
        self._steps = steps
        self._time_limit = time_limit
        self._state = session.state
        self._own_steps = own_steps
        # Whether a save is due but was postponed.
        self._postponed = False
        # Whether a resumed script has entered a loop that its earlier attempt has left behind.
        self._repeats_script = False
        self._reported_waiting = False
        # The number of epochs that this loop has read from start to end.
        self._epochs = 0
        self._reported_unkept = False
        # Finds counters that are missing from checkpoints. None once one has been reported.
        self._unkept_numbers: UnkeptNumbers | None = UnkeptNumbers(session.parts)
        self._reported_scheduler = False
        self._reported_loaders = False
        # Whether the most recent loop was left early, without a stop request.
        self._was_left = False
        # Whether the script has asked for a save at the next boundary.
        self._save_requested = False
        # The generator of the most recent loop.
        self._under_way: Generator[Any] | None = None
        watch(self)

    def begin(
        self,
        cursor: Cursor,
        max_epochs: int | None,
        max_steps: int | None,
        release: Callable[[End], None],
    ) -> Generator[Any]:
        """Return an iterator over the batches of a new loop, which `leave` can end early.

        The arguments are those of `batches`.
        """
        self._under_way = self.batches(cursor, max_epochs, max_steps, release)
        return self._under_way

    def leave(self) -> None:
        """End the most recent loop, as ``break`` would, if it is still suspended at a batch."""
        if self._under_way is not None:
            self._under_way.close()

    def end_at_exit(self) -> None:
        """End a run that is still open when the process exits.

        When Python frees the loop's iterator later, it would be too late to save.
        """
        # The generator raises ValueError if another thread is still running it.
        with contextlib.suppress(ValueError):
            self.leave()
        if self._was_left:
            self._record_error_of_script()
        if not self._session.is_open:
            return
        with self._record.errors():
            self._steps.settle_without_others()
        self._session.saving.finish()
        if not self._state.in_loop:
            with self._record.errors():
                self._save_as_asked()
        self._session.end_report.report_failed_saves(left=self._state.in_loop)
        self._session.end_report.report_left_steps()

    def _record_error_of_script(self) -> None:
        """Record the error that ended the script, if a loop was left because of it.

        When the loop body raises an error, Python closes the loop's iterator without saying why.
        """
        error = getattr(sys, "last_value", None)
        # Another guard may hold the run directory by now.
        with contextlib.suppress(RunDirectoryError):
            if isinstance(error, Exception):
                with self._session.recording():
                    self._record.left_by(error)

    def batches(
        self,
        cursor: Cursor,
        max_epochs: int | None,
        max_steps: int | None,
        release: Callable[[End], None],
    ) -> Generator[Any]:
        """Yield batches until a limit is reached or a stop is requested; see `Guard.batches`.

        Args:
            cursor: The position in the loader.
            max_epochs: The limit in epochs, or None.
            max_steps: The limit in optimizer steps, or None.
            release: Function that unlocks the run directory. It is called at the end of the loop,
                with a value that states how the run ended.
        """
        limits = Limits(epochs=max_epochs, steps=max_steps)
        self._undo_repeated_code(cursor, limits)
        self._begin_loop(cursor, limits)
        how: End = "failed"
        try:
            self._session.save_first()
            with self._own_steps:
                while not self._is_finished(cursor, limits):
                    yield from self._epoch(cursor, limits)
            how = self._end_loop(cursor)
        except GeneratorExit:
            with self._record.errors():
                how = "stopped" if self._save_as_asked() else "left"
                self._save_as_requested()
            raise
        except BaseException as error:
            self._note_failure(error)
            raise
        finally:
            self._leave_loop(cursor, how, release)

    def _is_finished(self, cursor: Cursor, limits: Limits) -> bool:
        """Return whether the loop must end at this boundary."""
        if limits.are_reached(epochs=cursor.epoch, steps=self._record.global_step):
            return True
        self._time_limit.check()
        # A checkpoint holds no gradients, so a stop waits for the step that they are for.
        return self._stop.reason is not None and not self._own_steps.accumulates

    def _undo_repeated_code(self, cursor: Cursor, limits: Limits) -> None:
        """Restore a resumed run again if the script has repeated code between finished loops.

        A script may enter a loop for each epoch, and for example step a scheduler after it. When it
        resumes, the loops of finished epochs are empty, and the code after them runs again. The
        checkpoint already contains its effects, except for the code after the loop at whose end the
        checkpoint was saved.
        """
        restoration = self._session.restoration
        if restoration.random_state is None:
            # The run was not resumed, or has continued since.
            return
        steps = self._record.global_step
        if limits.are_passed(epochs_begun=cursor.epoch + (cursor.batches > 0), steps=steps):
            self._repeats_script = True
            return
        if self._repeats_script:
            self._repeats_script = False
            restoration.restore_again()
        if limits.are_reached(epochs=cursor.epoch, steps=steps):
            # The code after this loop draws the random numbers that the next epoch continues from.
            restoration.restore_random_state()

    def _begin_loop(self, cursor: Cursor, limits: Limits) -> None:
        self._steps.settle()
        self._state.enter_loop()
        self._save_requested = False
        begun = run_events.LoopStarted(
            resume_promise=cursor.promise,
            epoch=cursor.epoch,
            batches=cursor.batches,
            max_epochs=limits.epochs,
            max_steps=limits.steps,
        )
        self._record.emit(begun)
        self._expect_schedule_lengths(cursor, limits)
        self._report_unkept(cursor)
        self._report_unkept_scheduler()
        self._epochs = 0
        # Discard the reports about loaders that were advanced before this loop, since only loaders
        # advanced inside the loop matter.
        take_unkept_loaders()

    def _expect_schedule_lengths(self, cursor: Cursor, limits: Limits) -> None:
        """Tell the schedules how long the loop will be, as far as that is certain.

        How many steps an epoch makes is not known, so a limit in epochs only tells whether at least
        one more step follows.
        """
        steps_made = self._record.global_step
        if limits.are_reached(epochs=cursor.epoch, steps=steps_made):
            return
        if self._stop.reason is not None:
            return
        if limits.epochs is None:
            steps = 1 if limits.steps is None else limits.steps - steps_made
            self._session.schedules.expect(steps=steps, epochs=0)
            return
        # In the middle of the last epoch, no batch may be left.
        may_be_over = cursor.batches > 0 and cursor.epoch + 1 >= limits.epochs
        epochs = limits.epochs - cursor.epoch if limits.steps is None else 0
        self._session.schedules.expect(steps=0 if may_be_over else 1, epochs=epochs)

    def _end_loop(self, cursor: Cursor) -> End:
        """Save the state at the end of a complete or stopped loop, and return how the run ended."""
        # A stop request may have arrived after the loop last asked whether a result is needed.
        self._settle()
        if self._stop.reason is None:
            self._report_waiting_schedulers(cursor.epoch)
        self._report_unkept_numbers()
        self._honor_stop()
        self._session.save()
        if self._stop.ends_process:
            # A launcher kills all ranks when the first one exits, so they wait here until the
            # checkpoint is complete.
            self._ranks.agree("stop", dict)
        # Another stop request may have arrived during the save.
        self._honor_stop()
        return "finished" if self._stop.reason is None else "stopped"

    def _note_failure(self, error: BaseException) -> None:
        """Record an error that ends the loop, and save the state if it is complete.

        Raises:
            BaseException: The error of another rank, if that error caused this one.
        """
        cause = self._ranks.announce_failure(error)
        self._record.left_by(cause or error)
        self._steps.settle_without_others()
        is_interrupt = not isinstance(error, Exception)
        directory_is_lost = isinstance(error, RunDirectoryError)
        if not is_interrupt and self._ranks.world_size == 1 and not directory_is_lost:
            # If the loader failed at a boundary, the state is complete. Otherwise, `save` does
            # nothing.
            self._session.saving.save()
        if cause is not None:
            raise cause from error

    def _leave_loop(self, cursor: Cursor, how: End, release: Callable[[End], None]) -> None:
        """Unlock the run directory.

        If the last step was rolled back, the earlier state is first restored again, since the loop
        body may have changed it.
        """
        try:
            self._steps.settle_without_others()
            if self._state.must_rewind:
                self._recovery.roll_back_again()
        except BaseException as error:
            how = "failed"
            self._record.left_by(error)
            raise
        finally:
            # `release` must run even if the rollback fails, so that the directory is unlocked and
            # the signal handlers are restored.
            self.count_batch()
            cursor.leave()
            self._state.leave_loop()
            if self._stop.signal is signal.SIGINT and is_interactive():
                # A second Ctrl-C has ended the loop before its boundary. The user may run the cell
                # of the loop again, so the request must not end that loop too.
                self._stop.honor()
            self._was_left = how == "left"
            release(how)

    def _save_as_asked(self) -> bool:
        """Save a checkpoint if a stop was requested. Called when a loop is left early, or at exit.

        The stop request stays in force and also ends the next loop. With several ranks, nothing is
        saved, because the other ranks may still be in their loops.

        Returns:
            Whether the state was saved.
        """
        if self._stop.reason is None or self._ranks.world_size > 1 or self._own_steps.accumulates:
            return False
        self._steps.settle()
        if not self._session.saving.may_save_more:
            # The state is incomplete, for example because a step failed partway.
            return False
        self.count_batch()
        self._record.emit(
            run_events.StopRequested(reason=self._stop.reason, signal=self._stop.signal_name)
        )
        self._session.save()
        return True

    def _save_as_requested(self) -> None:
        """Save a checkpoint if the script has asked for one in the batch in which it left the loop.

        With several ranks, nothing is saved, because the other ranks may still be in their loops.
        Nothing is saved either while the loop accumulates gradients.
        """
        may_save = self._ranks.world_size == 1 and not self._own_steps.accumulates
        if not (self._save_requested and may_save):
            return
        self._steps.settle()
        if self._session.saving.may_save_more:
            self.count_batch()
            self._session.save()

    def _honor_stop(self) -> None:
        """If a stop was requested, record once that this loop ends because of the request."""
        if self._stop.reason is not None and not self._stop.honored:
            self._stop.honor()
            request = run_events.StopRequested(
                reason=self._stop.reason,
                signal=self._stop.signal_name,
                asked_rank=self._stop.rank,
            )
            self._record.emit(request)

    def _epoch(self, cursor: Cursor, limits: Limits) -> Iterator[Any]:
        """Yield the remaining batches of an epoch.

        The iterator ends before the end of the epoch if the loop is finished, if a signal
        interrupts the wait for a batch, or if the run has returned to an earlier position.
        """
        place = {PLACE: [cursor.epoch, cursor.batches]}
        self._ranks.agree("epoch", lambda: place | self._session.parts.settings())
        iterator = cursor.begin(self._session.restoration.random_state)
        self._report_unkept(cursor)
        self._session.restoration.note_loader_started()
        begun = _EpochBegin(
            progress=self._progress(),
            is_whole=cursor.batches == 0,
            global_step=self._record.global_step,
        )
        while True:
            try:
                with self._interruption(), naming_lack_of_memory("fetching a batch"):
                    batch = cursor.fetch(iterator)
            except StopIteration:
                break
            except Interrupted:
                self._settle()
                return
            self._own_steps.begin_batch()
            yield batch
            self._own_steps.end_batch()
            self._recover_from_failed_step()
            self._session.check_averages()
            self._session.requests.poll()
            self._settle_if_due(limits)
            if self._state.must_rewind:
                # A step has restored an earlier state. The rest of the loop body has run since then
                # and may have changed that state, so restore it again.
                self._recovery.roll_back_again()
                return
            self._pass_boundary(cursor)
            if self._is_finished(cursor, limits):
                return
        # The next epoch draws its order from a generator that a refused step would have to rewind.
        if self._settle():
            return
        self._end_epoch(cursor, begun, needs_steps=limits.steps is not None)

    def _recover_from_failed_step(self) -> None:
        """Return to the newest checkpoint if the script has caught an error of its optimizer."""
        failed = self._own_steps.take_failure()
        if failed is not None:
            self._recovery.after_failed_step(failed)

    def _interruption(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which a stop signal ends the wait for a batch.

        While gradients are accumulated, it does not, since a stop waits for their step.
        """
        return _NOTHING if self._own_steps.accumulates else self._stop

    def _settle(self) -> bool:
        """Read the result of an undecided step between two batches, if there is one.

        Returns:
            Whether the step has returned the run to an earlier position in the data.
        """
        self._steps.settle()
        if not self._state.must_rewind:
            return False
        self._recovery.roll_back_again()
        return True

    def _settle_if_due(self, limits: Limits) -> None:
        """Read the result of an undecided step if the loop depends on it at this boundary."""
        if self._steps.is_settled and self._own_steps.are_recorded:
            return
        global_step = self._record.global_step
        may_end = self._stop.reason is not None or limits.are_reached(epochs=0, steps=global_step)
        may_save = self._save_requested or self._saves.is_due()
        if may_end or may_save or self._session.snapshots.is_due(global_step):
            self._steps.settle()
            self._own_steps.flush()

    def _pass_boundary(self, cursor: Cursor) -> None:
        """Count the batch that the loop body has finished with, and save if a save is due."""
        cursor.advance(used=self._state.batch_is_used)
        self._state.boundary()
        self._report_unkept_loaders()
        self._end_abandoned_epochs()
        # A save that is due at the last batch can wait for the end of the epoch. With several
        # ranks, the first rank has already decided for all ranks whether to wait.
        if self._ranks.world_size > 1 or not cursor.seems_to_end:
            self._save_if_due()

    def _end_epoch(self, cursor: Cursor, begun: _EpochBegin, *, needs_steps: bool) -> None:
        """Record the end of an epoch, advance the schedulers, and save if a save is due."""
        if (slow := self._ranks.end_epoch()) is not None:
            self._record.emit(slow)
        # A loop may accumulate gradients over more than one epoch.
        stepped = begun.progress != self._progress() or self._own_steps.accumulates
        epoch = cursor.end_epoch(needs_steps=needs_steps, stepped=stepped)
        if begun.is_whole:
            self._epochs += 1
        if cursor.epoch <= _EPOCHS_WITH_EVENTS or (
            begun.is_whole and _is_power_of_two(self._epochs)
        ):
            steps = self._record.global_step - begun.global_step
            ended = run_events.EpochEnded(
                epochs=cursor.epoch,
                steps=steps if begun.is_whole else None,
                batches=epoch.batches,
                batch_size=epoch.batch_size,
            )
            self._record.emit(ended)
        if not self._own_steps.accumulates:
            self._session.schedules.after_epoch(cursor.epoch)
        self._report_unkept_numbers()
        self._save_if_due()
        if self._record.global_step >= _STEPS_WITHOUT_METRIC:
            self._report_waiting_schedulers(cursor.epoch)

    def _report_unkept(self, cursor: Cursor) -> None:
        """If a resumed run may read different batches, report the reason once."""
        if self._reported_unkept or cursor.unkept is None:
            return
        self._reported_unkept = True
        self._record.emit(run_events.ResumeMayDiffer(why=cursor.unkept))

    def _report_unkept_scheduler(self) -> None:
        """Report once that an optimizer has a scheduler that was not passed to the guard."""
        if self._reported_scheduler:
            return
        name = optimizer_of_unkept_scheduler(self._session.parts)
        if name is None:
            return
        self._reported_scheduler = True
        why = (
            f"none for the learning rate of optimizer {name!r}, because its scheduler was not"
            " passed to the guard: after a resume, the scheduler starts again from its first step."
            " Pass it: Guard(..., scheduler=scheduler). With scheduler_interval=None, the script"
            " still steps it"
        )
        self._record.emit(run_events.ResumeMayDiffer(why=why))

    def _report_unkept_numbers(self) -> None:
        """Report the first counter of a scheduler or optimizer that its ``state_dict`` lacks."""
        unkept = None if self._unkept_numbers is None else self._unkept_numbers.find()
        if unkept is None:
            return
        self._unkept_numbers = None
        holder, attribute = unkept
        why = (
            f"none for {holder}, because its attribute {attribute} changes during training but is"
            " not in its state_dict(), so a resume starts again from the initial value. Return it"
            " from state_dict(), and restore it in load_state_dict(state)"
        )
        self._record.emit(run_events.ResumeMayDiffer(why=why))

    def _end_abandoned_epochs(self) -> None:
        """Advance loaders in ``state=`` whose epoch the loop body has left, as by ``break``.

        The next iteration would begin their next epoch, so a resumed run must do so, too.
        """
        for stateful in self._session.parts.states.values():
            if isinstance(stateful, DataLoader):
                stateful.end_abandoned_epoch()

    def _report_unkept_loaders(self) -> None:
        """Report once that the loop trains with another loader whose position is not saved.

        Loaders that the loop body iterates to the end without an optimizer step, as in an
        evaluation, are not reported.
        """
        if self._reported_loaders or not take_unkept_loaders():
            return
        self._reported_loaders = True
        why = (
            "none for a second holdfast.DataLoader, because the loop advances it but no checkpoint"
            " holds its position: after a resume it starts from the beginning. Pass it to the"
            ' guard: Guard(..., state={"labelled": loader})'
        )
        self._record.emit(run_events.ResumeMayDiffer(why=why))

    def report_lost_gradients(self) -> None:
        """Report that a checkpoint is saved in the middle of an accumulation of gradients."""
        if self._own_steps.has_called_backward:
            why = (
                "none for the batches since the last optimizer step, because this checkpoint is"
                " saved before the step for which the loop accumulates their gradients, and a"
                " checkpoint holds no gradients. Call guard.validated and guard.close after"
                " optimizer.step()"
            )
            self._record.emit(run_events.ResumeMayDiffer(why=why))

    def _report_waiting_schedulers(self, epochs: int) -> None:
        """Report once which schedulers need a metric but have never received one.

        Args:
            epochs: The number of epochs completed so far.
        """
        if epochs < _EPOCHS_WITHOUT_METRIC or self._reported_waiting:
            return
        waiting = self._session.schedules.without_metric()
        if waiting:
            self._reported_waiting = True
            self._record.emit(
                run_events.SchedulersWait(
                    schedulers=tuple(waiting), fix="call guard.validated(loss)"
                )
            )

    def _save_if_due(self) -> None:
        if self._own_steps.accumulates:
            return
        with naming_lack_of_memory("saving a checkpoint"):
            self._save_now_if_due()

    def _save_now_if_due(self) -> None:
        self._session.saving.at_boundary()
        # A save that was started some steps ago may have been refused since then.
        refused = self._saves.take_refusal()
        if refused is not None:
            # The run is about to return to an earlier state, which does not include this step.
            self._steps.settle()
        else:
            self._session.take_snapshot()
            if self._save_requested:
                self._save_requested = False
                self._session.save()
            elif self._saves.take_due():
                self._save_or_postpone()
            refused = self._saves.take_refusal()
        if refused is not None:
            self._recovery.after_refused_save(refused)

    def _save_or_postpone(self) -> None:
        """Start the save that is due, unless the loss or the gradient norm is unusually high."""
        if self._session.is_calm:
            self._postponed = False
            self._session.save_when_due()
        elif not self._postponed:
            self._record.emit(
                run_events.SavePostponed(
                    why="the loss or gradient norm is unusually high, so the save is delayed"
                )
            )
            self._postponed = True

    def _progress(self) -> tuple[int, int]:
        """Return the numbers of committed and skipped steps, one of which changes in every step.

        The global step is not suitable for detecting steps, since a rollback may reset it to an
        earlier value.
        """
        counters = self._session.counters
        return counters.steps, counters.skipped_steps

    def count_batch(self) -> None:
        """Count the loop body's current batch as trained, if a step was run with it."""
        if self._state.batch_is_used:
            if self._session.cursor is not None:
                self._session.cursor.advance(used=True)
            self._state.boundary()

    def save_at_boundary(self) -> None:
        """Save a checkpoint at the next boundary, because the script has asked for it."""
        self._save_requested = True

    def save_outside(self) -> None:
        """Save a checkpoint now, because a script without a loop has asked for it."""
        self._steps.settle()
        self.count_batch()
        self._session.save()

    def boundary_is_needed(self) -> bool:
        """Return whether there is a reason to save or to stop, without saving anything."""
        self._time_limit.check()
        self._session.requests.poll()
        return self._stop.reason is not None or self._save_requested or self._saves.is_due()

    def boundary_outside(self) -> None:
        """Save if a save is due, in a script that does not iterate `Guard.batches`.

        This is called at the beginning of a step, when the previous step is complete.
        """
        self._time_limit.check()
        self._session.requests.poll()
        self._settle_if_due(Limits(epochs=None, steps=None))
        self._state.boundary()
        self._save_if_due()


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
