"""Lightning strategies, for one device or several processes, whose steps are run by a guard.

This module opens the guard when ``fit`` starts training and closes it afterwards. It connects the
guard to Lightning's checkpoints, schedulers and signals. The steps themselves are run by
``automatic_optimization`` and ``manual_optimization``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from holdfast.core.policy.policy import Policy
from holdfast.guard.hosted import HostedGuard, hosted_policy
from holdfast.guard.result import StepResult
from holdfast.guard.splitting.split_safety import LossFunction
from holdfast.integrations.hosting import (
    Framework,
    carried_state,
    decode_carried,
    open_guard,
    restore_random_state,
    warn_of_persistent_workers,
)
from holdfast.integrations.lightning.automatic_optimization import (
    AutomaticOptimization,
    lightning_clips,
)
from holdfast.integrations.lightning.checkpoints import (
    CHECKPOINT_NAME,
    VerifiedCheckpointIO,
    checkpoint_folder,
    save_stopped,
)
from holdfast.integrations.lightning.delayed_saves import DelayedSaves
from holdfast.integrations.lightning.manual_optimization import ManualOptimization
from holdfast.integrations.lightning.optimization import Optimization, optimizer_names
from holdfast.integrations.lightning.unsupported import check_module, check_ranks
from holdfast.integrations.refusals import check_one_process, load, unsupported
from holdfast.integrations.saving import on_all_ranks, should_save
from holdfast.loader.splitting import Split
from holdfast.recorder.scalars import with_recording
from holdfast.supervise.observe.logged_scalars import read_lightning_log

load("lightning.pytorch")
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.strategies import (  # noqa: E402
    DDPStrategy,
    SingleDeviceStrategy,
    StrategyRegistry,
)
from lightning.pytorch.utilities.exceptions import SIGTERMException  # noqa: E402

# Maps Lightning's names for mixed precision to values of `Policy.precision`. Any other precision is
# treated like fp32, without autocast or loss scaling by the guard.
_PRECISIONS = {"16-mixed": "fp16", "bf16-mixed": "bf16"}
# The key of the carried state in Lightning's checkpoints.
_CARRIED_KEY = "holdfast"


class GuardedStrategy(Framework):  # type: ignore[misc]
    """Mixin for a Lightning strategy that runs each optimizer step as a transaction.

    List it before Lightning's strategy class in the bases of a class.
    """

    _checkpoint_io: Any

    def __init__(
        self,
        holdfast_policy: Any = None,
        holdfast_run_dir: str | os.PathLike[str] | None = None,
        *,
        split: Split = 0,
        **lightning_arguments: Any,
    ) -> None:
        super().__init__(**lightning_arguments)
        self._policy = Policy.of(holdfast_policy)
        self._run_dir = holdfast_run_dir
        self._split = split
        # The guard and the object that runs its steps. Both exist only while ``fit`` trains.
        self.holdfast_guard: HostedGuard | None = None
        self._optimization: Optimization | None = None
        self._delayed_saves: list[DelayedSaves] = []
        # The carried state from the loaded checkpoint. None once training has started.
        self._carried: dict[str, Any] | None = None
        # The carried states of all ranks, collected for the checkpoint that is being saved.
        self._states_of_ranks: dict[str, Any] | None = None

    def setup_environment(self) -> None:
        """Install the plugin that verifies checkpoints, unless the trainer has its own plugin."""
        if self._checkpoint_io is None:
            self._checkpoint_io = VerifiedCheckpointIO()
        super().setup_environment()

    # --- Opening ---

    def on_train_start(self) -> None:
        """Open the guard, after Lightning has restored its checkpoint."""
        super().on_train_start()
        module: Any = self.lightning_module
        trainer = module.trainer
        check_module(module)
        _reset_finished_epoch(trainer.fit_loop)
        carried = self._carried
        self._carried = None
        guard = self._open_guard(module, carried)
        self.holdfast_guard = guard
        warn_of_persistent_workers(trainer.train_dataloader, guard.emit)
        optimization: Optimization
        if module.automatic_optimization:
            optimization = AutomaticOptimization(
                module, guard, self.optimizers, self._split, super().training_step
            )
        else:
            optimization = ManualOptimization(module, guard, self.optimizers, self._split)
        self._optimization = optimization
        self._connect(module, guard, optimization)
        if carried is not None:
            self._continue_from(carried, trainer, optimization)

    def _open_guard(self, module: Any, carried: dict[str, Any] | None) -> HostedGuard:
        trainer = module.trainer
        root = Path(trainer.default_root_dir)
        names = optimizer_names(self.optimizers)
        schedulers = {
            f"scheduler_{number}": config.scheduler
            for number, config in enumerate(self.lr_scheduler_configs)
        }
        policy = hosted_policy(
            _without_requeue_signal(self._policy, trainer),
            max_grad_norm=self._max_grad_norm(module),
            precision=_PRECISIONS.get(str(trainer.precision), "fp32"),
            host="the Trainer",
        )
        return open_guard(
            self._run_dir or root / "holdfast",
            policy=policy,
            scaler=getattr(self.precision_plugin, "scaler", None),
            checkpoints=(checkpoint_folder(trainer) or root, CHECKPOINT_NAME),
            carried=carried,
            resumed=trainer.ckpt_path is not None,
            model=self.model,
            optimizer=dict(zip(names, self.optimizers, strict=True)),
            scheduler=schedulers or None,
            split=self._split,
        )

    def _max_grad_norm(self, module: Any) -> float | None:
        """Return the norm to which the guard clips gradients, or None if it does not clip."""
        if not module.automatic_optimization:
            # Lightning refuses ``gradient_clip_val`` here, so the policy's limit applies.
            return self._policy.max_grad_norm
        limit = float(module.trainer.gradient_clip_val or 0)
        if limit <= 0 or lightning_clips(module):
            return None
        return limit

    def _connect(self, module: Any, guard: HostedGuard, optimization: Optimization) -> None:
        """Connect Lightning's checkpoints, schedulers and logs to the guard."""
        trainer = module.trainer
        if isinstance(self.checkpoint_io, VerifiedCheckpointIO):
            self.checkpoint_io.emit = guard.emit
        self._delayed_saves = [
            DelayedSaves(callback, trainer)
            for callback in trainer.checkpoint_callbacks
            if isinstance(callback, ModelCheckpoint)
        ]
        self._hold_schedulers_after_skips(module, optimization)
        connector = trainer._logger_connector
        connector.log_metrics = with_recording(
            connector.log_metrics, partial(read_lightning_log, connector)
        )

    def _disconnect(self) -> None:
        """Undo the changes that `_connect` made to Lightning's objects."""
        module: Any = self.lightning_module
        if isinstance(self.checkpoint_io, VerifiedCheckpointIO):
            self.checkpoint_io.emit = None
        for delayed_saves in self._delayed_saves:
            delayed_saves.remove()
        self._delayed_saves = []
        # Remove the instance attributes that override methods of the class.
        vars(module).pop("lr_scheduler_step", None)
        vars(module.trainer._logger_connector).pop("log_metrics", None)

    def _hold_schedulers_after_skips(self, module: Any, optimization: Optimization) -> None:
        """Keep schedulers with ``interval="step"`` from advancing when a step is skipped."""
        advance = module.lr_scheduler_step
        stepwise = {
            id(config.scheduler)
            for config in self.lr_scheduler_configs
            if config.interval == "step"
        }

        def lr_scheduler_step(scheduler: Any, metric: Any) -> None:
            if optimization.skipped and metric is None and id(scheduler) in stepwise:
                return
            advance(scheduler, metric)

        module.lr_scheduler_step = lr_scheduler_step

    def _continue_from(
        self, carried: dict[str, Any], trainer: Any, optimization: Optimization
    ) -> None:
        """Restore the parts of the carried state that do not belong to the guard."""
        window = decode_carried(carried, "window")
        if window is not None:
            optimization.accumulation.load_state_dict(window)
        for callback in trainer.checkpoint_callbacks:
            # Lightning does not restore the step of its last save. After the first batch of a
            # window, it would therefore save again and overwrite the file from the beginning of the
            # window with one that has a later position in the data.
            if getattr(callback, "_every_n_train_steps", 0):
                callback._last_global_step_saved = trainer.global_step
        if not carried["between_epochs"]:
            restore_random_state(carried)

    # --- Closing ---

    def on_train_end(self) -> None:
        """Close the run directory after training has finished."""
        super().on_train_end()
        self._close(None)

    def on_exception(self, exception: BaseException) -> None:
        """Record the exception and close the run directory. After a stop signal, save first."""
        super().on_exception(exception)
        guard = self.holdfast_guard
        module = self.lightning_module
        if guard is not None and module is not None and isinstance(exception, SIGTERMException):
            save_stopped(module.trainer)
            guard.close_after_stop()
            exception.code = guard.policy.stop_exit_code
        self._close(exception)

    def teardown(self) -> None:
        """Close the run directory, if it is still open."""
        self._close(None)
        super().teardown()

    def _close(self, error: BaseException | None) -> None:
        guard = self.holdfast_guard
        optimization = self._optimization
        self.holdfast_guard = None
        self._optimization = None
        if optimization is not None:
            optimization.close()
        if guard is None:
            return
        self._disconnect()
        guard.__exit__(None if error is None else type(error), error, None)

    # --- Batches and steps ---

    def process_dataloader(self, dataloader: object) -> object:
        """Return the loader unchanged.

        If the loaded checkpoint is from the end of an epoch, the random state is restored first,
        because the loader draws the order of the next epoch from it.
        """
        carried = self._carried
        module = self.lightning_module
        is_training = module is not None and module.trainer.training
        if is_training and carried is not None and carried["between_epochs"]:
            restore_random_state(carried)
        return super().process_dataloader(dataloader)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Store the batch, and make Lightning stop after this batch if a stop was requested."""
        super().on_train_batch_start(batch, batch_idx)
        if self._optimization is None or self.holdfast_guard is None:
            return
        self._optimization.begin_batch(batch, batch_idx)
        if self.holdfast_guard.stop_reason is not None:
            self.lightning_module.trainer.should_stop = True

    def _automatic_optimization(self) -> AutomaticOptimization | None:
        """Return the object that runs the steps in automatic optimization.

        Return None if the module optimizes manually, or if the guard runs no step on this batch.
        """
        optimization = self._optimization
        if isinstance(optimization, AutomaticOptimization) and optimization.makes_steps:
            return optimization
        return None

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``training_step``, within a guarded step in automatic optimization."""
        optimization = self._automatic_optimization()
        if optimization is not None:
            return optimization.training_step(*args, **kwargs)
        output = super().training_step(*args, **kwargs)
        if isinstance(self._optimization, ManualOptimization):
            self._optimization.note_unguarded_steps()
        return output

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Run the optimizer step as a transaction."""
        optimization = self._automatic_optimization()
        if optimization is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        loss = optimization.optimizer_step(closure)
        if self.holdfast_guard is not None and self.holdfast_guard.must_stop:
            # All ranks learn of the stop request after the same step. Setting this flag makes
            # Lightning end training after the current batch.
            self.lightning_module.trainer._signal_connector.received_sigterm = True
        return loss

    def backward(
        self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """In automatic optimization, call only the hooks, because the guard runs the backward pass.

        Otherwise, run the backward pass as Lightning does.
        """
        optimization = self._automatic_optimization()
        if optimization is not None:
            optimization.call_backward_hooks()
            return closure_loss
        loss: torch.Tensor = super().backward(closure_loss, optimizer, *args, **kwargs)
        return loss

    def guarded_step(
        self,
        batch: Any,
        loss_fn: LossFunction,
        *,
        optimizer: Any = None,
        split: Split | None = None,
    ) -> StepResult:
        """Run one step under manual optimization, in place of zero_grad, backward and step.

        Args:
            batch: The batch. After an out-of-memory error, it is split into parts.
            loss_fn: Function that takes the batch or a part of it and returns the loss, as for
                ``Guard.step``. It may call ``self.log``.
            optimizer: One or several of ``self.optimizers()``. If None, all optimizers are stepped.
                Only the parameters of the stepped optimizers get gradients.
            split: The position of the batch dimension, as for ``Guard.step``.

        Returns:
            The result of the step. Its ``skipped`` is True if the weights did not change.

        Example:
            ``self.trainer.strategy.guarded_step(batch, self.generator_loss,
            optimizer=self.optimizers()[0])``
        """
        assert isinstance(self._optimization, ManualOptimization), (
            "guarded_step may only be called while fit trains, under manual optimization"
        )
        return self._optimization.step(batch, loss_fn, optimizer, split)

    # --- Checkpoints ---

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save a checkpoint with the guard's state and the random state.

        If the training state is not finite, roll back instead of saving.
        """
        guard = self.holdfast_guard
        if not should_save(guard):
            return
        if guard is not None:
            checkpoint[_CARRIED_KEY] = self._carried_state(guard)
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def _carried_state(self, guard: HostedGuard) -> dict[str, Any]:
        devices = [] if self.root_device.type == "cpu" else [self.root_device]
        # Lightning may save in the middle of a window: when a time interval has passed, after a
        # validation or after a signal. The accumulated gradients are then saved too.
        window = None
        if self._optimization is not None:
            window = self._optimization.accumulation.state_dict()
        carried = carried_state(guard, devices, window=window, ranks=self._states_of_ranks)
        epoch_loop = self.lightning_module.trainer.fit_loop.epoch_loop
        carried["between_epochs"] = bool(epoch_loop.batch_progress.is_last_batch)
        return carried

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> dict[str, Any]:
        """Load a checkpoint after verifying it, or a verified replacement.

        The first rank chooses the file for all ranks.
        """
        files = self.checkpoint_io
        load_file = super().load_checkpoint
        if isinstance(files, VerifiedCheckpointIO):
            checkpoint_path = self._choose_on_first_rank(files, checkpoint_path)
            load_file = files.load_verified
        checkpoint: dict[str, Any] = on_all_ranks(
            lambda: load_file(checkpoint_path, weights_only=weights_only)
        )
        module = self.lightning_module
        # In functions of the trainer other than ``fit``, only the checkpoint's weights are used.
        is_fit = module is not None and module.trainer.state.fn == "fit"
        self._carried = checkpoint.get(_CARRIED_KEY) if is_fit else None
        return checkpoint

    def _choose_on_first_rank(self, files: VerifiedCheckpointIO, checkpoint_path: Any) -> Any:
        def choose() -> Any:
            return files.verified(checkpoint_path) if self.is_global_zero else None

        return self.broadcast(on_all_ranks(choose))


