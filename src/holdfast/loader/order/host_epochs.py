"""Translate the epoch numbers that a loader's host sets with ``set_epoch``.

The host is the framework or training loop that iterates over the loader. A resume from a position
after the last batch of an epoch is ambiguous. The host may want to continue that epoch, which has
no batches left (as torchdata's ``StatefulDataLoader`` does), or it may count the epoch as done and
want the next one (as Lightning does). The epoch number that the host sets distinguishes the two
cases.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from holdfast.core.events import run_events
from holdfast.core.events.data import EventData
from holdfast.loader.weak_calls import WeakCall


class HostEpochs:
    """Translates the host's epoch numbers to a loader's epoch numbers.

    The two numbers can differ. For example, if a short dataset is repeated, one epoch of the host
    spans several epochs of the loader.

    Args:
        loader: The loader. Samplers that have no ``set_epoch`` are given one that calls the
            loader's ``set_epoch``.
    """

    def __init__(self, loader: Any) -> None:
        # The host's number for the loader's current epoch, or None if unknown.
        self.current: int | None = None
        # The number that the host has set for the next epoch, or None if it has not set one.
        self.named: int | None = None
        # Whether the host has set the number of the current epoch.
        self.is_named = False
        for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
            if sampler is not None and not sets_epoch(sampler):
                # Lists and objects with slots accept no new attributes.
                with contextlib.suppress(AttributeError):
                    sampler.set_epoch = WeakCall(loader, "set_epoch")

    def note_position(self, current: int) -> None:
        """Record that the loader was moved to an epoch, and discard any number set by the host.

        Args:
            current: The host's number for the epoch.
        """
        self.current = current
        self.named = None

    def note_move(self, epochs: int) -> None:
        """Record that the loader has advanced by a number of epochs."""
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
        """Return the epoch to iterate over next, in the loader's numbering.

        Args:
            epoch: The loader's next epoch, unless the host has set another one.
            epoch_on_sampler: The epoch that was set on the user's sampler since the last call, or
                None.
            emit: Called with an event if `epoch_on_sampler` moves the loader back.
            begun: Whether batches of `epoch` were returned before a restart. If so, only a later
                epoch is accepted.
        """
        if epoch_on_sampler is not None and begun:
            # The number is treated as if the host had set it on the loader itself.
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
        """Return the loader's number for the epoch that the host numbers `named`."""
        current = self.current
        self.current = named
        if current is None:
            # Nothing is known about the host's numbering yet, so assume that it equals the
            # loader's.
            return named
        # The loader advances by as many epochs as the host, and never goes back.
        return epoch + max(0, named - current)


def sets_epoch(sampler: Any) -> bool:
    """Return whether a sampler has its own ``set_epoch`` and not just one added by `HostEpochs`."""
    set_epoch = getattr(sampler, "set_epoch", None)
    return set_epoch is not None and not isinstance(set_epoch, WeakCall)
