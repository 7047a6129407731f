"""Lightning on one device and on several processes, with each optimizer step as a transaction of
a guard.
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
from holdfast.integrations.lightning.files import (
    NAME,
    VerifiedCheckpointIO,
    folder_of,
    save_stopped,
)
from holdfast.integrations.lightning.steps import TrainerSteps, clips_itself, names_of
from holdfast.integrations.protocol import (
    Framework,
    carried_by,
    carried_tree,
    check_one_process,
    excluded,
    load,
    may_save,
    on_all,
    open_guard,
    restore_random_state,
    warn_of_kept_workers,
)
from holdfast.loader.splitting import Split
from holdfast.recorder.scalars import recorded_too
from holdfast.supervise.observe.logged_scalars import read_lightning_log

load("lightning.pytorch")
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint  # noqa: E402
from lightning.pytorch.strategies import (  # noqa: E402
    DDPStrategy,
    SingleDeviceStrategy,
    StrategyRegistry,
)
from lightning.pytorch.utilities.exceptions import SIGTERMException  # noqa: E402
from lightning.pytorch.utilities.model_helpers import is_overridden  # noqa: E402
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature  # noqa: E402

_PRECISION = {"16-mixed": "fp16", "bf16-mixed": "bf16"}
_KEY = "holdfast"  # of what a checkpoint holds besides Lightning's own


class Guarded(Framework):  # type: ignore[misc]
    """Put before a strategy of Lightning's among the bases, it makes each optimizer step a
    transaction of a guard.
    """

    _checkpoint_io: Any

    def __init__(
        self,
        holdfast_policy: Any = None,
        holdfast_run_dir: str | os.PathLike[str] | None = None,
        *,
        split: Split = 0,
        **of_lightning: Any,
    ) -> None:
        super().__init__(**of_lightning)
        self._policy = Policy.of(holdfast_policy)
        self._run_dir = holdfast_run_dir
        self._split = split
        self._steps: TrainerSteps | None = None
        self._carried: dict[str, Any] | None = None
        self._of_ranks: dict[str, Any] | None = None  # of the checkpoint that is being made
        self.holdfast_guard: HostedGuard | None = None
        """The guard, while ``fit`` trains: `statistics`, `events`, `request_stop`."""

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
        schedulers = {
            f"scheduler_{i}": each.scheduler for i, each in enumerate(self.lr_scheduler_configs)
        }
        carried, self._carried = self._carried, None
        folder = folder_of(trainer)
        self.holdfast_guard = guard = open_guard(
            self._run_dir or Path(trainer.default_root_dir, "holdfast"),
            policy=hosted_policy(
                _without_requeue_signal(self._policy, trainer),
                max_grad_norm=self._clips(module),
                precision=_PRECISION.get(str(trainer.precision), "fp32"),
                host="the Trainer",
            ),
            scaler=getattr(self.precision_plugin, "scaler", None),
            saves_in=(folder or Path(trainer.default_root_dir), NAME),
            carried=carried,
            resumed=trainer.ckpt_path is not None,
            model=self.model,
            optimizer=dict(zip(names_of(self.optimizers), self.optimizers, strict=True)),
            scheduler=schedulers or None,
            split=self._split,
        )
        warn_of_kept_workers(trainer.train_dataloader, guard.emit)
        self._steps = TrainerSteps(
            module, guard, self.optimizers, self._split, super().training_step
        )
        if isinstance(self.checkpoint_io, VerifiedCheckpointIO):
            self.checkpoint_io.emit = guard.emit
        self._hold_schedulers(module, self._steps)
        for each in trainer.checkpoint_callbacks:
            if isinstance(each, ModelCheckpoint):
                _hold_saves(each, trainer)
        connector = trainer._logger_connector
        connector.log_metrics = recorded_too(
            connector.log_metrics, partial(read_lightning_log, connector)
        )
        if carried is not None:
            window = carried_tree(carried, "window")
            if window is not None:
                self._steps.accumulation.load_state_dict(window)
            for each in trainer.checkpoint_callbacks:
                # Lightning keeps no note of the step that was saved last. After the first batch of
                # a longer step it would replace the file of that step's beginning by one with a
                # later place in the data.
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
        by_step = {
            id(each.scheduler) for each in self.lr_scheduler_configs if each.interval == "step"
        }

        def lr_scheduler_step(scheduler: Any, metric: Any) -> None:
            if not (steps.skipped and metric is None and id(scheduler) in by_step):
                advance(scheduler, metric)

        module.lr_scheduler_step = lr_scheduler_step

    def on_train_end(self) -> None:
        """Close the run directory."""
        super().on_train_end()
        self._close(None)

    def on_exception(self, exception: BaseException) -> None:
        """Close the run directory, with the exception in it.

        After a stop by a signal with a checkpoint.
        """
        super().on_exception(exception)
        guard = self.holdfast_guard
        if (
            guard is not None
            and self.lightning_module is not None
            and isinstance(exception, SIGTERMException)
        ):
            save_stopped(self.lightning_module.trainer)
            guard.stopped()
            exception.code = guard.policy.stop_exit_code
        self._close(exception)

    def teardown(self) -> None:
        """Close the run directory, if that was not done."""
        self._close(None)
        super().teardown()

    def _close(self, error: BaseException | None) -> None:
        guard, steps, self.holdfast_guard, self._steps = (
            self.holdfast_guard,
            self._steps,
            None,
            None,
        )
        if steps is not None:
            steps.close()
        if guard is not None:
            self.lightning_module.__dict__.pop("lr_scheduler_step", None)
            trainer = self.lightning_module.trainer
            vars(trainer._logger_connector).pop("log_metrics", None)
            for each in trainer.checkpoint_callbacks:
                for name in ("on_train_batch_end", "on_validation_end", "on_train_epoch_end"):
                    vars(each).pop(name, None)
            if isinstance(self.checkpoint_io, VerifiedCheckpointIO):
                self.checkpoint_io.emit = None
            guard.__exit__(None if error is None else type(error), error, None)

    def process_dataloader(self, dataloader: object) -> object:
        """Take the loader as it is.

        After the end of an epoch, random numbers come back before it draws its order.
        """
        carried, module = self._carried, self.lightning_module
        if (
            carried is not None
            and carried["between_epochs"]
            and module is not None
            and module.trainer.training
        ):
            restore_random_state(carried)
        return super().process_dataloader(dataloader)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Keep the batch; end after it if that was asked for."""
        super().on_train_batch_start(batch, batch_idx)
        if self._steps is not None and self.holdfast_guard is not None:
            self._steps.begin_batch(batch, batch_idx)
            if self.holdfast_guard.stop_reason is not None:
                self.lightning_module.trainer.should_stop = True

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``training_step``, within a step of the guard."""
        if self._steps is None or not self._steps.automatic:
            found = super().training_step(*args, **kwargs)
            if self._steps is not None:
                self._steps.note_own_steps()
            return found
        return self._steps.training_step(*args, **kwargs)

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Make the step as a transaction."""
        if self._steps is None or not self._steps.automatic:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        done = self._steps.optimizer_step(closure)
        if self.holdfast_guard is not None and self.holdfast_guard.stopped_by_signal:
            # Now all ranks know it
            self.lightning_module.trainer._signal_connector.received_sigterm = True
        return done

    def backward(
        self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Leave the backward pass of automatic optimization to the guard."""
        if self._steps is None or not self._steps.automatic:
            closure_loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        else:
            self._steps.backward_is_called()
        return closure_loss

    def guarded_step(
        self,
        batch: Any,
        loss_fn: LossFunction,
        *,
        optimizer: Any = None,
        split: Split | None = None,
    ) -> StepResult:
        """Make one step in the ``training_step`` of manual optimization, instead of zero_grad,
        backward and step.

        Args:
            batch: What `loss_fn` takes; after out-of-memory, parts of it.
            loss_fn: As ``Guard.step`` takes it; it may use ``self.log``.
            optimizer: One of ``self.optimizers()``, or several; None: all. Gradients reach only
                their parameters.
            split: As ``Guard.step`` takes it.

        Returns:
            What happened; ``skipped`` if the weights are what they were.

        Example:
            ``self.trainer.strategy.guarded_step(batch, self.generator_loss,
            optimizer=self.optimizers()[0])``
        """
        assert self._steps is not None, "only while fit trains"
        return self._steps.manual(batch, loss_fn, optimizer, split)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save, with the state of the guard and of random numbers.

        A state that is not finite is refused.
        """
        guard = self.holdfast_guard
        if not may_save(guard):
            return
        if guard is not None:
            done = self.lightning_module.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
            devices = [] if self.root_device.type == "cpu" else [self.root_device]
            # Lightning may save in the middle of a step: after so much time, a validation, a
            # signal.
            window = None if self._steps is None else self._steps.accumulation.state_dict()
            carried = carried_by(guard, devices, window=window, ranks=self._of_ranks)
            checkpoint[_KEY] = {**carried, "between_epochs": bool(done)}
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> dict[str, Any]:
        """Load a checkpoint that verifies."""
        files, load = self.checkpoint_io, super().load_checkpoint
        if isinstance(files, VerifiedCheckpointIO):  # the first rank chooses for all
            chosen = on_all(
                lambda: files.verified(checkpoint_path) if self.is_global_zero else None
            )
            checkpoint_path, load = (
                self.broadcast(chosen),
                super(VerifiedCheckpointIO, files).load_checkpoint,
            )
        found: dict[str, Any] = on_all(lambda: load(checkpoint_path, weights_only=weights_only))
        module = self.lightning_module
        fits = module is not None and module.trainer.state.fn == "fit"  # others load weights only
        self._carried = found.get(_KEY) if fits else None
        return found


class HoldfastStrategy(Guarded, SingleDeviceStrategy):
    """Trains on one device, with each optimizer step as a transaction of a guard.

    Args:
        holdfast_policy: Settings: a `Policy`, a dict of its fields, the path of a YAML file, or
            None for the defaults. Clipping and precision are the trainer's; a policy that says
            otherwise is an error.
        holdfast_run_dir: Where it is recorded; None: ``holdfast`` in the trainer's
            ``default_root_dir``.
        split: Where the batch dimension is, as `holdfast.Guard` takes it.

    Raises:
        PolicyError: H101 or H102 for the policy; when training starts, H109 for one that
            contradicts the trainer, H111 for a module that cannot be guarded. RunDirectoryError:
            H30x.

    Example:
        ``Trainer(strategy=HoldfastStrategy({"nonfinite_patience": 5}), gradient_clip_val=1.0)``
    """

    strategy_name = "holdfast"

    @property
    def parallel_devices(self) -> list[torch.device]:
        """Return no device: here Lightning puts those that the trainer was given."""
        return []

    @parallel_devices.setter
    def parallel_devices(self, devices: Any) -> None:
        check_one_process(len(devices or ()), 'strategy "holdfast" and not "holdfast_ddp", devices')
        if devices:
            self._root_device = torch.device(devices[0])


class HoldfastDDPStrategy(Guarded, DDPStrategy):
    """Trains a ``DistributedDataParallel`` model on several processes, which step together or not
    at all.

    It takes what `HoldfastStrategy` takes and, by name, what Lightning's ``DDPStrategy`` does. H108
    and H111 are also raised for what several processes cannot do.

    Example:
        ``Trainer(strategy=HoldfastDDPStrategy({"nonfinite_patience": 5}), devices=4)``
    """

    strategy_name = "holdfast_ddp"
    _signalled = False  # before there was a guard

    def configure_ddp(self) -> None:
        """Wrap the module; not for one process, where there is nobody to average with."""
        if self.world_size > 1:
            super().configure_ddp()

    def setup(self, trainer: Any) -> None:
        """Set up as Lightning does, whose handler of SIGTERM begins a collective, wherever the
        other ranks are.
        """
        notifier = (
            {"_sigterm_notifier_fn": self._on_sigterm}
            if self.world_size > 1 and trainer.training
            else {}
        )
        vars(trainer._signal_connector).pop("_sigterm_notifier_fn", None)
        vars(trainer._signal_connector).update(notifier)
        super().setup(trainer)

    def _on_sigterm(self, number: int, _frame: Any) -> None:
        self._signalled = True
        if self.launcher is not None:
            self.launcher.kill(number)

    def on_train_start(self) -> None:
        """Open the run directory, once it is clear that several ranks can do what is asked for."""
        if self.world_size > 1:
            _check_ranks(self.lightning_module, averages=self._model_averager is not None)
        super().on_train_start()
        if self._signalled:
            os.kill(os.getpid(), signal.SIGTERM)  # to the guard

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce as Lightning does.

        Not in the middle of a step, which a rank may make again (H111).
        """
        if self.world_size > 1 and self._steps is not None and self._steps.passing:
            raise excluded(
                "self.log(..., sync_dist=True) in training_step, with on_step=True",
                "a rank that makes its step again would wait there for the others, which do not"
                " come",
                "log with on_step=False, on_epoch=True, which is reduced after the epoch; or leave"
                " sync_dist out.",
            )
        return super().reduce(tensor, group, reduce_op)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights of a checkpoint, on all ranks, after each has sent its own random
        state.
        """
        self._of_ranks = (
            None if self.holdfast_guard is None else self.holdfast_guard.state_of_ranks()
        )
        found: dict[str, Any] = super().lightning_module_state_dict()
        return found


def _check_ranks(module: Any, *, averages: bool) -> None:
    trainer = module.trainer
    scheduled = [
        number for each in trainer.callbacks for number in getattr(each, "scheduling", {}).values()
    ]
    most = max([trainer.accumulate_grad_batches, *scheduled])
    saves = any(
        isinstance(each, OnExceptionCheckpoint) or getattr(each, "save_on_exception", False)
        for each in trainer.callbacks
    )
    shared = (
        "ranks share no batch before the last of a step; give larger batches, cut where memory is"
        " short"
    )
    for is_set, what, why in (
        (
            not module.automatic_optimization,
            "manual optimization",
            "each rank would choose steps by itself",
        ),
        (most > 1, f"accumulate_grad_batches={most}", shared),
        (averages, "model_averaging_period", "between two averages the weights of ranks differ"),
        (saves, "a checkpoint on exceptions", "a rank that fails would wait there for the others"),
    ):
        if is_set:
            raise excluded(
                f"{what} with {trainer.world_size} ranks",
                why,
                "leave it out, or train on one device.",
            )


def _begin_next_epoch(loop: Any) -> None:
    """Let an epoch that follows a checkpoint of the last batch begin as any other.

    Lightning leaves out its beginning, and then takes checkpoints of this epoch for such of its
    end.
    """
    seen = loop.epoch_progress.current
    if loop.restarted_mid_epoch and seen.ready == seen.processed:
        loop.reset_restart_stage()


def _hold_saves(saves: Any, trainer: Any) -> None:
    """Let a save by steps be made after the validation or end of epoch that follows.

    A resume would not make that.
    """
    loop, at_batch = trainer.fit_loop.epoch_loop, saves.on_train_batch_end
    held: list[tuple[Any, ...]] = []

    def on_train_batch_end(*given: Any) -> None:
        last = loop._num_ready_batches_reached()
        # By itself
        waits = (
            last
            and saves.monitor is not None
            and not saves._should_save_on_train_epoch_end(trainer)
        )
        validates = (
            loop._should_check_val_fx(trainer.fit_loop._data_fetcher) and not loop.val_loop.skip
        )
        if (last or validates) and not waits:
            held.append(given)
        else:
            at_batch(*given)

    def made_before(hook: Callable[..., None], *given: Any, last: bool) -> None:
        while held and loop._num_ready_batches_reached() is last:
            at_batch(*held.pop())
        hook(*given)

    for name, last in (("on_validation_end", False), ("on_train_epoch_end", True)):
        vars(saves)[name] = partial(made_before, getattr(saves, name), last=last)
    vars(saves)["on_train_batch_end"] = on_train_batch_end


def _without_requeue_signal(policy: Policy, trainer: Any) -> Policy:
    """Leave the signal upon which Lightning saves and requeues its Slurm job to Lightning's own
    handler.
    """
    environment = trainer._accelerator_connector.cluster_environment
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return policy
    requeue = environment.requeue_signal or signal.SIGUSR1
    return policy.replace(
        stop_signals=[name for name in policy.stop_signals if name != requeue.name]
    )


def _check_supported(module: Any) -> None:
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise excluded(
            "training_step takes dataloader_iter",
            "a step can be repeated only with its batch",
            "take batch.",
        )
    if module.automatic_optimization and is_overridden("backward", module):
        raise excluded(
            "LightningModule.backward is overridden",
            "the guard runs backward itself, maybe several times",
            "leave it out, or use manual optimization with"
            " self.trainer.strategy.guarded_step(...).",
        )


for _strategy in (HoldfastStrategy, HoldfastDDPStrategy):
    if _strategy.strategy_name not in StrategyRegistry:
        StrategyRegistry.register(
            _strategy.strategy_name, _strategy, "steps are transactions of holdfast"
        )