class HoldfastStrategy(GuardedStrategy, SingleDeviceStrategy):
    """Strategy for one device that runs each optimizer step as a transaction.

    Args:
        holdfast_policy: A `Policy`, a dict of its fields, the path of a YAML file, or None for the
            defaults. Clipping and precision are taken from the trainer. A policy that contradicts
            them is an error.
        holdfast_run_dir: The run directory. Defaults to ``holdfast`` in the trainer's
            ``default_root_dir``.
        split: The position of the batch dimension, as for `holdfast.Guard`.

    Attributes:
        holdfast_guard: The guard while ``fit`` trains, otherwise None. Use its `statistics`,
            `events` and `request_stop`.

    Raises:
        PolicyError: H101 or H102 for an invalid policy. When training starts, H109 for a policy
            that contradicts the trainer, and H111 for a module that cannot be guarded.
        RunDirectoryError: H30x if the run directory cannot be opened when training starts.

    Example:
        ``Trainer(strategy=HoldfastStrategy({"nonfinite_patience": 5}), gradient_clip_val=1.0)``
    """

    strategy_name = "holdfast"

    @property
    def parallel_devices(self) -> list[torch.device]:
        """Return an empty list. Lightning only assigns the trainer's devices to this property."""
        return []

    @parallel_devices.setter
    def parallel_devices(self, devices: Any) -> None:
        check_one_process(
            len(devices or ()), 'strategy "holdfast" instead of "holdfast_ddp", devices'
        )
        if devices:
            self._root_device = torch.device(devices[0])


