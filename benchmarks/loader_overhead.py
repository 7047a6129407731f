"""Throughput of `holdfast.DataLoader` against ``torch.utils.data.DataLoader`` when nothing goes wrong.

How: a batch takes 1 ms (8 samples) or 5 ms (8 or 32 samples) to make. For an equal part of that time a sample sleeps,
as one does that waits for a drive; computes in a loop of Python; or hashes bytes, in one call of native code. (Not
decompresses: where its buffers happen to lie moves zlib by tens of percent, with either loader.)
How much it does is calibrated at the start. Then it draws 16 random numbers from torch.

Without workers and with two, an epoch of each loader, with the same arguments, is under way at once, and they take
turns in random order: a tenth of a second of batches of one, during which the loop does nothing, then of the other,
whose workers stand still since nobody has taken what they made. Such a pair of turns gives one ratio, torch's time
over ours; close together, since whatever else the machine does can slow a loop of Python down for seconds.
Also by CPU time, of the process and its workers, which says nothing about samples that sleep.
Many epochs, in many new processes, each give the median of their pairs: where code and data lie in memory moves it,
both ways; where the interpreter puts the next small objects, too, so that is drawn anew for each epoch.

Starting workers happens once an epoch and is no part of this: the time to the first batch is a figure of its own.

To reach: median ratio at least 0.95 at 1 ms and at least 0.98 at 5 ms.
"""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import random
import statistics
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
_TURN_SECONDS = 0.1
_PROCESSES = 24
_EPOCHS = 3
_PAIRS = 4
_PREFETCHED = 2  # batches of each worker, torch's default
_PAUSE = 3.0  # times as long as workers take for what they make ahead


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


class Turns:
    """An epoch of a loader that is gone through in turns.

    Args:
        make: Makes the loader.
        workers: That it has.
        batch_seconds: Of one batch.
    """

    def __init__(self, make: Callable[[], Any], workers: int, batch_seconds: float) -> None:
        self._workers = workers
        self._batch_seconds = batch_seconds
        # Of 32 bytes and of 48, the sizes of the numbers in `spin`.
        self._ballast = [2**bits + number for bits in (40, 70) for number in range(random.randrange(64))]
        began = time.perf_counter()
        self._batches = iter(make())
        next(self._batches)
        self.first_seconds = time.perf_counter() - began
        """From the call of `iter` to the first batch."""
        self._let_workers_fill()

    def take(self, count: int) -> tuple[float, float]:
        """Go through some batches; return the seconds and the CPU seconds for each, the latter of all processes."""
        for _ in range(self._workers * _PREFETCHED):  # made while nobody counted
            next(self._batches)
        used, began = _cpu_seconds(), time.perf_counter()
        for _ in range(count):
            next(self._batches)
        seconds = time.perf_counter() - began
        self._let_workers_fill()  # their CPU time for what is not counted is alike with both loaders
        return seconds / count, (_cpu_seconds() - used) / count

    def _let_workers_fill(self) -> None:
        if self._workers:
            time.sleep(_PAUSE * _PREFETCHED * self._batch_seconds)


def _cpu_seconds() -> float:
    clocks = [~each.pid << 3 | 2 for each in multiprocessing.active_children() if each.pid]  # as clock_getcpuclockid
    return time.process_time() + sum(time.clock_gettime(clock) for clock in clocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """Torch's over ours.

    Args:
        seconds: For a batch, in each pair of turns.
        cpu_seconds: The same.
        first_seconds: To the first batch of an epoch.
    """

    seconds: float
    cpu_seconds: float
    first_seconds: float


def ratios(milliseconds: int, batch_size: int, kind: str, workers: int) -> list[Ratios]:
    """Let both loaders take turns in this process; return what each of the epochs gives."""
    torch.set_num_threads(1)
    batch_seconds = milliseconds / 1000
    count = round(_TURN_SECONDS / batch_seconds) * max(1, workers)
    batches = 1 + (_PAIRS + 1) * (count + workers * _PREFETCHED)  # one turn more, which never comes
    dataset: Any = Work(batches * batch_size, work_for(kind, batch_seconds / batch_size))
    options: dict[str, Any] = {"batch_size": batch_size, "shuffle": True, "num_workers": workers}
    if workers:  # the default in a process that was itself spawned is spawn
        options["multiprocessing_context"] = "fork"
    makers: dict[str, Callable[[], Any]] = {
        "ours": partial(DataLoader, dataset, **options),
        "theirs": partial(torch.utils.data.DataLoader, dataset, **options),
    }
    return [_one_epoch(makers, workers, batch_seconds, count) for _ in range(_EPOCHS)]


def _one_epoch(makers: dict[str, Callable[[], Any]], workers: int, batch_seconds: float, count: int) -> Ratios:
    names = random.sample(list(makers), len(makers))
    epochs = {name: Turns(makers[name], workers, batch_seconds) for name in names}
    took = []
    for _ in range(_PAIRS):
        random.shuffle(names)
        took.append({name: epochs[name].take(count) for name in names})
    return Ratios(
        seconds=statistics.median(each["theirs"][0] / each["ours"][0] for each in took),
        cpu_seconds=statistics.median(each["theirs"][1] / each["ours"][1] for each in took),
        first_seconds=epochs["theirs"].first_seconds / epochs["ours"].first_seconds,
    )


def all_ratios() -> list[list[Ratios]]:
    """Return the ratios of each setting, measured in this process in random order."""
    found: list[list[Ratios]] = [[] for _ in _SETTINGS]
    for place in random.sample(range(len(_SETTINGS)), len(_SETTINGS)):
        (milliseconds, batch_size, _), kind, workers = _SETTINGS[place]
        found[place] = ratios(milliseconds, batch_size, kind, workers)
    return found


def main() -> None:
    """Compare all settings and write the result."""
    options = read_options("loader_overhead", __doc__)
    processes = 1 if options.quick else _PROCESSES
    parameters = {"processes": processes, "epochs": _EPOCHS, "pairs": _PAIRS, "turn_seconds": _TURN_SECONDS}
    result = Result(options=options, parameters=parameters)
    found: list[list[Ratios]] = [[] for _ in _SETTINGS]
    for _ in range(processes):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            for each, more in zip(found, pool.submit(all_ratios).result(), strict=True):
                each += more
    for ((milliseconds, batch_size, least), kind, workers), epochs in zip(_SETTINGS, found, strict=True):
        what = f"batches of {milliseconds} ms, {batch_size} samples, {kind}, {workers} workers"
        throughput = [each.seconds for each in epochs]
        result.add_samples(f"throughput over torch's, {what}", "ratio", throughput, at_least=least)
        if kind != "sleeping":
            result.add_samples(f"torch's CPU time over ours, {what}", "ratio", [each.cpu_seconds for each in epochs])
    for given in (0, 2):
        starts = [
            each.first_seconds
            for (_, _, workers), epochs in zip(_SETTINGS, found, strict=True)
            for each in epochs
            if workers == given
        ]
        result.add_samples(f"torch's time to an epoch's first batch over ours, {given} workers", "ratio", starts)
    result.write()


if __name__ == "__main__":
    main()
