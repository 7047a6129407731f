"""What an epoch fetches from a position on: entries for the workers, one per batch, made as they are asked for.

by position    `holdfast.data.orders`, and a user's sampler whose indices are drawn once an epoch: any batch size
by batch       a user's batch sampler, whose batches are its own

A position counts samples of all ranks, or batches of a batch sampler.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, NamedTuple, Protocol

import torch

from holdfast.core.errors import LoaderError
from holdfast.data.fetch import Entry
from holdfast.data.orders import TokenBatches
from holdfast.data.quarantine import key_of
from holdfast.data.random_state import isolated, seed_cpu
from holdfast.data.ranks import rank_positions, steps_left
from holdfast.data.seeds import SampleSeeds, derive_seed

_ENDLESS, _ENDLESS_EPOCHS = 2**20, 100  # a sampler that yields so many, and so many epochs, does not end
_PLACES = 20  # bits for the place in a batch
_AHEAD = 1024  # positions that are looked up before they are needed
_SPARES = 8  # samples that may stand in for bad ones of a batch; several bad ones in a row are rare


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


class Drawn(NamedTuple):
    """What a user's sampler drew for an epoch, in short.

    Args:
        digest: Of its indices.
        rank: Whose they are, if the sampler divides them among ranks.
    """

    digest: str
    rank: int | None


class Plan(Protocol):
    """Where the entries of an epoch come from."""

    def entries(self, epoch: int, start: int, aside: Collection[Any]) -> Iterator[tuple[Entry, int]]:
        """Yield entries from a position on, each with the position after it.

        Args:
            epoch: Which one.
            start: Position.
            aside: Indices that are set aside; read anew for each entry.
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
            if begin < 0 or end + _SPARES > len(ahead):  # many at once: less is done between two steps of training
                first_ahead, begin, end = positions.start, 0, len(positions)
                ahead = self._indices(epoch, drawn, first_ahead, first_ahead + end + _SPARES + more)
                seeds = [] if self.order.repeats else seeds_of.all(epoch, ahead)
            indices, spares = ahead[begin:end], ahead[end : end + _SPARES]
            if len(spares) < _SPARES:
                spares += self._indices(epoch, drawn, 0, _SPARES - len(spares))
            first = positions.start if self.order.repeats else None
            alone = self.batch_size is None
            yield _entry(number, epoch, indices, spares, aside, seeds[begin:end], first=first, alone=alone), start
            number += 1

    def _indices(self, epoch: int, drawn: list[Any] | None, start: int, stop: int) -> list[Any]:
        return self.order.indices(self.seed, epoch, start, stop) if drawn is None else drawn[start:stop]

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
            following = batches[(place + 1) % len(batches)]
            first = place << _PLACES if self.sampler.repeats else None
            yield (
                _entry(
                    place - start, epoch, list(batches[place]), list(following), aside, (), first=first, alone=False
                ),
                place + 1,
            )

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
    spares = spares[:_SPARES]
    bad = tuple(index for index in (*indices, *spares) if key_of(index) in aside) if aside else ()
    return Entry(number, epoch, tuple(indices), tuple(spares), bad, first, alone, seeds=tuple(seeds))


