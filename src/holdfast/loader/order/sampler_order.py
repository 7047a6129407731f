"""Draw the order of each epoch from a user's sampler or batch sampler.

The order is drawn once per epoch and depends only on (seed, epoch), because all generators that the
sampler may draw from are seeded first.

Some samplers carry state from epoch to epoch, such as a counter or a list that is shuffled again
and again. How a resume restores this state depends on the sampler:

- If the sampler has ``state_dict`` and ``load_state_dict``, its state is saved with the position.
- Otherwise, a resume draws all earlier epochs again, in the same order (`SamplerHistory`).
- If the training loop changes the sampler, for example its weights, drawing the epochs again cannot
  restore the state, so the resume is refused (H604).
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

# Maximum number of entries in an epoch. All entries are kept in memory, at 40 bytes each.
_MAX_ENTRIES = 10**8

# Number of epochs whose entries are kept. One is not enough, because a second iterator may draw
# another epoch. If the first epoch then had to be drawn again, a sampler with an unknown source of
# randomness would yield a different order.
_EPOCHS_HELD = 2


class Drawn(NamedTuple):
    """Identifies the entries that were drawn from a user's sampler for an epoch.

    Args:
        digest: Digest of the entries.
        rank: The rank that the entries are for, or None if the sampler does not divide samples
            among ranks.
    """

    digest: str
    rank: int | None


class SamplerOrder:
    """An order that is drawn from a user's sampler, one epoch at a time.

    Args:
        sampler: The sampler, which yields indices (numbers or tuples) or batches of indices.
        seed: Seed of the loader.
        repeats: Whether an index may occur more than once in an epoch. With None, this is derived
            from the sampler's attributes.
        batches: Whether the sampler yields batches.
        samples: Length of the dataset, or None if unknown.
        dataset: The dataset, which copies of the sampler share.

    Raises:
        LoaderError: H603 if the sampler has no length, or too many entries to be kept in memory.
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

        # For each epoch: all entries, their digest, and the state_dict of a stateful sampler before
        # the epoch was drawn.
        self._entries: dict[int, list[Any]] = {}
        self._digests: dict[int, str] = {}
        self._state_before: dict[int, Any] = {}

        # The last value read from the sampler's attribute `epoch`. torch's samplers start at 0.
        self._epoch_seen = 0
        # The outermost sampler that has ``state_dict`` and ``load_state_dict``, or None.
        self._stateful: Any = next(
            (candidate for candidate in self._samplers() if is_stateful(candidate)), None
        )
        # Used to restore the state if no sampler has these methods.
        self._history = SamplerHistory(sampler, seed, dataset)

    def __len__(self) -> int:
        """Return the sampler's own length, in entries per epoch."""
        return len(self._sampler)

    def count(self, epoch: int) -> int:
        """Return how many entries the sampler actually yields in an epoch.

        This number may differ from the sampler's length. As in torch, the loader uses all entries.
        """
        return len(self.drawn(epoch))

    def indices(self, seed: int, epoch: int, start: int, stop: int) -> list[Any]:
        """Return the entries at the positions from `start` to `stop` in an epoch.

        `start` and `stop` work as in a slice. `seed` is ignored, because the sampler is drawn with
        the seed that was passed to the constructor.
        """
        del seed
        return self.drawn(epoch)[start:stop]

    def identity(self) -> dict[str, Any]:
        """Return the properties of the order that must match when a saved position is loaded.

        The sampler's own length is not included, because it may differ from epoch to epoch.
        """
        return {"kind": type(self._sampler).__name__, "version": 1, "length": self._samples}

    @property
    def repeats(self) -> bool:
        """Whether an index may occur more than once in an epoch."""
        if self._repeats is not None:
            return self._repeats
        # Samplers that can draw with replacement have an attribute `replacement` in torch. A
        # `DistributedSampler` has `num_replicas`, and repeats a few samples so that all ranks get
        # the same number of samples.
        return any(
            getattr(sampler, "replacement", False) or hasattr(sampler, "num_replicas")
            for sampler in self._samplers()
        )

    @property
    def changed_by_others(self) -> bool:
        """Whether the training loop changed the sampler, which makes a resume impossible.

        A sampler with ``state_dict`` is not checked, because its state includes such changes.
        """
        return self._history.changed_by_others

    def _samplers(self) -> list[Any]:
        return with_inner_sampler(self._sampler)

    # --- drawing ----------------------------------------------------------------------------------

    def drawn(self, epoch: int) -> list[Any]:
        """Return all entries that the sampler yields in an epoch, drawing them if necessary.

        Raises:
            LoaderError: H609 if an index occurs more than once, but repeats are not allowed.
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
        # Drawing calls the sampler's `set_epoch`. That call must not be mistaken for one by the
        # user.
        self.take_epoch_set()
        if not self.repeats:
            _check_once(entries, type(self._sampler).__name__, batches=self._batches)
        # One fewer than `_EPOCHS_HELD` old epochs are kept, because the new epoch is added next.
        for old_epoch in list(self._entries)[: 1 - _EPOCHS_HELD]:
            self._forget(old_epoch)
        self._entries[epoch] = entries
        return entries

    def _forget(self, epoch: int) -> None:
        self._entries.pop(epoch, None)
        self._digests.pop(epoch, None)
        self._state_before.pop(epoch, None)

    # --- state carried from epoch to epoch --------------------------------------------------------

    def state_dict(self, epoch: int) -> dict[str, Any] | None:
        """Return the sampler's state for a position in an epoch, or None if it carries no state."""
        if self._stateful is not None:
            # The state before the epoch is only useful if no other epoch has been drawn since then.
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
        """Restore the state that the sampler had at a position in an epoch.

        Args:
            state: The result of `state_dict` at that position.
            epoch: Number of the epoch.

        Raises:
            LoaderError: H604 if the sampler cannot be restored.
        """
        if state is None:
            return
        if "epochs" in state:
            self._load_history(state)
        elif "changed_by_others" in state:
            raise cannot_restore(
                self._sampler,
                "was changed by the loop between epochs, and checkpoints do not save such changes",
            )
        elif self._stateful is None:
            raise cannot_restore(
                self._sampler,
                "has no state_dict and load_state_dict, but had them when the position was saved",
            )
        else:
            # The epoch is drawn again from the state before it. Then the later state is restored.
            if state["before"] is not None:
                self._forget(epoch)
                self._stateful.load_state_dict(copy.deepcopy(state["before"]))
                self.drawn(epoch)
            if not same_state(self._stateful.state_dict(), state["now"]):
                self._stateful.load_state_dict(copy.deepcopy(state["now"]))

    def _load_history(self, state: dict[str, Any]) -> None:
        """Draw the epochs of a saved history that have not been drawn yet, in the original order.

        Raises:
            LoaderError: H604 if the order of the last epoch differs from the original run.
        """
        if self._stateful is not None or self._history.carries_state is False:
            # The position was saved before the first draw. At that time, it was not yet known that
            # the sampler carries no state.
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
        """Return the epoch that the user set on the sampler since the last call, or None."""
        for sampler in self._samplers():
            epoch = getattr(sampler, "epoch", None)
            if sets_epoch(sampler) and isinstance(epoch, Integral) and int(epoch) >= 0:
                is_new = int(epoch) != self._epoch_seen
                self._epoch_seen = int(epoch)
                return self._epoch_seen if is_new else None
        return None

    def check_drawn(self, epoch: int, saved: Drawn | None) -> Drawn:
        """Return the digest of an epoch's order, after comparing it with a saved digest.

        Args:
            epoch: Number of the epoch.
            saved: The digest from the saved position, or None to skip the check. A digest from
                another rank is not compared.

        Raises:
            LoaderError: H604 if the order differs from the one drawn when the position was saved.
        """
        entries = self.drawn(epoch)
        if epoch not in self._digests:
            text = repr(key_of(entries))
            self._digests[epoch] = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        drawn = Drawn(self._digests[epoch], self._find_rank())
        if saved is not None and saved.rank == drawn.rank and saved.digest != drawn.digest:
            raise LoaderError(
                "with the same seed and epoch, the sampler draws a different order than when the"
                " position was saved",
                limit="continuing in the middle of an epoch requires the same order of samples",
                fix=(
                    "create the sampler with the same seed, and let it draw only from generators"
                    " that the loader seeds: the global ones of torch, NumPy and Python, or its"
                    " attribute `generator`. Alternatively, derive the order from the epoch in"
                    " set_epoch(). If the sampler carries state from epoch to epoch, add state_dict"
                    " and load_state_dict."
                ),
                rule="H604",
            )
        return drawn

    def _find_rank(self) -> int | None:
        """Return the rank that the sampler draws for, or None if its entries are for all ranks."""
        for sampler in self._samplers():
            rank = getattr(sampler, "rank", None)
            if isinstance(rank, Integral):
                return int(rank)
        return None


