"""What the ranks of a run agree on, once a step. One rank for now: this is the seam for many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from holdfast.core.errors import PolicyError


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """What one rank knows at the end of its attempt, and what all know afterwards."""

    step_id: int  # transactions begun; the same on every rank, so that votes of different steps are never paired
    out_of_memory: bool  # an attempt failed for lack of memory
    nonfinite: bool  # loss or gradient hold NaN or Inf
    stop_requested: bool  # the run shall end


class Ranks(Protocol):
    """All ranks of a run."""

    def agree(self, vote: Vote) -> Vote:
        """Return the vote that all ranks share: a flag is set if any rank has set it."""


class OneRank:
    """A run of one process."""

    def agree(self, vote: Vote) -> Vote:
        """Return the vote unchanged."""
        return vote


def find_ranks() -> Ranks:
    """Return the ranks of this run."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise PolicyError(
            f"world_size={distributed.get_world_size()}",
            limit="this version guards one process; ranks that retry or skip by themselves would diverge",
            fix="run with one process per run directory.",
            rule="H108",
        )
    return OneRank()
