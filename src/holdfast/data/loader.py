"""`DataLoader`: torch's loader with an order and augmentation that resume exactly.

Order comes from (seed, epoch), each sample's random numbers from (seed, epoch, index), and the position counts
what was handed out. Nothing else is state, so a run goes on at any batch, with another number of workers or
another batch size.

Does not (yet): heal a worker that dies or hangs, or shard over ranks.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from holdfast.core.errors import LoaderError
from holdfast.data.random_state import capture, isolated, restore, seed_cpu
from holdfast.data.seeds import SeededDataset, derive_seed, shuffled

_TORCH_ARGUMENTS = inspect.signature(TorchDataLoader.__init__)


class _Plan:
    """What the inner loader fetches in this epoch: keys, or lists of keys; set anew for each epoch."""

    def __init__(self) -> None:
        self.entries: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


class DataLoader(TorchDataLoader[Any]):
    """A drop-in `torch.utils.data.DataLoader` whose order and augmentation resume exactly.

    Each ``iter()`` is one epoch, as with torch; the position is in `state_dict`. With an ``IterableDataset`` the
    position is kept by reading and dropping the batches before it, and the number of workers must stay the same.

    Args:
        dataset: As torch.
        *args: As torch.
        seed: Decides the order of every epoch and the random numbers of every sample. If torch's
            ``generator`` is given, its initial seed is used instead.
        **kwargs: As torch.

    Raises:
        LoaderError: H603 for a sampler without a length.

    Example:
        >>> loader = DataLoader(list(range(4)), batch_size=2, shuffle=True, seed=1)
        >>> first = list(loader); loader.load_state_dict({**loader.state_dict(), "epoch": 0})
        >>> all(torch.equal(a, b) for a, b in zip(first, loader))
        True
    """

    def __init__(self, dataset: Any, *args: Any, seed: int = 0, **kwargs: Any) -> None:
        super().__init__(dataset, *args, **kwargs)
        given = _TORCH_ARGUMENTS.bind(self, dataset, *args, **kwargs).arguments
        self.seed = seed if self.generator is None else self.generator.initial_seed()
        self._shuffle = bool(given.get("shuffle"))
        self._own_sampler = given.get("sampler") is None and given.get("batch_sampler") is None
        self._iterable = isinstance(dataset, IterableDataset)
        for name in ("sampler", "batch_sampler"):
            if given.get(name) is not None and not isinstance(given[name], Sized):
                raise LoaderError(
                    f"{name}={type(given[name]).__name__} has no length",
                    limit="an order that resumes exactly needs to know where an epoch ends",
                    fix="give it a __len__, or use torch.utils.data.DataLoader and accept an inexact resume.",
                    rule="H603",
                )
        self._epoch = 0
        self._consumed = 0
        self._under_way = False
        self.batch_indices: list[int] | None = None
        """Dataset indices of the samples in the batch that was handed out last; None if they are not known."""
        self._plan = _Plan()
        self._base_seeds = torch.Generator()  # a private one: starting an epoch leaves the global one alone
        self._inner = self._make_inner()

    def _make_inner(self) -> TorchDataLoader[Any]:
        how: dict[str, Any] = {"generator": self._base_seeds}
        for name in (
            "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor",
            "multiprocessing_context", "persistent_workers", "pin_memory_device", "in_order",
        ):  # fmt: skip
            how[name] = getattr(self, name)
        if self._iterable:
            return TorchDataLoader(self.dataset, batch_size=self.batch_size, drop_last=self.drop_last, **how)
        seeded = SeededDataset(self.dataset, self.seed)
        if self.batch_sampler is None:
            return TorchDataLoader(seeded, batch_size=None, sampler=self._plan, **how)
        return TorchDataLoader(seeded, batch_sampler=self._plan, **how)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the batches of the next epoch, or the rest of the one that `load_state_dict` points into."""
        if self._under_way:  # an epoch that was left before its end, as torch: the next one starts
            self._epoch, self._consumed = self._epoch + 1, 0
        self._under_way = True
        epoch, start = self._epoch, self._consumed
        self._base_seeds.manual_seed(derive_seed(self.seed, epoch, "workers"))
        if self._iterable:
            entries: list[Any] = []
            steps, batches = _ones(), self._stream(epoch, start)
        else:
            entries, steps = self._make_plan(epoch, start)
            self._plan.entries = entries
            batches = iter(self._inner)
        for number, batch in enumerate(batches):
            self._consumed += next(steps)
            self.batch_indices = _indices(entries[number]) if self.in_order and number < len(entries) else None
            yield batch
        self._epoch, self._consumed, self._under_way = epoch + 1, 0, False

    def _stream(self, epoch: int, start: int) -> Iterator[Any]:
        """Yield the batches of an iterable dataset from a position on.

        Without workers the dataset draws from the random state of this process: it is given one of its own for the
        epoch, so that what it draws does not depend on what training draws, nor on where the run was stopped.
        """
        if self.num_workers:
            yield from itertools.islice(self._inner, start, None)
            return
        with isolated():
            seed_cpu(derive_seed(self.seed, epoch, "stream"))
            inner, own = iter(self._inner), capture()
        for number in itertools.count():
            with isolated():
                restore(own)
                try:
                    batch = next(inner)
                except StopIteration:
                    return
                own = capture()
            if number >= start:
                yield batch

    def _make_plan(self, epoch: int, start: int) -> tuple[list[Any], Iterator[int]]:
        """Return what is left to fetch of an epoch, and by how much each batch moves the position."""
        if not self._own_sampler:
            entries = self._sampled(epoch)[start:]
            keyed = [
                [(epoch, index) for index in entry] if self.batch_sampler is not None else (epoch, entry)
                for entry in entries
            ]
            return keyed, _ones()
        length = self._length()
        order = shuffled(length, self.seed, epoch) if self._shuffle else list(range(length))
        keys = [(epoch, index) for index in order[start:]]
        if self.batch_size is None:
            return keys, _ones()
        size = self.batch_size
        end = len(keys) - len(keys) % size if self.drop_last else len(keys)
        batches = [keys[first : first + size] for first in range(0, end, size)]
        return batches, iter([len(batch) for batch in batches])

    def _sampled(self, epoch: int) -> list[Any]:
        """Return all entries of a user's sampler, drawn from (seed, epoch) whatever its source of chance."""
        with isolated():
            seed = derive_seed(self.seed, epoch, "order")
            seed_cpu(seed)
            samplers: tuple[Any, ...] = (self.sampler, self.batch_sampler)
            for sampler in (*samplers, getattr(self.batch_sampler, "sampler", None)):
                if isinstance(getattr(sampler, "generator", None), torch.Generator):
                    sampler.generator.manual_seed(seed)
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(epoch)
            return list(self._sampler_of_entries())

    def state_dict(self) -> dict[str, Any]:
        """Return the position: what was handed out so far, as numbers and text."""
        return {"epoch": self._epoch, "consumed": self._consumed, "order": self._order_identity()}

    def state_at(self, epoch: int) -> dict[str, Any]:
        """Return the position at the beginning of an epoch."""
        return {"epoch": epoch, "consumed": 0, "order": self._order_identity()}

    def go_to(self, epoch: int) -> None:
        """Let the next ``iter()`` be the whole of this epoch."""
        self._epoch, self._consumed, self._under_way = epoch, 0, False

    def _order_identity(self) -> dict[str, Any]:
        """Return what must be the same for a position to point at the same samples."""
        by_sample = self._own_sampler and not self._iterable
        return {
            "seed": self.seed,
            "shuffle": self._shuffle,
            "length": self._length() if isinstance(self.dataset, Sized) and not self._iterable else None,
            "counts": "samples" if by_sample else "batches",
            "batches": None if by_sample or self._iterable else len(self._sampler_of_entries()),
        }

    def _sampler_of_entries(self) -> Any:
        return self.sampler if self.batch_sampler is None else self.batch_sampler

    def _length(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type] # torch's Dataset does not declare it

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position at the next ``iter()``.

        Raises:
            LoaderError: H604 if seed, shuffling or the length of the dataset is another one, since the
                position would then point at other samples.
        """
        here = self._order_identity()
        for name, saved in state["order"].items():
            if here[name] != saved:
                raise LoaderError(
                    f"the loader has {name}={here[name]!r} and the position was saved with {name}={saved!r}",
                    limit="the same order is needed to continue in the middle of an epoch",
                    fix="build the loader as it was, or start in a new run directory.",
                    rule="H604",
                )
        self._epoch, self._consumed, self._under_way = state["epoch"], state["consumed"], False


def _indices(entry: Any) -> list[int] | None:
    """Return the dataset indices of an entry of a plan: one key, or a list of them."""
    keys = entry if isinstance(entry, list) else [entry]
    indices = [index for _, index in keys]
    return indices if all(isinstance(index, int) for index in indices) else None


def _ones() -> Iterator[int]:
    while True:
        yield 1
