"""What an epoch fetches from a position on.

Entries for the workers, one per batch, made as they are asked for.

A position counts samples of all ranks, or batches of a batch sampler.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any, NamedTuple, final

from holdfast.loader.order.orders import Order
from holdfast.loader.order.ranks import rank_positions, steps_left
from holdfast.loader.order.sampled import Sampled
from holdfast.loader.quarantine import key_of

_PLACES = 20  # bits for the place in a batch
_PART = 64  # positions that are looked at together where many are quarantined
SPARES = 16
"""Samples that may stand in for bad ones of a batch.

More in a row are no bad samples, but a folder that is gone.
"""


class Entry(NamedTuple):
    """One batch to fetch.

    Args:
        number: Counts the batches of an epoch, for the workers' board.
        epoch: Seeds depend on it.
        indices: Dataset indices, in the order of the batch.
        spares: Indices that follow in the epoch's order: the next ones replace what cannot be read.
        bad: Those of `indices` and `spares` that are quarantined already.
        first: Position of the first sample, where an index may come more than once an epoch: its
            random numbers then depend on its position too. None elsewhere.
        alone: Whether this is a sample by itself (``batch_size=None``), not a batch of one.
        control: Place, among `indices` and `spares`, of a sample that a new worker reads first, to
            show that it can.
    """

    number: int
    epoch: int
    indices: tuple[Any, ...]
    spares: tuple[Any, ...] = ()
    bad: tuple[Any, ...] = ()
    first: int | None = None
    alone: bool = False
    control: int | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where the entries of an epoch come from.

    An order, cut into batches, which the ranks share step by step.

    A `batch_size` of None is for samples by themselves. A sampler of the user's says itself what is
    whose rank's; one `of_batches` yields batches, which are taken one by one as they are.
    """

    order: Order | Sampled
    seed: int = 0
    batch_size: int | None = 1
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1
    of_batches: bool = False

    def entries(self, epoch: int, start: int, bad: Collection[Any]) -> Iterator[tuple[Entry, int]]:
        """Yield entries from a position on, each with the position after it.

        Keys of indices that are quarantined are in `bad`, which is read anew for each entry.
        """
        size, most = self.batch_size or 1, self.order.count(epoch)
        for number in count():
            share = rank_positions(
                start, most, size, self.rank, self.world_size, drop_last=self.drop_last
            )
            if share is None:
                return
            begin, stop = share.start, share.stop
            indices = tuple(self._at(epoch, begin, stop))
            following = self._following(epoch, stop, most, _PART if bad else SPARES)
            spares = tuple(_until(SPARES, following, bad) if bad else islice(following, SPARES))
            known = (
                tuple(index for index in (*indices, *spares) if key_of(index) in bad) if bad else ()
            )
            repeats = isinstance(self.order, Sampled) and self.order.repeats
            first = begin << _PLACES * self.of_batches if repeats else None
            start = min(start + size * self.world_size, most)
            yield (
                Entry(number, epoch, indices, spares, known, first, self.batch_size is None),
                start,
            )

    def repeats(self, epoch: int, start: int) -> bool:
        """Return whether this rank's part of a step is one of another rank too.

        Fewer samples are left than ranks.
        """
        return 0 < self.order.count(epoch) - start <= self.rank

    def _at(self, epoch: int, start: int, stop: int) -> list[Any]:
        found: list[Any] = self.order.indices(self.seed, epoch, start, stop)
        return [index for batch in found for index in batch] if self.of_batches else found

    def _following(self, epoch: int, stop: int, most: int, part: int) -> Iterator[Any]:
        """Yield the indices from here to the end of the epoch, and then those from its beginning
        on.
        """
        part = 1 if self.of_batches else part
        for begin, end in ((stop, most), (0, most)):
            for first in range(begin, end, part):
                yield from self._at(epoch, first, min(first + part, end))

    def steps(self, start: int) -> int:
        """Return how many entries follow."""
        return steps_left(
            start, len(self.order), self.batch_size or 1, self.world_size, drop_last=self.drop_last
        )

    def among(self, rank: int, world_size: int) -> Plan:
        """Return the plan of one of so many ranks.

        A position counts samples of all of them, so it stays right.
        """
        return self if self.sampler is not None else replace(self, rank=rank, world_size=world_size)

    @property
    def sampler(self) -> Sampled | None:
        """Return the user's sampler, if there is one."""
        return self.order if isinstance(self.order, Sampled) else None

    def identity(self) -> dict[str, Any]:
        """Return what must be equal for a position to mean the same sample."""
        return {"counts": "batches" if self.of_batches else "samples", **self.order.identity()}


def _until(many: int, following: Iterable[Any], bad: Collection[Any]) -> list[Any]:
    """Return what follows up to the last of so many good ones.

    Bad ones between keep their places.
    """
    found = []
    for index in following:
        found.append(index)
        many -= key_of(index) not in bad
        if many <= 0:
            break
    return found
