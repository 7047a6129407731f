"""A user's sampler, or sampler of batches.

Drawn once an epoch from (seed, epoch), whatever its source of chance.

Some samplers carry state from epoch to epoch, such as counters or lists that are shuffled now and
then. How a resume restores it depends on the sampler:

it has state_dict and load_state_dict   its state is part of the position
it has neither                          a resume draws the earlier epochs again, in the same order
the loop changes it, such as weights    drawing again cannot restore that, so the resume is refused
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
from holdfast.loader.foreign import has_no_state, is_stateful
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
from holdfast.loader.seeds import derive_seed

_MOST_ENTRIES = 10**8  # of an epoch, 40 bytes each
# Another iterator may draw another epoch: one with its own source of chance would draw anew then
_KEPT_EPOCHS = 2


class Drawn(NamedTuple):
    """A digest of what a user's sampler drew for an epoch, and whose it is if the sampler
    divides by ranks.
    """

    digest: str
    rank: int | None


class Sampled:
    """A user's sampler, drawn once an epoch from (seed, epoch), whatever its source of chance.

    It yields indices, or `batches` of them; an index may be a tuple. `samples` are those of the
    dataset, if known. H603 for a sampler without a length, or with one that no memory holds.
    """

    changed_by_others = False
    """Whether the loop has changed a sampler without ``state_dict`` between epochs, so that no
    resume is possible."""

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
        if not isinstance(sampler, Sized):
            raise LoaderError(
                f"sampler {type(sampler).__name__} has no length",
                limit="an order that resumes exactly needs to know where an epoch ends",
                fix=(
                    "give it a __len__, or use torch.utils.data.DataLoader and accept an inexact"
                    " resume."
                ),
                rule="H603",
            )
        if len(sampler) > _MOST_ENTRIES:
            raise LoaderError(
                f"sampler {type(sampler).__name__} yields {len(sampler):,} entries an epoch",
                limit=(
                    f"they are drawn at once, at most {_MOST_ENTRIES:,}, so that a resume finds the"
                    " same"
                ),
                fix=(
                    "let an epoch be shorter, such as num_samples=len(dataset), and let steps end"
                    " the run: guard.batches(max_steps=...)."
                ),
                rule="H603",
            )
        self._sampler: Any = sampler
        self._seed = seed
        self._repeats = repeats
        self._batches = batches
        self._samples = samples
        self._kept: dict[int, list[Any]] = {}
        # That the sampler had when it was last looked at; torch's begin with 0
        self._epoch_seen = 0
        self._dataset = dataset
        # The outermost sampler that has ``state_dict`` and ``load_state_dict``, or None.
        self._stateful: Any = next(
            (sampler for sampler in self._samplers() if is_stateful(sampler)), None
        )
        self._digests: dict[int, str] = {}  # of the epochs that are kept
        # The epochs that were drawn since the sampler was passed in, in this order.
        self._history: list[int] = []
        # Whether drawing an epoch changes the orders of later ones; None before the first draw has
        # shown it.
        self._carries: bool | None = (
            False if self._stateful is not None or self._is_torchs else None
        )
        # A copy of the sampler before the first draw, unless it carries nothing.
        self._as_given: Any | None = None
        # The fingerprint of the sampler after the newest draw.
        self._left_as: Fingerprint | None = None
        # The state_dict of a stateful sampler before each epoch in `_kept`.
        self._before_draw: dict[int, Any] = {}

    def __len__(self) -> int:
        """Return the entries of an epoch, as the sampler states."""
        return len(self._sampler)

    def count(self, epoch: int) -> int:
        """Return what the sampler really yields in an epoch, as torch iterates it whatever its
        length says.
        """
        return len(self.drawn(epoch))

    def indices(self, seed: int, epoch: int, start: int, stop: int) -> list[Any]:
        """Return the indices at some positions of an epoch."""
        del seed
        return self.drawn(epoch)[start:stop]

    def drawn(self, epoch: int) -> list[Any]:
        """Return all that the sampler yields in an epoch; H609 if indices repeat by mistake."""
        if epoch not in self._kept:
            self._note_changes()
            if self._stateful is not None:
                self._before_draw[epoch] = copy.deepcopy(self._stateful.state_dict())
            elif self._carries is None and not self._history:
                self._as_given = copy_sampler(self._sampler, self._dataset)
            found = self._draw(epoch)
            self._history.append(epoch)
            self.epoch_set()
            if self._carries is None:
                self._carries = self._changes_itself(epoch, found)
            if not self._carries:
                self._as_given = None
            if not self.repeats:
                _check_once(found, type(self._sampler).__name__, batches=self._batches)
            for old in list(self._kept)[: 1 - _KEPT_EPOCHS]:
                self._forget(old)
            self._kept[epoch] = found
        return self._kept[epoch]

    def _forget(self, epoch: int) -> None:
        for of_epochs in (self._kept, self._digests, self._before_draw):
            of_epochs.pop(epoch, None)

    def _draw(self, epoch: int) -> list[Any]:
        """Return the entries of the sampler with the random numbers of an epoch, and note its
        state afterwards.
        """
        with isolated():
            self._begin_epoch(self._samplers(), epoch)
            before = self._fingerprint()
            found = list(self._sampler)
        self._left_as = self._fingerprint()
        if self._carries is None and before == self._left_as and before.is_complete:
            self._carries = False
        return found

    def _begin_epoch(self, samplers: Iterable[Any], epoch: int) -> None:
        seed = derive_seed(self._seed, epoch, "order")
        seed_cpu(seed)
        for sampler in samplers:
            generator = getattr(sampler, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
            if sets_epoch(sampler):
                sampler.set_epoch(epoch)

    # --- what is carried from epoch to epoch

    @property
    def _is_torchs(self) -> bool:
        return all(sampler is None or has_no_state(sampler) for sampler in self._samplers())

    def _fingerprint(self) -> Fingerprint:
        return fingerprint(
            (sampler for sampler in self._samplers() if sampler is not None), self._dataset
        )

    def _changes_itself(self, epoch: int, found: list[Any]) -> bool:
        """Return whether drawing an epoch changes the orders that the sampler yields afterwards.

        To find out, a copy of the sampler draws the same epoch again. Some samplers only store the
        order in an attribute, which does not change later ones. If the sampler cannot be copied,
        the answer is True.
        """
        again = copy_sampler(self._sampler, self._dataset)
        if again is None or self._left_as is None or not self._left_as.is_complete:
            return True
        samplers = [
            sampler for sampler in (again, getattr(again, "sampler", None)) if sampler is not None
        ]
        with isolated():
            self._begin_epoch(samplers, epoch)
            same = key_of(list(again)) == key_of(found)
        return not same or fingerprint(samplers, self._dataset) != self._left_as

    def _note_changes(self) -> None:
        """Notice whether the sampler was changed since the newest draw.

        One with ``set_epoch`` is left out: the loop may call that, and the next draw sets the epoch
        anyway.
        """
        if (
            self._stateful is not None
            or self._left_as is None
            or any(map(sets_epoch, self._samplers()))
        ):
            return
        self.changed_by_others |= self._left_as.is_complete and self._fingerprint() != self._left_as

    def state_dict(self, epoch: int) -> dict[str, Any] | None:
        """Return the state of the sampler for a position in an epoch, or None if it has none."""
        if self._stateful is not None:
            before = self._before_draw.get(epoch) if self._history[-1:] == [epoch] else None
            return {"before": before, "now": copy.deepcopy(self._stateful.state_dict())}
        if self.changed_by_others:
            return {"changed_by_others": True}
        if self._carries is False:
            return None
        newest = self._history[-1] if self._history else None
        digest = None if newest is None else self.in_short(newest, None)
        return {
            "epochs": as_ranges(self._history),
            "drawn": None if digest is None else list(digest),
        }

    def load_state_dict(self, state: dict[str, Any] | None, epoch: int) -> None:
        """Restore the sampler at a position in an epoch; H604 if that is not possible."""
        if state is None:
            return
        if "epochs" in state:
            if self._carries is False:
                # The position was saved before the first draw had shown that the sampler carries
                # nothing.
                return
            self._draw_again(from_ranges(state["epochs"]), state["drawn"])
        elif "changed_by_others" in state:
            raise self._lost("was changed between epochs by the loop, and no checkpoint holds that")
        elif self._stateful is None:
            raise self._lost(
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

        H604 if the order of the last one differs from the original.
        """
        if self._history != epochs[: len(self._history)]:
            self._return_to_the_beginning()
        for epoch in epochs[len(self._history) :]:
            self._forget(epoch)
            self.drawn(epoch)
        if drawn is not None:
            self.in_short(epochs[-1], Drawn(*drawn))

    def _return_to_the_beginning(self) -> None:
        again = None if self._as_given is None else copy_sampler(self._as_given, self._dataset)
        if again is None:
            raise self._lost(
                "cannot be copied, and so not be brought back to an earlier epoch in the same"
                " process"
            )
        vars(self._sampler).clear()
        vars(self._sampler).update(vars(again))
        for epoch in list(self._kept):
            self._forget(epoch)
        self._history, self._left_as = [], None

    def _lost(self, why: str) -> LoaderError:
        return LoaderError(
            f"{type(self._sampler).__name__} {why}",
            limit="the batches that follow depend on it",
            fix=(
                "give the sampler state_dict and load_state_dict, which are kept with the position,"
                " and begin in another run directory."
            ),
            rule="H604",
        )

    # --- epochs

    def epoch_set(self) -> int | None:
        """Return the epoch that somebody else has set on the sampler since this was last asked,
        or None.
        """
        for each in self._samplers():
            found = getattr(each, "epoch", None)
            if sets_epoch(each) and isinstance(found, Integral) and int(found) >= 0:
                before, self._epoch_seen = self._epoch_seen, int(found)
                return None if self._epoch_seen == before else self._epoch_seen
        return None

    def in_short(self, epoch: int, then: Drawn | None) -> Drawn:
        """Return a digest of an epoch.

        H604 if another order was drawn `then`, as far as it is of this rank.
        """
        ranks = [
            int(each.rank)
            for each in self._samplers()
            if isinstance(getattr(each, "rank", None), Integral)
        ]
        entries = self.drawn(epoch)
        if epoch not in self._digests:
            self._digests[epoch] = hashlib.blake2b(
                repr(key_of(entries)).encode(), digest_size=8
            ).hexdigest()
        now = Drawn(self._digests[epoch], ranks[0] if ranks else None)
        if then is not None and then.rank == now.rank and then.digest != now.digest:
            raise LoaderError(
                "the sampler draws another order than when the position was saved, at the same seed"
                " and epoch",
                limit="the same order is needed to continue in the middle of an epoch",
                fix=(
                    "let it draw from torch's, numpy's or python's global generator or from an"
                    " attribute `generator`, which are seeded for it, or from its epoch in"
                    " set_epoch(); make it from the same seed; what it carries from epoch to epoch"
                    " is kept by its state_dict and load_state_dict."
                ),
                rule="H604",
            )
        return now

    @property
    def repeats(self) -> bool:
        """Return whether an index may come more than once an epoch."""
        if self._repeats is not None:
            return self._repeats
        # torch's samplers with replacement say so; its DistributedSampler repeats a few to make
        # ranks equal.
        return any(
            getattr(each, "replacement", False) or hasattr(each, "num_replicas")
            for each in self._samplers()
        )

    def _samplers(self) -> tuple[Any, Any]:
        """Return the sampler, and the one that a sampler of batches takes its indices from."""
        return self._sampler, getattr(self._sampler, "sampler", None)

    def identity(self) -> dict[str, Any]:
        """Return its kind and the length of the dataset.

        Its own may be another one in each epoch.
        """
        return {"kind": type(self._sampler).__name__, "version": 1, "length": self._samples}


def _check_once(found: list[Any], name: str, *, batches: bool) -> None:
    many: Any = (list, tuple, np.ndarray, torch.Tensor) if batches else list
    keys = [
        key_of(index) for each in found for index in (each if isinstance(each, many) else [each])
    ]
    repeated = len(keys) - len(set(keys))
    if repeated:
        raise LoaderError(
            f"{name} yields {repeated} of {len(keys)} indices more than once in an epoch",
            limit="each sample is expected once",
            fix="repair the sampler, or pass repeats=True if it draws with replacement on purpose.",
            rule="H609",
        )
