"""Copy weights and optimizer state to all ranks, after the optimizer has failed on one rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

import torch
from torch import distributed, nn
from torch.optim import Optimizer

from holdfast.core.errors import OutOfMemoryError
from holdfast.guard.optimizer_state import has_torch_layout
from holdfast.guard.optimizers import OptimizerMemory
from holdfast.guard.parts import Parts
from holdfast.guard.ranks.distributed_model import DistributedModel
from holdfast.guard.ranks.messages import Messages


@final
class StateTransfer:
    """Copies weights and moments from another rank to a rank whose optimizer has failed.

    Used by `ProcessGroupRanks`, at points that all ranks reach.

    Args:
        model: The model that all ranks train.
        optimizers: The optimizers of the model, in the same order on all ranks.
        averages: Averaged models, which are equal on all ranks.
        optimizer_memory: Reduces the memory that optimizers need. All ranks reduce it together.
        messages: The connection to the other ranks.
    """

    def __init__(
        self,
        *,
        model: DistributedModel,
        optimizers: Iterable[Optimizer],
        averages: Iterable[nn.Module],
        optimizer_memory: OptimizerMemory,
        messages: Messages,
    ) -> None:
        self._model = model
        self._optimizers = list(optimizers)
        self._averages = list(averages)
        self._optimizer_memory = optimizer_memory
        self._messages = messages
        # Whether one of this rank's optimizers has failed in its step, so that the rank needs the
        # state of a rank whose optimizers have not.
        self.is_behind = False

    def request(self) -> None:
        """Request the state of another rank, since one of this rank's optimizers has failed."""
        self.is_behind = True

    def catch_up(self, behind: list[bool]) -> None:
        """If an optimizer has failed on any rank, copy the state of another rank to all ranks.

        All ranks must call this at the same point. All optimizers are copied, since the ranks do
        not know which of them have failed.

        Args:
            behind: For each rank, whether one of its optimizers failed in the last step.
        """
        if not any(behind):
            return
        self._optimizer_memory.release()
        source = _first_healthy(behind)
        group = self._model.group
        device = self._model.device
        for optimizer in self._optimizers:
            _copy_state(optimizer, source, self._messages, group, device)
        for average in self._averages:
            for tensor in average.state_dict().values():
                on_device = tensor.to(device)
                distributed.broadcast(on_device, source, group=group)
                tensor.copy_(on_device)
        self.is_behind = False


def transfer_of(parts: Parts, model: DistributedModel, messages: Messages) -> StateTransfer:
    """Return a `StateTransfer` for the optimizers of a guard.

    Args:
        parts: The objects that the guard manages.
        model: The model that all ranks train.
        messages: The connection to the other ranks.
    """
    return StateTransfer(
        model=model,
        optimizers=parts.optimizers.values(),
        averages=parts.averages.values(),
        optimizer_memory=OptimizerMemory(parts.optimizers.values()),
        messages=messages,
    )


def _copy_state(
    optimizer: Optimizer, source: int, messages: Messages, group: Any, device: torch.device
) -> None:
    """Copy the parameters and the state of an optimizer from one rank to all ranks.

    All ranks must call this.

    Args:
        optimizer: The optimizer, whose parameters and state are overwritten on the other ranks.
        source: The rank to copy from.
        messages: The connection to the other ranks.
        group: The process group in which tensors are broadcast.
        device: The device on which tensors are broadcast.

    Raises:
        OutOfMemoryError: H402 if the state cannot be copied, for example because it has a different
            form on another rank.
    """
    if not has_torch_layout(optimizer.state_dict()):
        raise without_help("the optimizer keeps state of an unknown type, which cannot be copied")
    states = [
        (parameter, optimizer.state.get(parameter, {}))
        for group_of_parameters in optimizer.param_groups
        for parameter in group_of_parameters["params"]
    ]
    forms = [
        [[key, list(getattr(state[key], "shape", []))] for key in sorted(state)]
        for _, state in states
    ]
    if any(other_forms != forms for other_forms in messages.exchange("forms of state", forms)):
        raise without_help("the state of the optimizer has a different form on other ranks")
    # Values that are not tensors on the device, such as step counters.
    hosted: list[tuple[dict[str, Any], str]] = []
    for parameter, state in states:
        distributed.broadcast(parameter.detach(), source, group=group)
        for key in sorted(state):
            if isinstance(state[key], torch.Tensor) and state[key].device.type == device.type:
                distributed.broadcast(state[key], source, group=group)
            else:
                hosted.append((state, key))
    values = messages.exchange("state", [state[key] for state, key in hosted])[source]
    for (state, key), value in zip(hosted, values, strict=True):
        state[key] = value


def _first_healthy(behind: list[bool]) -> int:
    """Return a rank whose optimizers have completed their steps.

    Args:
        behind: For each rank, whether one of its optimizers failed.

    Raises:
        OutOfMemoryError: H402 if there is no such rank.
    """
    if all(behind):
        raise without_help("this happened on all ranks")
    return behind.index(False)


def without_help(why: str) -> OutOfMemoryError:
    """Return error H402 for a failed optimizer whose rank cannot receive another rank's state."""
    return OutOfMemoryError(
        "an optimizer ran out of memory in the middle of its step",
        limit=f"weights and moments are only partly updated, and {why}",
        fix=(
            "leave more memory for the optimizer (fused=True, a smaller model or optimizer) and"
            " start all ranks again: they resume from the newest checkpoint."
        ),
        rule="H402",
    )
