"""`HoldfastMixin`: a Trainer whose optimizer steps are run by a guard.

The Trainer calls `HoldfastMixin.training_step` for each micro-batch of a step, and then
``optimizer.step``. The mixin's `training_step` only collects the micro-batches. When it receives
the last one of a step, it passes all of them to ``Guard.step``, with `WindowLoss` as the loss
function. The guard runs the whole step, so the Trainer's own call to ``optimizer.step`` does
nothing (`_StepAlreadyMade`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from holdfast.core.errors import OutOfMemoryError
from holdfast.core.policy.policy import Policy
from holdfast.guard.hosted import HostedGuard, hosted_policy
from holdfast.integrations.hosting import Framework, open_guard, warn_of_persistent_workers
from holdfast.integrations.refusals import check_accelerator, load
from holdfast.integrations.saving import should_save
from holdfast.integrations.transformers.checkpoints import (
    CHECKPOINT_NAME,
    check_best_checkpoint,
    read_carried_state,
    save_sealed,
    verified_checkpoint,
)
from holdfast.integrations.transformers.positioned_loader import PositionedLoader
from holdfast.integrations.transformers.unsupported import check_trainer
from holdfast.integrations.transformers.window_loss import WindowLoss
from holdfast.loader.loader import DataLoader
from holdfast.loader.splitting import Split
from holdfast.memory.oom import find_out_of_memory
from holdfast.recorder.scalars import with_recording
from holdfast.supervise.observe.logged_scalars import read_trainer_log

# The guard's counters that are logged along with the loss once they are above 0.
_LOGGED_COUNTERS = ("skipped_steps", "out_of_memory", "rollbacks")


@dataclass(slots=True, kw_only=True)
class _LoopState:
    """The mixin's state during one call to ``train``."""

    # The sum of the losses of all steps, and the number of these steps. Both include steps before
    # a resume, but not skipped steps.
    loss_sum: torch.Tensor
    steps_made: int = 0
    # The verified checkpoint that training resumes from, or a false value for a new run.
    resumed_from: Any = None
    # The trial of a hyperparameter search, which determines the output directory.
    trial: Any = None

    # The loss function for the guard's steps. None until the guard is open.
    loss: WindowLoss | None = None
    # The micro-batches collected for the next step.
    window: list[Any] = field(default_factory=list)
    # The gradient norm of the last step.
    grad_norm: float = math.nan

    # The training loader of the current epoch, of any type.
    trainer_loader: Any = None
    # The same loader if it is a `holdfast.DataLoader`, otherwise None.
    loader: DataLoader | None = None
    # The loader's position before the batches that were loaded but not yet trained. None if there
    # are no such batches.
    position: dict[str, Any] | None = None
    # The dataset indices of each of these batches. An entry is None if the indices are unknown.
    indices: list[list[int] | None] = field(default_factory=list)

    # The global step at the end of this epoch. None once `_maybe_log_save_evaluate` was called for
    # that step.
    last_step_of_epoch: int | None = None
    # The step at which the newest checkpoint was saved.
    saved_at: int | None = None


