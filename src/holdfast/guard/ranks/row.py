"""The row of numbers that each rank sends to all ranks in each step, during the backward pass.

A rank sends a `Row`. `PendingRows` is an exchange in progress. It returns the rows of all ranks as
`Rows`, for which the host must wait, or as `DeviceRows`, which the device can use before that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import distributed

from holdfast.core.errors import RankError
from holdfast.memory.host_copy import HostCopy

# The kinds of rows: a row is sent in each attempt at a step, and at the end of each epoch.
STEP = 0.0
EPOCH_END = 1.0

# Newer versions of torch warn about the older name.
_gather: Any = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


class Position(NamedTuple):
    """The position of a rank in its data.

    Attributes:
        epoch: The epoch, from 0.
        batch: The batch within the epoch that the step uses.
        passed: The number of batches that were skipped since the last batch with a step.
    """

    epoch: int = 0
    batch: int = 0
    passed: int = 0


class Row(NamedTuple):
    """The row of one rank. It is sent as fp64 numbers, so all received fields are floats."""

    # `STEP` or `EPOCH_END`.
    kind: float = STEP
    # How many attempts and epoch ends the guard has started, including this one.
    number: float = 0.0
    # How many items the loss is averaged over. At the end of an epoch, the peak memory of the rank
    # in bytes.
    items: float = 0.0
    # Whether the host of this rank knows the number of items.
    knows_items: float = False
    loss: float = 0.0
    # 0 for no stop request, 1 for `request_stop`, and 1 plus the signal number for a signal.
    stop: float = 0.0
    # Whether a save is due after this step, and after the next one. Only the values of the first
    # rank are used.
    save: float = False
    save_next: float = False
    # Whether a save was refused. Only the value of the first rank is used.
    refused: float = False
    # Whether another rank trains on the same samples and counts them.
    repeats: float = False
    # Whether the attempt has failed on this rank, or this rank's optimizer has failed in the last
    # step.
    failed: float = False
    # Seconds from the end of the last step to the start of this one.
    between: float = 0.0
    # Seconds from the start of the attempt until its loss was computed.
    forward: float = 0.0
    # The number of the guard in its process, in order of creation.
    guard: float = 0.0
    # The position in the data, which must be the same on all ranks; see `Position`.
    epoch: float = 0.0
    batch: float = 0.0
    passed: float = 0.0
    # A checksum of the names of the optimizers that the step uses, which must be the same on all
    # ranks. At the end of an epoch, it is ignored.
    optimizers: float = 0.0

    @property
    def position(self) -> Position:
        """Return the position of the rank in its data."""
        return Position(int(self.epoch), int(self.batch), int(self.passed))


_WIDTH = len(Row._fields)
_ITEMS = Row._fields.index("items")
_LOSS = Row._fields.index("loss")
_REPEATS = Row._fields.index("repeats")
# The fields that must be equal on all ranks. At the end of an epoch, the batches may differ: a rank
# may have skipped an empty last batch, which is harmless.
_EQUAL_AT_EPOCH_END = [Row._fields.index(name) for name in ("kind", "number", "guard")]
_EQUAL_IN_STEP = [
    *_EQUAL_AT_EPOCH_END,
    *(Row._fields.index(name) for name in ("epoch", "batch", "optimizers")),
]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of all ranks."""

    # The rows in order of rank.
    by_rank: list[Row]

    @property
    def items(self) -> float:
        """Return the total number of items over all ranks."""
        return sum(row.items for row in self.by_rank)

    @property
    def have_equal_known_items(self) -> bool:
        """Return whether all ranks have the same number of items, and each knows it on its host."""
        items = {row.items for row in self.by_rank}
        return len(items) == 1 and all(row.knows_items for row in self.by_rank)

    @property
    def loss(self) -> float:
        """Return the mean loss over the items of all ranks."""
        numbers = torch.tensor(self.by_rank, dtype=torch.float64)
        return float(DeviceRows(numbers).loss())

    @property
    def stop(self) -> tuple[int, float]:
        """Return the rank whose stop request has the highest number, and this number."""
        requests = [row.stop for row in self.by_rank]
        strongest = max(requests)
        return requests.index(strongest), strongest

    @property
    def failed(self) -> bool:
        """Return whether the attempt had failed on any rank when that rank sent its row."""
        return any(self.which_failed())

    def which_failed(self) -> list[bool]:
        """Return, for each rank, whether its row reports a failure."""
        return [bool(row.failed) for row in self.by_rank]

    def suspects(self) -> list[int]:
        """Return the ranks on which NaN or Inf may have originated.

        These are the ranks whose loss is not finite or, if there are none, all ranks.
        """
        losses = [row.loss for row in self.by_rank]
        nonfinite = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
        return nonfinite or list(range(len(losses)))

    def positions(self) -> list[Position]:
        """Return the position of each rank in its data."""
        return [row.position for row in self.by_rank]

    def check(self) -> None:
        """Raise H116 unless all ranks are at the same step, with the same batch."""
        first = _values_that_must_be_equal(self.by_rank[0])
        if all(_values_that_must_be_equal(row) == first for row in self.by_rank):
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
        """Return a sentence about the first difference in guard, kind, number or batch.

        If these are the same, the difference is in the optimizers.
        """
        guards = [row.guard for row in self.by_rank]
        if len({*guards}) > 1:
            return (
                f"the ranks are at guards {', '.join(f'{guard:.0f}' for guard in guards)}, in order"
                " of creation"
            )
        positions = self.positions()
        kinds = [row.kind for row in self.by_rank]
        if len({*kinds}) > 1:
            return self._ended_epoch(ended=kinds.index(EPOCH_END), stepping=kinds.index(STEP))
        numbers = [row.number for row in self.by_rank]
        if len({*numbers}) > 1:
            return f"the ranks are at steps {', '.join(f'{number:.0f}' for number in numbers)}"
        checksums = [row.optimizers for row in self.by_rank]
        if len({*checksums}) > 1 and len({position[:2] for position in positions}) == 1:
            other = next(rank for rank, value in enumerate(checksums) if value != checksums[0])
            return (
                f"rank {other} steps other optimizers than rank 0, or the same ones in another"
                " order"
            )
        ahead = max(range(len(positions)), key=lambda rank: positions[rank][:2])
        behind = min(range(len(positions)), key=lambda rank: positions[rank][:2])
        return self._passed_over(ahead, behind)

    def _ended_epoch(self, *, ended: int, stepping: int) -> str:
        """Return a sentence about a loader that has ended while another rank makes a step."""
        text = (
            f"the loader of rank {ended} has ended its epoch, and rank {stepping} makes another"
            " step"
        )
        positions = self.positions()
        if positions[ended].passed > positions[stepping].passed:
            return f"{text}; {self._passed_over(ended, stepping)}"
        return text

    def _passed_over(self, ahead: int, behind: int) -> str:
        """Return a sentence about batches that one rank has skipped and another has not."""
        positions = self.positions()
        first, other = positions[ahead], positions[behind]
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
        # The skipped batches come directly before the current one.
        last = first.batch - 1
        which = f"batch {last}" if skipped == 1 else f"batches {last - skipped + 1} to {last}"
        return f"{text}: rank {ahead} has skipped {which} of epoch {first.epoch}, without a step"


