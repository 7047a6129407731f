"""Detect and replay the state that a sampler without ``state_dict`` carries between epochs."""

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
    """The epochs that a sampler has drawn, and whether drawing them has changed it.

    Args:
        sampler: The sampler. It must have drawn nothing yet.
        seed: Seed of the loader.
        dataset: The dataset, which the sampler may hold; it is not copied with the sampler.
    """

    def __init__(self, sampler: Any, seed: int, dataset: Any) -> None:
        self._sampler = sampler
        self._seed = seed
        self._dataset = dataset
        # The epochs drawn since the sampler was passed in, in their order.
        self.epochs: list[int] = []
        # Whether drawing an epoch changes the orders of later ones; None before the first draw has
        # shown it.
        self.carries_state: bool | None = None
        if all(has_no_state(part) for part in with_inner_sampler(sampler)):
            self.carries_state = False
        # Whether something other than drawing has changed the sampler.
        self.changed_by_others = False
        # A copy of the sampler before the first draw, unless it carries nothing.
        self._as_passed: Any | None = None
        # The fingerprint of the sampler after the newest draw.
        self._left_as: Fingerprint | None = None

    def draw(self, epoch: int) -> list[Any]:
        """Return what the sampler yields in an epoch, and note whether drawing changes it."""
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
        """Return whether drawing an epoch changes the orders that the sampler yields afterwards.

        To find out, a copy of the sampler draws the same epoch again, and must yield the same
        `entries` and have the same fingerprint `after` that. Some samplers only store the order in
        an attribute, which does not change later ones. If the sampler cannot be copied, the answer
        is True.
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
        """Notice whether the sampler was changed since the newest draw."""
        samplers = with_inner_sampler(self._sampler)
        if any(sets_epoch(sampler) for sampler in samplers):
            # The loop may call `set_epoch`, and the next draw sets the epoch in any case.
            return
        if self._left_as is None or not self._left_as.is_complete:
            return
        if fingerprint(samplers, self._dataset) != self._left_as:
            self.changed_by_others = True

    def return_to_beginning(self) -> None:
        """Return the sampler to its state before the first draw.

        Raises:
            LoaderError: H604 if it cannot be copied.
        """
        as_passed = None
        if self._as_passed is not None:
            as_passed = copy_sampler(self._as_passed, self._dataset)
        if as_passed is None:
            raise cannot_restore(
                self._sampler,
                "cannot be copied, so it cannot be returned to an earlier epoch in this process",
            )
        vars(self._sampler).clear()
        vars(self._sampler).update(vars(as_passed))
        self.epochs = []
        self._left_as = None


def begin_epoch(samplers: Iterable[Any], seed: int, epoch: int) -> None:
    """Seed everything that samplers may draw from, and set their epoch."""
    order_seed = derive_seed(seed, epoch, "order")
    seed_cpu(order_seed)
    for sampler in samplers:
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(order_seed)
        if sets_epoch(sampler):
            sampler.set_epoch(epoch)


def with_inner_sampler(sampler: Any) -> list[Any]:
    """Return a sampler and, for a batch sampler, also the sampler inside it."""
    inner_sampler = getattr(sampler, "sampler", None)
    if inner_sampler is None:
        return [sampler]
    return [sampler, inner_sampler]


def cannot_restore(sampler: Any, why: str) -> LoaderError:
    """Return H604 for a sampler that cannot be moved to a saved position."""
    return LoaderError(
        f"{type(sampler).__name__} {why}",
        limit="the batches that follow depend on it",
        fix=(
            "give the sampler state_dict and load_state_dict, which are saved with the"
            " position, and start in a new run directory."
        ),
        rule="H604",
    )
