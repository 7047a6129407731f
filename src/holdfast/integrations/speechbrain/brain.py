"""`HoldfastMixin`: SpeechBrain's loop, with the steps of a guard."""

from __future__ import annotations

import copy
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
from holdfast.guard.directory import check_found
from holdfast.guard.hosted import HostedGuard, hosted_policy
from holdfast.guard.result import StepResult
from holdfast.guard.splitting.split_safety import LossFunction
from holdfast.integrations.protocol import (
    Framework,
    carried_by,
    carried_tree,
    check_one_process,
    load,
    may_save,
    open_guard,
    restore_random_state,
    warn_of_kept_workers,
)
from holdfast.integrations.speechbrain.checkpoints import NAME, sealed
from holdfast.loader.loader import DataLoader
from holdfast.loader.splitting import Split

_RECOVERABLE = "holdfast"


class HoldfastMixin(Framework):  # type: ignore[misc]
    """Put before ``sb.Brain`` among the bases, it makes each step a transaction and each checkpoint
    verified.

    Args:
        *positional: Of ``Brain``.
        holdfast_policy: Settings: a `Policy`, a dict of its fields, the path of a YAML file; None:
            ``holdfast_policy`` of ``hparams``, else the defaults. Clipping, precision and patience
            are the Brain's.
        holdfast_run_dir: Where it is recorded; None: ``holdfast_run_dir`` of ``hparams``, else
            ``holdfast`` in its ``output_folder`` or beside the checkpoints.
        **named: Of ``Brain``.

    Raises:
        PolicyError: H101 or H102 for the policy; in ``fit``, H108 for several processes, H109 for a
            policy that contradicts the options.
    """

    holdfast_guard: HostedGuard | None = None
    """The guard, while ``fit`` runs: `statistics`, `events`."""

    def __init__(
        self,
        *positional: Any,
        holdfast_policy: Any = None,
        holdfast_run_dir: str | os.PathLike[str] | None = None,
        **named: Any,
    ) -> None:
        super().__init__(*positional, **named)
        hparams = getattr(self, "hparams", None)
        given = (
            getattr(hparams, "holdfast_policy", None)
            if holdfast_policy is None
            else holdfast_policy
        )
        self._holdfast_policy = Policy.of(given)
        self._holdfast_run_dir = holdfast_run_dir or getattr(hparams, "holdfast_run_dir", None)
        self._holdfast_steps: Accumulation | None = None
        self._holdfast_carried: dict[str, Any] | None = None
        self._holdfast_within_epoch: dict[str, Any] | None = None  # carried, for the first batch
        self._holdfast_loader: DataLoader | None = None
        self._holdfast_warned = False
        self._holdfast_position: dict[str, Any] | None = None  # that the loader goes on from
        self._holdfast_batches: int | None = None  # of an epoch
        # The last part of a batch, and its outputs
        self._holdfast_seen: tuple[Any, Any] | None = None
        if self.checkpointer is not None:
            sealed(self.checkpointer)
            self.checkpointer.add_recoverable(
                _RECOVERABLE,
                self,
                custom_save_hook=_save,
                custom_load_hook=_load,
                optional_load=True,
            )

    def fit(self, *positional: Any, **named: Any) -> None:
        """Train, as ``Brain.fit``; the run directory is closed afterwards."""
        error: BaseException | None = None
        try:
            super().fit(*positional, **named)
        except BaseException as raised:
            error = raised
            raise
        finally:
            guard, self.holdfast_guard, self._holdfast_steps = self.holdfast_guard, None, None
            if self.checkpointer is not None:
                self.checkpointer.emit, self.checkpointer.may_save = None, lambda: True
            if guard is not None:
                guard.__exit__(None if error is None else type(error), error, None)

    def on_fit_start(self) -> None:
        """Do as ``Brain`` does, which restores everything, and open the run directory."""
        super().on_fit_start()
        for several in ("distributed_launch", "data_parallel_backend"):
            check_one_process(
                2 if getattr(self, several, False) else 1, f"{several}: processes or devices"
            )
        optimizers = self._holdfast_optimizers()
        if not optimizers:
            return  # gradients are only looked at
        resumed = self.checkpointer is not None and bool(self.checkpointer.folders())
        if self.checkpointer is not None and not resumed:
            check_found(self._holdfast_directory(), anew="")
        carried, self._holdfast_carried = self._holdfast_carried, None
        guard = open_guard(
            self._holdfast_directory(),
            policy=self._holdfast_settings(),
            scaler=self.scaler,
            saves_in=(
                None
                if self.checkpointer is None
                else (Path(self.checkpointer.checkpoints_dir), NAME)
            ),
            carried=carried,
            resumed=resumed,
            model=self.modules,
            optimizer=optimizers,
        )
        self.holdfast_guard, self._holdfast_steps = guard, Accumulation(guard)
        if self.checkpointer is not None:
            self.checkpointer.emit, self.checkpointer.may_save = guard.emit, lambda: may_save(guard)
        if type(self).fit_batch is not HoldfastMixin.fit_batch:
            guard.emit(
                run_events.OwnFitBatch(
                    why="it is not guarded, but for what goes through guarded_step"
                )
            )
        if carried is None:
            return
        self._holdfast_position = carried_tree(carried, "loader")
        if carried["in_epoch"]:
            # The loader draws from the random state until its first batch
            self._holdfast_within_epoch = carried
        else:
            restore_random_state(carried)

    def _holdfast_optimizers(self) -> dict[str, Any]:
        if self.optimizers_dict is not None:
            return dict(self.optimizers_dict)
        found = getattr(self, "optimizer", None)
        return {} if found is None else {"optimizer": found}

    def _holdfast_settings(self) -> Policy:
        # A limit of 0, which would multiply every gradient by 0, is H102
        clips = not self.max_grad_norm < 0
        chosen = hosted_policy(
            self._holdfast_policy,
            host="the options of the Brain",
            max_grad_norm=self.max_grad_norm if clips else None,
            clip_by="optimizer" if clips else "global",
            nonfinite_patience=max(1, int(self.nonfinite_patience)),
            precision=self.precision,
        )
        # SpeechBrain ends at the one after so many, a guard at the last of so many.
        return chosen.replace(nonfinite_patience=int(self.nonfinite_patience) + 1)

    def _holdfast_directory(self) -> Path:
        if self._holdfast_run_dir is not None:
            return Path(self._holdfast_run_dir)
        output = getattr(getattr(self, "hparams", None), "output_folder", None)
        if output is None and self.checkpointer is not None:
            output = Path(self.checkpointer.checkpoints_dir).parent
        return Path(output or ".", "holdfast")

    def _fit_train(self, train_set: Any, epoch: Any, enable: Any) -> None:
        try:
            self._holdfast_batches = len(train_set)
        except TypeError:
            self._holdfast_batches = None
        self._holdfast_loader = train_set if isinstance(train_set, DataLoader) else None
        if not self._holdfast_warned:
            self._holdfast_warned = True
            warn_of_kept_workers(
                train_set, None if self.holdfast_guard is None else self.holdfast_guard.emit
            )
        position, self._holdfast_position = self._holdfast_position, None
        if self._holdfast_loader is not None and position is not None:
            self._holdfast_loader.load_state_dict(position)
            # SpeechBrain goes on with it, also if nothing is left
            self._holdfast_loader.set_epoch(position["epoch"])
        carried, self._holdfast_within_epoch = self._holdfast_within_epoch, None
        super()._fit_train(train_set=_Begun(train_set, carried), epoch=epoch, enable=enable)

    def fit_batch(self, batch: Any) -> torch.Tensor:
        """Train on a batch, as ``Brain.fit_batch``; one that was left out returns its NaN."""
        steps = self._holdfast_steps
        if steps is None:
            found: torch.Tensor = super().fit_batch(batch)
            return found
        should_step = (
            self.step % self.grad_accumulation_factor == 0 or self.step == self._holdfast_batches
        )
        self.on_fit_batch_start(batch, should_step)
        make = steps.step if should_step else steps.add
        result = make(
            batch, self._holdfast_loss, optimizer=self._holdfast_active(), split=split_of(batch)
        )
        self.nonfinite_count += result.skipped and not bool(torch.isfinite(result.loss))
        self.optimizer_step += should_step and not result.skipped
        part, outputs = self._holdfast_seen or (batch, None)
        self._holdfast_seen = None
        self.on_fit_batch_end(part, outputs, result.loss, should_step and not result.skipped)
        return result.loss.detach().cpu()

    def _should_save_intra_epoch_ckpt(self, last_ckpt_time: Any, steps_since_ckpt: Any) -> bool:
        if self._holdfast_steps is not None and self._holdfast_steps.pending:
            return False  # its gradients would be lost; the save stays due
        if self.holdfast_guard is None or self.holdfast_guard.stop_reason is None:
            usual: bool = super()._should_save_intra_epoch_ckpt(last_ckpt_time, steps_since_ckpt)
            return usual
        if self.checkpointer is None:
            self._holdfast_stop()
        return True

    def _save_intra_epoch_ckpt(self) -> None:
        super()._save_intra_epoch_ckpt()
        if self.holdfast_guard is not None and self.holdfast_guard.stop_reason is not None:
            self._holdfast_stop()

    def _holdfast_stop(self) -> NoReturn:
        assert self.holdfast_guard is not None
        ending = self.holdfast_guard.ending()
        self.holdfast_guard.stopped()
        raise ending or SystemExit(0)

    def _holdfast_loss(self, part: Any) -> torch.Tensor:
        stage = load("speechbrain").Stage.TRAIN
        with self.training_ctx:
            outputs = self.compute_forward(part, stage)
            loss: torch.Tensor = self.compute_objectives(outputs, part, stage)
        assert self._holdfast_steps is not None
        if self._holdfast_steps.attempting:
            self._holdfast_seen = part, tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)
        return divided(loss, self.grad_accumulation_factor)

    def _holdfast_active(self) -> list[str]:
        if self.optimizers_dict is None:
            return list(self._holdfast_optimizers())
        return list(self.freeze_optimizers(self.optimizers_dict))

    def guarded_step(
        self, batch: Any, loss_fn: LossFunction, *, optimizer: str | Sequence[str] | None = None
    ) -> StepResult:
        """Make one step in a ``fit_batch`` of one's own, such as that of a GAN.

        Args:
            batch: What `loss_fn` takes; after out-of-memory, parts of it.
            loss_fn: As ``Guard.step`` takes it; autocast is on.
            optimizer: Keys of ``optimizers_dict``; None: all that are not frozen. Gradients reach
                only their parameters.

        Returns:
            What happened; ``skipped`` if the weights are what they were.
        """
        assert self.holdfast_guard is not None, "only while fit runs"
        names = self._holdfast_active() if optimizer is None else optimizer
        result = self.holdfast_guard.step(batch, loss_fn, optimizer=names, split=split_of(batch))
        self.optimizer_step += not result.skipped
        return result