def _values_that_must_be_equal(row: Row) -> list[float]:
    """Return the values in a row that must be equal on all ranks."""
    fields = _EQUAL_IN_STEP if row.kind == STEP else _EQUAL_AT_EPOCH_END
    return [row[field] for field in fields]


@final
class PendingRows:
    """An exchange of rows that is in progress.

    Args:
        row: The row of this rank. Its loss and items are taken from the next two arguments.
        loss: The loss of this rank: a number, or a tensor of shape ``()`` that may still be
            computed.
        items: How many items the loss is averaged over, also as a number or a tensor.
        device: The device on which the process group runs its collectives.
        group: The process group.
    """

    def __init__(self, row: Row, loss: Any, items: Any, device: torch.device, group: Any) -> None:
        # A copy to an accelerator makes the host wait unless its source is pinned.
        numbers = torch.tensor(row, dtype=torch.float64, pin_memory=device.type != "cpu")
        self._row = numbers.to(device, non_blocking=True)
        self._row[_ITEMS] = items
        self._row[_LOSS] = loss
        self._all = torch.empty(_WIDTH * group.size(), dtype=torch.float64, device=device)
        self._work = _gather(self._all, self._row, group=group, async_op=True)
        # Whether operations that are launched from now on can use `_all`.
        self._has_arrived = False
        # The copy of `_all` in host memory, once it has been started.
        self._copy: HostCopy | None = None
        self._rows: Rows | None = None

    def on_device(self) -> DeviceRows:
        """Return the rows of all ranks in a tensor on the device.

        With NCCL, the host does not wait. With gloo, it waits for the other ranks.
        """
        if not self._has_arrived:
            assert self._work is not None
            self._work.wait()
            self._has_arrived = True
        return DeviceRows(self._all.view(-1, _WIDTH))

    def start_reading(self) -> None:
        """Start copying the rows of all ranks to the host, without waiting for the copy."""
        self.on_device()
        self._copy = HostCopy(self._all)

    def rows(self) -> Rows:
        """Return the rows of all ranks, after waiting for the other ranks and for the device.

        Raises:
            RankError: H116 if the ranks are not at the same step with the same batch.
        """
        if self._rows is None:
            if self._copy is None:
                self.start_reading()
            assert self._copy is not None
            numbers = self._copy.read().tolist()
            begins = range(0, len(numbers), _WIDTH)
            self._rows = rows_of(numbers[begin : begin + _WIDTH] for begin in begins)
            self._rows.check()
        return self._rows


