"""A user's sampler, or sampler of batches: drawn once an epoch from (seed, epoch), whatever its source of chance."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sized
from numbers import Integral
from typing import Any, NamedTuple

import torch

from holdfast.core.errors import LoaderError
from holdfast.loader.host_epochs import sets_epoch
from holdfast.loader.quarantine import key_of
from holdfast.loader.random_state import isolated, seed_cpu
from holdfast.loader.seeds import derive_seed

_ENDLESS, _ENDLESS_EPOCHS = 2**20, 100  # a sampler that yields so many, and so many epochs, does not end
_COMPARABLE = {int, str, bytes}
_DIVIDED = ("num_replicas", "world_size", "num_processes", "rank")  # what samplers keep that divide by ranks


class Drawn(NamedTuple):
    """What a user's sampler drew for an epoch, in short.

    Args:
        digest: Of its indices.
        rank: Whose they are, if the sampler divides them among ranks.
    """

    digest: str
    rank: int | None


class Sampled:
    """A user's sampler, drawn once an epoch from (seed, epoch), whatever its source of chance.

    Args:
        sampler: Yields indices, or lists of them.
        seed: Of the loader.
        repeats: Whether an index may come more than once an epoch; None: only if the sampler says that it draws with
            replacement, or pads for ranks.
        batches: Whether it yields batches, not indices, which may be tuples.

    Raises:
        LoaderError: H603 for a sampler without a length.
    """

    def __init__(self, sampler: Iterable[Any], seed: int, *, repeats: bool | None, batches: bool = False) -> None:
        if not isinstance(sampler, Sized):
            raise LoaderError(
                f"sampler {type(sampler).__name__} has no length",
                limit="an order that resumes exactly needs to know where an epoch ends",
                fix="give it a __len__, or use torch.utils.data.DataLoader and accept an inexact resume.",
                rule="H603",
            )
        self._sampler = sampler
        self._seed = seed
        self._repeats = repeats
        self._batches = batches
        self._drawn: tuple[int, list[Any]] | None = None
        self._digest = ""
        self._told = 0  # the epoch that the sampler had when it was last looked at; torch's begin with 0

    def __len__(self) -> int:
        """Return the entries of an epoch, as the sampler tells."""
        return len(self._sampler)

    def drawn(self, epoch: int) -> list[Any]:
        """Return all that the sampler yields in an epoch.

        Raises:
            LoaderError: H609 if indices repeat although the sampler does not say that they may.
        """
        if self._drawn is None or self._drawn[0] != epoch:
            with isolated():
                seed = derive_seed(self._seed, epoch, "order")
                seed_cpu(seed)
                for each in self._samplers():
                    generator = getattr(each, "generator", None)
                    if isinstance(generator, torch.Generator):
                        generator.manual_seed(seed)
                    if sets_epoch(each):
                        each.set_epoch(epoch)
                most = max(_ENDLESS, _ENDLESS_EPOCHS * len(self))
                found = list(itertools.islice(self._sampler, most))
            self.told()
            if len(found) == most:
                raise LoaderError(
                    f"sampler {type(self._sampler).__name__} tells a length of {len(self)} and goes on after {most}",
                    limit="an order that resumes exactly needs to know where an epoch ends",
                    fix="let it end after each epoch: the next one draws it again.",
                    rule="H603",
                )
            if not self.repeats:
                if self._batches:
                    entries = [each.tolist() if getattr(each, "ndim", 0) else each for each in found]
                else:
                    entries = [each if isinstance(each, list) else [each] for each in found]
                _check_once(entries, type(self._sampler).__name__)
            self._drawn = epoch, found
            self._digest = hashlib.blake2b(repr(key_of(found)).encode(), digest_size=8).hexdigest()
        return self._drawn[1]

    def told(self) -> int | None:
        """Return the epoch that somebody else has set on the sampler since this was last asked, or None."""
        for each in self._samplers():
            found = getattr(each, "epoch", None)
            if sets_epoch(each) and isinstance(found, Integral) and int(found) >= 0:
                before, self._told = self._told, int(found)
                return None if self._told == before else self._told
        return None

    def in_short(self, epoch: int, then: Drawn | None) -> Drawn:
        """Draw an epoch, and return a digest of it.

        Args:
            epoch: Which one.
            then: What was drawn when the position was saved that is gone on from, or None for the beginning.

        Raises:
            LoaderError: H604 if that was another order; of the indices of another rank nothing can be told.
        """
        now = self._drawn_now(epoch)
        if then is not None and then.rank == now.rank and then.digest != now.digest:
            raise LoaderError(
                "the sampler draws another order than when the position was saved, at the same seed and epoch",
                limit="the same order is needed to continue in the middle of an epoch",
                fix="let it draw from torch's, numpy's or python's global generator or from an attribute "
                "`generator`, which are seeded for it, or from its epoch in set_epoch().",
                rule="H604",
            )
        return now

    def _drawn_now(self, epoch: int) -> Drawn:
        self.drawn(epoch)
        ranks = [int(each.rank) for each in self._samplers() if isinstance(getattr(each, "rank", None), Integral)]
        return Drawn(self._digest, ranks[0] if ranks else None)

    def may_have_told(self, length: Any, epoch: int, then: Drawn | None, *, begun: bool) -> bool:
        """Say whether a position may be of this sampler that tells another length now, which may depend on the epoch.

        Args:
            length: Told when the position was saved.
            epoch: Of the position.
            then: What was drawn for it, or None if that is not known.
            begun: Whether the position is behind the beginning of its epoch.
        """
        lengths = {len(self)}
        for each in (epoch,) if begun else (max(0, epoch - 1), epoch):  # at a beginning, the last one's may be told
            now = self._drawn_now(each)
            lengths.add(len(self))
        self._drawn = None  # whatever the sampler is told before it is used counts
        if begun:
            known = then is not None and then.rank == now.rank
            return now == then if known else len(self) == length
        return length in lengths or len(lengths) > 1

    @property
    def divides(self) -> bool:
        """Return whether it divides its indices by ranks, as far as its attributes show."""
        return any(hasattr(each, name) for each in self._samplers() for name in _DIVIDED)

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

    def indices(self, seed: int, epoch: int, start: int, stop: int) -> list[Any]:
        """Return the indices at some positions of an epoch."""
        del seed
        return self.drawn(epoch)[start:stop]

    def identity(self) -> dict[str, Any]:
        """Return what can be told of a sampler: its kind and its length."""
        return {"kind": type(self._sampler).__name__, "version": 1, "length": len(self)}


def _check_once(found: list[Any], name: str) -> None:
    flat = [index for entry in found for index in (entry if isinstance(entry, (list, tuple)) else [entry])]
    if not set(map(type, flat)) <= _COMPARABLE:
        flat = list(map(_comparable, flat))
    try:
        repeated = len(flat) - len(set(flat))
    except TypeError:
        return  # keys that cannot be compared
    if repeated:
        raise LoaderError(
            f"{name} yields {repeated} of {len(flat)} indices more than once in an epoch",
            limit="each sample is expected once",
            fix="repair the sampler, or pass repeats=True if it draws with replacement on purpose.",
            rule="H609",
        )


def _comparable(index: Any) -> Any:
    """Return an index as it can be compared: two tensors with one number are two things for a set."""
    if isinstance(index, (list, tuple)):
        return tuple(map(_comparable, index))
    return key_of(index) if hasattr(index, "__index__") or hasattr(index, "ndim") else index
