"""`Work`: the input of one step, and the state at its start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.loader.random_state import RandomState
from holdfast.loader.splitting import Split
from holdfast.memory.ladder import StepPlan


@dataclass(slots=True, kw_only=True)
class Work:
    """The input of one step, the state at its start, and the attempts so far."""

    # The batch that was passed to `Guard.step`.
    batch: Any
    # The loss function, which takes a micro-batch.
    loss_fn: Callable[[Any], Any]
    # The names of the optimizers to step.
    names: Sequence[str]
    # How to find the batch dimension of the tensors, as in the argument ``split=`` of `Guard`.
    split: Split
    # The number of samples in the batch, or in the largest batch of a window. None if the batch
    # cannot be split.
    size: int | None
    # The parameters of the optimizers to step.
    parameters: list[torch.Tensor]
    # Function that returns the parameters for which to compute gradients. None means all of them.
    inputs: Callable[[], Sequence[torch.Tensor] | None]
    # The random state at the start of the step.
    random_state: RandomState
    # The tensors in the batch.
    tensors: list[torch.Tensor]
    # The version counters of these tensors at the start of the step.
    versions: list[int]
    # Function to call before the step is attempted again. If it is set, the result of the first
    # attempt is not read from the device.
    before_retry: Callable[[], object] | None = None
    # The number of attempts so far, and the number of attempts that ran out of memory.
    attempts: int = 0
    out_of_memory: int = 0
    # Whether the optimizer state has been created.
    prepared: bool = False
    # Whether the last attempt measured how much memory recomputing modules would save.
    measured: bool = False
    # Names of state that the loss function has changed and that could not be restored.
    lost: list[str] = field(default_factory=list)

    def continue_from(self, failed: Work) -> None:
        """Continue to count attempts, if the step has already been attempted with another object.

        Args:
            failed: The input of the earlier attempts, which have failed.
        """
        self.attempts = failed.attempts
        self.out_of_memory = failed.out_of_memory
        self.prepared = failed.prepared

    def micro_batch_of(self, plan: StepPlan) -> int | None:
        """Return the number of samples in a micro-batch, or None if the batch is not split."""
        if self.size is None or plan.micro_batch_size is None:
            return None
        samples = plan.samples(self.size)
        return None if samples == self.size else samples
