"""Throughput of `holdfast.DataLoader` against ``torch.utils.data.DataLoader`` when nothing goes wrong.

How: a batch takes 1 ms (8 samples) or 5 ms (8 or 32 samples) to make. For an equal part of that time a sample sleeps,
as one does that waits for a drive; computes in a loop of Python; or hashes bytes, in one call of native code. (Not
decompresses: where its buffers happen to lie moves zlib by tens of percent, with either loader.)
How much it does is calibrated at the start. Then it draws 16 random numbers from torch.
Without workers and with two, both loaders with the same arguments. One measurement is the time from an epoch's first
batch to its last, during which the loop does nothing; starting workers is not part of it, since it happens once an
epoch. The two loaders take turns, in random order, and each turn gives one ratio, torch's time over ours. Also by CPU
time, of the process and its workers, over whole epochs with the start: that is less disturbed by whatever else the
machine does, and says nothing about samples that sleep. Many new processes make a few turns of each setting: where
code and data happen to lie in memory moves such a ratio from process to process, both ways. Where the interpreter
puts the next small objects moves a loop of Python too, so that is drawn anew for each epoch.

To reach: median ratio at least 0.95 at 1 ms and at least 0.98 at 5 ms.
"""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import random
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.results_file import Result, read_options
from holdfast import DataLoader

_BATCHES = ((1, 8, 0.95), (5, 8, 0.98), (5, 32, 0.98))
"""Milliseconds of a batch, its samples, and the ratio to reach."""
_KINDS = ("sleeping", "computing", "hashing")
_SETTINGS = tuple(itertools.product(_BATCHES, _KINDS, (0, 2)))
_EPOCH_SECONDS = 0.3
_PROCESSES = 24
_TURNS = 3


class Work:
    """Samples that take a time.

    Args:
        length: How many.
        work: Takes the time of one.
    """

    def __init__(self, length: int, work: Callable[[], object]) -> None:
        self.length = length
        self.work = work

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        self.work()
        return torch.rand(16)


def spin(loops: int) -> int:
    """Compute for a while."""
    value = 1
    for number in range(loops):
        value = (value * 31 + number) & 0xFFFFFFFF
    return value


def work_for(kind: str, seconds: float) -> Callable[[], object]:
    """Return what takes so long."""
    if kind == "sleeping":
        return partial(time.sleep, seconds)
    text = random.Random(0).randbytes(2**22)
    size = 5000  # turns of the loop, or bytes
    for _ in range(3):
        more = size * seconds / _least_seconds(_work(kind, size, text))
        size = min(max(1, round(more)), len(text))
    return _work(kind, size, text)


def _work(kind: str, size: int, text: bytes) -> Callable[[], object]:
    return partial(spin, size) if kind == "computing" else partial(hashlib.sha256, text[:size])


def _least_seconds(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(50):
        began = time.process_time()
        work()
        best = min(best, time.process_time() - began)
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """How long an epoch took.

    Args:
        seconds: From the first batch to the last.
        cpu_seconds: Of this process and its workers, from start to end.
    """

    seconds: float
    cpu_seconds: float


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def measure(make: Callable[[], Any]) -> Epoch:
    """Go through one epoch of a loader."""
    # Of 32 bytes and of 48, the sizes of the numbers in `spin`.
    ballast = [2**bits + number for bits in (40, 70) for number in range(random.randrange(64))]
    before = _cpu_seconds()
    batches = iter(make())
    next(batches)
    began = time.perf_counter()
    for _ in batches:
        pass
    seconds = time.perf_counter() - began
    del batches, ballast
    return Epoch(seconds=seconds, cpu_seconds=_cpu_seconds() - before)


def ratios(milliseconds: int, batch_size: int, kind: str, workers: int, turns: int) -> list[tuple[float, float]]:
    """Return torch's time over ours and torch's CPU time over ours, for each turn."""
    torch.set_num_threads(1)
    seconds = milliseconds / 1000 / batch_size
    batches = round(_EPOCH_SECONDS / (milliseconds / 1000) * max(1, workers))
    dataset = Work(batches * batch_size, work_for(kind, seconds))
    options: dict[str, Any] = {"batch_size": batch_size, "shuffle": True, "num_workers": workers}
    if workers:  # the default in a process that was itself spawned is spawn, whose start lasts into the epoch
        options["multiprocessing_context"] = "fork"
    makers = {
        "ours": partial(DataLoader, dataset, **options),
        "theirs": partial(torch.utils.data.DataLoader, dataset, **options),
    }
    chance, found = random.Random(), []
    for _ in range(turns):
        names = list(makers)
        chance.shuffle(names)
        took = {name: measure(makers[name]) for name in names}
        found.append(
            (took["theirs"].seconds / took["ours"].seconds, took["theirs"].cpu_seconds / took["ours"].cpu_seconds)
        )
    return found


def all_ratios(turns: int) -> list[list[tuple[float, float]]]:
    """Return the ratios of each setting, measured in this process in random order."""
    found: list[list[tuple[float, float]]] = [[] for _ in _SETTINGS]
    for place in random.sample(range(len(_SETTINGS)), len(_SETTINGS)):
        (milliseconds, batch_size, _), kind, workers = _SETTINGS[place]
        found[place] = ratios(milliseconds, batch_size, kind, workers, turns)
    return found


def main() -> None:
    """Compare all settings and write the result."""
    options = read_options("loader_overhead", __doc__)
    processes, turns = (1, _TURNS) if options.quick else (_PROCESSES, _TURNS)
    result = Result(
        options=options, parameters={"processes": processes, "turns": turns, "epoch_seconds": _EPOCH_SECONDS}
    )
    found: list[list[tuple[float, float]]] = [[] for _ in _SETTINGS]
    for _ in range(processes):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            for each, more in zip(found, pool.submit(all_ratios, turns).result(), strict=True):
                each += more
    for ((milliseconds, batch_size, least), kind, workers), pairs in zip(_SETTINGS, found, strict=True):
        what = f"batches of {milliseconds} ms, {batch_size} samples, {kind}, {workers} workers"
        throughput = [ratio for ratio, _ in pairs]
        result.add_samples(f"throughput over torch's, {what}", "ratio", throughput, at_least=least)
        if kind != "sleeping":
            result.add_samples(f"torch's CPU time over ours, {what}", "ratio", [ratio for _, ratio in pairs])
    result.write()


if __name__ == "__main__":
    main()
