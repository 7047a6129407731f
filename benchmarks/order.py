"""Orders: how long a run waits for its first indices in the middle of a huge epoch, and what an index costs.

How: an epoch of 50 million positions is entered at a random one, with a new order, a new epoch and a batch of 256, as
a resumed run does; for comparison the whole permutation is made as torch's RandomSampler makes it, and cut there.
Then the CPU time of an index, read in batches of 32 from one end of a stretch to the other, against that of
``torch.randperm(...).tolist()``, alternately. Padding is counted, not timed: log-normal lengths of speech, of 0.5 to
17 s, shuffled and bucketed.

To reach: a median of 0.1 s to the first indices; 1 us of CPU time an index.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.forks import single_threaded
from benchmarks.results_file import Result, read_options
from holdfast.loader.order.orders import LengthBucketed, Order, Shuffled, Weighted

_LENGTH = 50_000_000
_BATCH = 256
_SMALL_BATCH = 32
_STRETCH = 65_536


def seconds_of(work: Callable[[], object]) -> float:
    """Return the wall-clock seconds of some work: what a user waits."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def first_indices(epoch: int, place: int) -> list[int]:
    return Shuffled(_LENGTH).indices(0, epoch, place, place + _BATCH)


def first_indices_of_torch(epoch: int, place: int) -> list[int]:
    whole = torch.randperm(_LENGTH, generator=torch.Generator().manual_seed(epoch)).tolist()
    return whole[place : place + _BATCH]


def cost_of_order(order: Order, epoch: int) -> float:
    """Return the CPU microseconds of one index of a stretch that is read in small batches."""
    start = len(order) // 2
    started = time.process_time_ns()
    for first in range(start, start + _STRETCH, _SMALL_BATCH):
        order.indices(0, epoch, first, first + _SMALL_BATCH)
    return (time.process_time_ns() - started) / _STRETCH / 1000


def cost_of_torch() -> float:
    """Return the CPU microseconds of one index of a permutation of a million."""
    started = time.process_time_ns()
    torch.randperm(1_000_000).tolist()
    return (time.process_time_ns() - started) / 1_000_000 / 1000


def padding(lengths: np.ndarray, order: Order, epoch: int, batch_size: int) -> float:
    """Return the share of an epoch's padded batches that is padding."""
    found = lengths[order.indices(0, epoch, 0, len(order))]
    starts = np.arange(0, len(found), batch_size)
    sizes = np.diff(np.append(starts, len(found)))
    return 1 - float(found.sum() / (np.maximum.reduceat(found, starts) * sizes).sum())


def main() -> None:
    single_threaded()
    options = read_options("order", __doc__ or "")
    resumes, wholes, repeats, samples = (20, 1, 5, 20_000) if options.quick else (200, 5, 50, 100_000)
    parameters = {"length": _LENGTH, "batch_size": _BATCH, "small_batch_size": _SMALL_BATCH, "stretch": _STRETCH}
    result = Result(options=options, parameters={**parameters, "samples_with_lengths": samples, "seed": 1})
    chance, generator = random.Random(1), np.random.default_rng(1)
    places = [(epoch, chance.randrange(_LENGTH - _BATCH)) for epoch in range(resumes)]
    waits = [seconds_of(lambda epoch=epoch, place=place: first_indices(epoch, place)) for epoch, place in places]
    result.add_samples("first indices at a random position of 50 million", "s", waits, at_most=0.1, digits=6)
    waits = [seconds_of(lambda place=place: first_indices_of_torch(*place)) for place in places[:wholes]]
    result.add_samples("the same from a whole permutation", "s", waits, digits=2)

    orders = {
        "shuffled, of 50 million": Shuffled(_LENGTH),
        "weighted, of 1 million": Weighted(generator.random(1_000_000)),
        "bucketed by length, of 1 million": LengthBucketed(generator.random(1_000_000)),
    }
    costs: dict[str, list[float]] = {name: [] for name in orders}
    plain: list[float] = []
    for epoch in range(repeats):
        plain.append(cost_of_torch())
        for name, order in orders.items():
            costs[name].append(cost_of_order(order, epoch))
    for name, found in costs.items():
        result.add_samples(f"CPU time of one index, {name}", "us", found, at_most=1.0)
        ratios = [cost / other for cost, other in zip(found, plain, strict=True)]
        result.add_samples(f"the same by that of randperm and tolist, {name}", "ratio", ratios, digits=2)

    lengths = np.clip(generator.lognormal(1.6, 0.6, samples), 0.5, 17)
    for batch_size in (32, 48, 64):
        for name, order in (("shuffled", Shuffled(samples)), ("bucketed", LengthBucketed(lengths))):
            wasted = [padding(lengths, order, epoch, batch_size) for epoch in range(5)]
            result.add_samples(f"padding in batches of {batch_size}, {name}", "ratio", wasted)
    result.write()


if __name__ == "__main__":
    main()