class HoldfastDDPStrategy(GuardedStrategy, DDPStrategy):
    """Strategy for several processes with ``DistributedDataParallel``.

    Each optimizer step is a transaction: if one process skips a step, all of them do.

    The strategy takes the arguments of `HoldfastStrategy` and, as keywords, those of Lightning's
    ``DDPStrategy``. It also raises H108 and H111 for settings that are not supported with several
    processes.

    Example:
        ``Trainer(strategy=HoldfastDDPStrategy({"nonfinite_patience": 5}), devices=4)``
    """

    strategy_name = "holdfast_ddp"
    # Whether SIGTERM arrived before the guard was opened.
    _sigterm_received = False

    def configure_ddp(self) -> None:
        """Wrap the module in ``DistributedDataParallel``, unless there is only one process."""
        if self.world_size > 1:
            super().configure_ddp()

    def setup(self, trainer: Any) -> None:
        """Set up the strategy as Lightning does, but with our own SIGTERM handler.

        Lightning's handler runs a collective immediately, which would interfere with the
        collectives of the other ranks.
        """
        connector = trainer._signal_connector
        vars(connector).pop("_sigterm_notifier_fn", None)
        if self.world_size > 1 and trainer.training:
            connector._sigterm_notifier_fn = self._on_sigterm
        super().setup(trainer)

    def _on_sigterm(self, number: int, _frame: Any) -> None:
        self._sigterm_received = True
        if self.launcher is not None:
            self.launcher.kill(number)

    def on_train_start(self) -> None:
        """Refuse settings that are not supported on several ranks, then open the guard."""
        if self.world_size > 1:
            check_ranks(self.lightning_module)
        super().on_train_start()
        if self._sigterm_received:
            # Send the signal again, because the guard handles it from now on.
            os.kill(os.getpid(), signal.SIGTERM)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks as Lightning does, but refuse to do so within a step.

        A single rank may have to repeat a step, in which case the other ranks would not take part
        in the collective.

        Raises:
            PolicyError: H111 within a step.
        """
        optimization = self._optimization
        is_within_step = optimization is not None and optimization.is_called_by_guard
        if self.world_size > 1 and is_within_step:
            raise unsupported(
                "self.log(..., sync_dist=True) in training_step, with on_step=True",
                reason="a rank that repeats its step would wait for ranks that never arrive",
                fix=(
                    "log with on_step=False, on_epoch=True, which is reduced after the epoch. Or"
                    " remove sync_dist."
                ),
            )
        return super().reduce(tensor, group, reduce_op)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights for a checkpoint, and collect the carried states of all ranks.

        Lightning calls this method on every rank before it saves.
        """
        self._states_of_ranks = None
        if self.holdfast_guard is not None:
            self._states_of_ranks = self.holdfast_guard.state_of_ranks()
        weights: dict[str, Any] = super().lightning_module_state_dict()
        return weights


def _reset_finished_epoch(fit_loop: Any) -> None:
    """Make training begin a new epoch after a resume from a checkpoint at the end of an epoch.

    Otherwise, Lightning would skip the start of the new epoch, and would later mistake checkpoints
    from the middle of that epoch for checkpoints from its end.
    """
    progress = fit_loop.epoch_progress.current
    if fit_loop.restarted_mid_epoch and progress.ready == progress.processed:
        fit_loop.reset_restart_stage()


def _without_requeue_signal(policy: Policy, trainer: Any) -> Policy:
    """Return the policy without the signal that Lightning uses to requeue a Slurm job."""
    environment = trainer._accelerator_connector.cluster_environment
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return policy
    requeue_signal = environment.requeue_signal or signal.SIGUSR1
    return policy.replace(
        stop_signals=[name for name in policy.stop_signals if name != requeue_signal.name]
    )


for _strategy in (HoldfastStrategy, HoldfastDDPStrategy):
    if _strategy.strategy_name not in StrategyRegistry:
        StrategyRegistry.register(
            _strategy.strategy_name, _strategy, "holdfast runs each step as a transaction"
        )
