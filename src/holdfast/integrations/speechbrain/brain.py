"""`HoldfastMixin`: a SpeechBrain ``Brain`` whose steps are run by a guard.

SpeechBrain restores its checkpoint in ``on_fit_start``. The guard is opened right after that, and
closed when ``fit`` ends.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils._pytree import tree_map_only

from holdfast.core.events import run_events
from holdfast.core.policy.policy import Policy
from holdfast.guard.accumulation import Accumulation, divided
from holdfast.guard.directory import check_checkpoints_found
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
from holdfast.integrations.refusals import check_one_process, load
from holdfast.integrations.speechbrain.checkpoints import CHECKPOINT_NAME, seal_and_verify
from holdfast.integrations.speechbrain.padded_batches import split_of
from holdfast.loader.loader import DataLoader

# The name under which the carried state is registered as a recoverable of the checkpointer, and the
# key of its JSON values in the file's metadata.
_RECOVERABLE = "holdfast"
# Attributes that a Brain sets when it trains on several processes or devices.
_SEVERAL_PROCESSES = ("distributed_launch", "data_parallel_backend")


class HoldfastMixin(Framework):  # type: ignore[misc]
    """Mixin for a Brain that runs each step as a transaction and verifies checkpoints.

    List it before ``sb.Brain``: ``class ASR(HoldfastMixin, sb.Brain)``.

    Args:
        *positional: Positional arguments of ``Brain``.
        holdfast_policy: A `Policy`, a dict of its fields, or the path of a YAML file. Defaults to
            ``holdfast_policy`` in ``hparams``. Clipping, precision and patience are taken from the
            Brain.
        holdfast_run_dir: The run directory. Defaults to ``holdfast_run_dir`` in ``hparams``,
            otherwise to a folder ``holdfast`` in the ``output_folder`` of ``hparams`` or next to
            the checkpoints.
        **named: Keyword arguments of ``Brain``.

    Attributes:
        holdfast_guard: The guard while ``fit`` runs, otherwise None. Use its `statistics` and
            `events`.

    Raises:
        PolicyError: H101 or H102 for an invalid policy. In ``fit``, H108 for several processes, and
            H109 for a policy that contradicts the Brain's options.
    """

    holdfast_guard: HostedGuard | None = None

    def __init__(
        self,
        *positional: Any,
        holdfast_policy: Any = None,
        holdfast_run_dir: str | os.PathLike[str] | None = None,
        **named: Any,
    ) -> None:
        super().__init__(*positional, **named)
        hparams = getattr(self, "hparams", None)
        if holdfast_policy is None:
            holdfast_policy = getattr(hparams, "holdfast_policy", None)
        self._holdfast_policy = Policy.of(holdfast_policy)
        self._holdfast_run_dir = holdfast_run_dir or getattr(hparams, "holdfast_run_dir", None)
        # Runs the steps. None unless the guard is open.
        self._holdfast_accumulation: Accumulation | None = None
        # The carried state from the loaded checkpoint. None once the guard is open.
        self._holdfast_carried: dict[str, Any] | None = None
        # The same state if the checkpoint is from within an epoch. None once the epoch is resumed.
        self._holdfast_carried_within_epoch: dict[str, Any] | None = None
        # The loader of this epoch, if it is a `holdfast.DataLoader`, and the position from which it
        # resumes.
        self._holdfast_loader: DataLoader | None = None
        self._holdfast_position: dict[str, Any] | None = None
        # The number of batches in this epoch, or None if it is unknown.
        self._holdfast_num_batches: int | None = None
        # The part of the batch that the model has processed last, and the outputs for that part.
        self._holdfast_last_part: tuple[Any, Any] | None = None
        self._holdfast_has_checked_workers = False
        if self.checkpointer is not None:
            seal_and_verify(self.checkpointer)
            self.checkpointer.add_recoverable(
                _RECOVERABLE,
                self,
                custom_save_hook=_save_carried_state,
                custom_load_hook=_load_carried_state,
                optional_load=True,
            )

    # --- One fit ---

    def fit(self, *positional: Any, **named: Any) -> None:
        """Train as ``Brain.fit`` does, and close the run directory afterwards."""
        try:
            super().fit(*positional, **named)
        except BaseException as error:
            self._holdfast_close(error)
            raise
        self._holdfast_close(None)

    def _holdfast_close(self, error: BaseException | None) -> None:
        guard = self.holdfast_guard
        self.holdfast_guard = None
        self._holdfast_accumulation = None
        if self.checkpointer is not None:
            self.checkpointer.holdfast_guard = None
        if guard is not None:
            guard.__exit__(None if error is None else type(error), error, None)

    def on_fit_start(self) -> None:
        """Let ``Brain`` restore its checkpoint, then open the guard."""
        super().on_fit_start()
        for attribute in _SEVERAL_PROCESSES:
            # The attribute does not state the number of processes. Any number above 1 is refused.
            count = 2 if getattr(self, attribute, False) else 1
            check_one_process(count, f"{attribute}: processes or devices")
        optimizers = self._holdfast_optimizers()
        if not optimizers:
            # Without optimizers, nothing is trained, so no guard is needed.
            return
        carried = self._holdfast_carried
        self._holdfast_carried = None
        guard = self._holdfast_open(optimizers, carried)
        self.holdfast_guard = guard
        self._holdfast_accumulation = Accumulation(guard)
        if self.checkpointer is not None:
            self.checkpointer.holdfast_guard = guard
        if type(self).fit_batch is not HoldfastMixin.fit_batch:
            why = "only calls to guarded_step are guarded"
            guard.emit(run_events.OwnFitBatch(why=why))
        if carried is not None:
            self._holdfast_continue_from(carried)

    def _holdfast_open(
        self, optimizers: dict[str, Any], carried: dict[str, Any] | None
    ) -> HostedGuard:
        run_dir = self._holdfast_directory()
        checkpoints = None
        resumed = False
        if self.checkpointer is not None:
            checkpoints = (Path(self.checkpointer.checkpoints_dir), CHECKPOINT_NAME)
            resumed = bool(self.checkpointer.folders())
            if not resumed:
                check_checkpoints_found(run_dir, new_start="")
        return open_guard(
            run_dir,
            policy=self._holdfast_hosted_policy(),
            scaler=self.scaler,
            checkpoints=checkpoints,
            carried=carried,
            resumed=resumed,
            model=self.modules,
            optimizer=optimizers,
        )

    def _holdfast_continue_from(self, carried: dict[str, Any]) -> None:
        """Restore the parts of the carried state that do not belong to the guard."""
        self._holdfast_position = decode_carried(carried, "loader")
        if carried["in_epoch"]:
            # The loader draws random numbers when its iteration starts, so the random state is
            # restored after that.
            self._holdfast_carried_within_epoch = carried
        else:
            restore_random_state(carried)

    def _holdfast_optimizers(self) -> dict[str, Any]:
        """Return all optimizers by name, or an empty dict if the Brain has none."""
        if self.optimizers_dict is not None:
            return dict(self.optimizers_dict)
        optimizer = getattr(self, "optimizer", None)
        return {} if optimizer is None else {"optimizer": optimizer}

    def _holdfast_active_optimizers(self) -> list[str]:
        """Return the names of the optimizers that are not frozen at the moment."""
        if self.optimizers_dict is None:
            return list(self._holdfast_optimizers())
        return list(self.freeze_optimizers(self.optimizers_dict))

    def _holdfast_hosted_policy(self) -> Policy:
        """Return the user's policy with the Brain's options applied."""
        # In SpeechBrain, a negative limit turns clipping off. A limit of 0 would set every gradient
        # to 0, so the policy refuses it (H102).
        max_grad_norm = None if self.max_grad_norm < 0 else self.max_grad_norm
        patience = int(self.nonfinite_patience)
        policy = hosted_policy(
            self._holdfast_policy,
            host="the options of the Brain",
            max_grad_norm=max_grad_norm,
            clip_by="global" if max_grad_norm is None else "optimizer",
            nonfinite_patience=max(1, patience),
            precision=self.precision,
        )
        # SpeechBrain gives up when the number of bad losses exceeds the patience, but a guard gives
        # up as soon as the number reaches it. The difference is 1.
        return policy.replace(nonfinite_patience=patience + 1)

    def _holdfast_directory(self) -> Path:
        """Return the path of the run directory: as configured, or a folder next to the outputs."""
        if self._holdfast_run_dir is not None:
            return Path(self._holdfast_run_dir)
        output = getattr(getattr(self, "hparams", None), "output_folder", None)
        if output is None and self.checkpointer is not None:
            output = Path(self.checkpointer.checkpoints_dir).parent
        return Path(output or ".", "holdfast")

    # --- Batches and steps ---

    def _fit_train(self, train_set: Any, epoch: Any, enable: Any) -> None:
        """Run an epoch, starting at the resumed position in the data."""
        try:
            self._holdfast_num_batches = len(train_set)
        except TypeError:
            self._holdfast_num_batches = None
        self._holdfast_warn_of_workers(train_set)
        position = self._holdfast_position
        self._holdfast_position = None
        self._holdfast_loader = None
        if isinstance(train_set, DataLoader):
            self._holdfast_loader = train_set
            if position is not None:
                train_set.load_state_dict(position)
                # SpeechBrain resumes in the epoch of the position, even if no batches are left in
                # that epoch.
                train_set.set_epoch(position["epoch"])
        carried = self._holdfast_carried_within_epoch
        self._holdfast_carried_within_epoch = None
        resumed_set = _ResumedLoader(train_set, carried)
        super()._fit_train(train_set=resumed_set, epoch=epoch, enable=enable)

    def _holdfast_warn_of_workers(self, train_set: Any) -> None:
        if self._holdfast_has_checked_workers:
            return
        self._holdfast_has_checked_workers = True
        emit = None if self.holdfast_guard is None else self.holdfast_guard.emit
        warn_of_persistent_workers(train_set, emit)

    def fit_batch(self, batch: Any) -> torch.Tensor:
        """Train on one batch, as ``Brain.fit_batch`` does.

        Returns:
            The loss, shape ``()``, on the CPU. If the loss is NaN or Inf, the batch was skipped for
            that reason.
        """
        accumulation = self._holdfast_accumulation
        if accumulation is None:
            plain_loss: torch.Tensor = super().fit_batch(batch)
            return plain_loss
        ends_window = self.step % self.grad_accumulation_factor == 0
        should_step = ends_window or self.step == self._holdfast_num_batches
        self.on_fit_batch_start(batch, should_step)
        train = accumulation.step if should_step else accumulation.add
        result = train(
            batch,
            self._holdfast_loss,
            optimizer=self._holdfast_active_optimizers(),
            split=split_of(batch),
        )
        if result.skipped and not bool(torch.isfinite(result.loss)):
            self.nonfinite_count += 1
        stepped = should_step and not result.skipped
        if stepped:
            self.optimizer_step += 1
        # If the batch was split, the hook gets the last part and the outputs for that part.
        part, outputs = self._holdfast_last_part or (batch, None)
        self._holdfast_last_part = None
        self.on_fit_batch_end(part, outputs, result.loss, stepped)
        return result.loss.detach().cpu()

    def _holdfast_loss(self, part: Any) -> torch.Tensor:
        """Return the loss of the batch or of a part of it, as the loss function of the guard."""
        stage = load("speechbrain").Stage.TRAIN
        with self.training_ctx:
            outputs = self.compute_forward(part, stage)
            loss: torch.Tensor = self.compute_objectives(outputs, part, stage)
        assert self._holdfast_accumulation is not None
        if self._holdfast_accumulation.attempt is not None:
            detached = tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)
            self._holdfast_last_part = (part, detached)
        return divided(loss, self.grad_accumulation_factor)

    def guarded_step(
        self, batch: Any, loss_fn: LossFunction, *, optimizer: str | Sequence[str] | None = None
    ) -> StepResult:
        """Run one step from your own ``fit_batch``, for example for a GAN.

        Args:
            batch: The batch. After an out-of-memory error, it is split into parts.
            loss_fn: Function that takes the batch or a part of it and returns the loss, as for
                ``Guard.step``. It runs under autocast.
            optimizer: One or several keys of ``optimizers_dict``. If None, all optimizers that are
                not frozen are stepped. Only the parameters of the stepped optimizers get gradients.

        Returns:
            The result of the step. Its ``skipped`` is True if the weights did not change.
        """
        assert self.holdfast_guard is not None, "guarded_step may only be called while fit runs"
        names = self._holdfast_active_optimizers() if optimizer is None else optimizer
        result = self.holdfast_guard.step(batch, loss_fn, optimizer=names, split=split_of(batch))
        if not result.skipped:
            self.optimizer_step += 1
        return result

    # --- Checkpoints and stopping ---

    def _should_save_intra_epoch_ckpt(self, last_ckpt_time: Any, steps_since_ckpt: Any) -> bool:
        accumulation = self._holdfast_accumulation
        if accumulation is not None and accumulation.pending:
            # A save in the middle of a window would lose the accumulated gradients, so it waits
            # for the end of the window.
            return False
        if not self._holdfast_must_stop():
            is_due: bool = super()._should_save_intra_epoch_ckpt(last_ckpt_time, steps_since_ckpt)
            return is_due
        if self.checkpointer is None:
            self._holdfast_stop()
        # The process ends after the save, in `_save_intra_epoch_ckpt`.
        return True

    def _save_intra_epoch_ckpt(self) -> None:
        super()._save_intra_epoch_ckpt()
        if self._holdfast_must_stop():
            self._holdfast_stop()

    def _holdfast_must_stop(self) -> bool:
        return self.holdfast_guard is not None and self.holdfast_guard.stop_reason is not None

    def _holdfast_stop(self) -> NoReturn:
        """Record the stop request, close the guard and exit the process."""
        assert self.holdfast_guard is not None
        exception = self.holdfast_guard.stop_exception()
        self.holdfast_guard.close_after_stop()
        raise exception or SystemExit(0)


class _ResumedLoader:
    """Wraps a loader so that its first batch is loaded with the checkpoint's random state.

    Args:
        loader: The loader to wrap.
        carried: The carried state from a checkpoint within an epoch, or None.
    """

    def __init__(self, loader: Any, carried: dict[str, Any] | None) -> None:
        self._loader = loader
        self._carried = carried

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        # Creating an iterator draws a seed, as it did in the original run. The checkpoint's random
        # state was captured after that, so it is restored once the iterator exists.
        iterator: Iterator[Any] = iter(self._loader)
        if self._carried is not None:
            restore_random_state(self._carried)
            self._carried = None
        return iterator


def _save_carried_state(brain: HoldfastMixin, path: Any) -> None:
    """Write the carried state to a safetensors file, with its JSON values in the metadata."""
    guard = brain.holdfast_guard
    carried: dict[str, Any] | None = None
    tensors: dict[str, torch.Tensor] = {}
    if guard is not None:
        loader = brain._holdfast_loader
        position = None if loader is None else loader.state_dict()
        carried = carried_state(guard, guard.steps.parts.devices(), loader=position)
        carried["in_epoch"] = bool(brain.step) and brain.modules.training
        tensors = carried.pop("tensors")
    save_file(tensors, path, metadata={_RECOVERABLE: json.dumps(carried)})


def _load_carried_state(brain: HoldfastMixin, path: Any, end_of_epoch: Any) -> None:
    """Read the carried state from a file that `_save_carried_state` has written.

    SpeechBrain passes `end_of_epoch` to every load hook. It is not needed here.
    """
    del end_of_epoch
    with safe_open(path, "pt") as file:
        carried = json.loads(file.metadata()[_RECOVERABLE])
        if carried is not None:
            carried["tensors"] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    brain._holdfast_carried = carried
