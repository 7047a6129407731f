"""Epochs that are stopped after every batch and continued otherwise: each sample once, with the same augmentation?

How: an epoch of samples that draw from python's, numpy's and torch's generators is stopped after each of its
batches, with 0, 1, 2 or 4 workers, and its position is loaded into a new loader with 0, 1, 2 or 4 workers, of the
same batch size and of another. What both have handed out must be the samples of an undisturbed epoch, bit for bit and
in order; and the epoch after it too. The same for iterable datasets, with a state of their own and without.

To reach: all of them.
"""

from __future__ import annotations

import itertools
import logging
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from benchmarks.forks import single_threaded
from benchmarks.results_file import Result, read_options
from holdfast import DataLoader

_SAMPLES, _BATCH, _OTHER_BATCH = 46, 6, 5
_WORKERS = (0, 1, 2, 4)


def drawn(index: int) -> torch.Tensor:
    """Return a sample: its index and a number of each generator."""
    return torch.tensor([index, random.random(), float(np.random.rand()), float(torch.rand(()))], dtype=torch.float64)


class Samples:
    """A map-style dataset."""

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return drawn(index)


class Stream(IterableDataset[torch.Tensor]):
    """An iterable dataset that is divided by the loader."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from map(drawn, range(_SAMPLES))


class StatefulStream(Stream):
    """One that keeps its own position."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < _SAMPLES:
            self.at += 1
            yield drawn(self.at - 1)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:  # noqa: D102
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: D102
        self.at = state["at"]


def make_loader(kind: str, workers: int, batch_size: int) -> DataLoader:
    dataset: Any = {"shuffled": Samples, "stream": Stream, "stateful stream": StatefulStream}[kind]()
    return DataLoader(dataset, batch_size, shuffle=kind == "shuffled", seed=11, num_workers=workers)


def goes_on(kind: str, cut: int, before: int, after: int, batch_size: int, expected: torch.Tensor) -> bool:
    """Stop after `cut` batches and continue; say whether two epochs are those of an undisturbed run."""
    first, second = make_loader(kind, before, _BATCH), make_loader(kind, after, batch_size)
    iterator = iter(first)
    found = [next(iterator) for _ in range(cut)]
    del iterator
    second.load_state_dict(first.state_dict())
    found += [*second, *second]
    together = torch.cat(found)
    return together.shape == expected.shape and bool(torch.equal(together, expected))


def main() -> None:
    warnings.simplefilter("ignore")  # torch's, of more workers than processors
    single_threaded()
    logging.disable(logging.WARNING)  # that streams are read over
    options = read_options("loader_resume", __doc__ or "")
    result = Result(options=options, parameters={"samples": _SAMPLES, "batch_sizes": [_BATCH, _OTHER_BATCH]})
    cuts = range(-(-_SAMPLES // _BATCH) + 1)
    ways = list(itertools.product(cuts, _WORKERS, _WORKERS, (_BATCH, _OTHER_BATCH)))
    for kind in ("shuffled", "stream", "stateful stream"):
        whole = make_loader(kind, 0, _BATCH)
        expected = torch.cat([*whole, *whole])
        tried = ways if kind == "shuffled" and not options.quick else ways[:: 37 if options.quick else 5]
        good = sum(goes_on(kind, *way, expected) for way in tried)
        result.add_count(f"{kind}: continued exactly", good, len(tried), expected=len(tried))
    result.write()


if __name__ == "__main__":
    main()
