"""What the host of a loader calls its epochs, where it says so, as it would to torch's
DistributedSampler.

A position behind the last batch of an epoch can be read in two ways. A host that saved there may go
on with that epoch, of which nothing is left, as with torchdata's StatefulDataLoader; or it may
count it as done and iterate the next one, as Lightning does. The number that it gives to the epoch
distinguishes them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from holdfast.core.events import run_events
from holdfast.core.events.event import EventData
from holdfast.loader.weak_calls import WeakCall


class HostEpochs:
    """The number that the host gives to the epoch of a loader, at whose samplers it looks for
    ``set_epoch``.

    The loader may count others: a short one that is repeated has several in one epoch of its host.
    """

    def __init__(self, loader: Any) -> None:
        self.current: int | None = None
        """The host's number of the epoch that the loader is at, or None if none is known."""
        self.named: int | None = None
        """The number of the epoch that is iterated next, if the host has given one."""
        self.followed = False
        """Whether the host has named the epoch that is iterated."""
        for each in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
            if each is not None and not sets_epoch(each):
                with contextlib.suppress(AttributeError):  # a list, or slots
                    each.set_epoch = WeakCall(loader, "set_epoch")

    def placed(self, current: int) -> None:
        """Note that the loader was brought to an epoch of this number.

        What was named before is void.
        """
        self.current, self.named = current, None

    def moved(self, by: int) -> None:
        """Note that the loader has gone on by so many epochs."""
        self.current = None if self.current is None else self.current + by

    def follow(
        self, epoch: int, on_sampler: int | None, emit: Callable[[EventData], None], *, begun: bool
    ) -> int:
        """Return the epoch to iterate.

        The loader's next, or what the host has set on a sampler of the user's.

        `begun`: batches of this epoch were handed out before a restart; then only a later one is
        followed.
        """
        if on_sampler is not None and begun:
            self.named = on_sampler
        elif on_sampler is not None:
            if on_sampler < epoch:
                why = "set_epoch() of the sampler said so"
                emit(run_events.EpochSetBack(before=epoch, now=on_sampler, why=why))
            self.moved(on_sampler - epoch)
            epoch = on_sampler
        named, self.named = self.named, None
        self.followed = on_sampler is not None or named is not None
        if named is None:
            return epoch
        before, self.current = self.current, named
        return named if before is None else epoch + max(0, named - before)


def sets_epoch(sampler: Any) -> bool:
    """Return whether a sampler has a ``set_epoch`` of its own."""
    found = getattr(sampler, "set_epoch", None)
    return found is not None and not isinstance(found, WeakCall)