@final
class DeviceRows:
    """The rows of all ranks in a tensor. The host does not read any of them here.

    Args:
        numbers: The rows in order of rank, shape ``(ranks, fields)``, fp64.
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self._numbers = numbers

    def loss(self) -> torch.Tensor:
        """Return the mean loss over the items of all ranks, shape ``()``."""
        items = self._column(_ITEMS)
        return (items * self._column(_LOSS)).sum() / items.sum()

    def items(self) -> torch.Tensor:
        """Return the total number of items over all ranks, shape ``()``."""
        return self._column(_ITEMS).sum()

    def are_valid(self, *, counted: bool) -> torch.Tensor:
        """Return whether all ranks are at the same step, each with a valid number of items.

        This corresponds to `Rows.check` and to the checks in `ItemWeights.correct_gradients`: all
        ranks must have the same batch, and a rank may have 0 items only if it repeats samples that
        another rank counts.

        Args:
            counted: Whether the numbers of items must be whole numbers.

        Returns:
            A bool tensor of shape ``()``.
        """
        # An index with a list of fields would copy the list to the device, and make the host wait.
        values = torch.stack([self._column(field) for field in _EQUAL_IN_STEP])
        are_equal = (values == values[:, :1]).all()
        items = self._column(_ITEMS)
        repeats = self._column(_REPEATS) != 0
        valid = (items > 0) | ((items == 0) & repeats)
        valid = valid & torch.isfinite(items)
        if counted:
            valid = valid & (items == items.floor())
        return are_equal & valid.all()

    def _column(self, field: int) -> torch.Tensor:
        """Return the values of a field, given by its index, on all ranks: shape ``(ranks,)``."""
        return self._numbers[:, field]


def rows_of(numbers: Iterable[Iterable[float]]) -> Rows:
    """Create the rows of all ranks from the received numbers, in order of rank."""
    return Rows([Row._make(row) for row in numbers])
