"""What each rank says in each step: one row of numbers, gathered beside the backward pass."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from holdfast.core.errors import RankError

STEP, EPOCH_END = 0.0, 1.0
_WIDTH = 12
# The newer name where there is one: torch warns of the other.
_gather: Any = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The row of one rank, before its loss and items."""

    kind: float = STEP  # or the end of an epoch
    number: int  # of the attempt or end of an epoch
    guard: int  # of those of this process, in the order in which they were made
    stop: float = 0.0  # 1: it was asked to stop by a call; 1 + its number: by a signal
    save: bool = False  # a save is due after this step; what the first rank says counts
    refused: bool = False  # a save was refused; as above
    repeats: bool = False  # what it trains on counts on another rank
    failed: bool = False  # this rank cannot make this attempt, or has not made its last step whole
    between: float = 0.0  # seconds since its last step, until this one began
    forward: float = 0.0  # and since then


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of all ranks."""

    each: list[list[float]]

    @property
    def items(self) -> float:
        """Return the items of all ranks."""
        return sum(row[2] for row in self.each)

    @property
    def loss(self) -> float:
        """Return the mean loss over the items of all ranks."""
        return sum(row[2] * row[3] for row in self.each) / self.items

    @property
    def stop(self) -> tuple[int, float]:
        """Return which rank asks to stop most strongly, and how."""
        rank = max(range(len(self.each)), key=lambda rank: self.each[rank][4])
        return rank, self.each[rank][4]

    @property
    def failed(self) -> bool:
        """Return whether a rank could not make this attempt, and knew it before its loss was there."""
        return any(self.which_failed())

    def which_failed(self) -> list[bool]:
        """Return for each rank whether it could not."""
        return [bool(row[8]) for row in self.each]

    def suspects(self) -> list[int]:
        """Return the ranks that NaN or Inf may come from: those whose own loss is not finite, or else all."""
        bad = [rank for rank, row in enumerate(self.each) if not math.isfinite(row[3])]
        return bad or list(range(len(self.each)))

    def check(self) -> None:
        """Raise H116 unless all ranks are at the same place."""
        guards = [row[11] for row in self.each]
        if all(row[:2] == self.each[0][:2] for row in self.each) and len({*guards}) == 1:
            return
        ended = [rank for rank, row in enumerate(self.each) if row[0] == EPOCH_END]
        others = [rank for rank, row in enumerate(self.each) if row[0] != EPOCH_END]
        what = f"the ranks are at steps {', '.join(f'{row[1]:.0f}' for row in self.each)}"
        if ended and others:
            what = f"the loader of rank {ended[0]} has ended its epoch, and rank {others[0]} makes another step"
        if len({*guards}) > 1:
            what = f"the ranks are at guards {', '.join(f'{each:.0f}' for each in guards)}, counted as they were made"
        raise RankError(
            what,
            limit="all ranks make the same steps, since each of them waits for all gradients",
            fix="let the loaders of all ranks yield equally many batches, as holdfast.DataLoader does by itself, and "
            "call guard.step on all ranks, of several guards in one order, or on none.",
            rule="H116",
        )


class PendingRow:
    """A row that is on its way to all ranks, and those that come from them."""

    def __init__(self, said: Said, loss: Any, items: Any, device: torch.device, group: Any) -> None:
        flags = said.stop, said.save, said.refused, said.repeats, said.failed, said.between, said.forward, said.guard
        self._row = torch.tensor([said.kind, said.number, 0.0, 0.0, *flags], dtype=torch.float64, device=device)
        self._row[2] = items
        self._row[3] = loss
        self._all = torch.empty(_WIDTH * group.size(), dtype=torch.float64, device=device)
        self._work = _gather(self._all, self._row, group=group, async_op=True)
        self._rows: Rows | None = None

    def rows(self) -> Rows:
        """Wait for the rows of all ranks. Cost: one host sync."""
        if self._rows is None:
            assert self._work is not None
            self._work.wait()
            self._rows = Rows(self._all.view(-1, _WIDTH).tolist())
            self._rows.check()
        return self._rows