class Sampled:
    """A user's sampler, drawn once an epoch from (seed, epoch), whatever its source of chance.

    Args:
        sampler: Yields indices, or lists of them.
        seed: Of the loader.
        repeats: Whether an index may come more than once an epoch; None: only if the sampler says that it draws with
            replacement, or pads for ranks.
        batches: Whether it yields batches, not indices, which may be tuples.

    Raises:
        LoaderError: H603 for a sampler without a length.
    """

    def __init__(self, sampler: Iterable[Any], seed: int, *, repeats: bool | None, batches: bool = False) -> None:
        if not isinstance(sampler, Sized):
            raise LoaderError(
                f"sampler {type(sampler).__name__} has no length",
                limit="an order that resumes exactly needs to know where an epoch ends",
                fix="give it a __len__, or use torch.utils.data.DataLoader and accept an inexact resume.",
                rule="H603",
            )
        self._sampler = sampler
        self._seed = seed
        self._repeats = repeats
        self._batches = batches
        self._drawn: tuple[int, list[Any]] | None = None
        self._digest = ""
        self._told = 0  # the epoch that the sampler had when it was last looked at; torch's begin with 0

    def __len__(self) -> int:
        """Return the entries of an epoch, as the sampler tells."""
        return len(self._sampler)

    def drawn(self, epoch: int) -> list[Any]:
        """Return all that the sampler yields in an epoch.

        Raises:
            LoaderError: H609 if indices repeat although the sampler does not say that they may.
        """
        if self._drawn is None or self._drawn[0] != epoch:
            with isolated():
                seed = derive_seed(self._seed, epoch, "order")
                seed_cpu(seed)
                for each in self._samplers():
                    generator = getattr(each, "generator", None)
                    if isinstance(generator, torch.Generator):
                        generator.manual_seed(seed)
                    if hasattr(each, "set_epoch"):
                        each.set_epoch(epoch)
                most = max(_ENDLESS, _ENDLESS_EPOCHS * len(self))
                found = list(itertools.islice(self._sampler, most))
            self.told()
            if len(found) == most:
                raise LoaderError(
                    f"sampler {type(self._sampler).__name__} tells a length of {len(self)} and goes on after {most}",
                    limit="an order that resumes exactly needs to know where an epoch ends",
                    fix="let it end after each epoch: the next one draws it again.",
                    rule="H603",
                )
            if not self.repeats:
                entries = found if self._batches else [each if isinstance(each, list) else [each] for each in found]
                _check_once(entries, type(self._sampler).__name__)
            self._drawn = epoch, found
            self._digest = hashlib.blake2b(repr(key_of(found)).encode(), digest_size=8).hexdigest()
        return self._drawn[1]

    def told(self) -> int | None:
        """Return the epoch that somebody else has set on the sampler since this was last asked, or None."""
        for each in self._samplers():
            found = getattr(each, "epoch", None)
            if hasattr(each, "set_epoch") and isinstance(found, Integral) and int(found) >= 0:
                before, self._told = self._told, int(found)
                return None if self._told == before else self._told
        return None

    def in_short(self, epoch: int, then: Drawn | None) -> Drawn:
        """Draw an epoch, and return a digest of it.

        Args:
            epoch: Which one.
            then: What was drawn when the position was saved that is gone on from, or None for the beginning.

        Raises:
            LoaderError: H604 if that was another order; of the indices of another rank nothing can be told.
        """
        self.drawn(epoch)
        ranks = [int(each.rank) for each in self._samplers() if isinstance(getattr(each, "rank", None), Integral)]
        now = Drawn(self._digest, ranks[0] if ranks else None)
        if then is not None and then.rank == now.rank and then.digest != now.digest:
            raise LoaderError(
                "the sampler draws another order than when the position was saved, at the same seed and epoch",
                limit="the same order is needed to continue in the middle of an epoch",
                fix="let it draw from torch's, numpy's or python's global generator or from an attribute "
                "`generator`, which are seeded for it, or from its epoch in set_epoch().",
                rule="H604",
            )
        return now

    @property
    def repeats(self) -> bool:
        """Return whether an index may come more than once an epoch."""
        if self._repeats is not None:
            return self._repeats
        # torch's samplers with replacement say so; its DistributedSampler repeats a few to make ranks equal.
        return any(getattr(each, "replacement", False) or hasattr(each, "num_replicas") for each in self._samplers())

    def _samplers(self) -> tuple[Any, Any]:
        """Return the sampler, and the one that a sampler of batches takes its indices from."""
        return self._sampler, getattr(self._sampler, "sampler", None)

    def indices(self, seed: int, epoch: int, start: int, stop: int) -> list[Any]:
        """Return the indices at some positions of an epoch."""
        del seed
        return self.drawn(epoch)[start:stop]

    def identity(self) -> dict[str, Any]:
        """Return what can be told of a sampler: its kind and its length."""
        return {"kind": type(self._sampler).__name__, "version": 1, "length": len(self)}


def _check_once(found: list[Any], name: str) -> None:
    flat = [index for entry in found for index in (entry if isinstance(entry, (list, tuple)) else [entry])]
    try:
        repeated = len(flat) - len(set(flat))
    except TypeError:
        return  # keys that cannot be compared
    if repeated:
        raise LoaderError(
            f"{name} yields {repeated} of {len(flat)} indices more than once in an epoch",
            limit="each sample is expected once",
            fix="repair the sampler, or pass repeats=True if it draws with replacement on purpose.",
            rule="H609",
        )
