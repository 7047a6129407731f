"""`HoldfastMixin`, and what it puts into the Trainer's loop.

A loader at its place, a step that was made, a stop.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

from holdfast.core.errors import BatchError, OutOfMemoryError
from holdfast.core.events import run_events
from holdfast.core.policy.policy import Policy
from holdfast.guard.hosted import HostedGuard, hosted_policy
from holdfast.guard.splitting.window import Window
from holdfast.integrations.protocol import (
    Framework,
    check_accelerator,
    excluded,
    load,
    may_save,
    open_guard,
    warn_of_kept_workers,
)
from holdfast.integrations.transformers.checkpoints import (
    NAME,
    carried_in,
    check_best,
    resumable,
    save_sealed,
)
from holdfast.loader.loader import DataLoader
from holdfast.loader.splitting import Split, batch_size, select
from holdfast.memory.oom import find_out_of_memory
from holdfast.recorder.scalars import recorded_too
from holdfast.supervise.observe.logged_scalars import read_trainer_log

_STEPS_IN_BACKWARD = ("lomo", "layerwise")


class HoldfastMixin(Framework):  # type: ignore[misc]
    """Put before a Trainer class among the bases, it makes each of its steps a transaction.

    ``TrainingArguments`` win: ``max_grad_norm``, ``bf16``, ``fp16``, ``save_*`` and the schedule
    are taken from there; a policy that says otherwise is an error. ``logging_nan_inf_filter`` is
    switched off. Logs have ``skipped_steps``, ``out_of_memory`` and ``rollbacks`` once there are
    any.

    Args:
        *positional: Of the Trainer.
        holdfast_policy: Settings: a `Policy`, a dict of its fields, the path of a YAML file, or
            None for defaults.
        holdfast_run_dir: Where it is recorded; None: ``holdfast`` in the output directory.
        holdfast_split: Where the batch dimension is, as `holdfast.Guard` takes ``split``.
        **named: Of the Trainer.

    Raises:
        PolicyError: H111 or H108 for what cannot be guarded, H109 for a policy that contradicts the
            arguments.
    """

    holdfast_guard: HostedGuard | None = None
    """The guard, while a training runs: `statistics`, `events`, `request_stop`."""

    def __init__(
        self,
        *positional: Any,
        holdfast_policy: Any = None,
        holdfast_run_dir: str | None = None,
        holdfast_split: Split = 0,
        **named: Any,
    ) -> None:
        super().__init__(*positional, **named)
        _check_supported(self)
        self._holdfast_given = Policy.of(holdfast_policy)
        self._holdfast_settings()  # a contradiction is an error before anything else is made
        self._holdfast_run_dir, self._holdfast_split = holdfast_run_dir, holdfast_split
        self._holdfast_loss: _TrainerLoss | None = None
        self._holdfast_window: list[Any] = []
        self._holdfast_loader: DataLoader | None = None
        self._holdfast_iterated: Any = None  # what the Trainer iterates in this epoch
        self._holdfast_indices: list[list[int] | None] = []
        self._holdfast_position: dict[str, Any] | None = None
        self._holdfast_norm = math.nan
        # Of the losses that are in the weights,
        self._holdfast_total = torch.zeros((), dtype=torch.float64)
        self._holdfast_counted = 0  # and how many they are
        self._holdfast_resumed: Any = None
        self._holdfast_trial: Any = None
        self._holdfast_step_before: Any = None
        # Step of the newest checkpoint that holds the weights as they are
        self._holdfast_saved_at: int | None = None
        self.args.logging_nan_inf_filter = False
        base = load("transformers").TrainerCallback
        self.add_callback(type("HoldfastStop", (_StopWhenAsked, base), {})(self))

    def _holdfast_settings(self) -> Policy:
        # Under the arguments as they are now: a hyperparameter search changes them.
        return hosted_policy(
            self._holdfast_given,
            max_grad_norm=self.args.max_grad_norm if self.args.max_grad_norm > 0 else None,
            precision=check_accelerator(self.accelerator),
            host="TrainingArguments",
        )

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, **named: Any) -> Any:
        """Train as the Trainer does.

        ``resume_from_checkpoint`` is verified, and falls back to the one before.

        ``resume_from_checkpoint=True`` where there is none yet starts anew, with a warning.

        Raises:
            HoldfastError: H307 or H312 for checkpoints, H401, H402, H501 or H503 for steps.
            SystemExit, KeyboardInterrupt: After a stop by a signal, as ``Guard.batches``.
        """
        _check_supported(self)
        resume_from_checkpoint = resumable(self, resume_from_checkpoint, self._holdfast_run_dir)
        self._holdfast_resumed, self._holdfast_trial = resume_from_checkpoint, trial
        self._holdfast_loader, self._holdfast_position, self._holdfast_indices = None, None, []
        self._holdfast_saved_at = None
        total, self._holdfast_counted = (carried_in(resume_from_checkpoint) or {}).get(
            "losses", (0.0, 0)
        )
        self._holdfast_total = torch.tensor(total, dtype=torch.float64, device=self.args.device)
        try:
            done = super().train(resume_from_checkpoint, trial, **named)
        except BaseException as error:
            self._holdfast_close(type(error))
            raise
        ending = None if self.holdfast_guard is None else self.holdfast_guard.ending()
        self._holdfast_close(None)
        if ending is not None:
            raise ending
        return done

    def _holdfast_open(self, model: torch.nn.Module) -> HostedGuard:
        folder = Path(self._get_output_dir(self._holdfast_trial))
        carried = carried_in(self._holdfast_resumed)
        guard = open_guard(
            self._holdfast_run_dir or folder / "holdfast",
            policy=self._holdfast_settings(),
            scaler=self.accelerator.scaler,
            saves_in=(folder, NAME),
            carried=carried,
            resumed=bool(self._holdfast_resumed),
            model=model,
            optimizer=self.optimizer.optimizer,
            scheduler=self.lr_scheduler,
            loader=self._holdfast_loader,
            split=self._holdfast_split,
        )
        if carried is None:
            # Of a checkpoint that was written without holdfast
            guard.count_from(self.state.global_step)
        self._holdfast_loss, self._holdfast_window = (
            _TrainerLoss(self, model, self._holdfast_split),
            [],
        )
        self._holdfast_step_before = vars(self.optimizer).get("step")
        # The guard steps the optimizer inside this one
        self.optimizer.step = _StepMade(self.optimizer)
        self.holdfast_guard = guard
        warn_of_kept_workers(self._holdfast_iterated, guard.emit)
        return guard

    def _holdfast_close(self, error: type[BaseException] | None) -> None:
        guard, self.holdfast_guard = self.holdfast_guard, None
        if guard is None:
            return
        del self.optimizer.step
        if self._holdfast_step_before is not None:
            self.optimizer.step = self._holdfast_step_before
        self.optimizer._is_overflow = False
        guard.__exit__(error, None, None)

    def _run_epoch(self, *rest: Any, **named: Any) -> Any:
        """Let a `holdfast.DataLoader` keep its order, also where the Trainer resumes in the
        middle of an epoch.
        """
        loader = named.get("train_dataloader")
        self._holdfast_iterated = loader
        self._holdfast_last_step: int | None = (named["epoch"] + 1) * named[
            "num_update_steps_per_epoch"
        ]
        if isinstance(loader, DataLoader):
            self._holdfast_loader = loader
            resumes = (
                named["resume_from_checkpoint"] is not None
                and named["epoch"] == named["epochs_trained"]
            )
            skipped = named["steps_trained_in_current_epoch"] if resumes else 0
            carried = carried_in(self._holdfast_resumed) if skipped else None
            state = None if carried is None else carried.get("loader")
            named["train_dataloader"] = _PlacedLoader(loader, named["epoch"], skipped, state)
            if self.holdfast_guard is None:
                # Before the first batch is made, so that its events are recorded
                self._holdfast_open(named["model"])
        return super()._run_epoch(*rest, **named)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *rest: Any, **named: Any) -> Any:
        """Collect the micro-batches of a window, and note which samples they hold, where the
        loader knows it.
        """
        loader = self._holdfast_loader
        if loader is None:
            return super().get_batch_samples(epoch_iterator, *rest, **named)
        self._holdfast_position = loader.state_dict()

        def noted() -> Iterator[Any]:
            for batch in epoch_iterator:
                self._holdfast_indices.append(loader.batch_indices)
                yield batch

        return super().get_batch_samples(noted(), *rest, **named)

    def _holdfast_carried(self, guard: HostedGuard) -> dict[str, Any]:
        losses = [float(self._holdfast_total), self._holdfast_counted]
        carried: dict[str, Any] = {"guard": guard.state_dict(), "losses": losses}
        if self._holdfast_loader is not None:
            carried["loader"] = self._holdfast_position or self._holdfast_loader.state_dict()
        return carried

    def training_step(
        self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Gather a micro-batch and return 0.

        At the last one of the window make the step and return its loss.
        """
        guard = self.holdfast_guard or self._holdfast_open(model)
        assert self._holdfast_loss is not None
        window = self._holdfast_window
        window.append(self._prepare_inputs(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        if len(window) != self.current_gradient_accumulation_steps:
            # The rest of an epoch whose length nobody knew is trained with the first window of the
            # next one.
            num_items_in_batch = self._get_num_items_in_batch(window, self.args.device)
        self._holdfast_window = []
        known, self._holdfast_indices = self._holdfast_indices, []
        guard.next_samples(
            None
            if None in known
            else [index for indices in known if indices for index in indices] or None
        )
        model.train()
        self.optimizer.train()
        try:
            result = guard.step(
                self._holdfast_loss.window(window, num_items_in_batch, guard), self._holdfast_loss
            )
        except OutOfMemoryError:
            self._holdfast_keep_if_alone(model)  # the weights are those of the last step
            raise
        self._holdfast_position = None  # what was handed out is trained
        self.optimizer._is_overflow = result.skipped  # so that the schedule stays where it is
        self._holdfast_norm = math.hypot(*result.grad_norm.values())
        if not result.skipped:
            self._holdfast_total += result.loss
            self._holdfast_counted += 1
        return result.loss.to(torch.float32)

    def _clip_grad_norm(self, model: torch.nn.Module) -> float:  # noqa: ARG002 - the Trainer passes it
        return self._holdfast_norm

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> float:  # noqa: ARG002 - this too
        return self._holdfast_norm

    def log(self, logs: dict[str, float], *rest: Any, **named: Any) -> None:
        """Log as the Trainer does, and in the guard, with the counts of steps that were not made
        as usual.
        """
        if self.holdfast_guard is not None and ("loss" in logs or "train_loss" in logs):
            found = self.holdfast_guard.statistics()
            for name in ("skipped_steps", "out_of_memory", "rollbacks"):
                if getattr(found, name):
                    logs[name] = getattr(found, name)
        # The Trainer takes NaN from NaN, and would log it for ever
        if not math.isfinite(logs.get("loss", 0.0)):
            self._tr_loss.zero_()
        recorded_too(super().log, partial(read_trainer_log, self))(logs, *rest, **named)

    def _finalize_training(self, *rest: Any, **named: Any) -> Any:
        """Let ``train_loss`` be the mean of the steps that were made, before a resume too.

        NaN where none was.
        """
        steps, counted = self.state.global_step, self._holdfast_counted
        # The Trainer divides the sum of this life by all steps
        if self._holdfast_resumed or counted != steps:
            self._tr_loss.zero_()
            self._total_loss_scalar = float(self._holdfast_total) / (counted or math.nan) * steps
        return super()._finalize_training(*rest, **named)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Save as the Trainer does, and seal.

        A disk that refuses is an event and does not stop training.
        """
        guard, step = self.holdfast_guard, self.state.global_step
        if may_save(guard):
            folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{step}")
            write = super()._save_checkpoint
            carried = None if guard is None else self._holdfast_carried(guard)
            emit = None if guard is None else guard.emit
            if save_sealed(self, folder, lambda: write(model, trial), carried, emit):
                self._holdfast_saved_at = step

    def _holdfast_keep_if_alone(self, model: torch.nn.Module) -> None:
        """Save what is left after an error.

        Others of several processes do not come to save it with this one.
        """
        if self.accelerator.num_processes == 1:
            self._holdfast_keep(model)

    def _holdfast_keep(self, model: torch.nn.Module) -> None:
        """Save before training ends, unless these weights were saved or nothing shall be."""
        step, resumed = self.state.global_step, self._holdfast_resumed
        there = isinstance(resumed, str) and Path(resumed).name == f"checkpoint-{step}"
        if (
            self.args.save_strategy != "no"
            and step
            and step != self._holdfast_saved_at
            and not there
        ):
            self._save_checkpoint(model, self._holdfast_trial)

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, model: Any, *rest: Any, **named: Any
    ) -> None:
        """Log, evaluate and save as the Trainer does.

        When training stops, ``save_strategy="best"`` saves too.

        A save of an epoch's last step is made after its evaluation: one that resumes from it begins
        the next epoch.
        """
        last, due = self.state.global_step == self._holdfast_last_step, self.control.should_save
        if last:
            self._holdfast_last_step, self.control.should_save = None, False
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, *rest, **named)
        if last:
            # Until the Trainer comes here once more
            self.control.should_save = due or self.control.should_save
        elif self.holdfast_guard is not None and self.holdfast_guard.stop_reason is not None:
            self._holdfast_keep(model)

    def _evaluate(self, *rest: Any, **named: Any) -> Any:
        try:
            return super()._evaluate(*rest, **named)
        except Exception as error:
            if self.holdfast_guard is not None and find_out_of_memory(error) is not None:
                # The weights are those of the last step
                self._holdfast_keep_if_alone(self.model_wrapped)
            raise

    def _load_best_model(self) -> None:
        # Only if its checkpoint verifies.
        check_best(self.state)
        super()._load_best_model()


def _check_supported(trainer: Any) -> None:
    """Refuse a Trainer that cannot be guarded: H108 or H111, naming the setting."""
    check_accelerator(trainer.accelerator)
    args = trainer.args
    optimizer = str(getattr(args.optim, "value", args.optim))
    engine = getattr(trainer.accelerator, "parallelism_config", None)
    refused = [
        (
            args.n_gpu > 1,
            f"n_gpu={args.n_gpu}",
            "DataParallel makes copies of the model that cannot be taken back",
        ),
        (
            args.auto_find_batch_size,
            "auto_find_batch_size=True",
            "it starts the loop again with a smaller batch",
        ),
        (
            any(word in optimizer for word in _STEPS_IN_BACKWARD),
            f"optim={optimizer}",
            "it moves weights during backward, which cannot be taken back",
        ),
        (
            getattr(args, "enable_jit_checkpoint", False),
            "enable_jit_checkpoint=True",
            "it saves in the middle of a step",
        ),
        (engine is not None, "a parallelism_config", "it spreads a step over devices"),
    ]
    for is_set, what, why in refused:
        if is_set:
            raise excluded(
                what, why, "leave it out; for n_gpu, set CUDA_VISIBLE_DEVICES to one device."
            )


class _StopWhenAsked:
    """A callback that ends a training when that was asked for, with a checkpoint, and passes
    evaluations on.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        self._look(args, control)

    def on_evaluate(
        self,
        args: Any,
        state: Any,  # noqa: ARG002
        control: Any,
        metrics: Any = None,
        **_: Any,
    ) -> None:
        self._look(args, control)  # again, since an evaluation lasts
        guard, loss = self._trainer.holdfast_guard, (metrics or {}).get("eval_loss")
        if guard is not None and loss is not None:
            guard.validated(loss)

    def _look(self, args: Any, control: Any) -> None:
        guard = self._trainer.holdfast_guard
        if guard is not None and guard.stop_reason is not None and not control.should_training_stop:
            guard.note_stop()
            control.should_training_stop = True
            control.should_save = args.save_strategy != "no"


class _StepMade:
    """Stands in for the step of an optimizer that was stepped already."""

    _wrapped_by_lr_sched = True  # as torch's schedulers want to see it

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def __call__(self, _closure: Any = None) -> None:
        self._optimizer._opt_called = True  # they want to see this too


class _Placed(IterableDataset[Any]):
    """The rest of an epoch, behind placeholders.

    A loader that the Trainer lets skip batches has another order.
    """

    def __init__(self, loader: DataLoader, placeholders: int) -> None:
        self._loader = loader
        self._placeholders = placeholders

    def __iter__(self) -> Iterator[Any]:
        yield from (None for _ in range(self._placeholders))
        yield from self._loader


class _PlacedLoader:
    """What the Trainer iterates for a `holdfast.DataLoader`, with what
    ``accelerate.skip_first_batches`` needs.

    Where the loader stood when the checkpoint was written may not be known; then batches are read
    over.
    """

    drop_last = pin_memory = persistent_workers = False
    batch_size = prefetch_factor = worker_init_fn = multiprocessing_context = generator = None
    num_workers = timeout = 0

    def __init__(
        self, loader: DataLoader, epoch: int, skipped: int, state: dict[str, Any] | None
    ) -> None:
        if state is not None and skipped:
            loader.load_state_dict(state)
        else:
            loader.go_to(epoch)
        self.dataset = _Placed(loader, skipped if state is not None else 0)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)

    @staticmethod
    def collate_fn(batch: Any) -> Any:
        return batch


class _TrainerLoss:
    """The loss, batch by batch of one accumulation window, normalised as the Trainer means it.

    The Trainer has three ways, and which one holds is asked of the model itself, once:

        items used     the model is given how many label tokens the window holds, and losses of
                       batches add up
        items ignored  it is given them, and its forward takes any keyword and uses none (Pegasus,
                       Bart and others in transformers 5.17). The Trainer then adds up means, so
                       that the gradient is as many times too large as there are batches. Here the
                       guard finds out what the means are over, and weights them
        no items       the model takes none: the mean of the means of the batches, as in the Trainer
    """

    def __init__(self, trainer: Any, model: torch.nn.Module, split: Split = 0) -> None:
        self._trainer = trainer
        self._model = model
        self._split = split
        self._items: Any = None
        self._batches = 1
        self._uses_items: bool | None = None

    def window(self, batches: Sequence[Any], items: Any, guard: HostedGuard) -> Window:
        """Return what one step is made of, and be the loss function of it.

        `items` is what the Trainer counted.
        """
        self._items, self._batches = items, len(batches)
        if items is not None and self._uses_items is None:
            self._find_out(batches[0], guard)
        return Window(
            batches, added=items is None or self._uses_items is not False, on_cut=self._cut
        )

    def _cut(self, batches: Sequence[Any]) -> None:
        """Take in that samples were taken out of the window."""
        self._batches = len(batches)
        # Else all would have to count
        if self._items is not None and self._trainer.accelerator.num_processes == 1:
            self._items = self._trainer._get_num_items_in_batch(
                list(batches), self._trainer.args.device
            )

    def __call__(self, batch: Any) -> Any:
        """Return the loss of one batch, or of a part of one, as it goes into the step."""
        # A mean that is no share of the items must not be multiplied by the number of processes, as
        # a share is.
        loss = self._compute(batch, None if self._uses_items is False else self._items)
        mean_of_means = self._items is None and self._trainer.compute_loss_func is None
        return loss / self._batches if mean_of_means else loss

    def _compute(self, batch: Any, items: Any) -> torch.Tensor:
        # Accelerate has put autocast around forward, and around nothing else.
        with (
            torch.autocast(self._trainer.args.device.type, enabled=False),
            self._trainer.compute_loss_context_manager(),
        ):
            loss: torch.Tensor = self._trainer.compute_loss(
                self._model, batch, num_items_in_batch=items
            )
        return loss

    def _find_out(self, batch: Any, guard: HostedGuard) -> None:
        """Ask one sample, or a batch that cannot be cut, whether its loss depends on the items
        of the window.
        """
        try:
            size = batch_size(batch, self._split)
            most_labels = int(batch["labels"].reshape(size, -1).ne(-100).sum(-1).argmax())
            batch = select(batch, size, [most_labels], self._split)
        except (BatchError, RuntimeError):
            pass

        def loss_with(items: int) -> float:
            # A label smoother takes the labels out of a batch, so each has its own.
            return float(
                self._compute(
                    copy.copy(batch), torch.tensor(items, device=self._trainer.args.device)
                )
            )

        with guard.trying():
            once, twice = loss_with(1), loss_with(2)
        if not (math.isfinite(once) and math.isfinite(twice)) or once == 0.0:
            return  # asked again in the next step
        self._uses_items = once != twice
        if not self._uses_items:
            guard.emit(
                run_events.ItemsIgnored(
                    model=type(self._model).__name__,
                    why=(
                        "its loss is a mean whatever num_items_in_batch is, and Trainer would add"
                        " up such means; they are weighted by what they are over instead"
                    ),
                )
            )
