"""What an epoch fetches from a position on: entries for the workers, one per batch, made as they are asked for.

by position    an order of holdfast, or a user's sampler whose indices are drawn once an epoch: any batch size
by batch       a user's batch sampler, whose batches are its own

A position counts samples of all ranks, or batches of a batch sampler.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple, final

from holdfast.loader.order.orders import Order
from holdfast.loader.order.ranks import rank_positions, steps_left
from holdfast.loader.order.sampled import Sampled
from holdfast.loader.quarantine import key_of

_PLACES = 20  # bits for the place in a batch
_PART = 64  # positions that are looked at together where many are quarantined
SPARES = 16
"""Samples that may stand in for bad ones of a batch: more in a row are no bad samples, but a folder that is gone."""


class Entry(NamedTuple):
    """One batch to fetch.

    Args:
        number: Counts the batches of an epoch, for the workers' board.
        epoch: Seeds depend on it.
        indices: Dataset indices, in the order of the batch.
        spares: Indices that follow in the epoch's order: the next ones replace what cannot be read.
        bad: Those of `indices` and `spares` that are quarantined already.
        first: Position of the first sample, where an index may come more than once an epoch: its random numbers then
            depend on its position too. None elsewhere.
        alone: Whether this is a sample by itself (``batch_size=None``), not a batch of one.
        control: Place, among `indices` and `spares`, of a sample that a new worker reads first, to show that it can.
    """

    number: int
    epoch: int
    indices: tuple[Any, ...]
    spares: tuple[Any, ...] = ()
    bad: tuple[Any, ...] = ()
    first: int | None = None
    alone: bool = False
    control: int | None = None


class Plan(ABC):
    """Where the entries of an epoch come from."""

    @final
    def entries(self, epoch: int, start: int, bad: Collection[Any]) -> Iterator[tuple[Entry, int]]:
        """Yield entries from a position on, each with the position after it.

        Keys of indices that are quarantined are in `bad`, which is read anew for each entry.
        """
        for number in count():
            step = self._step(epoch, start)
            if step is None:
                return
            indices, first, stop, start = step
            spares = _until(SPARES, self._following(epoch, stop), bad)
            known = tuple(index for index in (*indices, *spares) if key_of(index) in bad) if bad else ()
            yield Entry(number, epoch, tuple(indices), tuple(spares), known, first, self.alone), start

    @property
    def alone(self) -> bool:
        """Return whether entries are samples by themselves."""
        return False

    @abstractmethod
    def _step(self, epoch: int, start: int) -> tuple[list[Any], int | None, int, int] | None:
        """Return this rank's indices, where they begin if they may repeat, where they end, and the next step."""

    @abstractmethod
    def _following(self, epoch: int, stop: int) -> Iterator[Any]:
        """Yield the indices from here to the end of the epoch, and then those from its beginning on."""

    @abstractmethod
    def steps(self, start: int) -> int:
        """Return how many entries follow."""

    @abstractmethod
    def among(self, rank: int, world_size: int) -> Plan:
        """Return the plan of one of so many ranks; a sampler of the user's says itself what is whose."""

    @property
    @abstractmethod
    def sampler(self) -> Sampled | None:
        """Return the user's sampler, if there is one."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return what must be equal for a position to mean the same sample."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ByPosition(Plan):
    """Cut an order into batches (of None: samples by themselves), and each step's batches among ranks."""

    order: Order | Sampled
    seed: int
    batch_size: int | None
    drop_last: bool
    rank: int
    world_size: int

    @property
    def alone(self) -> bool:
        """Return whether entries are samples by themselves."""
        return self.batch_size is None

    def _step(self, epoch: int, start: int) -> tuple[list[Any], int | None, int, int] | None:
        size, most = self.batch_size or 1, self.order.count(epoch)
        share = rank_positions(start, most, size, self.rank, self.world_size, drop_last=self.drop_last)
        if share is None:
            return None
        positions, after = share.positions, min(start + size * self.world_size, most)
        indices = self.order.indices(self.seed, epoch, positions.start, positions.stop)
        return indices, positions.start if self.order.repeats else None, positions.stop, after

    def _following(self, epoch: int, stop: int) -> Iterator[Any]:
        most = self.order.count(epoch)
        for begin, end in ((stop, most), (0, most)):
            for first in range(begin, end, _PART):
                yield from self.order.indices(self.seed, epoch, first, min(first + _PART, end))

    def steps(self, start: int) -> int:
        """Return how many entries follow."""
        return steps_left(start, len(self.order), self.batch_size or 1, self.world_size, drop_last=self.drop_last)

    def among(self, rank: int, world_size: int) -> ByPosition:
        """Return the plan of one of so many ranks: a position counts samples of all of them, so it stays right."""
        return self if self.sampler is not None else replace(self, rank=rank, world_size=world_size)

    @property
    def sampler(self) -> Sampled | None:
        """Return the user's sampler, if there is one."""
        return self.order if isinstance(self.order, Sampled) else None

    def identity(self) -> dict[str, Any]:
        """Return what must be equal for a position to mean the same sample."""
        return {"counts": "samples", **self.order.identity()}


@final
@dataclass(frozen=True, slots=True)
class ByBatch(Plan):
    """Take the batches of a user's batch sampler, as they are."""

    batches: Sampled

    def _step(self, epoch: int, start: int) -> tuple[list[Any], int | None, int, int] | None:
        batches = self.batches.drawn(epoch)
        first = start << _PLACES if self.batches.repeats else None
        return None if start >= len(batches) else (list(batches[start]), first, start + 1, start + 1)

    def _following(self, epoch: int, stop: int) -> Iterator[Any]:
        batches = self.batches.drawn(epoch)
        for number in range(stop, stop + len(batches)):
            yield from batches[number % len(batches)]

    def steps(self, start: int) -> int:
        """Return how many entries follow."""
        return max(0, len(self.batches) - start)

    @property
    def sampler(self) -> Sampled:
        """Return the user's sampler."""
        return self.batches

    def among(self, rank: int, world_size: int) -> ByBatch:
        """Return this plan: the batch sampler says itself what is whose."""
        del rank, world_size
        return self

    def identity(self) -> dict[str, Any]:
        """Return what must be equal for a position to mean the same batch."""
        return {"counts": "batches", **self.batches.identity()}


def _until(many: int, following: Iterable[Any], bad: Collection[Any]) -> list[Any]:
    """Return what follows up to the last of so many good ones; bad ones between keep their places."""
    found = []
    for index in following:
        found.append(index)
        many -= not bad or key_of(index) not in bad
        if many <= 0:
            break
    return found
