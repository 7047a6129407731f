"""The order of a user's sampler or batch sampler.

It is drawn once per epoch and depends only on (seed, epoch), whichever generator the sampler draws
from.

Some samplers carry state from epoch to epoch, such as counters or lists that are shuffled now and
then. How a resume restores it depends on the sampler:

- It has ``state_dict`` and ``load_state_dict``: its state is part of the position.
- It has neither: a resume draws the earlier epochs again, in the same order (`SamplerHistory`).
- The loop changes it, for example its weights: drawing again cannot restore that, so the resume is
  refused (H604).
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Sized
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast.core.errors import LoaderError
from holdfast.loader.order.host_epochs import sets_epoch
from holdfast.loader.order.sampler_history import (
    SamplerHistory,
    begin_epoch,
    cannot_restore,
    with_inner_sampler,
)
from holdfast.loader.order.sampler_state import as_ranges, from_ranges, same_state
from holdfast.loader.quarantine import key_of
from holdfast.loader.random_state import isolated
from holdfast.loader.samplers import is_stateful

# The largest number of entries in an epoch. They are held in memory, at 40 bytes each.
_MOST_ENTRIES = 10**8

# The number of epochs whose entries are held. One is not enough: a second iterator may draw another
# epoch, and a sampler whose source of randomness is unknown would then draw a different order when
# the first epoch is needed again.
_EPOCHS_HELD = 2


class Drawn(NamedTuple):
    """A record of what a user's sampler drew for an epoch.

    Args:
        digest: A digest of the entries.
        rank: The rank that the entries belong to, or None if the sampler does not divide by ranks.
    """

    digest: str
    rank: int | None


class SamplerOrder:
    """The order of a user's sampler.

    Args:
        sampler: The sampler. It yields indices, which may be tuples, or batches of indices.
        seed: Seed of the loader.
        repeats: Whether an index may occur more than once in an epoch. None: the sampler's own
            attributes decide.
        batches: Whether it yields batches.
        samples: Length of the dataset, if that is known.
        dataset: The dataset, which the sampler may hold; it is not copied with the sampler.

    Raises:
        LoaderError: H603 for a sampler without a length, or with more entries than can be held in
            memory.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        seed: int,
        *,
        repeats: bool | None = None,
        batches: bool = False,
        samples: int | None = None,
        dataset: Any = None,
    ) -> None:
        _check_length(sampler)
        self._sampler: Any = sampler
        self._seed = seed
        self._repeats = repeats
        self._batches = batches
        self._samples = samples

        # By epoch: all entries, their digest, and the state_dict of a stateful sampler before them.
        self._entries: dict[int, list[Any]] = {}
        self._digests: dict[int, str] = {}
        self._state_before: dict[int, Any] = {}

        # The sampler's attribute `epoch` when it was last read. torch's samplers start at 0.
        self._epoch_seen = 0
        # The outermost sampler that has ``state_dict`` and ``load_state_dict``, or None.
        self._stateful: Any = next(
            (candidate for candidate in self._samplers() if is_stateful(candidate)), None
        )
        # For a sampler that has neither.
        self._history = SamplerHistory(sampler, seed, dataset)

    def __len__(self) -> int:
        """Return the entries of an epoch, as the sampler states."""
        return len(self._sampler)

    def count(self, epoch: int) -> int:
        """Return how many entries the sampler yields in an epoch.

        This may differ from its length. Like torch, the loader uses whatever it yields.
        """
        return len(self.drawn(epoch))

    def indices(self, seed: int, epoch: int, start: int, stop: int) -> list[Any]:
        """Return the entries at some positions of an epoch."""
        del seed
        return self.drawn(epoch)[start:stop]

    def identity(self) -> dict[str, Any]:
        """Return the kind of sampler and the length of the dataset, as JSON values.

        The sampler's own length is left out, because it may differ from epoch to epoch.
        """
        return {"kind": type(self._sampler).__name__, "version": 1, "length": self._samples}

    @property
    def repeats(self) -> bool:
        """Whether an index may come more than once in an epoch."""
        if self._repeats is not None:
            return self._repeats
        # torch's samplers say whether they draw with replacement. `DistributedSampler` repeats a
        # few samples to make the ranks equal.
        return any(
            getattr(sampler, "replacement", False) or hasattr(sampler, "num_replicas")
            for sampler in self._samplers()
        )

    @property
    def changed_by_others(self) -> bool:
        """Whether the loop has changed the sampler between epochs, so that no resume is possible.

        A sampler with ``state_dict`` is not checked, because its state includes such changes.
        """
        return self._history.changed_by_others

    def _samplers(self) -> list[Any]:
        return with_inner_sampler(self._sampler)

    # --- drawing ----------------------------------------------------------------------------------

    def drawn(self, epoch: int) -> list[Any]:
        """Return everything that the sampler yields in an epoch.

        Raises:
            LoaderError: H609 if indices repeat by mistake.
        """
        entries = self._entries.get(epoch)
        if entries is not None:
            return entries
        if self._stateful is None:
            entries = self._history.draw(epoch)
        else:
            self._state_before[epoch] = copy.deepcopy(self._stateful.state_dict())
            with isolated():
                begin_epoch(self._samplers(), self._seed, epoch)
                entries = list(self._sampler)
        # Drawing has set the epoch on the sampler, which must not be mistaken for a call by the
        # user.
        self.take_epoch_set()
        if not self.repeats:
            _check_once(entries, type(self._sampler).__name__, batches=self._batches)
        for old_epoch in list(self._entries)[: 1 - _EPOCHS_HELD]:
            self._forget(old_epoch)
        self._entries[epoch] = entries
        return entries

    def _forget(self, epoch: int) -> None:
        self._entries.pop(epoch, None)
        self._digests.pop(epoch, None)
        self._state_before.pop(epoch, None)

    # --- what is carried from epoch to epoch ------------------------------------------------------

    def state_dict(self, epoch: int) -> dict[str, Any] | None:
        """Return the state of the sampler for a position in an epoch, or None if it has none."""
        if self._stateful is not None:
            # The state before an epoch leads to a position in it only if no other epoch was drawn
            # since.
            newest_epoch = next(reversed(self._state_before), None)
            before = self._state_before[epoch] if epoch == newest_epoch else None
            return {"before": before, "now": copy.deepcopy(self._stateful.state_dict())}
        if self.changed_by_others:
            return {"changed_by_others": True}
        if self._history.carries_state is False:
            return None
        epochs = self._history.epochs
        drawn = list(self.check_drawn(epochs[-1], None)) if epochs else None
        return {"epochs": as_ranges(epochs), "drawn": drawn}

    def load_state_dict(self, state: dict[str, Any] | None, epoch: int) -> None:
        """Restore the sampler at a position in an epoch.

        Args:
            state: What `state_dict` returned there.
            epoch: Number of the epoch.

        Raises:
            LoaderError: H604 if that is not possible.
        """
        if state is None:
            return
        if "epochs" in state:
            self._load_history(state)
        elif "changed_by_others" in state:
            raise cannot_restore(
                self._sampler,
                "was changed between epochs by the loop, and no checkpoint holds such a change",
            )
        elif self._stateful is None:
            raise cannot_restore(
                self._sampler,
                "has no state_dict and load_state_dict, and had them when the position was saved",
            )
        else:
            if state["before"] is not None:
                self._forget(epoch)
                self._stateful.load_state_dict(copy.deepcopy(state["before"]))
                self.drawn(epoch)
            if not same_state(self._stateful.state_dict(), state["now"]):
                self._stateful.load_state_dict(copy.deepcopy(state["now"]))

    def _load_history(self, state: dict[str, Any]) -> None:
        """Draw the epochs of a saved history that were not drawn yet, in their original order.

        Raises:
            LoaderError: H604 if the order of the last one differs from the original.
        """
        if self._stateful is not None or self._history.carries_state is False:
            # The position was saved before the first draw had shown that nothing is carried.
            return
        epochs = from_ranges(state["epochs"])
        drawn_epochs = len(self._history.epochs)
        if self._history.epochs != epochs[:drawn_epochs]:
            self._history.return_to_beginning()
            drawn_epochs = 0
            for held_epoch in list(self._entries):
                self._forget(held_epoch)
        for epoch in epochs[drawn_epochs:]:
            self._forget(epoch)
            self.drawn(epoch)
        if state["drawn"] is not None:
            self.check_drawn(epochs[-1], Drawn(*state["drawn"]))

    # --- epochs -----------------------------------------------------------------------------------

    def take_epoch_set(self) -> int | None:
        """Return the epoch that the user has set on the sampler since the last call, or None."""
        for sampler in self._samplers():
            epoch = getattr(sampler, "epoch", None)
            if sets_epoch(sampler) and isinstance(epoch, Integral) and int(epoch) >= 0:
                is_new = int(epoch) != self._epoch_seen
                self._epoch_seen = int(epoch)
                return self._epoch_seen if is_new else None
        return None

    def check_drawn(self, epoch: int, saved: Drawn | None) -> Drawn:
        """Draw an epoch and compare it with the digest in a saved position; return the digest.

        Args:
            epoch: Number of the epoch.
            saved: The digest when the position was saved, or None to check nothing. A digest from
                another rank is not compared.

        Raises:
            LoaderError: H604 if a different order was drawn when the position was saved.
        """
        entries = self.drawn(epoch)
        if epoch not in self._digests:
            text = repr(key_of(entries))
            self._digests[epoch] = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        drawn = Drawn(self._digests[epoch], self._find_rank())
        if saved is not None and saved.rank == drawn.rank and saved.digest != drawn.digest:
            raise LoaderError(
                "the sampler draws a different order than when the position was saved, with the"
                " same seed and epoch",
                limit="the same order is needed to continue in the middle of an epoch",
                fix=(
                    "let it draw from the global generator of torch, numpy or python or from an"
                    " attribute `generator`, which are seeded for it, or derive its order from the"
                    " epoch in set_epoch(); create it with the same seed; if it carries state from"
                    " epoch to epoch, give it state_dict and load_state_dict."
                ),
                rule="H604",
            )
        return drawn

    def _find_rank(self) -> int | None:
        """Return the rank for which the sampler draws, or None if it does not divide by ranks."""
        for sampler in self._samplers():
            rank = getattr(sampler, "rank", None)
            if isinstance(rank, Integral):
                return int(rank)
        return None


