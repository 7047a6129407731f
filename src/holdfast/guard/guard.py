"""`Guard`: the user's own loop, made to hold.

batches()   where the run continues, when it saves, and where it stops
step()      one transaction, and what is done about NaN, Inf and an optimizer step that fails
            half-way
evaluate()  evaluation that leaves no trace in training and can be interrupted
"""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

import torch
from torch import nn

from holdfast.core.clock import Clock, SystemClock
from holdfast.core.errors import PolicyError
from holdfast.core.events import run_events
from holdfast.core.events.data import EventData
from holdfast.core.events.event import Event
from holdfast.core.policy.policy import Policy
from holdfast.core.vector_functions import settle_vector_functions
from holdfast.guard.arguments import check_loader, gather_parts
from holdfast.guard.cursor import Cursor
from holdfast.guard.directory import RunDirectory
from holdfast.guard.images import keep_image
from holdfast.guard.ranks.recognise import ranks_of
from holdfast.guard.record import End, RunRecord
from holdfast.guard.result import Statistics, StepResult
from holdfast.guard.run.loop import Loop
from holdfast.guard.run.session import Session
from holdfast.guard.run.steps import Recovery, Steps
from holdfast.guard.saving.best import Best, BestOf, as_metric
from holdfast.guard.saving.components import check_models_can_be_saved, check_saveable
from holdfast.guard.schedules import Schedules
from holdfast.guard.splitting.split_safety import LossFunction
from holdfast.guard.state.trained_weights import TrainedWeights
from holdfast.guard.step.engine import StepEngine
from holdfast.guard.stop import Interrupted, StopRequest
from holdfast.learning.finding import Finding
from holdfast.loader.random_state import capture, restore
from holdfast.loader.splitting import Split
from holdfast.memory.host_memory import set_malloc_threshold
from holdfast.memory.oom import naming_lack_of_memory
from holdfast.recorder.scalars import check_scalars


