"""A user's sampler, or sampler of batches: drawn once an epoch from (seed, epoch), whatever its source of chance."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sized
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast.core.errors import LoaderError
from holdfast.loader.order.host_epochs import sets_epoch
from holdfast.loader.quarantine import key_of
from holdfast.loader.random_state import isolated, seed_cpu
from holdfast.loader.seeds import derive_seed

_MOST_ENTRIES = 10**8  # of an epoch, 40 bytes each
_KEPT_EPOCHS = 2  # another iterator may draw another epoch: one with its own source of chance would draw anew then


class Drawn(NamedTuple):
    """A digest of what a user's sampler drew for an epoch, and whose it is if the sampler divides by ranks."""

    digest: str
    rank: int | None


class Sampled:
    """A user's sampler, drawn once an epoch from (seed, epoch), whatever its source of chance.

    It yields indices, or `batches` of them; an index may be a tuple. `samples` are those of the dataset, if known.
    H603 for a sampler without a length, or with one that no memory holds.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        seed: int,
        *,
        repeats: bool | None = None,
        batches: bool = False,
        samples: int | None = None,
    ) -> None:
        if not isinstance(sampler, Sized):
            raise LoaderError(
                f"sampler {type(sampler).__name__} has no length",
                limit="an order that resumes exactly needs to know where an epoch ends",
                fix="give it a __len__, or use torch.utils.data.DataLoader and accept an inexact resume.",
                rule="H603",
            )
        if len(sampler) > _MOST_ENTRIES:
            raise LoaderError(
                f"sampler {type(sampler).__name__} yields {len(sampler):,} entries an epoch",
                limit=f"they are drawn at once, at most {_MOST_ENTRIES:,}, so that a resume finds the same",
                fix="let an epoch be shorter, such as num_samples=len(dataset), and let steps end the run: "
                "guard.batches(max_steps=...).",
                rule="H603",
            )
        self._sampler = sampler
        self._seed = seed
        self._repeats = repeats
        self._batches = batches
        self._samples = samples
        self._kept: dict[int, list[Any]] = {}
        self._epoch_seen = 0  # that the sampler had when it was last looked at; torch's begin with 0

    def __len__(self) -> int:
        """Return the entries of an epoch, as the sampler states."""
        return len(self._sampler)

    def count(self, epoch: int) -> int:
        """Return what the sampler really yields in an epoch, as torch iterates it whatever its length says."""
        return len(self.drawn(epoch))

    def indices(self, seed: int, epoch: int, start: int, stop: int) -> list[Any]:
        """Return the indices at some positions of an epoch."""
        del seed
        return self.drawn(epoch)[start:stop]

    def drawn(self, epoch: int) -> list[Any]:
        """Return all that the sampler yields in an epoch; H609 if indices repeat by mistake."""
        if epoch not in self._kept:
            found = self._draw(epoch)
            if not self.repeats:
                _check_once(found, type(self._sampler).__name__, batches=self._batches)
            for old in list(self._kept)[: 1 - _KEPT_EPOCHS]:
                del self._kept[old]
            self._kept[epoch] = found
        return self._kept[epoch]

    def _draw(self, epoch: int) -> list[Any]:
        with isolated():
            seed = derive_seed(self._seed, epoch, "order")
            seed_cpu(seed)
            for each in self._samplers():
                generator = getattr(each, "generator", None)
                if isinstance(generator, torch.Generator):
                    generator.manual_seed(seed)
                if sets_epoch(each):
                    each.set_epoch(epoch)
            found = list(self._sampler)
        self.epoch_set()
        return found

    def epoch_set(self) -> int | None:
        """Return the epoch that somebody else has set on the sampler since this was last asked, or None."""
        for each in self._samplers():
            found = getattr(each, "epoch", None)
            if sets_epoch(each) and isinstance(found, Integral) and int(found) >= 0:
                before, self._epoch_seen = self._epoch_seen, int(found)
                return None if self._epoch_seen == before else self._epoch_seen
        return None

    def in_short(self, epoch: int, then: Drawn | None) -> Drawn:
        """Return a digest of an epoch; H604 if another order was drawn `then`, as far as it is of this rank."""
        ranks = [int(each.rank) for each in self._samplers() if isinstance(getattr(each, "rank", None), Integral)]
        digest = hashlib.blake2b(repr(key_of(self.drawn(epoch))).encode(), digest_size=8).hexdigest()
        now = Drawn(digest, ranks[0] if ranks else None)
        if then is not None and then.rank == now.rank and then.digest != now.digest:
            raise LoaderError(
                "the sampler draws another order than when the position was saved, at the same seed and epoch",
                limit="the same order is needed to continue in the middle of an epoch",
                fix="let it draw from torch's, numpy's or python's global generator or from an attribute "
                "`generator`, which are seeded for it, or from its epoch in set_epoch().",
                rule="H604",
            )
        return now

    @property
    def repeats(self) -> bool:
        """Return whether an index may come more than once an epoch."""
        if self._repeats is not None:
            return self._repeats
        # torch's samplers with replacement say so; its DistributedSampler repeats a few to make ranks equal.
        return any(getattr(each, "replacement", False) or hasattr(each, "num_replicas") for each in self._samplers())

    def _samplers(self) -> tuple[Any, Any]:
        """Return the sampler, and the one that a sampler of batches takes its indices from."""
        return self._sampler, getattr(self._sampler, "sampler", None)

    def identity(self) -> dict[str, Any]:
        """Return its kind and the length of the dataset: its own may be another one in each epoch."""
        return {"kind": type(self._sampler).__name__, "version": 1, "length": self._samples}


def _check_once(found: list[Any], name: str, *, batches: bool) -> None:
    many: Any = (list, tuple, np.ndarray, torch.Tensor) if batches else list
    keys = [key_of(index) for each in found for index in (each if isinstance(each, many) else [each])]
    repeated = len(keys) - len(set(keys))
    if repeated:
        raise LoaderError(
            f"{name} yields {repeated} of {len(keys)} indices more than once in an epoch",
            limit="each sample is expected once",
            fix="repair the sampler, or pass repeats=True if it draws with replacement on purpose.",
            rule="H609",
        )
