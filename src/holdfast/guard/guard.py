"""`Guard`, the public class that guards a training run.

`Guard` delegates its work to these modules:

- ``run/session.py``: the open run directory; ``run/saved_state.py``: the contents of a checkpoint;
  ``run/restoration.py``: resuming and rolling back
- ``run/loop.py``: `Guard.batches`, which saves and stops between batches
- ``run/steps.py``: `Guard.step`, and recovery from a refused step
- ``run/own_steps.py``: optimizer steps that the loop takes itself, without `Guard.step`
- ``step/engine.py``: one step as a transaction
"""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

import torch
from torch import nn

from holdfast.core.clock import Clock, SystemClock
from holdfast.core.errors import HoldfastError, PolicyError
from holdfast.core.events import run_events
from holdfast.core.events.data import EventData
from holdfast.core.events.event import Event
from holdfast.core.interactive import is_interactive
from holdfast.core.policy.policy import Policy
from holdfast.core.standard_streams import reserve_standard_descriptors
from holdfast.core.vector_functions import settle_vector_functions
from holdfast.guard.arguments import check_loader, gather_parts
from holdfast.guard.context import RunContext
from holdfast.guard.cursor import Cursor
from holdfast.guard.directory import RunDirectory
from holdfast.guard.evaluation import BatchEvaluator, EvaluationFunction
from holdfast.guard.images import write_image
from holdfast.guard.notifications import notifications_for
from holdfast.guard.ranks.recognize import ranks_of
from holdfast.guard.record import End, RunRecord
from holdfast.guard.result import Statistics, StepResult
from holdfast.guard.run.joint_steps import JointSteps
from holdfast.guard.run.loop import Loop
from holdfast.guard.run.own_steps import OwnSteps
from holdfast.guard.run.recovery import Recovery
from holdfast.guard.run.session import Session
from holdfast.guard.run.steps import Steps
from holdfast.guard.run.time_limit import TimeLimit
from holdfast.guard.saving.best import Best, BestOf, as_metric
from holdfast.guard.saving.components import check_models_can_be_saved, check_saveable
from holdfast.guard.schedules import Schedules
from holdfast.guard.splitting.split_safety import LossFunction
from holdfast.guard.state.trained_weights import TrainedWeights
from holdfast.guard.step.engine import StepEngine
from holdfast.guard.stop import Interrupted, StopRequest
from holdfast.guard.timing import DecisionTiming
from holdfast.learning.finding import Finding
from holdfast.loader.random_state import capture, restore
from holdfast.loader.splitting import Split
from holdfast.memory.host_memory import set_malloc_threshold
from holdfast.memory.oom import find_out_of_memory, naming_lack_of_memory
from holdfast.recorder.run_files import announce_guard_event
from holdfast.recorder.scalars import check_scalars

# The newest guard of each run directory in this process.
_newest_guards: weakref.WeakValueDictionary[Path, Guard] = weakref.WeakValueDictionary()


