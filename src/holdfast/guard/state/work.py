"""What one step works on, and what it was like when the step began."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.loader.random_state import RandomState
from holdfast.loader.splitting import Split


@dataclass(slots=True, kw_only=True)
class Work:
    """What one step works on.

    Args:
        batch: As given to the step.
        loss_fn: Of a micro-batch.
        names: Optimizers to step.
        split: How the batch is cut.
        size: Its samples, None if it cannot be cut; of a window, those of its largest batch.
        parameters: Of these optimizers.
        inputs: Returns where gradients may go at that time; None: everywhere.
        random_state: At the beginning.
        tensors: In the batch.
        versions: Their counters of in-place changes at the beginning.
        attempts: Made so far.
        out_of_memory: How many of them ran out of memory.
        prepared: Whether the state of the optimizers exists.
        measured: Whether the last attempt was measured, to see what to recompute.
        lost: What the loss function has changed and could not be put back.
    """

    batch: Any
    loss_fn: Callable[[Any], Any]
    names: Sequence[str]
    split: Split
    size: int | None
    parameters: list[torch.Tensor]
    inputs: Callable[[], Sequence[torch.Tensor] | None]
    random_state: RandomState
    tensors: list[torch.Tensor]
    versions: list[int]
    attempts: int = 0
    out_of_memory: int = 0
    prepared: bool = False
    measured: bool = False
    lost: list[str] = field(default_factory=list)
