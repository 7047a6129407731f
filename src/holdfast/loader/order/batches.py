"""Cut an order into batches and divide them among ranks, starting at any position of an epoch.

A position counts samples of all ranks, or batches if a batch sampler makes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any, NamedTuple, final

from holdfast.loader.order.orders import Order
from holdfast.loader.order.ranks import rank_positions, steps_left
from holdfast.loader.order.sampler_order import SamplerOrder
from holdfast.loader.quarantine import key_of

# The number of samples that may replace the bad ones of a batch. If even more are bad in a row, the
# samples are not the problem: a folder is missing.
SPARES = 16

# The number of positions to look up at once for spares. With quarantined samples, more than
# `SPARES` positions may be needed.
_LOOKAHEAD = 64

# If positions count batches, the number of bits of a position used for the place within a batch.
_PLACE_BITS = 20


class BatchRequest(NamedTuple):
    """The information from which a worker makes one batch.

    Args:
        number: The number of the batch, counted from the position at which the epoch continues.
        epoch: The epoch, on which seeds depend.
        indices: Dataset indices, in the order of the batch.
        spares: The indices that follow in the epoch's order, as replacements for samples that
            cannot be read.
        bad: Those of `indices` and `spares` that are quarantined already.
        first_position: Position of the first sample if an index may come more than once in an
            epoch: its random numbers then depend on its position too. None otherwise.
        is_single_sample: Whether this is a sample without a batch dimension (``batch_size=None``).
        control_place: Place among the `candidates` of the control sample, which a new worker reads
            first to show that it works.
    """

    number: int
    epoch: int
    indices: tuple[Any, ...]
    spares: tuple[Any, ...] = ()
    bad: tuple[Any, ...] = ()
    first_position: int | None = None
    is_single_sample: bool = False
    control_place: int | None = None

    @property
    def candidates(self) -> tuple[Any, ...]:
        """The indices and the spares. Places beyond the batch are those of spares."""
        return (*self.indices, *self.spares)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EpochBatches:
    """Which samples are in which batch of this rank.

    Args:
        order: The order of an epoch. A sampler of the user already yields only the part of this
            rank.
        seed: Seed of the order.
        batch_size: Samples in a batch; None for single samples without a batch dimension.
        drop_last: Whether an incomplete last batch is dropped.
        rank: This rank.
        world_size: The number of ranks that share the order.
        counts_batches: Whether `order` yields whole batches, which are used unchanged.
    """

    order: Order | SamplerOrder
    seed: int = 0
    batch_size: int | None = 1
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1
    counts_batches: bool = False

    def requests(
        self, epoch: int, start: int, bad_keys: Collection[Any]
    ) -> Iterator[tuple[BatchRequest, int]]:
        """Yield requests from a position on, each with the position after it.

        Args:
            epoch: Number of the epoch.
            start: The position.
            bad_keys: Keys of the quarantined indices. The set may change between requests.
        """
        length = self.order.count(epoch)
        step = (self.batch_size or 1) * self.world_size
        position = start
        for number in count():
            share = rank_positions(
                position,
                length,
                self.batch_size or 1,
                self.rank,
                self.world_size,
                drop_last=self.drop_last,
            )
            if share is None:
                return
            indices = tuple(self._indices_at(epoch, share.start, share.stop))
            spares = self._spares_after(epoch, share.stop, length, bad_keys)
            bad: tuple[Any, ...] = ()
            if bad_keys:
                bad = tuple(index for index in (*indices, *spares) if key_of(index) in bad_keys)
            request = BatchRequest(
                number=number,
                epoch=epoch,
                indices=indices,
                spares=spares,
                bad=bad,
                first_position=self._first_position(share.start),
                is_single_sample=self.batch_size is None,
            )
            position = min(position + step, length)
            yield request, position

    def is_repeated(self, epoch: int, position: int) -> bool:
        """Return whether this rank's batch at a position is also one of another rank.

        This happens if fewer samples are left than there are ranks.
        """
        return 0 < self.order.count(epoch) - position <= self.rank

    def _first_position(self, first: int) -> int | None:
        """Return `BatchRequest.first_position` for a batch that begins at a position."""
        may_repeat = isinstance(self.order, SamplerOrder) and self.order.repeats
        if not may_repeat:
            return None
        return first << _PLACE_BITS if self.counts_batches else first

    def _indices_at(self, epoch: int, start: int, stop: int) -> list[Any]:
        indices: list[Any] = self.order.indices(self.seed, epoch, start, stop)
        if self.counts_batches:
            return [index for batch in indices for index in batch]
        return indices

    def _spares_after(
        self, epoch: int, stop: int, length: int, bad_keys: Collection[Any]
    ) -> tuple[Any, ...]:
        """Return the indices after a batch, up to and including `SPARES` good samples.

        The bad samples between them are included, so that places do not shift.
        """
        if not bad_keys:
            return tuple(islice(self._following(epoch, stop, length, SPARES), SPARES))
        spares: list[Any] = []
        good_spares = 0
        for index in self._following(epoch, stop, length, _LOOKAHEAD):
            spares.append(index)
            if key_of(index) not in bad_keys:
                good_spares += 1
            if good_spares == SPARES:
                break
        return tuple(spares)

    def _following(self, epoch: int, stop: int, length: int, lookahead: int) -> Iterator[Any]:
        """Yield the indices from a position to the end of the epoch, then those from its start."""
        positions_at_once = 1 if self.counts_batches else lookahead
        for begin, end in ((stop, length), (0, length)):
            for first in range(begin, end, positions_at_once):
                yield from self._indices_at(epoch, first, min(first + positions_at_once, end))

    def steps_after(self, position: int) -> int:
        """Return how many batches follow after a position, according to the order's length."""
        return steps_left(
            position,
            len(self.order),
            self.batch_size or 1,
            self.world_size,
            drop_last=self.drop_last,
        )

    def for_rank(self, rank: int, world_size: int) -> EpochBatches:
        """Return the same batches for another rank or another number of ranks.

        A position counts samples of all ranks, so it keeps its meaning.
        """
        if self.sampler is not None:
            return self
        return replace(self, rank=rank, world_size=world_size)

    @property
    def sampler(self) -> SamplerOrder | None:
        """The user's own sampler, or None."""
        return self.order if isinstance(self.order, SamplerOrder) else None

    def identity(self) -> dict[str, Any]:
        """Return the JSON values that must be equal for a position to mean the same sample."""
        counts = "batches" if self.counts_batches else "samples"
        return {"counts": counts, **self.order.identity()}
