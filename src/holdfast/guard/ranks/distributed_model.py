"""`DistributedModel`: the interface to a model that is distributed over the ranks.

`ProcessGroupRanks` uses it. `ReplicatedModel` implements it for DistributedDataParallel, and
`ShardedModel` for ``fully_shard``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch


class DistributedModel(ABC):
    """The model that all ranks train.

    Args:
        group: The process group of the model's collectives.
        device: The device of its weights.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group = group
        self.device = device

    # --- what it supports

    @property
    @abstractmethod
    def allowed_values(self) -> Mapping[str, Sequence[Any]]:
        """Return the policy fields that this model restricts, with the values that are allowed."""

    @property
    @abstractmethod
    def policy_overrides(self) -> Mapping[str, Any]:
        """Return the policy fields that this model overrides, with their values."""

    @property
    @abstractmethod
    def sends_before_row(self) -> bool:
        """Return whether the model starts collectives in an attempt before the row is exchanged."""

    # --- an attempt

    @abstractmethod
    def begin_attempt(self) -> None:
        """Start an attempt on all ranks."""

    @abstractmethod
    def before_row(self) -> None:
        """Record that the exchange of the row is about to start."""

    @abstractmethod
    def after_row(self) -> None:
        """Record that the exchange of the row has started."""

    @abstractmethod
    def end_attempt(self) -> None:
        """End an attempt, successful or not."""

    @abstractmethod
    def discard_attempt(self) -> None:
        """Discard an attempt that has failed on some rank. All ranks must call this."""

    @abstractmethod
    def own_collectives(self) -> int:
        """Return how many collectives the loss or the model started in a complete attempt."""

    # --- state

    @abstractmethod
    def may_differ(self, name: str) -> bool:
        """Return whether a buffer or a frozen weight may differ between ranks."""

    @property
    @abstractmethod
    def gradient_order(self) -> list[int]:
        """Return the order in which the gradients are summed, as positions of parameters.

        The list is empty if the order is unknown or does not matter.
        """

    @abstractmethod
    def lay_out_gradients(self, order: list[int]) -> None:
        """Sum the gradients in the order that `gradient_order` returned in an earlier process."""