class Guard:
    """Keeps a training run alive, correct and within the available memory.

    Creating a guard locks the run directory. If the directory contains a valid checkpoint, the
    state of all objects passed here is restored from the newest one. The directory is unlocked when
    the loop over `batches` ends, when `close` is called, or on exit from the guard as a context
    manager.

    Args:
        run_dir: The run directory. It is created if it does not exist.
        model: A module, or a dict of modules by name. With several ranks, it must be a single
            module that is wrapped in ``DistributedDataParallel`` or sharded by ``fully_shard``.
        optimizer: An optimizer, or a dict of optimizers by name. All their parameters must belong
            to the models.
        scheduler: A learning-rate scheduler, or a dict of schedulers by optimizer name. Any
            object with ``step()``, ``state_dict()`` and ``load_state_dict(state)`` is stepped at
            ``Policy.scheduler_interval``. ReduceLROnPlateau is stepped by `validated`, since it
            needs your metric. timm's schedulers are stepped both after steps and after epochs.
        loader: The loader that `batches` iterates: a `holdfast.DataLoader` or any other iterable
            of batches.
        state: Additional state to save, by name: objects with ``state_dict`` and
            ``load_state_dict``.
        averaged: A ``torch.optim.swa_utils.AveragedModel`` of the unwrapped model, or a dict of
            averages by model name. It is updated after each committed step that changed the model's
            weights; see `averaged`.
        policy: A `Policy`, a dict of its fields, the path of a YAML file, or None for the
            defaults. ``HOLDFAST_*`` environment variables override files and defaults.
        split: The position of the batch dimension: a number, a prefix of the batch's structure, or
            a function of the batch and the micro-batch size. See ``guard.splitting``.
        clock: The source of time. Tests pass a fake clock.
        **overrides: Policy fields by name, such as ``precision="bf16"``. They take precedence over
            `policy`.

    Raises:
        PolicyError: H1xx for an invalid argument. With several ranks, also H108 or H115.
        RankError: H114 if another rank has failed.
        RunDirectoryError: H30x if the directory is locked, not writable, written by a newer version
            of holdfast, or belongs to another model. H32x if the mirror cannot be used.
        CheckpointError: H31x if no checkpoint can be verified, or if the newest one does not fit
            the objects passed here.

    Example:
        >>> import tempfile, torch, holdfast
        >>> model = torch.nn.Linear(2, 1)
        >>> data = [torch.randn(8, 2) for _ in range(3)]
        >>> guard = holdfast.Guard(tempfile.mkdtemp(), model=model, loader=data,
        ...                        optimizer=torch.optim.AdamW(model.parameters()))
        >>> for batch in guard.batches(max_epochs=2):
        ...     result = guard.step(batch, lambda x: model(x).square().mean())
        >>> guard.global_step
        6
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        model: torch.nn.Module | Mapping[str, torch.nn.Module],
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
        scheduler: Any = None,
        loader: Iterable[Any] | None = None,
        state: Any = None,
        averaged: Any = None,
        policy: Policy | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        split: Split = 0,
        clock: Clock | None = None,
        **overrides: Any,
    ) -> None:
        reserve_standard_descriptors()
        with naming_lack_of_memory("creating the guard"):
            self._parts = gather_parts(model, optimizer, scheduler, state, averaged)
            self._ranks = ranks_of(self._parts)
            # An error on one rank is raised on all of them.
            with self._ranks.together():
                self._begin(
                    run_dir, loader, split, clock or SystemClock(), Policy.of(policy, **overrides)
                )

    def _begin(
        self,
        run_dir: str | os.PathLike[str],
        loader: Iterable[Any] | None,
        split: Split,
        clock: Clock,
        policy: Policy,
    ) -> None:
        ranks = self._ranks
        self.policy = ranks.supported_policy(policy)
        schedules = Schedules(
            self._parts.schedulers,
            self._parts.optimizers,
            self.policy.scheduler_interval,
            has_epochs=loader is not None,
        )
        if loader is not None:
            check_loader(loader)
        if self.policy.save_interval_steps is not None:
            check_models_can_be_saved(self._parts)
            check_saveable(self._parts)
        settle_vector_functions(torch)
        if (
            self.policy.cpu_malloc_threshold_bytes is not None
            and self._parts.device_type() == "cpu"
        ):
            set_malloc_threshold(self.policy.cpu_malloc_threshold_bytes)
        self._cursor = None if loader is None else self._cursor_over(loader)
        # The best values of each validation metric, by the metric's name.
        self._validated: dict[str, BestOf] = {}
        # True once the position in the data is settled: either `batches` has moved there, or the
        # user was warned that the script must do so itself.
        self._position_known = False
        # Closing this stack inside `averaged` restores the trained weights early.
        self._swapped = ExitStack()
        self._trained_weights = TrainedWeights(self._parts.models)
        with ranks.in_turn():
            self._directory = RunDirectory(run_dir, ranks.rank)
        self._record = RunRecord(
            self._directory.recorder, clock, ranks.rank if ranks.world_size > 1 else None
        )
        # The observer of `holdfast run` must know of rollbacks and stops.
        self._record.listen(announce_guard_event)
        if ranks.rank == 0:
            # The other ranks would send the same messages.
            notifications_for(self.policy, self._directory.path.name, self._record, clock)
        # The stop request of this process. All ranks agree on one request, `self._stop`.
        self._asked = StopRequest(self.policy.stop_signals, self._record.note_stop_signal)
        self._loader = loader
        self._split = split
        self._evaluator = BatchEvaluator(
            self._parts.models.values(),
            self._parts.devices(),
            self._parts.device_type(),
            self.policy.precision,
            may_split=ranks.world_size == 1,
        )
        context = RunContext.of(
            self._parts, self.policy, self._record, ranks, self._cursor, schedules
        )
        self._session = Session(context, self._directory, clock, self._asked)
        self._engine = StepEngine(context, split, self._session.reserves)
        recovery = self._new_recovery()
        timing = DecisionTiming(context, self._framework())
        steps_type = JointSteps if ranks.has_group else Steps
        self._steps = steps_type(self._session, self._engine, recovery, timing)
        self._stop, saves = ranks.connect(self._asked, self._session.saving, self._cursor)
        self._own_steps = OwnSteps(
            self._session,
            _weak_call(self._open),
            self._trained_weights.remember,
            self._why_guard_must_step(),
        )
        self._boundaries = Loop(
            self._session,
            self._stop,
            saves,
            self._steps,
            self._own_steps,
            self._new_time_limit(clock),
        )
        weakref.finalize(self, self._asked.uninstall)
        # At exit, this must run before the interpreter shuts down. If the observer's hooks were
        # removed later, torch would abort the process.
        weakref.finalize(self, self._engine.diagnosis.close)
        with ranks.in_turn():
            self._take_over_in_notebook()
            self._open()
        _newest_guards[self._directory.path] = self
        try:
            with naming_lack_of_memory("resuming from a checkpoint"):
                self.resumed_from: Path | None = self._resume()
            self._report_steps_left_behind()
            self._trained_weights.remember()
        except BaseException:
            self._release()
            raise

    def _take_over_in_notebook(self) -> None:
        """Close an idle guard of the same run, because a notebook's cell is being run again.

        The variable in the cell still refers to the earlier guard, which therefore holds the lock.
        Nothing is saved, since other cells may have changed the weights; steps that are in no
        checkpoint are reported. A guard whose loop is still suspended keeps the lock.
        """
        earlier = _newest_guards.get(self._directory.path)
        if earlier is None or not is_interactive() or self._ranks.world_size > 1:
            return
        state = earlier._session.state
        if earlier._session.is_open and not state.in_loop and not state.is_attempting:
            earlier._release()

    def _new_time_limit(self, clock: Clock) -> TimeLimit:
        """Return the object that asks for a stop before the time of the run is over."""
        # The other ranks learn of a request in the next step, and a framework reads it after that.
        is_alone = self._ranks.world_size == 1 and self._framework() is None
        return TimeLimit(
            # A request by the first rank stops all ranks.
            self.policy.max_time if self._ranks.rank == 0 else None,
            self._asked,
            self._session.saving,
            self._record,
            clock,
            steps_until_stop=0 if is_alone else 1,
        )

    def _new_recovery(self) -> Recovery:
        """Create the object that recovers from refused steps. `ScriptGuard` overrides this."""
        return Recovery(self._session)

    def _resume(self) -> Path | None:
        """Resume from the newest checkpoint, if there is one. `ScriptGuard` overrides this.

        If the mirror has a newer checkpoint than the run directory, it is fetched first.
        """
        self._session.mirroring.start()
        try:
            resumed_from = self._session.restoration.resume()
        except HoldfastError as error:
            misfit = self._session.mirroring.undo_pull(error)
            if misfit is None:
                raise
            raise misfit from error
        self._session.mirroring.offer_newest()
        return resumed_from

    def _cursor_over(self, loader: Iterable[Any]) -> Cursor:
        """Return a cursor at the beginning of a loader. `HostedGuard` returns another type."""
        return Cursor(loader, self._parts.devices())

    def _framework(self) -> str | None:
        """Return why a framework needs the result of a step at once, or None without a framework.

        `HostedGuard` overrides this.
        """
        return None

    def _why_guard_must_step(self) -> str | None:
        """Return why the loop must not step the optimizers itself, or None if it may.

        `AcceleratedGuard` overrides this.
        """
        if self._framework() is not None:
            return "a guard for a framework sees only the steps of guard.step"
        if self._ranks.world_size > 1:
            return "several ranks agree on saves and stops in guard.step"
        return None

    def _report_steps_left_behind(self) -> None:
        self._session.restoration.report_steps_left_behind()

    # --- progress and recorded events

    @property
    def global_step(self) -> int:
        """Return the number of optimizer steps that have updated the weights, over all restarts.

        A rollback resets this number to that of the restored state. If the result of the last step
        is not known yet (see ``Policy.decide``), the step is counted, and the number drops by one
        if it is refused. Reading the number never waits.
        """
        return self._record.global_step

    @property
    def epoch(self) -> int:
        """Return the number of epochs that `batches` has completed, over all restarts."""
        if self._cursor is None:
            return 0
        return self._cursor.epoch

    @property
    def epochs_validated(self) -> int:
        """Return the number of epochs that were complete at the last call to `validated`.

        After a restart, this is the value from the newest checkpoint. Validations that the previous
        process ran after its last save are not counted.
        """
        return self._session.counters.epochs_validated

    @property
    def stop_reason(self) -> str | None:
        """Return why the run was asked to stop, such as ``"SIGUSR1"``, or None if it was not.

        All ranks return the same reason, regardless of which rank received the request. The signals
        that stop a run are set by ``Policy.stop_signals``. If the time of the run is nearly over,
        the reason begins with ``"max_time"``; see ``Policy.max_time``. After `holdfast stop`, it is
        ``"requested from outside"``.
        """
        return self._stop.reason

    def statistics(self) -> Statistics:
        """Return a snapshot of the run's totals.

        With fp16, this synchronizes with the device once. If the result of the last step is not
        known yet, this waits for it. In another thread, that step is counted as committed.
        """
        self._settle_to_read()
        return self._session.statistics()

    def _settle(self) -> None:
        """Read the result of the last step if it is not known yet."""
        with naming_lack_of_memory("running a step"):
            if self._steps.may_repeat and not self._record.is_open:
                # All ranks have left their loops after a refused step, and meet again only here.
                self._open()
            self._steps.settle()

    def _settle_without_others(self) -> None:
        """Read the result of the last step, as far as this is possible without other ranks."""
        with naming_lack_of_memory("running a step"):
            self._steps.settle_without_others()

    def _settle_to_read(self) -> None:
        """Read the result of the last step, unless another thread runs the steps."""
        with naming_lack_of_memory("running a step"):
            self._steps.settle_to_read()

    def events(self) -> list[Event]:
        """Return all events of the run, oldest first, including those of earlier processes."""
        self._settle_to_read()
        return self._record.events()

    def save(self) -> None:
        """Save a checkpoint of the current state, whether or not one is due.

        Inside the loop over `batches`, the checkpoint is saved at the end of the current batch,
        since only then is the work of the loop body complete. It is written before the next batch
        is yielded. A loop that accumulates gradients for its own ``optimizer.step()`` saves at the
        end of the batch in which it steps. Anywhere else, the checkpoint is written before this
        method returns; after the loop, this method does the same as `close`.

        If a checkpoint already holds the current state, nothing is saved. If the save fails, the
        failure is recorded, and training continues. A state with NaN or Inf is not saved.

        With several ranks, all of them must call this method at the same point.

        Raises:
            BatchError: H209 if the loss function calls this method.
            PolicyError: H105 if the guard saves no checkpoints, or inside `averaged`.
            RankError: H116 if the ranks are at different points of the program, H114 if a rank does
                not arrive.
        """
        self._session.check_may_save()
        if not self._session.is_open:
            self.close()
            return
        self._ranks.agree("guard.save", dict)
        if self._session.state.in_loop:
            self._boundaries.save_at_boundary()
            return
        with naming_lack_of_memory("saving a checkpoint"):
            self._boundaries.save_outside()

    def request_stop(self, reason: str = "requested") -> None:
        """Ask the run to save a checkpoint and stop at the next boundary.

        Args:
            reason: The reason for `stop_reason` and the recorded event.
        """
        self._asked.request(reason)

    # --- the loop

    def batches(
        self, *, max_epochs: int | None = None, max_steps: int | None = None
    ) -> Iterator[Any]:
        """Yield batches from the run's current position until a limit or a stop request.

        A checkpoint is saved whenever one is due and at the end of the loop. Then the run directory
        is unlocked. If the last save fails, the loop ends normally, but the process exits with code
        74 unless a later save succeeds.

        A signal in ``Policy.stop_signals`` ends the loop once a checkpoint is saved, and so does
        ``Policy.max_time``. The script can read `stop_reason` after the loop.

        If you leave the loop early, by ``break`` or by calling ``next`` only a few times, no
        checkpoint is saved unless a stop was requested. Call `request_stop` instead, or `close`
        afterwards. Otherwise, a line on stderr reports the unsaved steps when the process exits.
        Starting a new loop ends the previous one, as ``break`` does.

        Args:
            max_epochs: The number of passes over the loader, counted over all restarts of the run.
            max_steps: The number of optimizer steps, counted over all restarts of the run.

        Raises:
            PolicyError: H105 without a loader or without a limit.
            LoaderError: H601 for an empty loader. H602 if a whole epoch passes without a step, so
                that `max_steps` would never be reached.
            SystemExit: After a stop by a signal or by ``Policy.max_time``, and the last save, if
                ``Policy.stop_exit_code`` is set.
            KeyboardInterrupt: After Ctrl-C and the last save, if ``Policy.stop_exit_code`` is not
                set.
        """
        if self._cursor is None or (max_epochs is None and max_steps is None):
            missing = "loader=" if self._cursor is None else "max_epochs= or max_steps="
            raise PolicyError(
                f"batches() without {missing}",
                limit="the loop needs to know what to iterate over and when to end",
                fix=f"pass {missing} to {'Guard' if self._cursor is None else 'batches()'}.",
                rule="H105",
            )
        return self._loop(self._cursor, max_epochs, max_steps)

    def _loop(self, cursor: Cursor, max_epochs: int | None, max_steps: int | None) -> Iterator[Any]:
        self._session.check_not_in_step()
        # End the previous loop now. Otherwise, its iterator would end this one when it is garbage
        # collected.
        self._boundaries.leave()
        self._position_known = True
        with naming_lack_of_memory("iterating over batches"):
            self._stop.reset(raised=self._ending() is not None)
            # `_loop` is a generator, so the directory is opened when the first batch is requested.
            self._ready()
            self._asked.install()
            yield from self._boundaries.begin(cursor, max_epochs, max_steps, self._release)
            ending = self._ending()
        if ending is not None:
            raise ending

    def _ready(self) -> None:
        """Open the run directory if it is closed, before a step or a loop.

        If the script does not iterate `batches`, each call to `step` marks the end of the previous
        step. A due checkpoint is then saved, and a stop signal or ``Policy.max_time`` ends the
        process.
        """
        self._session.check_not_in_step()
        if self._stop.honored and self._ending() is not None:
            # The script has caught the exception that the stop raised, and continues training.
            self._stop.reset(raised=True)
        if not self._record.is_open:
            self._open()
        if not self._session.state.in_loop:
            if self.resumed_from is not None and not self._position_known:
                self._position_known = True
                self._record.emit(run_events.PositionNotKept())
            self._boundaries.boundary_outside()
            if self._stop.ends_process:
                self._end_process()

    # --- the step

    def step(
        self,
        batch: Any,
        loss_fn: LossFunction,
        *,
        optimizer: str | Sequence[str] | None = None,
        split: Split | None = None,
    ) -> StepResult:
        """Run one training step: forward, backward, gradient clipping and optimizer step.

        The step is a transaction: it either takes effect completely or not at all.

        Args:
            batch: The batch, any pytree of tensors.
            loss_fn: A function that takes the batch, or a part of it, and returns its mean loss as
                a scalar tensor, as a `Loss`, or as a pair ``(mean, items)``. It may be called
                several times in one step, so it should change no state other than buffers and the
                objects passed as ``state=``.
            optimizer: The name of the optimizer to step, or a sequence of names. If None, all
                optimizers are stepped. Only the parameters of these optimizers receive gradients.
            split: Overrides the guard's `split` for this batch.

        Returns:
            The result of the step. ``skipped`` is True if the weights were not updated with this
            batch.

        Raises:
            BatchError: H2xx if the batch or the loss is unusable. The step has no effect.
            OutOfMemoryError: H401 if the batch does not fit in memory after all remedies. H402 if
                an optimizer ran out of memory in the middle of its step and the run cannot roll
                back.
            NonFiniteError: H501 if losses or gradients stay NaN or Inf.
            DivergenceError: H503 if the loss has diverged and ``Policy.max_rollbacks`` is used up.
        """
        try:
            names = self._parts.optimizer_names(optimizer)
            with naming_lack_of_memory("running a step"):
                self._own_steps.note_guarded_step()
                self._ready()
                result = self._steps.step(batch, loss_fn, names, split=split)
                self._trained_weights.remember()
                return result
        except BaseException as error:
            self._leave(error)
            raise

    def _leave(self, error: BaseException) -> None:
        """Record an error that is about to be raised to the guard's caller.

        If it was caused by another rank's error, that error is recorded and raised instead.
        """
        cause = self._ranks.announce_failure(error)
        self._record.left_by(cause or error)
        if cause is not None:
            raise cause from error

    # --- opening, closing

    def _open(self) -> None:
        with naming_lack_of_memory("opening the run directory"):
            self._session.open()
            self._asked.install()
            for name in self._asked.left_alone:
                self._record.emit(run_events.SignalLeftAlone(signal=name))
            self._engine.diagnosis.open()

    def _release(self, how: End | None = None) -> None:
        try:
            self._settle_without_others()
        except BaseException as error:
            self._record.left_by(error)
            self._close_session("failed")
            raise
        self._close_session(how)

    def _close_session(self, how: End | None) -> None:
        """Stop observing, and unlock the run directory."""
        self._boundaries.count_batch()
        self._asked.uninstall()
        try:
            self._engine.diagnosis.close()
        finally:
            self._session.close(how)

    def close(self) -> None:
        """Save any steps that are not yet in a checkpoint, and unlock the run directory.

        This method may be called more than once.
        """
        with naming_lack_of_memory("saving and closing the run"):
            self._session.check_averages()
            self._settle()
            self._boundaries.count_batch()
            if self._session.saving.has_unsaved:
                self._boundaries.report_lost_gradients()
            try:
                self._session.save_unsaved(self._open)
            finally:
                self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._record.left_by(kind if error is None else error)
            self._ranks.announce_failure(RuntimeError(kind.__name__) if error is None else error)
            self._release("failed")

    def _end_process(self) -> NoReturn:
        """Save a checkpoint and exit, because there is no loop over `batches` that could end."""
        self._swapped.close()
        self._settle()
        self._record_stop()
        self._boundaries.count_batch()
        self._session.save_unsaved(self._open)
        # If the run has not completed a step yet, this writes its first checkpoint.
        self._session.save()
        self._release_and_exit()

    def _record_stop(self) -> None:
        """Record that the run ends because of a stop request."""
        self._stop.honor()
        request = run_events.StopRequested(
            reason=str(self._stop.reason),
            signal=self._stop.signal_name,
            asked_rank=self._stop.rank,
        )
        self._record.emit(request)

    def _release_and_exit(self) -> NoReturn:
        """Unlock the run directory, and exit after a stop request."""
        self._release("stopped")
        raise self._ending() or SystemExit(0) from None

    def _ending(self) -> BaseException | None:
        """Return the exception to raise after a signal or the time has stopped the run, or None.

        Ctrl-C raises KeyboardInterrupt, as it would without a guard, so that a notebook's "Run all"
        stops.
        """
        # Fall back on this process's own signal, which may have arrived too late for the ranks to
        # agree on it.
        number = self._stop.signal or self._asked.signal
        if number is None and not self._stop.ends_process:
            return None
        if self.policy.stop_exit_code is not None:
            return SystemExit(self.policy.stop_exit_code)
        return KeyboardInterrupt() if number == signal.SIGINT else None

    # --- evaluation

    def validated(
        self,
        value: float | torch.Tensor,
        *,
        name: str = "loss",
        mode: Literal["min", "max"] = "min",
        keep: int | None = None,
        patience: int | None = None,
    ) -> bool:
        """Report a metric that was measured on the validation set.

        The guard passes the value to the ``step`` of every ReduceLROnPlateau that has this `mode`.
        The diagnosis uses the metric ``"loss"`` to detect overfitting. With several ranks, all of
        them must report the same value.

        Args:
            value: The metric over the whole validation set: a number, or a tensor with one element.
                NaN and Inf are never the best value, but count towards `patience`.
            name: The name of the metric.
            mode: ``"min"`` if lower values are better, ``"max"`` if higher values are better.
            keep: The number of best checkpoints to keep in addition to the newest ones; see `best`.
                If this value is among the best, a checkpoint is saved immediately. Defaults to 0
                for the metric ``"loss"`` and to 1 for all others.
            patience: Stop the run, as `request_stop` does, after this many validations in a row
                without a new best value. If None, validations never stop the run.

        Returns:
            Whether a checkpoint of the current state was kept as one of the best.

        Raises:
            PolicyError: H105 for an invalid argument, H115 if the ranks report different values.
        """
        self._session.check_averages()
        self._settle()
        number = as_metric(value, keep, patience)
        if name not in self._validated:
            # Every rank reads the saved best values here, before rank 0 overwrites them.
            self._validated[name] = BestOf(
                self._directory.path, name, mode, writes=self._ranks.rank == 0
            )
        best = self._validated[name]
        with self._ranks.together():
            # NaN is not equal to itself, so the values are compared as text.
            self._ranks.agree("guard.validated", lambda: {name: repr(number)})
        self._session.counters.note_validation(self.epoch)
        changed = self._session.schedules.validated(number, mode, self.epoch)
        if name == "loss":
            self._engine.diagnosis.validated(number)
        most = keep
        if most is None:
            most = 0 if name == "loss" else 1
        entry = None
        if best.is_better(number, self.global_step, most):
            if self._session.is_open:
                # The weights include the last step's batch, so the checkpoint must count it.
                self._boundaries.count_batch()
            self._boundaries.report_lost_gradients()
            entry = self._session.save_current(and_then=best.link)
        if entry is not None:
            best.keep(number, entry, most)
        best.write()
        self.emit(
            run_events.Validated(
                loss=number,
                learning_rate_changed_by=tuple(changed),
                name=name,
                kept_as=None if entry is None else entry.path.name,
            )
        )
        if patience is not None and best.waited >= patience:
            self.request_stop(f"{name} did not improve in {best.waited} validations")
        return entry is not None

    def best(self, name: str = "loss") -> Best | None:
        """Return the best checkpoint that `validated` has kept for a metric, or None.

        Checkpoints kept by earlier processes of the run are considered too.

        Args:
            name: The name of the metric, as passed to `validated`.
        """
        return next(iter(BestOf(self._directory.path, name, "min", writes=False).kept), None)

    def diagnose(self) -> list[Finding]:
        """Return possible reasons why the run is not learning, most important first.

        Most findings are also recorded as events as soon as they are detected. Two are reported
        only here, because they are less reliable: that the run does not learn (H828) and that its
        loss has risen (H826). The list is empty if the policy has ``diagnose=False``.
        """
        self._settle_without_others()
        return self._engine.diagnosis.findings_on_request()

    def emit(self, data: EventData) -> None:
        """Record an event, to be shown by `holdfast events` and in the report.

        Args:
            data: An event from ``core.events.run_events``, or an instance of your own subclass of
                `EventData`.
        """
        with self._session.recording():
            self._record.emit(data)
        if isinstance(data, run_events.Aligned):
            self._engine.diagnosis.aligned(data.facts())

    def log(
        self, values: Mapping[str, Any] | None = None, /, *, split: str = "", **more: Any
    ) -> None:
        """Record your own numbers with the current step, epoch and time.

        The numbers appear in all reports. This method may also be called after the loop.

        Args:
            values: Numbers, or tensors with one element, by name. Reading a tensor on an
                accelerator synchronizes with the device.
            split: A prefix such as ``"validation"``, shown as ``split/name``. The prefix and the
                name together may have at most 64 bytes in UTF-8.
            **more: Further values by name, such as ``accuracy=0.93``. NaN and Inf are recorded
                too.

        Raises:
            PolicyError: H117 for a value that is not a number, or a name that is empty or too long.
                A full disk does not raise an error.
        """
        self._session.log(check_scalars(values, split, more))

    def add_image(self, tag: str, image: Any) -> None:
        """Save an image for the current step, such as a grid of samples.

        The report shows the newest image of each tag. The last 16 images of each tag are kept in
        the run directory, as ``images/<tag>/<step>.png``. After a rollback or a resume, images of
        later steps stay there until the run reaches those steps again.

        Args:
            tag: The name of the series: at most 64 letters, digits, ``-``, ``_`` and ``.``.
            image: An array or tensor of shape ``(height, width)`` or ``(height, width, 3)``, with
                uint8 values or floats from 0 to 1. Floats outside this range are clipped, and NaN
                becomes black. The recorded event counts both.

        Raises:
            PolicyError: H105 for an invalid tag or image, H742 if Pillow is missing. Install the
                extra ``report`` to get Pillow. A full disk does not raise an error.
        """
        with self._session.recording():
            write_image(self._directory.path, self._record, tag, image)

    @contextmanager
    def evaluate(self) -> Iterator[None]:
        """Put the models into evaluation mode and disable gradients inside the context.

        On exit, the mode of each module and the random state are restored, so an evaluation has no
        effect on training.

        A signal in ``Policy.stop_signals`` interrupts the evaluation. A checkpoint is saved, and
        the process exits with ``Policy.stop_exit_code`` or 0. After Ctrl-C, it ends with a
        KeyboardInterrupt unless ``Policy.stop_exit_code`` is set. The rest of the loop body does
        not run, because an interrupted evaluation has no result.

        After `request_stop`, the evaluation completes before the loop ends. The same applies to a
        signal that arrives while the models hold weights other than the trained ones, such as an
        average that the script has swapped in, because a checkpoint would contain those weights.

        ``Policy.max_time`` is checked between steps only, so it does not interrupt an evaluation.
        An evaluation in the body of the loop counts as part of a step, though, so the run stops
        before one that would take too long if it took as long as an earlier one.
        """
        try:
            self._settle_without_others()
            models, devices = list(self._parts.models.values()), self._parts.devices()
            stop = self._stop.interrupting_if(self._may_save_in_evaluation)
            with self._record.errors(), stop, evaluating(models, devices):
                yield
        except Interrupted:
            self._end_process()

    def evaluate_batches(
        self,
        loader: Iterable[Any],
        fn: EvaluationFunction,
        *,
        split: Split | None = None,
    ) -> Any:
        """Call a function on every batch of a loader inside `evaluate`, and combine its outputs.

        A batch that does not fit into memory is split into halves, and again until the parts fit.
        The size that fits is remembered for later batches and evaluations of the same function.
        With several ranks, batches are never split, because the ranks would then call a model that
        runs collectives different numbers of times.

        Args:
            loader: The batches to evaluate. This must not be the guard's own `loader`, since
                iterating it would move the position of training.
            fn: A function that takes a batch, or a part of one, and returns a tree of outputs:
                tuples and dicts whose leaves are tensors, lists, means, scalars or None. It runs in
                the policy's precision.
            split: The position of the batch dimension. If None, the guard's `split` is used.

        Returns:
            A tree with the structure that `fn` returns, with the outputs for the whole loader and
            tensors on the CPU. A tensor of shape ``(samples, ...)`` or a list with one entry per
            sample is concatenated in the order of the samples. A mean over items, as a `Loss` or
            as a pair ``(mean, items)`` with at least one item per sample, becomes the mean over all
            items, as a float. Any other scalar becomes a tensor of shape ``(batches,)``. None stays
            None. A mapping becomes a dict.

        Raises:
            BatchError: H204 if the loader yields no batch, or if outputs cannot be combined. H205
                if a batch that had to be split has a scalar output.
            OutOfMemoryError: H401 if a batch does not fit and cannot be split further.
            PolicyError: H105 if `loader` is the guard's own loader, or an argument is invalid.

        Example:
            >>> import tempfile, torch, holdfast
            >>> model = torch.nn.Linear(2, 3)
            >>> guard = holdfast.Guard(tempfile.mkdtemp(), model=model,
            ...                        optimizer=torch.optim.SGD(model.parameters()))
            >>> batches = [torch.randn(8, 2), torch.randn(5, 2)]
            >>> logits, loss = guard.evaluate_batches(
            ...     batches, lambda x: (model(x), (model(x).square().mean(), len(x))))
            >>> logits.shape, type(loss)
            (torch.Size([13, 3]), <class 'float'>)
        """
        check_loader(loader)
        if not callable(fn):
            raise PolicyError(
                f"guard.evaluate_batches with a {type(fn).__name__} as fn",
                limit="it is called with each batch",
                fix="pass a function of the batch, such as lambda batch: model(batch[0]).",
                rule="H105",
            )
        if loader is self._loader:
            raise PolicyError(
                "guard.evaluate_batches with the loader that was passed to Guard",
                limit="iterating over it would change the position of the training run",
                fix="create a separate loader for the evaluation; it may use the same dataset.",
                rule="H105",
            )
        with naming_lack_of_memory("evaluating batches"), self.evaluate():
            if split is None:
                split = self._split
            return self._evaluator.evaluate(loader, fn, split, self._emit_if_memory_suffices)

    def _emit_if_memory_suffices(self, data: EventData) -> None:
        """Record an event, or only log it if there is not enough memory to record it.

        After the loop, the recording is closed, and opening it again needs memory.
        """
        try:
            self.emit(data)
        except Exception as error:
            if find_out_of_memory(error) is None:
                raise
            self._record.emit(data)

    def _may_save_in_evaluation(self) -> bool:
        """Return whether the models hold the trained weights, or the guard can restore them."""
        return self._session.state.averaged or self._trained_weights.are_in_place()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the averaged weights into the models inside the context, for an evaluation.

        On exit, the trained weights are restored bit for bit, even after an exception. Inside the
        context, buffers are averaged too if the average was created with ``use_buffers=True``.
        Otherwise, they are those of the last step. An average that has not been updated yet has no
        effect.

        This needs memory for one more copy of the models.

        Raises:
            PolicyError: H105 if the guard has no average, or if the script runs a step, saves, or
                requests the next batch inside the context.
        """
        self._session.check_not_in_step()
        self._session.check_averages(required=True)
        self._settle_without_others()
        with ExitStack() as self._swapped:
            self._swapped.enter_context(self._parts.averages_swapped_in(self._session.state))
            yield


@contextmanager
def evaluating(models: Sequence[nn.Module], devices: Sequence[torch.device]) -> Iterator[None]:
    """Put models into evaluation mode and disable gradients inside the context.

    On exit, the mode of each module and the random state are restored, even after an exception.
    """
    modules = [module for model in models for module in model.modules()]
    modes = [module.training for module in modules]
    random_state = capture(devices)
    try:
        for model in models:
            model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        restore(random_state)


def take_scale(guard: Guard, scaler: torch.amp.GradScaler | None) -> None:
    """Set a guard's loss scale to that of a framework's scaler.

    This does nothing if the framework has no scaler or the scaler is disabled.
    """
    if scaler is not None and scaler.is_enabled():
        guard._engine.loss_scale.load_state_dict(scaler.state_dict())


def _weak_call(method: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls a bound method, but does not keep its object alive."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        bound = reference()
        if bound is not None:
            bound()

    return call