class Guard:
    """Keeps one training run alive, correct and inside its memory.

    Making a guard takes the lock of the run directory and, if there is a good checkpoint in it,
    puts all state back into the given objects. It is released by `close`, by the end of `batches`,
    or as a context manager.

    Args:
        run_dir: Directory of the run, made if missing.
        model: One module, or a dict of named ones. On several ranks one, in
            ``DistributedDataParallel``.
        optimizer: One optimizer, or a dict of named ones. All their parameters belong to the
            models.
        scheduler: Learning-rate scheduler(s); several in a dict by optimizer name. Any object with
            ``step()``, ``state_dict()`` and ``load_state_dict(state)`` is advanced at
            ``Policy.scheduler_interval``; ReduceLROnPlateau by `validated`, since it needs your
            metric; timm's schedulers after steps and epochs.
        loader: What `batches` iterates: a `holdfast.DataLoader`, or any other iterable of batches.
        state: Further state by name: anything with ``state_dict`` and ``load_state_dict``.
        averaged: ``torch.optim.swa_utils.AveragedModel`` of the bare model, or a dict of such by
            the names of models. It takes in the weights after each step that is committed and has
            moved them; see `averaged`.
        policy: Settings: a `Policy` or a dict of its fields, the path of a YAML file, or None for
            the defaults. Files and the defaults are overridden by ``HOLDFAST_*`` variables.
        split: Where the batch dimension is (see ``guard.splitting``): a number, a prefix of the
            batch's structure, or a function of batch and micro-batch size.
        clock: Time, for tests.
        **overrides: Policy fields by name, stronger than `policy`; for instance
            ``precision="bf16"``.

    Raises:
        PolicyError: H1xx, for an argument that cannot be used; on several ranks H108 or H115.
        RankError: H114, if another rank has failed meanwhile.
        RunDirectoryError: H30x, if the directory is locked, not writable, newer, or of another
            model.
        CheckpointError: H31x, if no checkpoint verifies, or the newest does not fit these objects.

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
        with naming_lack_of_memory("making the guard"):
            self._parts = gather_parts(model, optimizer, scheduler, state, averaged)
            self._ranks = ranks_of(self._parts)
            with self._ranks.together():  # an error on one is an error on all
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
        self.policy = ranks.policy(policy)
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
        self._cursor = None if loader is None else Cursor(loader, self._parts.devices())
        self._validated: dict[str, BestOf] = {}  # by metric
        # A loop of ours goes to its place, or it was said that none does
        self._position_is_clear = False
        self._asked = StopRequest(self.policy.stop_signals)  # of this process
        self._swapped = ExitStack()  # puts the weights of the run back
        self._trained_weights = TrainedWeights(self._parts.models)
        with ranks.in_turn():
            self._directory = RunDirectory(run_dir, ranks.rank)
        self._record = RunRecord(
            self._directory.recorder, clock, ranks.rank if ranks.world_size > 1 else None
        )
        self._engine = StepEngine(self._parts, self.policy, self._record, split, ranks)
        self._session = Session(self._engine, self._directory, clock, self._cursor, schedules)
        self._recovery = Recovery(self._session)
        self._steps = Steps(self._session, self._engine, self._recovery)
        self._stop, saves = ranks.agreed(self._asked, self._session.saving, self._cursor)
        self._boundaries = Loop(self._session, self._stop, saves, self._recovery)
        weakref.finalize(self, self._asked.uninstall)
        # At exit: later, torch would abort the process
        weakref.finalize(self, self._engine.diagnosis.close)
        with ranks.in_turn():
            self._open()
        try:
            with naming_lack_of_memory("resuming from a checkpoint"):
                self.resumed_from: Path | None = self._session.resume()
            self._report_steps_left_behind()
            self._trained_weights.remember()
        except BaseException:
            self._release()
            raise

    def _report_steps_left_behind(self) -> None:
        self._session.report_steps_left_behind()

    # --- facts

    @property
    def global_step(self) -> int:
        """Return the optimizer steps in the weights, over all restarts of the run."""
        return self._record.global_step

    @property
    def epoch(self) -> int:
        """Return the epochs that `batches` has completed."""
        return 0 if self._cursor is None else self._cursor.epoch

    @property
    def epochs_validated(self) -> int:
        """Return how many epochs were completed when `validated` was called last, as the newest
        checkpoint holds it.

        A run that is started again after its end does not know what was validated after its last
        save.
        """
        return self._session.counters.epochs_validated

    @property
    def stop_reason(self) -> str | None:
        """Return why the run was asked to stop, such as ``"SIGUSR1"``, or None.

        See ``Policy.stop_signals``.

        It is the same on all ranks, whichever of them was asked.
        """
        return self._stop.reason

    def statistics(self) -> Statistics:
        """Return a snapshot of the run's totals.

        Cost: in fp16, one host sync.
        """
        return self._session.statistics()

    def events(self) -> list[Event]:
        """Return what was recorded in the run directory, oldest first, by earlier processes too."""
        return self._record.events()

    def request_stop(self, reason: str = "requested") -> None:
        """Ask the run to end at the next boundary, with a checkpoint."""
        self._asked.request(reason)

    # --- the loop

    def batches(
        self, *, max_epochs: int | None = None, max_steps: int | None = None
    ) -> Iterator[Any]:
        """Yield batches from where the run stands, until a limit is reached or a stop was
        requested.

        A checkpoint is written when one is due and at the end; then the run directory is released.
        If that last save fails, the loop ends normally, but the process ends with exit code 74
        unless a later save succeeds.

        Leaving the loop with ``break``, or with ``next`` before its end, writes no checkpoint
        unless a stop was requested: use `request_stop`, or call `close` afterwards. If nobody does,
        a line on stderr names the steps that are in no checkpoint when the process ends. Starting a
        new loop ends one that is still open, as ``break`` does. A signal of ``Policy.stop_signals``
        ends the loop with a checkpoint; the script can check `stop_reason` after it.

        Args:
            max_epochs: Passes over the loader, counted over all restarts of the run.
            max_steps: Optimizer steps, counted in the same way.

        Raises:
            PolicyError: H105 without a loader or a limit. LoaderError: H601 for an empty loader,
                H602 if `max_steps` can never be reached since no step is made.
            SystemExit: After a stop by a signal and the last save, if ``Policy.stop_exit_code`` is
                set.
            KeyboardInterrupt: After a stop by Ctrl-C and the last save, if it is not set.
        """
        if self._cursor is None or (max_epochs is None and max_steps is None):
            missing = "loader=" if self._cursor is None else "max_epochs= or max_steps="
            raise PolicyError(
                f"batches() without {missing}",
                limit="it must know what to iterate and when to end",
                fix=f"pass {missing} to {'Guard' if self._cursor is None else 'batches()'}.",
                rule="H105",
            )
        return self._loop(self._cursor, max_epochs, max_steps)

    def _loop(self, cursor: Cursor, max_epochs: int | None, max_steps: int | None) -> Iterator[Any]:
        self._session.check_not_in_step()
        # Else the last loop would end this one, whenever its iterator is collected
        self._boundaries.leave()
        self._position_is_clear = True
        with naming_lack_of_memory("iterating over batches"):
            self._stop.reset(raised=self._ending() is not None)
            self._ready()  # not before the first batch is asked for
            self._asked.install()
            yield from self._boundaries.begin(cursor, max_epochs, max_steps, self._release)
            ending = self._ending()
        if ending is not None:
            raise ending

    def _ready(self) -> None:
        """Open the run directory if it was released, and keep boundaries in a loop that is not
        ours.
        """
        self._session.check_not_in_step()
        if self._stop.honoured and self._ending() is not None:
            # The caller has seen the exception and goes on nevertheless.
            self._stop.reset(raised=True)
        if not self._record.is_open:
            self._open()
        if not self._session.state.in_loop:
            if self.resumed_from is not None and not self._position_is_clear:
                self._position_is_clear = True
                self._record.emit(run_events.PositionNotKept())
            self._boundaries.boundary_outside()
            if self._stop.by_signal:
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
        """Make one training step: forward, backward, clip, optimizer step. All of it, or nothing.

        Args:
            batch: Any pytree of tensors.
            loss_fn: Takes a batch, or a part of one, and returns its scalar mean loss, or `Loss`,
                or a pair (mean, items). It may run several times, so it should change nothing but
                buffers and `state`.
            optimizer: Name(s) of the optimizers to step; None: all. Gradients reach only their
                parameters.
            split: Overrides the guard's `split` for this batch.

        Returns:
            What happened. ``skipped`` is True if the weights were left as they were.

        Raises:
            BatchError: H2xx, if the batch or the loss cannot be used; no trace is left.
            OutOfMemoryError: H401 if no remedy is left, H402 if an optimizer failed half-way for
                good.
            NonFiniteError: H501, if NaN or Inf persists.
        """
        try:
            names = self._parts.optimizer_names(optimizer)
            with naming_lack_of_memory("making a step"):
                self._ready()
                result = self._steps.step(batch, loss_fn, names, split=split)
                self._trained_weights.remember()
                return result
        except BaseException as error:
            self._leave(error)
            raise

    def _leave(self, error: BaseException) -> None:
        """Record an error that leaves the guard.

        Raise that of another rank, if that is behind it.
        """
        behind = self._ranks.leave(error)
        self._record.left_by(behind or error)
        if behind is not None:
            raise behind from error

    # --- opening, closing

    def _open(self) -> None:
        with naming_lack_of_memory("opening the run directory"):
            self._session.open()
            self._asked.install()
            for name in self._asked.left_alone:
                self._record.emit(run_events.SignalLeftAlone(signal=name))
            self._engine.diagnosis.open()

    def _release(self, how: End | None = None) -> None:
        self._boundaries.count_batch()
        self._asked.uninstall()
        try:
            self._engine.diagnosis.close()
        finally:
            self._session.close(how)

    def close(self) -> None:
        """Write what is not saved yet, also without a step since; release the run directory.

        May be called again.
        """
        with naming_lack_of_memory("saving and closing the run"):
            self._session.check_averages()
            self._boundaries.count_batch()
            try:
                self._session.save_the_rest(self._open)
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
            self._ranks.leave(RuntimeError(kind.__name__) if error is None else error)
            self._release("failed")

    def _end_process(self) -> NoReturn:
        """Save and end the process cleanly, where there is no loop of ours that could end."""
        self._swapped.close()
        self._stop.honoured = True
        request = run_events.StopRequested(
            reason=str(self._stop.reason),
            signal=self._stop.signal_name,
            asked_rank=self._stop.rank,
        )
        self._record.emit(request)
        self._boundaries.count_batch()
        self._session.save_the_rest(self._open)
        self._session.save()  # a first checkpoint in any case
        self._release("stopped")
        raise self._ending() or SystemExit(0) from None

    def _ending(self) -> BaseException | None:
        """Return the exception to raise after a stop by a signal, once the run is saved, or None.

        Ctrl-C raises KeyboardInterrupt, as without a guard, so that a notebook's "Run all" stops.
        """
        # A signal to this rank may have come after the last step of all ranks, so that they did not
        # agree on it.
        number = self._stop.signal or self._asked.signal
        if number is None:
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
        """Take in a metric of an evaluation; on several ranks all say the same.

        It drives each ReduceLROnPlateau of the same mode, which must not be fed with losses of
        batches. The loss shows overfitting.

        Args:
            value: Over the validation set: a number or a tensor of one element. NaN and Inf are no
                best one, but count for `patience`.
            name: Of the metric.
            mode: Whether lower or higher is better.
            keep: How many of the best checkpoints are kept beside the newest ones, see `best`; they
                need a save, but no more room. None: 1, of the loss without a name 0.
            patience: So many validations in a row that are not the best one stop the training, as
                `request_stop`.

        Returns:
            Whether its checkpoint was kept.

        Raises:
            PolicyError: H105 for a name, a mode or a value that cannot be; H115 if ranks differ.
        """
        self._session.check_averages()
        number, self._session.validated = as_metric(value, keep, patience), True
        if name not in self._validated:  # read before another rank writes
            self._validated[name] = BestOf(
                self._directory.path, name, mode, writes=self._ranks.rank == 0
            )
        best = self._validated[name]
        with self._ranks.together():
            # NaN is not equal to itself
            self._ranks.agree("guard.validated", lambda: {name: repr(number)})
        self._session.counters.epochs_validated = self.epoch
        changed = self._session.schedules.validated(number, mode, self.epoch)
        if name == "loss":
            self._engine.diagnosis.validated(number)
        most = int(name != "loss") if keep is None else keep
        entry = None
        if best.is_better(number, self.global_step, most):
            if self._session.is_open:
                self._boundaries.count_batch()  # it is in the weights
            entry = self._session.checkpoint_of_now(and_then=best.link)
        if entry is not None:
            best.keep(number, entry, most)
        best.write()
        kept_as, by = None if entry is None else entry.path.name, tuple(changed)
        self.emit(
            run_events.Validated(
                loss=number, learning_rate_changed_by=by, name=name, kept_as=kept_as
            )
        )
        if patience is not None and best.waited >= patience:
            self.request_stop(f"{name} was not the best one in {best.waited} validations")
        return entry is not None

    def best(self, name: str = "loss") -> Best | None:
        """Return the best checkpoint that `validated` has kept for a metric, in this process or
        an earlier one.
        """
        return next(iter(BestOf(self._directory.path, name, "min", writes=False).kept), None)

    def diagnose(self) -> list[Finding]:
        """Return why the run may not be learning, the most important finding first.

        Most of it is recorded as events when it is found. Only on request it also says whether the
        run learns nothing (H828) or its loss has risen (H826), which is often right, but not often
        enough to be said of every run. Empty if the policy has ``diagnose=False``.
        """
        return self._engine.diagnosis.findings_on_request()

    def emit(self, data: EventData) -> None:
        """Record an event of ``core.events.run_events``, or of a subclass of `EventData` of your
        own.

        `holdfast events` and the report show it. ``learning.alignment.report_alignment`` uses it
        for rule H852.
        """
        with self._session.recording():
            self._record.emit(data)
        if isinstance(data, run_events.Aligned):
            self._engine.diagnosis.aligned(data.facts())

    def log(
        self, values: Mapping[str, Any] | None = None, /, *, split: str = "", **more: Any
    ) -> None:
        """Record numbers of your own with step, epoch and time, also after `batches`.

        All reports show them.

        Args:
            values: By name: numbers, or tensors of one element. One on a device is read, which
                waits for it.
            split: Such as ``"validation"``; what is shown is ``split/name``, of at most 64 bytes of
                UTF-8.
            **more: Further values by name, such as ``accuracy=0.93``. NaN and Inf are values.

        Raises:
            PolicyError: H117, for what is no number or a name that is empty or too long. A full
                disk raises nothing.
        """
        self._session.log(check_scalars(values, split, more))

    def add_image(self, tag: str, image: Any) -> None:
        """Keep an image of this step, such as a grid of samples.

        The report shows the newest of each tag.

        The last 16 of a tag are kept, as ``images/<tag>/<step>.png`` in the run directory. Where a
        run has gone back to an earlier checkpoint, images of later steps still lie there: harmless,
        they are replaced or dropped later.

        Args:
            tag: Letters, digits, ``-``, ``_`` and ``.``, 64 at most.
            image: Array or tensor, shape ``(height, width)`` or ``(height, width, 3)``, uint8 or
                floats from 0 to 1. What lies outside is clipped, NaN is black; the event counts
                both.

        Raises:
            PolicyError: H105, for a tag or an image that cannot be used; H742, if Pillow, of the
                extra ``report``, is not installed. A full disk raises nothing.
        """
        with self._session.recording():
            keep_image(self._directory.path, self._record, tag, image)

    @contextmanager
    def evaluate(self) -> Iterator[None]:
        """Switch the models to evaluation without gradients, and leave no trace in training.

        Train/eval modes and random state are restored afterwards. If a signal of
        ``Policy.stop_signals`` comes inside, a checkpoint is saved and the process ends with
        ``Policy.stop_exit_code`` or 0, and on Ctrl-C with a KeyboardInterrupt: an interrupted
        evaluation has no result with which the script could continue. The rest of the loop body
        does not run. `request_stop` lets the evaluation finish and ends the loop after it. So does
        a signal while the models hold other weights than the trained ones, such as an average that
        the script has put there, since a checkpoint would save those.
        """
        try:
            models, devices = list(self._parts.models.values()), self._parts.devices()
            stop = self._stop.interrupting_if(self._may_save_in_evaluation)
            with self._record.errors(), stop, evaluating(models, devices):
                yield
        except Interrupted:
            self._end_process()

    def _may_save_in_evaluation(self) -> bool:
        """Return whether the weights of the run are in the models, or it is the guard that puts
        them back.
        """
        return self._session.state.averaged or self._trained_weights.are_in_place()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Have averaged weights in the models for an evaluation.

        Those of the run come back bit for bit, in any case.

        Buffers are those of the average: averaged too with its ``use_buffers=True``, else those of
        the last step. An average that has taken in nothing yet changes nothing. Memory: one more
        copy of the models.

        Raises:
            PolicyError: H105 where none was given, and for a step, a save, or the next batch
                inside.
        """
        self._session.check_not_in_step()
        self._session.check_averages(there=True)
        with ExitStack() as self._swapped:
            self._swapped.enter_context(self._parts.averages_swapped_in(self._session.state))
            yield


@contextmanager
def evaluating(models: Sequence[nn.Module], devices: Sequence[torch.device]) -> Iterator[None]:
    """Switch to evaluation without gradients.

    Modes and random state come back, however the context is left.
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
    """Let a guard begin with the loss scale of its host, as that was set or restored.

    Without one nothing changes.
    """
    if scaler is not None and scaler.is_enabled():
        guard._engine.loss_scale.load_state_dict(scaler.state_dict())
