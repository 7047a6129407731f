"""What the host of a loader calls its epochs, if it says so as it would to torch's
``DistributedSampler``.

A position after the last batch of an epoch can be read in two ways. A host that saved it may
continue with that epoch, of which nothing is left, as torchdata's ``StatefulDataLoader`` does. Or
it may count that epoch as done and iterate the next one, as Lightning does. The number that it
gives to the epoch tells them apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from holdfast.core.events import run_events
from holdfast.core.events.data import EventData
from holdfast.loader.weak_calls import WeakCall


class HostEpochs:
    """The number that the host gives to the epoch of a loader.

    The loader may count differently: if a short dataset is repeated, one epoch of the host has
    several of the loader's.

    Args:
        loader: The loader. Its samplers are given a ``set_epoch`` that calls the loader's, unless
            they have one.
    """

    def __init__(self, loader: Any) -> None:
        # The host's number of the loader's current epoch, or None if it is not known.
        self.current: int | None = None
        # The number of the epoch that is iterated next, if the host has given one.
        self.named: int | None = None
        # Whether the host has named the epoch that is being iterated.
        self.is_named = False
        for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
            if sampler is not None and not sets_epoch(sampler):
                # A list, or an object with slots, takes no attributes.
                with contextlib.suppress(AttributeError):
                    sampler.set_epoch = WeakCall(loader, "set_epoch")

    def note_position(self, current: int) -> None:
        """Note that the loader was moved to an epoch to which the host gives this number.

        What was named before no longer counts.
        """
        self.current = current
        self.named = None

    def note_move(self, epochs: int) -> None:
        """Note that the loader has moved on by a number of epochs."""
        if self.current is not None:
            self.current += epochs

    def choose_epoch(
        self,
        epoch: int,
        epoch_on_sampler: int | None,
        emit: Callable[[EventData], None],
        *,
        begun: bool,
    ) -> int:
        """Return the epoch to iterate, in the loader's numbers.

        Args:
            epoch: The loader's next epoch.
            epoch_on_sampler: What somebody has set on a sampler of the user, or None.
            emit: Called with an event if that sets the loader back.
            begun: Whether batches of this epoch were handed out before a restart. If so, only a
                later epoch is followed.
        """
        if epoch_on_sampler is not None and begun:
            # It is treated like an epoch that the host has named to the loader.
            self.named = epoch_on_sampler
        elif epoch_on_sampler is not None:
            if epoch_on_sampler < epoch:
                why = "set_epoch() of the sampler was called with an earlier epoch"
                emit(run_events.EpochSetBack(before=epoch, now=epoch_on_sampler, why=why))
            self.note_move(epoch_on_sampler - epoch)
            epoch = epoch_on_sampler
        named = self.named
        self.named = None
        self.is_named = epoch_on_sampler is not None or named is not None
        if named is None:
            return epoch
        return self._go_to_named_epoch(epoch, named)

    def _go_to_named_epoch(self, epoch: int, named: int) -> int:
        """Return the loader's number of the epoch that the host calls `named`."""
        current = self.current
        self.current = named
        if current is None:
            # The host's numbers are the loader's, as far as is known.
            return named
        # The loader moves on by as many epochs as the host. Earlier epochs do not come again.
        return epoch + max(0, named - current)


def sets_epoch(sampler: Any) -> bool:
    """Return whether a sampler has a ``set_epoch`` of its own."""
    set_epoch = getattr(sampler, "set_epoch", None)
    return set_epoch is not None and not isinstance(set_epoch, WeakCall)
