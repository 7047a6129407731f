"""`DistributedModel`: the interface to a model that is distributed over the ranks.

`ProcessGroupRanks` accesses its model through this interface. `ReplicatedModel` implements it for
DistributedDataParallel, and `ShardedModel` for ``fully_shard``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch


class DistributedModel(ABC):
    """The model that all ranks train.

    Args:
        group: The process group in which the model runs its collectives.
        device: The device that holds the model's weights.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group = group
        self.device = device

    # --- what it supports

    @property
    @abstractmethod
    def allowed_values(self) -> Mapping[str, Sequence[Any]]:
        """Return the policy fields that this model restricts, mapped to their allowed values."""

    @property
    @abstractmethod
    def policy_overrides(self) -> Mapping[str, Any]:
        """Return the policy fields that this model overrides, mapped to their new values."""

    @property
    @abstractmethod
    def sends_before_row(self) -> bool:
        """Return whether the model starts collectives before the ranks exchange their rows."""

    # --- an attempt

    @abstractmethod
    def begin_attempt(self) -> None:
        """Start an attempt at a step. All ranks must call this."""

    @abstractmethod
    def before_row(self) -> None:
        """Record that this rank is about to send its row to the other ranks."""

    @abstractmethod
    def after_row(self) -> None:
        """Record that this rank has started to send its row to the other ranks."""

    @abstractmethod
    def end_attempt(self) -> None:
        """End an attempt, whether or not it succeeded."""

    @abstractmethod
    def discard_attempt(self) -> None:
        """Discard an attempt that has failed on at least one rank.

        All ranks must call this before the next attempt that succeeds. A rank that has failed may
        also call it earlier.
        """

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
        """Return the order in which the gradients are summed, as a list of parameter indices.

        The list is empty if the order is unknown or does not matter.
        """

    @abstractmethod
    def lay_out_gradients(self, order: list[int]) -> None:
        """Make torch sum the gradients in the order of an earlier process.

        Args:
            order: The value of `gradient_order` in that process.
        """