class HoldfastMixin(Framework):  # type: ignore[misc]
    """Mixin for a Trainer that runs each optimizer step as a transaction.

    List it before the Trainer class, as in ``class MyTrainer(HoldfastMixin, Trainer)``.

    ``TrainingArguments`` still determine ``max_grad_norm``, ``bf16``, ``fp16``, ``save_*`` and the
    schedule. A policy that contradicts them is an error. ``logging_nan_inf_filter`` is turned off.
    The counters ``skipped_steps``, ``out_of_memory`` and ``rollbacks`` appear in the logs once they
    are above 0.

    Args:
        *positional: Positional arguments of the Trainer.
        holdfast_policy: A `Policy`, a dict of its fields, the path of a YAML file, or None for the
            defaults.
        holdfast_run_dir: The run directory. Defaults to ``holdfast`` in the output directory.
        holdfast_split: The position of the batch dimension, as for the argument ``split`` of
            `holdfast.Guard`.
        **named: Keyword arguments of the Trainer.

    Attributes:
        holdfast_guard: The guard while ``train`` runs, otherwise None. Use its `statistics`,
            `events` and `request_stop`.

    Raises:
        PolicyError: H111 or H108 for a setting that cannot be guarded, H109 for a policy that
            contradicts the ``TrainingArguments``.
    """

    holdfast_guard: HostedGuard | None = None

    def __init__(
        self,
        *positional: Any,
        holdfast_policy: Any = None,
        holdfast_run_dir: str | None = None,
        holdfast_split: Split = 0,
        **named: Any,
    ) -> None:
        super().__init__(*positional, **named)
        check_trainer(self)
        self._holdfast_policy = Policy.of(holdfast_policy)
        # Build the policy now, so that contradictions are reported before training starts.
        self._holdfast_hosted_policy()
        self._holdfast_run_dir = holdfast_run_dir
        self._holdfast_split = holdfast_split
        self._holdfast = _LoopState(loss_sum=torch.zeros((), dtype=torch.float64))
        # The value of the optimizer's instance attribute ``step`` before it was replaced, or None
        # if the optimizer had no such attribute.
        self._holdfast_own_step: Any = None
        self.args.logging_nan_inf_filter = False
        callback_class = type(
            "HoldfastStop", (_StopOnRequest, load("transformers").TrainerCallback), {}
        )
        self.add_callback(callback_class(self))

    def _holdfast_hosted_policy(self) -> Policy:
        """Return the policy for the current arguments, which a hyperparameter search may change."""
        max_grad_norm = self.args.max_grad_norm
        return hosted_policy(
            self._holdfast_policy,
            max_grad_norm=max_grad_norm if max_grad_norm > 0 else None,
            precision=check_accelerator(self.accelerator),
            host="TrainingArguments",
        )

    # --- One run ---

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, **named: Any) -> Any:
        """Train as the Trainer does, with verified checkpoints and guarded steps.

        If the requested checkpoint is damaged, an older one is loaded instead.
        ``resume_from_checkpoint=True`` starts a new run, with a warning, if there is no checkpoint
        yet.

        Raises:
            HoldfastError: H307 or H312 if no checkpoint can be loaded. H401, H402, H501 or H503 if
                a step fails and cannot be retried.
            SystemExit, KeyboardInterrupt: After a signal has stopped training, as in
                ``Guard.batches``.
        """
        check_trainer(self)
        resumed_from = verified_checkpoint(self, resume_from_checkpoint, self._holdfast_run_dir)
        self._holdfast = self._holdfast_initial_state(resumed_from, trial)
        try:
            output = super().train(resumed_from, trial, **named)
        except BaseException as error:
            self._holdfast_close(type(error))
            raise
        stop: BaseException | None = None
        if self.holdfast_guard is not None:
            stop = self.holdfast_guard.stop_exception()
        self._holdfast_close(None)
        if stop is not None:
            raise stop
        return output

    def _holdfast_initial_state(self, resumed_from: Any, trial: Any) -> _LoopState:
        carried = read_carried_state(resumed_from) or {}
        loss_sum, steps_made = carried.get("losses", (0.0, 0))
        return _LoopState(
            loss_sum=torch.tensor(loss_sum, dtype=torch.float64, device=self.args.device),
            steps_made=steps_made,
            resumed_from=resumed_from,
            trial=trial,
        )

    def _holdfast_open(self, model: torch.nn.Module) -> HostedGuard:
        training = self._holdfast
        folder = Path(self._get_output_dir(training.trial))
        carried = read_carried_state(training.resumed_from)
        guard = open_guard(
            self._holdfast_run_dir or folder / "holdfast",
            policy=self._holdfast_hosted_policy(),
            scaler=self.accelerator.scaler,
            checkpoints=(folder, CHECKPOINT_NAME),
            carried=carried,
            resumed=bool(training.resumed_from),
            model=model,
            optimizer=self.optimizer.optimizer,
            scheduler=self.lr_scheduler,
            loader=training.loader,
            split=self._holdfast_split,
        )
        if carried is None:
            # The Trainer may have resumed from a checkpoint without carried state. In that case,
            # continue from the Trainer's own step count.
            guard.count_from(self.state.global_step)
        training.loss = WindowLoss(self, model, self._holdfast_split)
        training.window = []
        self._holdfast_own_step = vars(self.optimizer).get("step")
        # The guard steps the inner optimizer, so the Trainer must not step Accelerate's wrapper.
        self.optimizer.step = _StepAlreadyMade(self.optimizer)
        self.holdfast_guard = guard
        warn_of_persistent_workers(training.trainer_loader, guard.emit)
        return guard

    def _holdfast_close(self, error: type[BaseException] | None) -> None:
        guard = self.holdfast_guard
        self.holdfast_guard = None
        if guard is None:
            return
        del self.optimizer.step
        if self._holdfast_own_step is not None:
            self.optimizer.step = self._holdfast_own_step
        self.optimizer._is_overflow = False
        guard.__exit__(error, None, None)

    # --- Data ---

    def _run_epoch(self, *rest: Any, **named: Any) -> Any:
        """Run an epoch, wrapping a `holdfast.DataLoader` so that it keeps its order after a resume.

        Other loaders are left unchanged.
        """
        training = self._holdfast
        loader = named.get("train_dataloader")
        training.trainer_loader = loader
        # Epochs are counted from 0, so this epoch ends with step `(epoch + 1) * steps per epoch`.
        training.last_step_of_epoch = (named["epoch"] + 1) * named["num_update_steps_per_epoch"]
        if isinstance(loader, DataLoader):
            training.loader = loader
            named["train_dataloader"] = self._holdfast_positioned(loader, **named)
            if self.holdfast_guard is None:
                # Open the guard before the first batch is loaded, so that it records the loader's
                # events.
                self._holdfast_open(named["model"])
        return super()._run_epoch(*rest, **named)

    def _holdfast_positioned(
        self,
        loader: DataLoader,
        *,
        epoch: int,
        epochs_trained: int,
        steps_trained_in_current_epoch: int,
        resume_from_checkpoint: Any,
        **_: Any,
    ) -> PositionedLoader:
        """Return the loader, wrapped to start at the position where the Trainer starts the epoch.

        The keyword arguments are those of the Trainer's ``_run_epoch``.
        """
        resumes_here = resume_from_checkpoint is not None and epoch == epochs_trained
        skipped = steps_trained_in_current_epoch if resumes_here else 0
        state = None
        if skipped:
            carried = read_carried_state(self._holdfast.resumed_from) or {}
            state = carried.get("loader")
        return PositionedLoader(loader, epoch=epoch, skipped=skipped, state=state)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *rest: Any, **named: Any) -> Any:
        """Load the micro-batches of a step, and note their dataset indices if they are known."""
        training = self._holdfast
        loader = training.loader
        if loader is None:
            return super().get_batch_samples(epoch_iterator, *rest, **named)
        training.position = loader.state_dict()

        def note_indices() -> Iterator[Any]:
            for batch in epoch_iterator:
                training.indices.append(loader.batch_indices)
                yield batch

        return super().get_batch_samples(note_indices(), *rest, **named)

    # --- Steps ---

    def training_step(
        self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Collect a micro-batch. If the micro-batch completes a window, run the step.

        Args:
            model: The model, as wrapped by the Trainer.
            inputs: The micro-batch.
            num_items_in_batch: The Trainer's count of label tokens in the whole window, or None.

        Returns:
            The loss of the step, or 0 if the micro-batch was only collected.
        """
        guard = self.holdfast_guard or self._holdfast_open(model)
        training = self._holdfast
        training.window.append(self._prepare_inputs(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches = training.window
        training.window = []
        if len(batches) != self.current_gradient_accumulation_steps:
            # If the length of the epoch is unknown, its last, incomplete window is trained together
            # with the first window of the next epoch. The Trainer's item count covers only the
            # latter, so count the items again.
            num_items_in_batch = self._get_num_items_in_batch(batches, self.args.device)
        guard.note_next_samples(_sample_indices(training.indices))
        training.indices = []
        model.train()
        self.optimizer.train()
        return self._holdfast_step(guard, model, batches, num_items_in_batch)

    def _holdfast_step(
        self, guard: HostedGuard, model: torch.nn.Module, batches: list[Any], num_items: Any
    ) -> torch.Tensor:
        training = self._holdfast
        assert training.loss is not None
        try:
            window = training.loss.begin_window(batches, num_items, guard)
            result = guard.step(window, training.loss)
        except OutOfMemoryError:
            # The weights are still those of the last step, so they can be saved.
            self._holdfast_save_if_alone(model)
            raise
        # All batches that the loader has yielded have been trained, so its own position is correct.
        training.position = None
        # Report a skipped step as an overflow, so that the Trainer does not advance the scheduler.
        self.optimizer._is_overflow = result.skipped
        training.grad_norm = math.hypot(*result.grad_norm.values())
        if not result.skipped:
            training.loss_sum += result.loss
            training.steps_made += 1
        return result.loss.to(torch.float32)

    def _clip_grad_norm(self, model: torch.nn.Module) -> float:  # noqa: ARG002 - the Trainer passes it
        return self._holdfast.grad_norm

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> float:  # noqa: ARG002 - likewise
        return self._holdfast.grad_norm

    # --- Logs ---

    def log(self, logs: dict[str, float], *rest: Any, **named: Any) -> None:
        """Log as the Trainer does, with the guard's counters added, and record the values."""
        if self.holdfast_guard is not None and ("loss" in logs or "train_loss" in logs):
            statistics = self.holdfast_guard.statistics()
            for name in _LOGGED_COUNTERS:
                count = getattr(statistics, name)
                if count:
                    logs[name] = count
        if not math.isfinite(logs.get("loss", 0.0)):
            # The Trainer keeps a running loss and subtracts logged values from it. Reset the
            # running loss, since a NaN would otherwise remain in it forever.
            self._tr_loss.zero_()
        log_and_record = with_recording(super().log, partial(read_trainer_log, self))
        log_and_record(logs, *rest, **named)

    def _finalize_training(self, *rest: Any, **named: Any) -> Any:
        """Make ``train_loss`` the mean loss over all steps that were not skipped.

        Steps before a resume are included. The mean is NaN if every step was skipped.
        """
        training = self._holdfast
        steps = self.state.global_step
        if training.resumed_from or training.steps_made != steps:
            # The Trainer divides its sum of losses by the global step, although the sum covers only
            # the steps of this process. Replace the sum with the mean times the global step, so
            # that the quotient is the mean.
            mean = float(training.loss_sum) / (training.steps_made or math.nan)
            self._tr_loss.zero_()
            self._total_loss_scalar = mean * steps
        return super()._finalize_training(*rest, **named)

    # --- Checkpoints ---

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Save as the Trainer does, and seal the checkpoint.

        If the training state is not finite, roll back instead of saving. A disk error is recorded
        as an event and does not end training.
        """
        guard = self.holdfast_guard
        if not should_save(guard):
            return
        step = self.state.global_step
        folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{step}")
        write = partial(super()._save_checkpoint, model, trial)
        carried = None
        emit = None
        if guard is not None:
            carried = self._holdfast_carried_state(guard)
            emit = guard.emit
        if save_sealed(self, folder, write, carried, emit):
            self._holdfast.saved_at = step

    def _holdfast_carried_state(self, guard: HostedGuard) -> dict[str, Any]:
        training = self._holdfast
        carried: dict[str, Any] = {
            "guard": guard.state_dict(),
            "losses": [float(training.loss_sum), training.steps_made],
        }
        if training.loader is not None:
            carried["loader"] = training.position or training.loader.state_dict()
        return carried

    def _holdfast_save_if_alone(self, model: torch.nn.Module) -> None:
        """Save a checkpoint after an error, unless there are other processes.

        Saving is a collective operation, in which the other processes would not take part.
        """
        if self.accelerator.num_processes == 1:
            self._holdfast_save_last(model)

    def _holdfast_save_last(self, model: torch.nn.Module) -> None:
        """Save a checkpoint before training ends, unless this step is saved or saving is off."""
        training = self._holdfast
        step = self.state.global_step
        if self.args.save_strategy == "no" or not step:
            return
        resumed_from = training.resumed_from
        is_where_it_resumed = (
            isinstance(resumed_from, str) and Path(resumed_from).name == f"checkpoint-{step}"
        )
        if step != training.saved_at and not is_where_it_resumed:
            self._save_checkpoint(model, training.trial)

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, model: Any, *rest: Any, **named: Any
    ) -> None:
        """Log, evaluate and save as the Trainer does, but delay a save at the end of an epoch.

        The Trainer calls this method after the last step of an epoch, and again after the epoch. A
        run that resumed from a save in the first call would start with the next epoch and never run
        the evaluation at the end of this epoch, so the save is delayed until the second call.

        When training stops on request, a checkpoint is saved even with ``save_strategy="best"``.
        """
        is_last_step = self.state.global_step == self._holdfast.last_step_of_epoch
        save_is_due = self.control.should_save
        if is_last_step:
            self._holdfast.last_step_of_epoch = None
            self.control.should_save = False
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, *rest, **named)
        if is_last_step:
            self.control.should_save = save_is_due or self.control.should_save
        elif self.holdfast_guard is not None and self.holdfast_guard.stop_reason is not None:
            self._holdfast_save_last(model)

    def _evaluate(self, *rest: Any, **named: Any) -> Any:
        try:
            return super()._evaluate(*rest, **named)
        except Exception as error:
            if self.holdfast_guard is not None and find_out_of_memory(error) is not None:
                # The weights are still those of the last step, so they can be saved.
                self._holdfast_save_if_alone(self.model_wrapped)
            raise

    def _load_best_model(self) -> None:
        check_best_checkpoint(self.state)
        super()._load_best_model()


def _sample_indices(indices_by_batch: Sequence[list[int] | None]) -> list[int] | None:
    """Return the dataset indices of all samples in a step, or None if any of them are unknown.

    Args:
        indices_by_batch: The indices of each batch in the step, or None if they are unknown.
    """
    indices: list[int] = []
    for batch_indices in indices_by_batch:
        if batch_indices is None:
            return None
        indices.extend(batch_indices)
    return indices or None


class _StopOnRequest:
    """Callback that ends training on a stop request, and passes evaluation losses to the guard."""

    def __init__(self, trainer: HoldfastMixin) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        self._stop_if_requested(args, control)

    def on_evaluate(
        self,
        args: Any,
        state: Any,  # noqa: ARG002
        control: Any,
        metrics: Any = None,
        **_: Any,
    ) -> None:
        # A request may have arrived during the evaluation, which takes a long time.
        self._stop_if_requested(args, control)
        guard = self._trainer.holdfast_guard
        loss = (metrics or {}).get("eval_loss")
        if guard is not None and loss is not None:
            guard.validated(loss)

    def _stop_if_requested(self, args: Any, control: Any) -> None:
        guard = self._trainer.holdfast_guard
        if guard is None or guard.stop_reason is None or control.should_training_stop:
            return
        guard.record_stop()
        control.should_training_stop = True
        control.should_save = args.save_strategy != "no"


class _StepAlreadyMade:
    """A replacement for ``optimizer.step`` that does nothing, because the guard has run the step.

    It sets the two attributes by which torch schedulers detect whether the optimizer was stepped
    before them: `_wrapped_by_lr_sched` on itself and ``_opt_called`` on the optimizer.
    """

    _wrapped_by_lr_sched = True

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def __call__(self, _closure: Any = None) -> None:
        self._optimizer._opt_called = True
