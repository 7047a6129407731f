"""The session of a run in one process: opening the run directory, saving, and closing it.

``saved_state`` defines the state of a run, ``restoration`` resumes and rolls back, and ``saving``
decides when and how checkpoints are written.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any

from holdfast.checkpoint.background import wait_for_jobs
from holdfast.checkpoint.interval import IntervalChooser
from holdfast.checkpoint.loading import read_components
from holdfast.checkpoint.saver import Writers
from holdfast.checkpoint.store import Entry, Store
from holdfast.core.clock import Clock
from holdfast.core.errors import CheckpointError, PolicyError, RunDirectoryError
from holdfast.core.events import run_events
from holdfast.core.secret_text import SecretText
from holdfast.core.secrets import SecretUrl
from holdfast.guard.context import RunContext
from holdfast.guard.directory import RunDirectory
from holdfast.guard.outside_requests import OutsideRequests
from holdfast.guard.record import End, describe_error
from holdfast.guard.result import Statistics
from holdfast.guard.run.last_steps import note_last_step
from holdfast.guard.run.restoration import Restoration, chosen_on_first_rank
from holdfast.guard.run.saved_state import SavedState
from holdfast.guard.saving.components import (
    changes_without_a_step,
    check_saveable,
    has_weights_of,
)
from holdfast.guard.saving.directory_check import DirectoryCheck
from holdfast.guard.saving.end_report import EndReport
from holdfast.guard.saving.mirroring import Mirroring
from holdfast.guard.saving.reserves import Reserves
from holdfast.guard.saving.save_results import SaveResults
from holdfast.guard.saving.save_schedule import SaveSchedule, chooser_of
from holdfast.guard.saving.save_writer import SaveWriter
from holdfast.guard.saving.saves import Saving, StateToSave
from holdfast.guard.saving.snapshots import Snapshots
from holdfast.guard.saving.unsaved import forget_left_steps
from holdfast.guard.saving.writer_thread import WriterThread
from holdfast.guard.splitting.loss_functions import called_inside
from holdfast.guard.stop import StopRequest
from holdfast.loader.random_state import RandomState
from holdfast.loader.signalled import let_through
from holdfast.memory.host_memory import available_bytes
from holdfast.recorder.run_files import announce_recording, guarded
from holdfast.recorder.scalars import CheckedScalars, outlets

# Returned by `recording` while the run is open. Created once, since `log` may be called often.
_OPEN = contextlib.nullcontext()
_CHANGED = (
    "the weights, buffers or moments were changed without a step, so they are not those that"
    " training produced"
)


class Session:
    """One run while its directory is open, with the objects that save and restore its state.

    Args:
        context: The shared objects of the run.
        directory: The run directory.
        clock: The source of time.
        stop: The stop request of this process.
    """

    def __init__(
        self, context: RunContext, directory: RunDirectory, clock: Clock, stop: StopRequest
    ) -> None:
        self._directory = directory
        self.clock = clock
        self._loss_scale = context.loss_scale
        self.cursor = context.cursor
        self.schedules = context.schedules
        self.record = context.record
        self.ranks = context.ranks
        self.parts = context.parts
        self.policy = context.policy
        self.ladder = context.ladder
        self.state = context.state
        self.spikes = context.spikes
        self.counters = context.counters
        self._store = Store(directory.checkpoints)
        chooser = chooser_of(context.policy)
        self.saved_state = SavedState(context, directory, chooser)
        self._save_results = SaveResults(directory)
        self.mirroring = Mirroring(
            context.policy,
            directory,
            self._store,
            context.record.emit,
            is_enabled=context.ranks.rank == 0,
        )
        self.saving = self._new_saving(context, chooser)
        self.requests = OutsideRequests(
            directory=directory,
            stop=stop,
            saving=self.saving,
            record=context.record,
            clock=clock,
            is_enabled=context.ranks.rank == 0,
        )
        self.end_report = EndReport(
            directory.path, context.record, self.saving, self._save_results, context.ranks.rank
        )
        self.snapshots = Snapshots(context.policy.snapshot_interval_steps, clock, available_bytes)
        # Memory that the engine may free after an out-of-memory error.
        self.reserves = Reserves(self.snapshots, self.saving)
        self.restoration = Restoration(
            context, directory, self._store, self.saved_state, self.saving, self.snapshots
        )
        # The id of the newest checkpoint when this session last closed the directory. None if it
        # is unknown.
        self._newest_id: int | None = None
        # The names of the optimizers that have not stepped yet. An optimizer's state is checked
        # after its first step, which creates most of the state.
        self._new_state = set(context.parts.optimizers)

    def _new_saving(self, context: RunContext, chooser: IntervalChooser) -> Saving:
        """Create the object that saves the run's checkpoints, with its collaborators."""
        policy = context.policy
        record = context.record
        saved_state = self.saved_state
        writers = context.ranks.writers
        # This process saves nothing if another rank writes for it.
        interval = None if writers is None else policy.save_interval_steps
        devices = context.parts.devices()
        cuda = next((device for device in devices if device.type == "cuda"), None)
        state = StateToSave(
            components=lambda: context.ranks.part_to_save(saved_state.components()),
            must_be_finite=saved_state.must_be_finite,
            position=saved_state.position,
            run_state=context.state,
        )
        thread = WriterThread(
            self._directory.path,
            record,
            cuda,
            is_enabled=policy.async_save and interval is not None,
        )
        return Saving(
            state=state,
            schedule=SaveSchedule(
                interval, chooser, record, self.clock, trains_on_cpu=cuda is None
            ),
            writer=SaveWriter(
                self._store,
                record,
                self.clock,
                writers or Writers(),
                keep_latest_k=policy.keep_latest_k,
                mirroring=self.mirroring,
            ),
            thread=thread,
            results=self._save_results,
            directory_check=DirectoryCheck(self._directory, record, self.clock),
            clock=self.clock,
        )

    @property
    def is_open(self) -> bool:
        """Return whether this session holds the directory's lock."""
        return self.record.is_open

    def open(self) -> None:
        """Lock the run directory, and open the recording.

        Raises:
            RunDirectoryError: H301 if another run has locked the directory. H306 if another process
                has continued the run. H302 if the directory or the recording is not writable.
        """
        # Wait, because an abandoned guard in this process holds the lock until its last save is
        # written.
        wait_for_jobs(self._directory.path)
        self._directory.acquire()
        try:
            if self.ranks.rank == 0:
                self._store.clean_up()
            self.requests.open()
            self._check_not_continued()
            self.record.open()
            announce_recording(self._directory.path)
            self._describe()
            if self.cursor is not None:
                self.cursor.attach(self.record.emit, self._directory.path)
        except BaseException:
            self._directory.release()
            raise
        self.state.open()
        self.ranks.open()
        outlets[self] = None
        for name, optimizer in self.parts.optimizers.items():
            guarded[id(optimizer)] = (name, weakref.ref(self.record))

    def _describe(self) -> None:
        """Record the optimizers, their settings, the batch size and non-default policy fields."""
        settings: dict[str, Any] = {}
        for field in fields(self.policy):
            value = getattr(self.policy, field.name)
            if value != field.default:
                settings[f"policy.{field.name}"] = _without_secret(value)
        for name, optimizer in self.parts.optimizers.items():
            settings[name] = type(optimizer).__name__
        settings |= self.saved_state.settings.begun_with
        batch_size = None if self.cursor is None else self.cursor.batch_size
        if batch_size is not None:
            settings["batch_size"] = batch_size
        self.record.describe(settings)

    def check_not_in_step(self) -> None:
        """Raise H209 if a step is in progress, or H105 if the models hold averaged weights."""
        if self.state.is_attempting:
            raise called_inside("step")
        self.check_averages()

    def check_may_save(self) -> None:
        """Raise an error if the script must not, or can not, save a checkpoint now.

        Raises:
            BatchError: H209 if a step is in progress.
            PolicyError: H105 if the models hold averaged weights, or if the run saves nothing.
        """
        if self.state.is_attempting:
            raise called_inside("save")
        self.check_averages()
        if self.policy.save_interval_steps is None:
            raise PolicyError(
                "guard.save() in a run that saves no checkpoints",
                limit="save_interval_steps is None, by your policy or because a framework saves",
                fix='set save_interval_steps="auto", or save with the framework.',
                rule="H105",
            )

    def check_averages(self, *, required: bool = False) -> None:
        """Raise H105 if the models hold averaged weights at the moment.

        Args:
            required: Whether to raise H105 also if the guard has no average.
        """
        if self.state.averaged or (required and not self.parts.averages):
            problem = "guard.averaged() without an average"
            if self.state.averaged:
                problem = "a step, a save or the next batch was requested inside guard.averaged()"
            raise PolicyError(
                problem,
                limit=(
                    "inside this context the model holds the weights of Guard(averaged=...), for"
                    " evaluation only"
                ),
                fix=(
                    "pass averaged= to Guard; evaluate inside the context, and call"
                    " guard.validated(...) and guard.step(...) after it."
                ),
                rule="H105",
            )

    def _check_not_continued(self) -> None:
        """Raise H306 if another process has saved since this session closed the directory."""
        # The newest checkpoint has the id before the next free one.
        if self._newest_id is not None and self._store.next_save_id() - 1 != self._newest_id:
            raise RunDirectoryError(
                f"another process has continued the run in {self._directory.path}",
                limit="the state in this process is no longer the newest",
                fix="create a new Guard: it resumes from the newest checkpoint.",
                rule="H306",
            )

    def close(self, how: End | None = None) -> None:
        """Wait for a save in progress, end the recording, and unlock the directory.

        Args:
            how: How the run ended; see `RunRecord.close`.
        """
        try:
            self.saving.finish()
            # Discard a refusal to save, since it concerns only the current state, which the script
            # may repair before it opens the run again.
            self.saving.take_refusal()
            if self.is_open:
                note_last_step(self._directory.run_id, self.record.global_step)
                self._newest_id = None
                # If the checkpoints cannot be read, `end_report` reports the unsaved steps.
                with contextlib.suppress(CheckpointError):
                    self._newest_id = (
                        self._store.next_save_id() - 1 if self.ranks.rank == 0 else None
                    )
                self.end_report.report_failed_saves(left=how == "left")
                forget_left_steps(self._directory.path)
                if how == "left":
                    self.end_report.report_left_steps()
                self._report_late_steps()
                self.requests.close()
                self.mirroring.finish()
            self.record.close(how)
            self.ranks.close(in_order=how != "failed" and sys.exception() is None)
        finally:
            outlets.pop(self, None)
            for optimizer in self.parts.optimizers.values():
                guarded.pop(id(optimizer), None)
            self.state.close()
            self._directory.release()

    def _report_late_steps(self) -> None:
        """Record how many steps of the run were decided late, if there were any."""
        counters = self.counters
        if counters.late_steps:
            self.record.emit(
                run_events.LateSteps(
                    steps=counters.late_steps, repeated=counters.repeated_late_steps
                )
            )

    def recording(self, *, events: bool = True) -> AbstractContextManager[None]:
        """Return a context in which events or numbers can be recorded, even after the run ended.

        Args:
            events: Whether events will be recorded. False for numbers only.

        Raises:
            RunDirectoryError: H301 on entering, if another run has locked the directory.
        """
        return _OPEN if self.is_open else self._after_the_loop(events=events)

    @contextlib.contextmanager
    def _after_the_loop(self, *, events: bool) -> Iterator[None]:
        """Reopen the recording of an ended run, and close it again with the same ending on exit."""
        ending = self.record.ended
        with contextlib.ExitStack() as stack:
            self._directory.acquire()
            stack.callback(self._directory.release)
            stack.callback(self.record.close, ending)
            if events and ending != "failed":
                self.record.open()
            yield

    def log(self, scalars: CheckedScalars, step: int | None = None) -> None:
        """Record the user's numbers with the current epoch.

        Args:
            scalars: The numbers by name.
            step: The step to record the numbers for. Defaults to the current step.

        Raises:
            RunDirectoryError: H301 if this run is closed and another run has locked the directory.
        """
        with self.recording(events=False):
            epoch = None if self.cursor is None else self.cursor.epoch
            self.record.scalars.write(
                scalars, self.record.global_step if step is None else step, epoch
            )

    def statistics(self) -> Statistics:
        """Return the run's current totals. With fp16, this synchronizes with the device once."""
        counters = self.counters
        self.saving.collect()
        plan = self.ladder.plan
        return Statistics(
            global_step=self.record.global_step,
            epoch=0 if self.cursor is None else self.cursor.epoch,
            steps=counters.steps,
            skipped_steps=counters.skipped_steps,
            out_of_memory=counters.out_of_memory,
            rollbacks=counters.rollbacks,
            resumes=counters.resumes,
            late_steps=counters.late_steps,
            repeated_late_steps=counters.repeated_late_steps,
            checkpoints_saved=self._save_results.saved,
            checkpoints_failed=self._save_results.failed,
            micro_batch_size=plan.micro_batch_size,
            recompute=bool(plan.recompute),
            loss_scale=self._loss_scale.value(),
        )

    # --- saving

    @property
    def is_calm(self) -> bool:
        """Return whether losses and gradient norms look normal. If not, due saves are postponed."""
        return self.policy.spike_action == "off" or self.spikes.is_calm()

    def check_new_state(self, names: Sequence[str]) -> None:
        """Raise H310 or H105 if an optimizer's state cannot be saved in a checkpoint.

        This is called after each step, but checks each optimizer only after its first step. Without
        the check, every save would fail, and the whole run could be lost.

        Args:
            names: The names of the optimizers that have just stepped.
        """
        if self._new_state:
            new = self._new_state.intersection(names)
            self._new_state -= new
            if new and self.policy.save_interval_steps is not None:
                check_saveable(self.parts, new)

    def save_first(self) -> None:
        """Save a checkpoint before the run's first step, so that the run can always roll back."""
        self._exchange_states()
        self.saving.save_first()

    def save(self) -> None:
        """Save a checkpoint of the current state, and wait until it is written.

        Nothing is saved if the state is incomplete, for example because a step failed partway.
        """
        self._exchange_states()
        self.saving.save()

    def save_current(self, and_then: Callable[[Entry], None]) -> Entry | None:
        """Save a checkpoint of the current state if the run is open, and return it.

        If the run is closed, the newest checkpoint is returned if it holds the current state.

        Args:
            and_then: Function that the first rank calls with the checkpoint. If it raises an
                OSError, the error is recorded and None is returned.

        Returns:
            The checkpoint, or None if no checkpoint holds the current state.
        """
        if self.ranks.has_left_group:
            return None
        if self.is_open:
            self.save()

        def newest_if_current() -> Entry | None:
            entry = self._save_results.newest
            if entry is None or self.saving.has_unsaved:
                return None
            try:
                and_then(entry)
            except OSError as error:
                self.record.emit(
                    run_events.SaveFailed(checkpoint=entry.path.name, error=describe_error(error))
                )
                return None
            return entry

        return chosen_on_first_rank(self.ranks, self._store, newest_if_current)

    def save_when_due(self) -> None:
        """Start saving the current state in the background, because a save is due."""
        self.saving.save_when_due(busy=self._exchange_states())

    def _exchange_states(self) -> bool:
        """Exchange the state that differs between ranks, for the next checkpoint.

        Returns:
            Whether a rank is still writing the previous checkpoint.
        """
        return self.saved_state.exchange(lambda: self.saving.is_busy)

    def states_of_ranks(self) -> dict[str, Any] | None:
        """Return the per-rank state for a checkpoint; see `Ranks.gather_states`."""
        return self.saved_state.states_of_ranks(lambda: self.saving.is_busy)

    def save_unsaved(self, open_again: Callable[[], None]) -> None:
        """Save steps or other changes of state that are not in a checkpoint yet.

        This is called when a run is closed. Weights or moments that the script has changed without
        a step are not saved, since the script may have replaced them with an average, cast them for
        an export, or collected statistics on other data.

        Args:
            open_again: Opens the run directory if it is closed.
        """
        self.saving.finish()
        if self.ranks.has_left_group:
            # The shards of the other ranks can no longer be collected, so nothing can be saved.
            return
        self._exchange_states()
        try:
            if not self.saving.has_unsaved:
                if self.ranks.shards_state:
                    # This rank cannot know whether another rank has changed its shard without a
                    # step.
                    return
                entry = self._checkpoint_to_replace()
                if entry is None:
                    return
                if not has_weights_of(self.parts, entry):
                    self.record.emit(run_events.ChangesNotSaved(why=_CHANGED))
                    return
                self._reuse_random_state_of(entry)
            if not self.is_open:
                open_again()
        except Exception as error:
            let_through(error)
            if self.saving.has_unsaved:
                raise
            self.record.emit(run_events.ChangesNotSaved(why=describe_error(error)))
            return
        self.saving.save_again()

    def _checkpoint_to_replace(self) -> Entry | None:
        """Return the checkpoint of the current position if state has changed since it was saved.

        Return None if nothing has changed, or if the checkpoint must not be replaced.
        """
        entry = self._save_results.newest
        if (
            entry is None
            or not self.saving.may_save_more
            or (self.cursor is not None and self.cursor.left_in_batch)
        ):
            # Nothing may be saved now. For example, the loop was left in the middle of a batch, so
            # a run could not resume from this position.
            return None
        if [newest.save_id for newest in self._store.entries()[:1]] != [entry.save_id]:
            # Another process has continued the run.
            return None
        return entry if changes_without_a_step(self.parts, entry) else None

    def _reuse_random_state_of(self, entry: Entry) -> None:
        """Make the next save at this position reuse the random state in an existing checkpoint.

        Random numbers that the script draws before a loop, or after leaving a loop in the middle of
        an epoch, are not part of training.

        Args:
            entry: The checkpoint of the current position.
        """
        if self.cursor is None:
            return
        if self.cursor.batches or self.restoration.random_state is not None:
            training = read_components(entry, ["training"])["training"]
            random_state = RandomState.from_tree(training["random_state"])
            self.saved_state.reuse_random_state(random_state)

    def take_snapshot(self) -> None:
        """Take a snapshot in host memory, if one is due and the state is complete and finite."""
        step = self.record.global_step
        if not (self.snapshots.is_due(step) and self.state.may_be_saved and self.is_calm):
            return
        try:
            if not self.snapshots.take(step, self.saved_state.components_if_finite):
                self.record.emit(run_events.SnapshotsDoNotFit())
        except Exception as error:  # noqa: BLE001 - the user's state_dict may raise anything
            let_through(error)
            self.snapshots.failed(step)
            self.record.emit(run_events.SnapshotFailed(error=describe_error(error)))


def _without_secret(value: Any) -> Any:
    """Return the value of a policy field as it is recorded."""
    if isinstance(value, SecretUrl):
        return value.redacted
    # str() hides the content of a secret.
    return str(value) if isinstance(value, SecretText) else value
