"""The order of a user's sampler, or sampler of batches.

It is drawn once an epoch from (seed, epoch), wherever the sampler takes its random numbers from.

Some samplers carry state from epoch to epoch, such as counters or lists that are shuffled now and
then. How a resume restores it depends on the sampler:

- It has ``state_dict`` and ``load_state_dict``: its state is part of the position.
- It has neither: a resume draws the earlier epochs again, in the same order.
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
from holdfast.loader.order.sampler_state import (
    Fingerprint,
    as_ranges,
    copy_sampler,
    fingerprint,
    from_ranges,
    same_state,
)
from holdfast.loader.quarantine import key_of
from holdfast.loader.random_state import isolated, seed_cpu
from holdfast.loader.samplers import has_no_state, is_stateful
from holdfast.loader.seeds import derive_seed

# Entries of an epoch: they are held in memory, at 40 bytes each.
_MOST_ENTRIES = 10**8

# Epochs whose entries are held. There are two, because another iterator may draw another epoch, and
# a sampler whose source of randomness is unknown would draw a different order when asked again.
_EPOCHS_HELD = 2


class Drawn(NamedTuple):
    """What a user's sampler drew for an epoch.

    Args:
        digest: A digest of the entries.
        rank: Whose they are, if the sampler divides by ranks; None otherwise.
    """

    digest: str
    rank: int | None


class Sampled:
    """The order of a user's sampler.

    Args:
        sampler: The sampler. It yields indices, which may be tuples, or batches of indices.
        seed: Seed of the loader.
        repeats: Whether an index may come more than once in an epoch; None if the sampler knows.
        batches: Whether it yields batches.
        samples: Length of the dataset, if that is known.
        dataset: The dataset, which the sampler may hold; it is not copied with the sampler.

    Raises:
        LoaderError: H603 for a sampler without a length, or with one that no memory holds.
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
        self._dataset = dataset

        # By epoch: all entries, their digest, and the state_dict of a stateful sampler before them.
        self._entries: dict[int, list[Any]] = {}
        self._digests: dict[int, str] = {}
        self._state_before: dict[int, Any] = {}

        # The sampler's attribute `epoch` when it was last looked at. Samplers of torch begin with
        # 0.
        self._epoch_seen = 0
        # The outermost sampler that has ``state_dict`` and ``load_state_dict``, or None.
        self._stateful: Any = next(
            (sampler for sampler in self._samplers() if is_stateful(sampler)), None
        )
        # The epochs that were drawn since the sampler was passed in, in this order.
        self._history: list[int] = []
        # Whether drawing an epoch changes the orders of later ones; None before the first draw has
        # shown it.
        self._carries_state: bool | None = None
        if self._stateful is not None or self._needs_no_state():
            self._carries_state = False
        # A copy of the sampler before the first draw, unless it carries nothing.
        self._as_passed: Any | None = None
        # The fingerprint of the sampler after the newest draw.
        self._left_as: Fingerprint | None = None
        # Whether the loop has changed a sampler without ``state_dict`` between epochs, so that no
        # resume is possible.
        self.changed_by_others = False

    def __len__(self) -> int:
        """Return the entries of an epoch, as the sampler states."""
        return len(self._sampler)

    def count(self, epoch: int) -> int:
        """Return how many entries the sampler yields in an epoch.

        This may differ from its length. Like torch, the loader takes what is yielded.
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
        # Samplers of torch that draw with replacement say so. Its `DistributedSampler` repeats a
        # few samples to make the ranks equal.
        return any(
            getattr(sampler, "replacement", False) or hasattr(sampler, "num_replicas")
            for sampler in self._samplers()
        )

    def _samplers(self) -> list[Any]:
        return _with_inner_sampler(self._sampler)

    # --- drawing ----------------------------------------------------------------------------------

    def drawn(self, epoch: int) -> list[Any]:
        """Return everything that the sampler yields in an epoch.

        Raises:
            LoaderError: H609 if indices repeat by mistake.
        """
        entries = self._entries.get(epoch)
        if entries is not None:
            return entries
        self._note_changes()
        if self._stateful is not None:
            self._state_before[epoch] = copy.deepcopy(self._stateful.state_dict())
        elif self._carries_state is None and not self._history:
            self._as_passed = copy_sampler(self._sampler, self._dataset)
        entries = self._draw(epoch)
        self._history.append(epoch)
        # Drawing has set the epoch on the sampler, which is no wish of the user.
        self.take_epoch_set()
        if self._carries_state is None:
            self._carries_state = self._changes_itself(epoch, entries)
        if not self._carries_state:
            self._as_passed = None
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

    def _draw(self, epoch: int) -> list[Any]:
        """Return the entries of an epoch, and note the sampler's state afterwards."""
        with isolated():
            self._begin_epoch(self._samplers(), epoch)
            before = self._fingerprint()
            entries = list(self._sampler)
        self._left_as = self._fingerprint()
        if self._carries_state is None and before == self._left_as and before.is_complete:
            self._carries_state = False
        return entries

    def _begin_epoch(self, samplers: Iterable[Any], epoch: int) -> None:
        """Seed everything that samplers may draw from, and set their epoch."""
        seed = derive_seed(self._seed, epoch, "order")
        seed_cpu(seed)
        for sampler in samplers:
            generator = getattr(sampler, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
            if sets_epoch(sampler):
                sampler.set_epoch(epoch)

    # --- what is carried from epoch to epoch ------------------------------------------------------

    def _needs_no_state(self) -> bool:
        """Return whether all samplers are known to carry nothing from epoch to epoch."""
        return all(has_no_state(sampler) for sampler in self._samplers())

    def _fingerprint(self) -> Fingerprint:
        return fingerprint(self._samplers(), self._dataset)

    def _changes_itself(self, epoch: int, entries: list[Any]) -> bool:
        """Return whether drawing an epoch changes the orders that the sampler yields afterwards.

        To find out, a copy of the sampler draws the same epoch again. Some samplers only store the
        order in an attribute, which does not change later ones. If the sampler cannot be copied,
        the answer is True.
        """
        sampler_copy = copy_sampler(self._sampler, self._dataset)
        if sampler_copy is None or self._left_as is None or not self._left_as.is_complete:
            return True
        copies = _with_inner_sampler(sampler_copy)
        with isolated():
            self._begin_epoch(copies, epoch)
            entries_again = list(sampler_copy)
        if key_of(entries_again) != key_of(entries):
            return True
        return fingerprint(copies, self._dataset) != self._left_as

    def _note_changes(self) -> None:
        """Notice whether the sampler was changed since the newest draw."""
        if self._stateful is not None or self._left_as is None:
            return
        if any(sets_epoch(sampler) for sampler in self._samplers()):
            # The loop may call `set_epoch`, and the next draw sets the epoch anyway.
            return
        if self._left_as.is_complete and self._fingerprint() != self._left_as:
            self.changed_by_others = True

    def state_dict(self, epoch: int) -> dict[str, Any] | None:
        """Return the state of the sampler for a position in an epoch, or None if it has none."""
        if self._stateful is not None:
            before = None
            if self._history[-1:] == [epoch]:
                before = self._state_before.get(epoch)
            return {"before": before, "now": copy.deepcopy(self._stateful.state_dict())}
        if self.changed_by_others:
            return {"changed_by_others": True}
        if self._carries_state is False:
            return None
        drawn = None
        if self._history:
            newest_epoch = self._history[-1]
            drawn = list(self.check_drawn(newest_epoch, None))
        return {"epochs": as_ranges(self._history), "drawn": drawn}

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
            if self._carries_state is False:
                # The position was saved before the first draw had shown that the sampler carries
                # nothing.
                return
            self._draw_again(from_ranges(state["epochs"]), state["drawn"])
        elif "changed_by_others" in state:
            raise self._cannot_restore(
                "was changed between epochs by the loop, and no checkpoint holds such a change"
            )
        elif self._stateful is None:
            raise self._cannot_restore(
                "has no state_dict and load_state_dict, and had them when the position was saved"
            )
        else:
            if state["before"] is not None:
                self._forget(epoch)
                self._stateful.load_state_dict(copy.deepcopy(state["before"]))
                self.drawn(epoch)
            if not same_state(self._stateful.state_dict(), state["now"]):
                self._stateful.load_state_dict(copy.deepcopy(state["now"]))

    def _draw_again(self, epochs: list[int], drawn: list[Any] | None) -> None:
        """Draw epochs in their original order.

        Args:
            epochs: The epochs.
            drawn: The fields of `Drawn` for the last one, if they were saved.

        Raises:
            LoaderError: H604 if the order of the last one differs from the original.
        """
        if self._history != epochs[: len(self._history)]:
            self._return_to_beginning()
        for epoch in epochs[len(self._history) :]:
            self._forget(epoch)
            self.drawn(epoch)
        if drawn is not None:
            self.check_drawn(epochs[-1], Drawn(*drawn))

    def _return_to_beginning(self) -> None:
        """Bring the sampler back to where it was when it was passed in.

        Raises:
            LoaderError: H604 if it cannot be copied.
        """
        as_passed = None
        if self._as_passed is not None:
            as_passed = copy_sampler(self._as_passed, self._dataset)
        if as_passed is None:
            raise self._cannot_restore(
                "cannot be copied, so it cannot be returned to an earlier epoch in this process"
            )
        vars(self._sampler).clear()
        vars(self._sampler).update(vars(as_passed))
        for epoch in list(self._entries):
            self._forget(epoch)
        self._history = []
        self._left_as = None

    def _cannot_restore(self, why: str) -> LoaderError:
        return LoaderError(
            f"{type(self._sampler).__name__} {why}",
            limit="the batches that follow depend on it",
            fix=(
                "give the sampler state_dict and load_state_dict, which are saved with the"
                " position, and start in a new run directory."
            ),
            rule="H604",
        )

    # --- epochs -----------------------------------------------------------------------------------

    def take_epoch_set(self) -> int | None:
        """Return the epoch that somebody has set on the sampler since the last call, or None."""
        for sampler in self._samplers():
            epoch = getattr(sampler, "epoch", None)
            if sets_epoch(sampler) and isinstance(epoch, Integral) and int(epoch) >= 0:
                is_new = int(epoch) != self._epoch_seen
                self._epoch_seen = int(epoch)
                return self._epoch_seen if is_new else None
        return None

    def check_drawn(self, epoch: int, saved: Drawn | None) -> Drawn:
        """Return a digest of what is drawn for an epoch.

        Args:
            epoch: Number of the epoch.
            saved: The digest when the position was saved, or None to check nothing. It is not
                checked if it is that of another rank.

        Raises:
            LoaderError: H604 if another order was drawn then.
        """
        entries = self.drawn(epoch)
        if epoch not in self._digests:
            text = repr(key_of(entries))
            self._digests[epoch] = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        drawn = Drawn(self._digests[epoch], self._find_rank())
        if saved is not None and saved.rank == drawn.rank and saved.digest != drawn.digest:
            raise LoaderError(
                "the sampler draws another order than when the position was saved, with the same"
                " seed and epoch",
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


def _with_inner_sampler(sampler: Any) -> list[Any]:
    """Return a sampler, and the one that a sampler of batches takes its indices from."""
    inner_sampler = getattr(sampler, "sampler", None)
    if inner_sampler is None:
        return [sampler]
    return [sampler, inner_sampler]


def _check_length(sampler: Any) -> None:
    """Check that a sampler has a length whose entries fit into memory; H603."""
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
            f"sampler {name} yields {len(sampler):,} entries an epoch",
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
    """Check that no index comes twice in an epoch; H609."""
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
    """Return the indices in the entries of a sampler, or of a sampler of batches."""
    batch_types: Any = (list, tuple, np.ndarray, torch.Tensor) if batches else list
    indices: list[Any] = []
    for entry in entries:
        if isinstance(entry, batch_types):
            indices.extend(entry)
        else:
            indices.append(entry)
    return indices
