"""What the host of a loader calls its epochs, where it says so, as it would to torch's DistributedSampler.

A position behind the last batch of an epoch can be read in two ways. A host that saved there may go on with that
epoch, of which nothing is left, as with torchdata's StatefulDataLoader; or it may count it as done and iterate the
next one, as Lightning does. The number that it gives to the epoch distinguishes them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from holdfast.loader.weak_calls import WeakCall


class HostEpochs:
    """The number that the host gives to the epoch of a loader.

    The loader may count others: a short one that is repeated has several in one epoch of its host.

    Args:
        loader: A loader with ``set_epoch``; hosts look for that at its samplers, as PyTorch's documents have it.
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
        """Note that the loader was brought to an epoch of this number; what was named before is void."""
        self.current, self.named = current, None

    def moved(self, by: int) -> None:
        """Note that the loader has gone on by so many epochs."""
        self.current = None if self.current is None else self.current + by

    def nothing_left(self, epoch: int, tell: Callable[..., None]) -> None:
        """Tell of an iteration without batches, unless the host has said that it means this epoch."""
        if not self.followed:
            tell(
                "nothing_left", epoch=epoch,
                why="the position that was loaded is behind the last batch of its epoch, so the next one is the next "
                "iteration; if your loop counts this epoch as done, call loader.set_epoch(epoch) before each",
            )  # fmt: skip

    def follow(self, epoch: int, told: int | None, tell: Callable[..., None], *, begun: bool) -> int:
        """Return the epoch to iterate.

        Args:
            epoch: The next of the loader.
            told: What the host has set on a sampler of the user's, or None.
            tell: Called with the kind of an event and its facts.
            begun: Whether batches of this epoch were handed out, in an earlier life: only a later one is followed.
        """
        if told is not None and begun:
            self.named = told
        elif told is not None:
            if told < epoch:
                tell("epoch_set_back", before=epoch, now=told, why="set_epoch() of the sampler said so")
            self.moved(told - epoch)
            epoch = told
        named, self.named = self.named, None
        self.followed = told is not None or named is not None
        if named is None:
            return epoch
        before, self.current = self.current, named
        return named if before is None else epoch + max(0, named - before)


def sets_epoch(sampler: Any) -> bool:
    """Return whether a sampler has a ``set_epoch`` of its own."""
    found = getattr(sampler, "set_epoch", None)
    return found is not None and not isinstance(found, WeakCall)
