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
from functools import partial

import numpy as np
import torch

from benchmarks.forks import single_threaded
from benchmarks.results_file import Result, read_options
from holdfast.loader.order.orders import LengthBucketed, Order, Shuffled

_LENGTH, _BATCH, _SMALL_BATCH, _STRETCH = 50_000_000, 256, 32, 65_536


def seconds_of(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    started = clock()
    work()
    return clock() - started


def first_indices_of_torch(epoch: int, place: int) -> list[int]:
    whole = torch.randperm(_LENGTH, generator=torch.Generator().manual_seed(epoch)).tolist()
    return whole[place : place + _BATCH]


def read_stretch(order: Order, epoch: int) -> None:
    start = len(order) // 2
    for first in range(start, start + _STRETCH, _SMALL_BATCH):
        order.indices(0, epoch, first, first + _SMALL_BATCH)


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
    waits = [seconds_of(lambda at=at: Shuffled(_LENGTH).indices(0, *at, at[1] + _BATCH)) for at in places]
    result.add_samples("first indices at a random position of 50 million", "s", waits, at_most=0.1, digits=6)
    waits = [seconds_of(lambda at=at: first_indices_of_torch(*at)) for at in places[:wholes]]
    result.add_samples("the same from a whole permutation", "s", waits, digits=2)

    orders = {
        "shuffled, of 50 million": Shuffled(_LENGTH),
        "bucketed by length, of 1 million": LengthBucketed(generator.random(1_000_000)),
    }
    for name, order in orders.items():
        costs, ratios = [], []
        for epoch in range(repeats):
            plain = seconds_of(lambda: torch.randperm(1_000_000).tolist(), time.process_time)
            seconds = seconds_of(partial(read_stretch, order, epoch), time.process_time)
            costs.append(seconds / _STRETCH * 1e6)
            ratios.append(costs[-1] / plain)
        result.add_samples(f"CPU time of one index, {name}", "us", costs, at_most=1.0)
        result.add_samples(f"the same by that of randperm and tolist, {name}", "ratio", ratios, digits=2)

    lengths = np.clip(generator.lognormal(1.6, 0.6, samples), 0.5, 17)
    for batch_size in (32, 48, 64):
        for name, order in (("shuffled", Shuffled(samples)), ("bucketed", LengthBucketed(lengths))):
            wasted = [padding(lengths, order, epoch, batch_size) for epoch in range(5)]
            result.add_samples(f"padding in batches of {batch_size}, {name}", "ratio", wasted)
    result.write()


if __name__ == "__main__":
    main()