def _check_length(sampler: Any) -> None:
    """Check that a sampler has a length, and that its entries fit into memory; else raise H603."""
    name = type(sampler).__name__
    if not isinstance(sampler, Sized):
        raise LoaderError(
            f"sampler {name} has no length",
            limit="an order that resumes exactly needs to know where an epoch ends",
            fix=(
                "give it a __len__, or use torch.utils.data.DataLoader and accept an inexact"
                " resume."
            ),
            rule="H603",
        )
    if len(sampler) > _MOST_ENTRIES:
        raise LoaderError(
            f"sampler {name} yields {len(sampler):,} entries per epoch",
            limit=(
                f"all of them are drawn at once, at most {_MOST_ENTRIES:,}, so that a resume finds"
                " the same order"
            ),
            fix=(
                "make epochs shorter, for example num_samples=len(dataset), and end the run after a"
                " number of steps: guard.batches(max_steps=...)."
            ),
            rule="H603",
        )


def _check_once(entries: list[Any], name: str, *, batches: bool) -> None:
    """Check that no index occurs twice in an epoch; else raise H609."""
    keys = [key_of(index) for index in _indices_in(entries, batches=batches)]
    repeated = len(keys) - len(set(keys))
    if repeated:
        raise LoaderError(
            f"{name} yields {repeated} of {len(keys)} indices more than once in an epoch",
            limit="each sample is expected once",
            fix="repair the sampler, or pass repeats=True if it draws with replacement on purpose.",
            rule="H609",
        )


def _indices_in(entries: list[Any], *, batches: bool) -> list[Any]:
    """Return the indices in the entries of a sampler or a batch sampler."""
    batch_types: Any = (list, tuple, np.ndarray, torch.Tensor) if batches else list
    indices: list[Any] = []
    for entry in entries:
        if isinstance(entry, batch_types):
            indices.extend(entry)
        else:
            indices.append(entry)
    return indices
