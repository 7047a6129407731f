"""The row of numbers that each rank sends to all others in each step, during the backward pass.

`Said` is what a rank sends, `PendingRow` the exchange, and `Rows` what it receives from all ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import distributed

from holdfast.core.errors import RankError

# The kinds of rows: one for each attempt at a step, and one at the end of each epoch.
STEP = 0.0
EPOCH_END = 1.0


class Column(IntEnum):
    """The positions of the numbers in a row. `Said` and `Place` describe them."""

    KIND = 0
    NUMBER = 1
    # At the end of an epoch, the items are the peak memory of the rank in bytes.
    ITEMS = 2
    LOSS = 3
    STOP = 4
    SAVE = 5
    REFUSED = 6
    REPEATS = 7
    FAILED = 8
    BETWEEN = 9
    FORWARD = 10
    GUARD = 11
    EPOCH = 12
    BATCH = 13
    PASSED = 14


# Newer versions of torch warn of the older name.
_gather: Any = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


class Place(NamedTuple):
    """The position of a rank in its data.

    Attributes:
        epoch: The epoch, from 0.
        batch: The batch within the epoch that the step uses.
        passed: The number of batches without a step since the last batch with one.
    """

    epoch: int = 0
    batch: int = 0
    passed: int = 0


_NOWHERE = Place()


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The row of one rank, without its loss and items."""

    # `STEP` or `EPOCH_END`.
    kind: float = STEP
    # The number of the attempt, or of the end of an epoch.
    number: int
    # The number of the guard among those of this process, in the order of their creation.
    guard: int
    # 0 without a stop request, 1 for a request by a call, 1 plus the signal number for a signal.
    stop: float = 0.0
    # Whether a save is due after this step, and whether a save was refused. Only the values of the
    # first rank count.
    save: bool = False
    refused: bool = False
    # Whether another rank trains on the same samples and counts them.
    repeats: bool = False
    # Whether the attempt has failed on this rank, or its optimizer has failed in the last step.
    failed: bool = False
    # Seconds from the end of the last step to the start of this one.
    between: float = 0.0
    # Seconds from the start of the attempt to its loss.
    forward: float = 0.0
    # The position in the data, which must be the same on all ranks.
    place: Place = _NOWHERE

    def numbers(self, loss: float, items: float) -> list[float]:
        """Return the row as numbers, with the loss and the number of items of this rank."""
        # In the order of `Column`.
        row = (
            self.kind,
            self.number,
            items,
            loss,
            self.stop,
            self.save,
            self.refused,
            self.repeats,
            self.failed,
            self.between,
            self.forward,
            self.guard,
            *self.place,
        )
        return [float(number) for number in row]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of all ranks."""

    # The row of each rank, in order of rank.
    each: list[list[float]]

    @property
    def items(self) -> float:
        """Return the total number of items over all ranks."""
        return sum(row[Column.ITEMS] for row in self.each)

    @property
    def loss(self) -> float:
        """Return the mean loss over the items of all ranks."""
        weighted = (row[Column.ITEMS] * row[Column.LOSS] for row in self.each)
        return sum(weighted) / self.items

    @property
    def stop(self) -> tuple[int, float]:
        """Return the rank with the strongest stop request, and that request."""
        requests = [row[Column.STOP] for row in self.each]
        strongest = max(requests)
        return requests.index(strongest), strongest

    @property
    def failed(self) -> bool:
        """Return whether the attempt had failed on a rank when it sent its row."""
        return any(self.which_failed())

    def which_failed(self) -> list[bool]:
        """Return for each rank whether its row says that it has failed."""
        return [bool(row[Column.FAILED]) for row in self.each]

    def suspects(self) -> list[int]:
        """Return the ranks on which NaN or Inf may have originated.

        They are those whose loss is not finite or, if there are none, all ranks.
        """
        losses = [row[Column.LOSS] for row in self.each]
        nonfinite = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
        return nonfinite or list(range(len(losses)))

    def places(self) -> list[Place]:
        """Return the position of each rank in its data."""
        return [Place(*(int(number) for number in row[Column.EPOCH :])) for row in self.each]

    def check(self) -> None:
        """Raise H116 unless all ranks are at the same place."""
        if all(_must_agree(row) == _must_agree(self.each[0]) for row in self.each):
            return
        raise RankError(
            self._difference(),
            limit=(
                "all ranks must run the same steps with the same batches, since each of them waits"
                " for the gradients of all others"
            ),
            fix=(
                "make the loaders of all ranks yield the same number of batches, as"
                " holdfast.DataLoader does; call guard.step on all ranks or on none and, with"
                " several guards, in the same order. If one rank has to skip a batch, skip it on"
                " all ranks (all_reduce the decision)."
            ),
            rule="H116",
        )

    def _difference(self) -> str:
        """Return a sentence about the first difference, in guard, kind, number or batch."""
        guards = [row[Column.GUARD] for row in self.each]
        if len({*guards}) > 1:
            return (
                f"the ranks are at guards {', '.join(f'{guard:.0f}' for guard in guards)}, in order"
                " of creation"
            )
        places = self.places()
        kinds = [row[Column.KIND] for row in self.each]
        if len({*kinds}) > 1:
            ended, stepping = kinds.index(EPOCH_END), kinds.index(STEP)
            text = (
                f"the loader of rank {ended} has ended its epoch, and rank {stepping} makes another"
                " step"
            )
            has_skipped = places[ended].passed > places[stepping].passed
            return f"{text}; {self._passed_over(ended, stepping)}" if has_skipped else text
        numbers = [row[Column.NUMBER] for row in self.each]
        if len({*numbers}) > 1:
            return f"the ranks are at steps {', '.join(f'{number:.0f}' for number in numbers)}"
        ahead = max(range(len(places)), key=lambda rank: places[rank][:2])
        behind = min(range(len(places)), key=lambda rank: places[rank][:2])
        return self._passed_over(ahead, behind)

    def _passed_over(self, ahead: int, behind: int) -> str:
        """Return a sentence about the batches that one rank has skipped and another has not."""
        places = self.places()
        first, other = places[ahead], places[behind]
        text = (
            f"rank {ahead} is at batch {first.batch} of epoch {first.epoch}, and rank {behind} at"
            " batch "
        )
        text += (
            f"{other.batch}"
            if first.epoch == other.epoch
            else f"{other.batch} of epoch {other.epoch}"
        )
        skipped = first.passed - other.passed
        if skipped <= 0:
            return text
        if other.passed:
            passed = f"rank {ahead} has passed {first.passed} batches, rank {behind} {other.passed}"
            return f"{text}: since the last step {passed}"
        last = first.batch - 1
        which = f"batch {last}" if skipped == 1 else f"batches {last - skipped + 1} to {last}"
        return f"{text}: rank {ahead} has skipped {which} of epoch {first.epoch}, without a step"


def _must_agree(row: list[float]) -> list[float]:
    """Return the part of a row that must be equal on all ranks.

    That is kind, number, guard and, in a step, the epoch and the batch. At the end of an epoch the
    batches may differ: a rank may have skipped an empty last batch, which does no harm.
    """
    columns = [Column.KIND, Column.NUMBER, Column.GUARD]
    if row[Column.KIND] == STEP:
        columns += [Column.EPOCH, Column.BATCH]
    return [row[column] for column in columns]


class PendingRow:
    """A running exchange of rows: sends the row of this rank, and receives those of all ranks."""

    def __init__(self, said: Said, loss: Any, items: Any, device: torch.device, group: Any) -> None:
        self._row = torch.tensor(said.numbers(0.0, 0.0), dtype=torch.float64, device=device)
        self._row[Column.ITEMS] = items
        self._row[Column.LOSS] = loss
        self._all = torch.empty(len(Column) * group.size(), dtype=torch.float64, device=device)
        self._work = _gather(self._all, self._row, group=group, async_op=True)
        self._rows: Rows | None = None

    def rows(self) -> Rows:
        """Return the rows of all ranks. This waits for the other ranks and for the device.

        Raises:
            RankError: H116 if the ranks are not at the same place.
        """
        if self._rows is None:
            assert self._work is not None
            self._work.wait()
            self._rows = Rows(self._all.view(-1, len(Column)).tolist())
            self._rows.check()
        return self._rows
