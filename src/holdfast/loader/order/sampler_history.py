"""Detect and restore the state that a sampler without ``state_dict`` carries between epochs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from holdfast.core.errors import LoaderError
from holdfast.loader.order.host_epochs import sets_epoch
from holdfast.loader.order.sampler_state import Fingerprint, copy_sampler, fingerprint
from holdfast.loader.quarantine import key_of
from holdfast.loader.random_state import isolated, seed_cpu
from holdfast.loader.samplers import has_no_state
from holdfast.loader.seeds import derive_seed


class SamplerHistory:
    """Draws epochs from a sampler, and detects whether drawing changes the sampler.

    Args:
        sampler: The sampler, from which nothing has been drawn yet.
        seed: Seed of the loader.
        dataset: The dataset, which is shared between the sampler and its copies.
    """

    def __init__(self, sampler: Any, seed: int, dataset: Any) -> None:
        self._sampler = sampler
        self._seed = seed
        self._dataset = dataset
        # The numbers of all epochs drawn so far, in the order in which the epochs were drawn.
        self.epochs: list[int] = []
        # Whether drawing an epoch changes the order of later epochs. None until the first draw.
        self.carries_state: bool | None = None
        if all(has_no_state(part) for part in with_inner_sampler(sampler)):
            self.carries_state = False
        # Whether the sampler was changed by something other than drawing.
        self.changed_by_others = False
        # A copy of the sampler before the first draw, or None if the sampler carries no state.
        self._as_passed: Any | None = None
        # Fingerprint of the sampler after the last draw.
        self._left_as: Fingerprint | None = None

    def draw(self, epoch: int) -> list[Any]:
        """Return the entries that the sampler yields in an epoch.

        This also detects whether drawing an epoch changes the order of later epochs.
        """
        self._note_changes()
        if self.carries_state is None and not self.epochs:
            self._as_passed = copy_sampler(self._sampler, self._dataset)
        samplers = with_inner_sampler(self._sampler)
        with isolated():
            begin_epoch(samplers, self._seed, epoch)
            before = fingerprint(samplers, self._dataset)
            entries = list(self._sampler)
        after = fingerprint(samplers, self._dataset)
        self._left_as = after
        self.epochs.append(epoch)
        if self.carries_state is None:
            is_unchanged = after.is_complete and before == after
            self.carries_state = not is_unchanged and self._changes_itself(epoch, entries, after)
        if not self.carries_state:
            self._as_passed = None
        return entries

    def _changes_itself(self, epoch: int, entries: list[Any], after: Fingerprint) -> bool:
        """Return whether drawing an epoch changes the order of later epochs.

        The same epoch is drawn again from a copy of the sampler. If the copy yields the same
        `entries` and then has the fingerprint `after`, drawing changes nothing. This is the case
        for a sampler that merely stores the order in an attribute, because that does not affect
        later epochs. Returns True if the sampler cannot be copied.
        """
        if not after.is_complete:
            return True
        sampler_copy = copy_sampler(self._sampler, self._dataset)
        if sampler_copy is None:
            return True
        copies = with_inner_sampler(sampler_copy)
        with isolated():
            begin_epoch(copies, self._seed, epoch)
            entries_again = list(sampler_copy)
        if key_of(entries_again) != key_of(entries):
            return True
        return fingerprint(copies, self._dataset) != after

    def _note_changes(self) -> None:
        """Detect whether the sampler was changed since the last draw."""
        samplers = with_inner_sampler(self._sampler)
        if any(sets_epoch(sampler) for sampler in samplers):
            # A change may be due to a call of `set_epoch`, which is harmless: the next draw sets
            # the epoch again.
            return
        if self._left_as is None or not self._left_as.is_complete:
            return
        if fingerprint(samplers, self._dataset) != self._left_as:
            self.changed_by_others = True

    def return_to_beginning(self) -> None:
        """Restore the state that the sampler had before the first draw.

        Raises:
            LoaderError: H604 if the sampler cannot be copied.
        """
        as_passed = None
        if self._as_passed is not None:
            as_passed = copy_sampler(self._as_passed, self._dataset)
        if as_passed is None:
            raise cannot_restore(
                self._sampler,
                "cannot be copied, so its state in an earlier epoch cannot be restored in this"
                " process",
            )
        vars(self._sampler).clear()
        vars(self._sampler).update(vars(as_passed))
        self.epochs = []
        self._left_as = None


def begin_epoch(samplers: Iterable[Any], seed: int, epoch: int) -> None:
    """Seed all generators that the samplers may draw from, and set the epoch of the samplers."""
    order_seed = derive_seed(seed, epoch, "order")
    seed_cpu(order_seed)
    for sampler in samplers:
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(order_seed)
        if sets_epoch(sampler):
            sampler.set_epoch(epoch)


def with_inner_sampler(sampler: Any) -> list[Any]:
    """Return a sampler and, if it is a batch sampler, the sampler inside it."""
    inner_sampler = getattr(sampler, "sampler", None)
    if inner_sampler is None:
        return [sampler]
    return [sampler, inner_sampler]


def cannot_restore(sampler: Any, why: str) -> LoaderError:
    """Return an H604 error for a sampler whose state at a saved position cannot be restored."""
    return LoaderError(
        f"{type(sampler).__name__} {why}",
        limit="all following batches depend on the sampler's state",
        fix=(
            "add state_dict and load_state_dict to the sampler, so that its state is saved with"
            " the position, and start in a new run directory."
        ),
        rule="H604",
    )
