"""`HoldfastStrategy`: Lightning on one device, with each optimizer step as a transaction of a guard."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from holdfast.core.policy.policy import Policy
from holdfast.guard.hosted import HostedGuard, hosted_policy
from holdfast.guard.result import StepResult
from holdfast.guard.splitting.split_safety import LossFunction
from holdfast.integrations.lightning.files import NAME, VerifiedCheckpointIO, folder_of, save_when_stopped
from holdfast.integrations.lightning.steps import TrainerSteps, clips_itself, names_of
from holdfast.integrations.protocol import (
    carried_by,
    carried_tree,
    check_one_process,
    excluded,
    load,
    may_save,
    open_guard,
    restore_random_state,
)
from holdfast.loader.splitting import Split

load("lightning.pytorch")
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry  # noqa: E402
from lightning.pytorch.utilities.model_helpers import is_overridden  # noqa: E402
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature  # noqa: E402

_PRECISION = {"16-mixed": "fp16", "bf16-mixed": "bf16"}
_KEY = "holdfast"  # of what a checkpoint holds besides Lightning's own


class HoldfastStrategy(SingleDeviceStrategy):
    """Trains on one device, with each optimizer step as a transaction of a guard.

    Args:
        holdfast_policy: Settings: a `Policy`, a dict of its fields, the path of a YAML file, or None for the
            defaults. Clipping and precision are the trainer's; a policy that says otherwise is an error.
        holdfast_run_dir: Where it is recorded; None: ``holdfast`` in the trainer's ``default_root_dir``.
        split: Where the batch dimension is, as `holdfast.Guard` takes it.

    Raises:
        PolicyError: H101 or H102 for the policy; when training starts, H109 for one that contradicts the trainer,
            H111 for a module that cannot be guarded. RunDirectoryError: H30x.

    Example:
        ``Trainer(strategy=HoldfastStrategy({"nonfinite_patience": 5}), gradient_clip_val=1.0)``
    """

    strategy_name = "holdfast"

    def __init__(
        self,
        holdfast_policy: Any = None,
        holdfast_run_dir: str | os.PathLike[str] | None = None,
        *,
        split: Split = 0,
    ) -> None:
        super().__init__(device="cpu")  # until the trainer says which
        self._policy = Policy.of(holdfast_policy)
        self._run_dir = holdfast_run_dir
        self._split = split
        self._steps: TrainerSteps | None = None
        self._carried: dict[str, Any] | None = None
        self.holdfast_guard: HostedGuard | None = None
        """The guard, while ``fit`` trains: `statistics`, `events`, `request_stop`."""

    @property
    def parallel_devices(self) -> list[torch.device]:
        """Return no device: here Lightning puts those that the trainer was given."""
        return []

    @parallel_devices.setter
    def parallel_devices(self, devices: Any) -> None:
        check_one_process(len(devices or ()), "devices")
        if devices:
            self._root_device = torch.device(devices[0])

    def setup_environment(self) -> None:
        """Have checkpoints verified, unless the trainer has a plugin for them."""
        if self._checkpoint_io is None:
            self._checkpoint_io = VerifiedCheckpointIO()
        super().setup_environment()

    def on_train_start(self) -> None:
        """Open the run directory: everything was restored by now."""
        super().on_train_start()
        module: Any = self.lightning_module
        trainer = module.trainer
        _check_supported(module)
        _begin_next_epoch(trainer.fit_loop)
        schedulers = {f"scheduler_{i}": each.scheduler for i, each in enumerate(self.lr_scheduler_configs)}
        carried, self._carried = self._carried, None
        folder = folder_of(trainer)
        self.holdfast_guard = guard = open_guard(
            self._run_dir or Path(trainer.default_root_dir, "holdfast"),
            policy=hosted_policy(
                self._policy,
                max_grad_norm=self._clips(module),
                precision=_PRECISION.get(str(trainer.precision), "fp32"),
                host="the Trainer",
            ),
            scaler=getattr(self.precision_plugin, "scaler", None),
            saves_in=(folder or Path(trainer.default_root_dir), NAME),
            carried=carried,
            resumed=trainer.ckpt_path is not None,
            model=module,
            optimizer=dict(zip(names_of(self.optimizers), self.optimizers, strict=True)),
            scheduler=schedulers or None,
            split=self._split,
        )
        self._steps = TrainerSteps(module, guard, self.optimizers, self._split, super().training_step)
        if isinstance(self.checkpoint_io, VerifiedCheckpointIO):
            self.checkpoint_io.emit = guard.emit
        self._hold_schedulers(module, self._steps)
        if carried is not None:
            window = carried_tree(carried, "window")
            if window is not None:
                self._steps.accumulation.load_state_dict(window)
            for each in trainer.checkpoint_callbacks:
                # Lightning keeps no note of the step that was saved last. After the first batch of a longer step it
                # would replace the file of that step's beginning by one with a later place in the data.
                if getattr(each, "_every_n_train_steps", 0):
                    each._last_global_step_saved = trainer.global_step
            if not carried["between_epochs"]:
                restore_random_state(carried)

    def _clips(self, module: Any) -> float | None:
        # By manual optimization the trainer has no limit, and the policy's holds.
        if not module.automatic_optimization:
            return self._policy.max_grad_norm
        limit = float(module.trainer.gradient_clip_val or 0)
        return limit if limit > 0 and not clips_itself(module) else None

    def _hold_schedulers(self, module: Any, steps: TrainerSteps) -> None:
        """Let schedulers stand still where a step was skipped."""
        advance = module.lr_scheduler_step
        by_step = {id(each.scheduler) for each in self.lr_scheduler_configs if each.interval == "step"}

        def lr_scheduler_step(scheduler: Any, metric: Any) -> None:
            if not (steps.skipped and metric is None and id(scheduler) in by_step):
                advance(scheduler, metric)

        module.lr_scheduler_step = lr_scheduler_step

    def on_train_end(self) -> None:
        """Close the run directory."""
        super().on_train_end()
        self._close(None)

    def on_exception(self, exception: BaseException) -> None:
        """Close the run directory, with the exception in it; after SIGTERM with a checkpoint."""
        super().on_exception(exception)
        if self.holdfast_guard is not None and self.lightning_module is not None:
            save_when_stopped(self.lightning_module.trainer, exception)
        self._close(exception)

    def teardown(self) -> None:
        """Close the run directory, if that was not done."""
        self._close(None)
        super().teardown()

    def _close(self, error: BaseException | None) -> None:
        guard, steps, self.holdfast_guard, self._steps = self.holdfast_guard, self._steps, None, None
        if steps is not None:
            steps.close()
        if guard is not None:
            vars(self.lightning_module).pop("lr_scheduler_step", None)
            if isinstance(self.checkpoint_io, VerifiedCheckpointIO):
                self.checkpoint_io.emit = None
            guard.__exit__(None if error is None else type(error), error, None)

    def process_dataloader(self, dataloader: object) -> object:
        """Take the loader as it is; after the end of an epoch, random numbers come back before it draws its order."""
        carried, module = self._carried, self.lightning_module
        if carried is not None and carried["between_epochs"] and module is not None and module.trainer.training:
            restore_random_state(carried)
        return super().process_dataloader(dataloader)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Keep the batch; end after it if that was asked for."""
        super().on_train_batch_start(batch, batch_idx)
        if self._steps is not None and self.holdfast_guard is not None:
            self._steps.begin_batch(batch, batch_idx)
            if self.holdfast_guard.stop_reason is not None:
                self.lightning_module.trainer.should_stop = True  # type: ignore[union-attr]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``training_step``, within a step of the guard."""
        if self._steps is None or not self._steps.automatic:
            found = super().training_step(*args, **kwargs)
            if self._steps is not None:
                self._steps.note_own_steps()
            return found
        return self._steps.training_step(*args, **kwargs)

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Make the step as a transaction."""
        if self._steps is None or not self._steps.automatic:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        return self._steps.optimizer_step(closure)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Leave the backward pass of automatic optimization to the guard."""
        if self._steps is None or not self._steps.automatic:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        self._steps.backward_is_called()
        return closure_loss

    def guarded_step(
        self, batch: Any, loss_fn: LossFunction, *, optimizer: Any = None, split: Split | None = None
    ) -> StepResult:
        """Make one step in the ``training_step`` of manual optimization, instead of zero_grad, backward and step.

        Args:
            batch: What `loss_fn` takes; after out-of-memory, parts of it.
            loss_fn: As ``Guard.step`` takes it; it may use ``self.log``.
            optimizer: One of ``self.optimizers()``, or several; None: all. Gradients reach only their parameters.
            split: As ``Guard.step`` takes it.

        Returns:
            What happened; ``skipped`` if the weights are what they were.

        Example:
            ``self.trainer.strategy.guarded_step(batch, self.generator_loss, optimizer=self.optimizers()[0])``
        """
        assert self._steps is not None, "only while fit trains"
        return self._steps.manual(batch, loss_fn, optimizer, split)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save, with the state of the guard and of random numbers; a state that is not finite is refused."""
        guard = self.holdfast_guard
        if not may_save(guard):
            return
        if guard is not None:
            done = self.lightning_module.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch  # type: ignore[union-attr]
            devices = [] if self.root_device.type == "cpu" else [self.root_device]
            # Lightning may save in the middle of a step: after so much time, a validation, a signal.
            window = None if self._steps is None else self._steps.accumulation.state_dict()
            checkpoint[_KEY] = {**carried_by(guard, devices, window=window), "between_epochs": bool(done)}
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> dict[str, Any]:
        """Load a checkpoint that verifies."""
        found = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        module = self.lightning_module
        fits = module is not None and module.trainer.state.fn == "fit"  # others load weights only
        self._carried = found.get(_KEY) if fits else None
        return found


def _begin_next_epoch(loop: Any) -> None:
    """Let an epoch that follows a checkpoint of the last batch begin as any other.

    Lightning leaves out its beginning, and then takes checkpoints of this epoch for such of its end.
    """
    seen = loop.epoch_progress.current
    if loop.restarted_mid_epoch and seen.ready == seen.processed:
        loop.reset_restart_stage()


def _check_supported(module: Any) -> None:
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise excluded(
            "training_step takes dataloader_iter", "a step can be repeated only with its batch", "take batch."
        )
    if module.automatic_optimization and is_overridden("backward", module):
        raise excluded(
            "LightningModule.backward is overridden",
            "the guard runs backward itself, maybe several times",
            "leave it out, or use manual optimization with self.trainer.strategy.guarded_step(...).",
        )


if HoldfastStrategy.strategy_name not in StrategyRegistry:
    StrategyRegistry.register(
        HoldfastStrategy.strategy_name, HoldfastStrategy, description="steps are transactions of holdfast"
    )
