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
    """What one step works on."""

    batch: Any  # as given to the step
    loss_fn: Callable[[Any], Any]  # of a micro-batch
    names: Sequence[str]  # optimizers to step
    split: Split  # how the batch is cut
    # Its samples, None if it cannot be cut; of a window, those of its largest batch
    size: int | None
    parameters: list[torch.Tensor]  # of these optimizers
    # Where gradients may go at that time; None: everywhere
    inputs: Callable[[], Sequence[torch.Tensor] | None]
    random_state: RandomState  # at the beginning
    tensors: list[torch.Tensor]  # in the batch
    versions: list[int]  # their counters of in-place changes at the beginning
    attempts: int = 0  # made so far
    out_of_memory: int = 0  # how many of them ran out of memory
    prepared: bool = False  # whether the state of the optimizers exists
    measured: bool = False  # whether the last attempt was measured, to see what to recompute
    # What the loss function has changed and could not be put back
    lost: list[str] = field(default_factory=list)
