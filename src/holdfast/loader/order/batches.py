"""Group an order into batches and divide them among ranks, starting at any position in an epoch.

A position counts the samples of all ranks, or batches if the user passed a batch sampler.
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

# Number of samples that can replace bad ones in a batch. If even more consecutive samples are bad,
# the cause is probably not the samples but, for example, a missing folder.
SPARES = 16

# Number of positions searched for spares at a time. If some samples are quarantined, `SPARES`
# positions may not be enough.
_LOOKAHEAD = 64

# If positions count batches, the position of a sample is the position of its batch, shifted left by
# this number of bits, plus the place of the sample in the batch.
_PLACE_BITS = 20


class BatchRequest(NamedTuple):
    """A request to a worker for one batch.

    Args:
        number: Number of the batch, counted from the position at which the epoch was started or
            resumed.
        epoch: The epoch, which determines the samples' seeds.
        indices: Dataset indices of the samples, in the order of the batch.
        spares: The next indices in the epoch's order, used to replace samples that cannot be read.
        bad: The `indices` and `spares` that are already quarantined.
        first_position: Position of the first sample, if an index may occur more than once in an
            epoch. The random numbers of a sample then also depend on its position. None otherwise.
        is_single_sample: Whether the batch is a single sample without a batch dimension
            (``batch_size=None``).
        control_place: Index into `candidates` of the control sample, which a new worker reads first
            to show that it works. None for no control sample.
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
        """The indices, followed by the spares."""
        return (*self.indices, *self.spares)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EpochBatches:
    """Groups the samples of an epoch into this rank's batches.

    Args:
        order: The order of an epoch. If it comes from the user's sampler, it already contains only
            this rank's samples.
        seed: Seed of the loader, on which the order depends.
        batch_size: Samples per batch, or None for single samples without a batch dimension.
        drop_last: Whether an incomplete last batch is dropped.
        rank: This rank.
        world_size: The number of ranks that share the order.
        counts_batches: Whether `order` consists of whole batches, which are used unchanged.
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
        """Yield the requests for the rest of the epoch, each with the position after it.

        Args:
            epoch: Number of the epoch.
            start: The position to start from.
            bad_keys: The keys (see `key_of`) of quarantined indices. The set may change between
                requests.
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
        """Return whether a lower rank gets the same batch as this rank at a position.

        This happens when fewer samples are left than there are ranks (see `rank_positions`).
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
        # If the order consists of batches, the slice contains batches, which are flattened.
        if self.counts_batches:
            return [index for batch in indices for index in batch]
        return indices

    def _spares_after(
        self, epoch: int, stop: int, length: int, bad_keys: Collection[Any]
    ) -> tuple[Any, ...]:
        """Return the indices after a batch, up to and including the last of `SPARES` good samples.

        Bad samples between the good ones are included, so that the place of a spare does not change
        when a sample is quarantined.
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
        """Yield the indices from a position to the end of the epoch, then from its beginning."""
        positions_at_once = 1 if self.counts_batches else lookahead
        for begin, end in ((stop, length), (0, length)):
            for first in range(begin, end, positions_at_once):
                yield from self._indices_at(epoch, first, min(first + positions_at_once, end))

    def steps_after(self, position: int) -> int:
        """Return how many batches this rank gets after a position, based on the order's length."""
        return steps_left(
            position,
            len(self.order),
            self.batch_size or 1,
            self.world_size,
            drop_last=self.drop_last,
        )

    def for_rank(self, rank: int, world_size: int) -> EpochBatches:
        """Return the same batches for another rank or another number of ranks.

        Positions remain valid, because they count the samples of all ranks.
        """
        if self.sampler is not None:
            return self
        return replace(self, rank=rank, world_size=world_size)

    @property
    def sampler(self) -> SamplerOrder | None:
        """The user's own sampler, or None."""
        return self.order if isinstance(self.order, SamplerOrder) else None

    def identity(self) -> dict[str, Any]:
        """Return the properties of the order that must match when a saved position is loaded.

        If they match, the position refers to the same sample.
        """
        counts = "batches" if self.counts_batches else "samples"
        return {"counts": counts, **self.order.identity()}