def _check_length(sampler: Any) -> None:
    """Raise H603 if a sampler has no length, or too many entries to be kept in memory."""
    name = type(sampler).__name__
    if not isinstance(sampler, Sized):
        raise LoaderError(
            f"sampler {name} has no length",
            limit="an exact resume requires knowing where an epoch ends",
            fix=(
                "add a __len__ to the sampler, or use torch.utils.data.DataLoader and accept an"
                " inexact resume."
            ),
            rule="H603",
        )
    if len(sampler) > _MAX_ENTRIES:
        raise LoaderError(
            f"sampler {name} yields {len(sampler):,} entries per epoch",
            limit=(
                "all entries of an epoch are drawn at once, so that a resume gets the same order,"
                f" and at most {_MAX_ENTRIES:,} fit into memory"
            ),
            fix=(
                "make epochs shorter, for example with num_samples=len(dataset), and end the run"
                " after a number of steps with guard.batches(max_steps=...)."
            ),
            rule="H603",
        )


def _check_once(entries: list[Any], name: str, *, batches: bool) -> None:
    """Raise H609 if an index occurs more than once in an epoch."""
    keys = [key_of(index) for index in _indices_in(entries, batches=batches)]
    repeated = len(keys) - len(set(keys))
    if repeated:
        raise LoaderError(
            f"{name} yields {repeated} of {len(keys)} indices more than once in an epoch",
            limit="each index may occur only once unless repeats=True",
            fix="fix the sampler, or pass repeats=True if it repeats samples on purpose.",
            rule="H609",
        )


def _indices_in(entries: list[Any], *, batches: bool) -> list[Any]:
    """Return all indices in the entries of a sampler or a batch sampler."""
    # An index may itself be a tuple or an array. Without `batches`, only a list is a group of
    # indices.
    batch_types: Any = (list, tuple, np.ndarray, torch.Tensor) if batches else list
    indices: list[Any] = []
    for entry in entries:
        if isinstance(entry, batch_types):
            indices.extend(entry)
        else:
            indices.append(entry)
    return indices