class _Begun:
    """A loader whose first batch is made under the random state that the checkpoint was left
    with.
    """

    def __init__(self, loader: Any, carried: dict[str, Any] | None) -> None:
        self._loader, self._carried = loader, carried

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        iterator: Iterator[Any] = iter(self._loader)
        carried, self._carried = self._carried, None
        if carried is not None:
            restore_random_state(carried)
        return iterator


def _save(brain: HoldfastMixin, path: Any) -> None:
    guard, loader = brain.holdfast_guard, brain._holdfast_loader
    carried, tensors = None, {}
    if guard is not None:
        position = None if loader is None else loader.state_dict()
        carried = carried_by(guard, guard.steps.parts.devices(), loader=position)
        carried["in_epoch"] = bool(brain.step) and brain.modules.training
        tensors = carried.pop("tensors")
    save_file(tensors, path, metadata={_RECOVERABLE: json.dumps(carried)})


def _load(brain: HoldfastMixin, path: Any, end_of_epoch: Any) -> None:
    del end_of_epoch
    with safe_open(path, "pt") as file:
        carried = json.loads(file.metadata()[_RECOVERABLE])
        if carried is not None:
            carried["tensors"] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    brain._holdfast_carried = carried


def is_padded(batch: Any) -> bool:
    """Return whether this is a ``PaddedBatch``, whose parts are attributes."""
    return hasattr(batch, "at_position") and hasattr(batch, "batchsize")


def split_of(batch: Any) -> Split:
    """Return how a batch of SpeechBrain's is cut."""
    return cut_padded if is_padded(batch) else 0


def cut_padded(batch: Any, size: int) -> list[Any]:
    """Cut a ``PaddedBatch`` into parts of so many samples.

    Padding and relative lengths stay as they are.
    """
    # Private, as its length is
    name = next(name for name in vars(batch) if name.endswith("__keys"))
    length = name.removesuffix("keys") + "length"
    parts = []
    for start in range(0, len(batch), size):
        part = copy.copy(batch)
        for key in vars(batch)[name]:
            setattr(part, key, _cut(batch[key], slice(start, start + size)))
        setattr(part, length, min(size, len(batch) - start))
        parts.append(part)
    return parts


def _cut(value: Any, where: slice) -> Any:
    if not hasattr(value, "lengths"):
        return value[where]
    return type(value)(value.data[where], value.lengths[where])  # PaddedData
