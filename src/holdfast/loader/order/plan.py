"""What an epoch fetches from a position on: entries for the workers, one per batch, made as they are asked for.

by position    `loader.order.orders`, and a user's sampler whose indices are drawn once an epoch: any batch size
by batch       a user's batch sampler, whose batches are its own

A position counts samples of all ranks, or batches of a batch sampler.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from holdfast.loader.fetch import Entry
from holdfast.loader.order.orders import TokenBatches
from holdfast.loader.order.sampled import Sampled
from holdfast.loader.quarantine import key_of
from holdfast.loader.ranks import rank_positions, steps_left
from holdfast.loader.seeds import SampleSeeds

_PLACES = 20  # bits for the place in a batch
_PART = 64  # positions that are looked at together where many are set aside
_AHEAD = 1024  # positions that are looked up before they are needed
SPARES = 8  # samples that may stand in for bad ones of a batch; several bad ones in a row are rare


class Ordered(Protocol):
    """What a plan needs of an order."""

    @property
    def repeats(self) -> bool:
        """Return whether an index may come more than once an epoch."""

    def __len__(self) -> int:
        """Return the positions of an epoch."""

    def indices(self, seed: int, epoch: int, start: int, stop: int) -> list[Any]:
        """Return the indices at some positions."""

    def identity(self) -> dict[str, Any]:
        """Return what must be equal for a position to mean the same sample."""


class Plan(Protocol):
    """Where the entries of an epoch come from."""

    def entries(self, epoch: int, start: int, aside: Collection[Any]) -> Iterator[tuple[Entry, int]]:
        """Yield entries from a position on, each with the position after it.

        Args:
            epoch: Which one.
            start: Position.
            aside: Indices that are set aside; read anew for each entry.
        """

    def spares(self, epoch: int, start: int, aside: Collection[Any], many: int) -> tuple[Any, ...]:
        """Return what may stand in for samples of the entry at a position; fewer are its beginning.

        Args:
            epoch: Which one.
            start: Position.
            aside: Indices that are set aside; they are in it, and do not count.
            many: How many that are not set aside.
        """

    def steps(self, epoch: int, start: int) -> int:
        """Return how many entries follow."""

    def among(self, rank: int, world_size: int) -> Plan:
        """Return the plan of one of so many ranks; a sampler of the user's says itself what is whose."""

    @property
    def drawn(self) -> Sampled | None:
        """Return the user's sampler, if there is one."""

    def identity(self) -> dict[str, Any]:
        """Return what must be equal for a position to mean the same sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByPosition:
    """Cut an order into batches, and each step's batches among the ranks.

    Args:
        order: The order.
        seed: Of the loader.
        batch_size: Samples of a rank in a step; None for samples by themselves.
        drop_last: Whether a step that is not full is left out.
        rank: Which rank this is.
        world_size: Number of ranks.
        tokens: Cuts batches by their tokens instead, or None.
    """

    order: Ordered
    seed: int
    batch_size: int | None
    drop_last: bool
    rank: int
    world_size: int
    tokens: TokenBatches | None = None

    def entries(self, epoch: int, start: int, aside: Collection[Any]) -> Iterator[tuple[Entry, int]]:
        """Yield entries as `Plan.entries` says."""
        number = first_ahead = 0
        ahead: list[Any] = []
        seeds: list[int] = []
        seeds_of = SampleSeeds(self.seed)
        more = _AHEAD if self.world_size == 1 else 0  # with others, most of it would be theirs
        # Once: another iterator may draw another epoch meanwhile, and a sampler with its own chance draws anew then.
        drawn = self.order.drawn(epoch) if isinstance(self.order, Sampled) else None
        # What a sampler yields counts, not what it tells: torch asks for no more than the length of an epoch.
        count = len(self.order if drawn is None else drawn)
        while (found := self._step(epoch, start, count)) is not None:
            positions, start = found
            begin, end = positions.start - first_ahead, positions.stop - first_ahead
            if begin < 0 or end + SPARES > len(ahead):  # many at once: less is done between two steps of training
                first_ahead, begin, end = positions.start, 0, len(positions)
                ahead = self._indices(epoch, drawn, first_ahead, first_ahead + end + SPARES + more)
                seeds = [] if self.order.repeats else seeds_of.all(epoch, ahead)
            indices, spares = ahead[begin:end], ahead[end : end + SPARES]
            if len(spares) < SPARES:
                spares += self._indices(epoch, drawn, 0, SPARES - len(spares))
            if _touches(spares, aside):
                spares = _until(SPARES, self._following(epoch, drawn, positions.stop, count), aside)
            first = positions.start if self.order.repeats else None
            alone = self.batch_size is None
            yield _entry(number, epoch, indices, spares, aside, seeds[begin:end], first=first, alone=alone), start
            number += 1

    def _indices(self, epoch: int, drawn: list[Any] | None, start: int, stop: int) -> list[Any]:
        return self.order.indices(self.seed, epoch, start, stop) if drawn is None else drawn[start:stop]

    def spares(self, epoch: int, start: int, aside: Collection[Any], many: int) -> tuple[Any, ...]:
        """Return what may stand in, as `Plan.spares` says."""
        drawn = self.order.drawn(epoch) if isinstance(self.order, Sampled) else None
        count = len(self.order if drawn is None else drawn)
        found = self._step(epoch, start, count)
        stop = count if found is None else found[0].stop
        return tuple(_until(many, self._following(epoch, drawn, stop, count), aside))

    def _following(self, epoch: int, drawn: list[Any] | None, stop: int, count: int) -> Iterator[Any]:
        """Yield what comes from a position on, and then the epoch from its beginning."""
        for begin, end in ((stop, count), (0, count)):
            for first in range(begin, end, _PART):
                yield from self._indices(epoch, drawn, first, min(first + _PART, end))

    def _step(self, epoch: int, start: int, count: int) -> tuple[range, int] | None:
        """Return this rank's positions in a step, and where the next step begins."""
        if self.tokens is not None:
            shares = self.tokens.parts(self.seed, epoch, start, self.world_size)
            return (shares[self.rank].positions, max(each.positions.stop for each in shares)) if shares else None
        size = self.batch_size or 1
        share = rank_positions(start, count, size, self.rank, self.world_size, drop_last=self.drop_last)
        return None if share is None else (share.positions, min(start + size * self.world_size, count))

    def steps(self, epoch: int, start: int) -> int:
        """Return how many entries follow."""
        if self.tokens is not None:
            return self.tokens.count(self.seed, epoch, start, self.world_size)
        size = self.batch_size or 1
        return steps_left(start, len(self.order), size, self.world_size, drop_last=self.drop_last)

    def among(self, rank: int, world_size: int) -> ByPosition:
        """Return the plan of one of so many ranks: a position counts samples of all of them, so it stays right."""
        return self if self.drawn is not None else replace(self, rank=rank, world_size=world_size)

    @property
    def drawn(self) -> Sampled | None:
        """Return the user's sampler, if there is one."""
        return self.order if isinstance(self.order, Sampled) else None

    def identity(self) -> dict[str, Any]:
        """Return what must be equal for a position to mean the same sample."""
        return {"counts": "samples", **self.order.identity()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ByBatch:
    """Take the batches of a user's batch sampler, as they are."""

    sampler: Sampled

    def entries(self, epoch: int, start: int, aside: Collection[Any]) -> Iterator[tuple[Entry, int]]:
        """Yield entries as `Plan.entries` says."""
        batches = self.sampler.drawn(epoch)
        for place in range(start, len(batches)):
            spares = list(batches[(place + 1) % len(batches)])[:SPARES]
            if _touches(spares, aside):
                spares = _until(len(spares), self._following(batches, place), aside)
            first = place << _PLACES if self.sampler.repeats else None
            entry = _entry(place - start, epoch, list(batches[place]), spares, aside, (), first=first, alone=False)
            yield entry, place + 1

    def spares(self, epoch: int, start: int, aside: Collection[Any], many: int) -> tuple[Any, ...]:
        """Return what may stand in, as `Plan.spares` says."""
        return tuple(_until(many, self._following(self.sampler.drawn(epoch), start), aside))

    @staticmethod
    def _following(batches: list[Any], place: int) -> Iterator[Any]:
        for number in range(place + 1, place + 1 + len(batches)):
            yield from batches[number % len(batches)]

    def steps(self, epoch: int, start: int) -> int:
        """Return how many entries follow."""
        del epoch
        return max(0, len(self.sampler) - start)

    def among(self, rank: int, world_size: int) -> ByBatch:
        """Return this plan: the batch sampler says itself what is whose."""
        del rank, world_size
        return self

    @property
    def drawn(self) -> Sampled | None:
        """Return the user's sampler."""
        return self.sampler

    def identity(self) -> dict[str, Any]:
        """Return what must be equal for a position to mean the same batch."""
        return {"counts": "batches", **self.sampler.identity()}


def _entry(
    number: int,
    epoch: int,
    indices: list[Any],
    spares: list[Any],
    aside: Collection[Any],
    seeds: Sequence[int],
    *,
    first: int | None,
    alone: bool,
) -> Entry:
    bad = tuple(index for index in (*indices, *spares) if key_of(index) in aside) if aside else ()
    return Entry(number, epoch, tuple(indices), tuple(spares), bad, first, alone, seeds=tuple(seeds))


def _touches(indices: Iterable[Any], aside: Collection[Any]) -> bool:
    return bool(aside) and any(key_of(index) in aside for index in indices)


def _until(many: int, following: Iterable[Any], aside: Collection[Any]) -> list[Any]:
    """Return what follows up to the last of so many that are not set aside, with those that are between.

    They keep their places: where samples come more than once, random numbers depend on these.
    """
    found = []
    for index in following:
        if many <= 0:
            break
        found.append(index)
        many -= key_of(index) not in aside
    return found
