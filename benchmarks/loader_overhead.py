"""Throughput of `holdfast.DataLoader` against ``torch.utils.data.DataLoader`` when nothing goes
wrong.

How: a batch takes 1 ms (8 samples) or 5 ms (8 or 32 samples) to make. For an equal part of that
time a sample sleeps, as one does that waits for a drive; computes in a loop of Python; or hashes
bytes, in one call of native code. How much it does is calibrated at the start. Then it draws 16
random numbers from torch.

Without workers and with two, an epoch of each loader, with the same arguments, is under way at
once, and they take turns in random order: a tenth of a second of batches of one, during which the
loop does nothing, then of the other, whose workers stand still since nobody has taken what they
made. Such a pair of turns gives one ratio, torch's time over ours; close together, since whatever
else the machine does can slow a loop of Python down for seconds. Many epochs, in many new
processes, each give the median of their pairs: where code and data lie in memory moves it, both
ways; where the interpreter puts the next small objects, too, so that is drawn anew for each epoch.

Starting workers happens once an epoch and is no part of this.

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
from functools import partial
from typing import Any

import torch

from benchmarks.results_file import Result, read_options
from holdfast import DataLoader

_BATCHES = ((1, 8, 0.95), (5, 8, 0.98), (5, 32, 0.98))
"""Milliseconds of a batch, its samples, and the ratio to reach."""
_KINDS = ("sleeping", "computing", "hashing")
_SETTINGS = tuple(itertools.product(_BATCHES, _KINDS, (0, 2)))
_TURN_SECONDS, _PROCESSES, _EPOCHS, _PAIRS = 0.1, 24, 3, 4
_PREFETCHED = 2  # batches of each worker, torch's default
_PAUSE = 3.0  # times as long as workers take for what they make ahead


class Work:
    """So many samples that take a time."""

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

    def make(size: int) -> Callable[[], object]:
        return partial(spin, size) if kind == "computing" else partial(hashlib.sha256, text[:size])

    size = 5000  # turns of the loop, or bytes
    for _ in range(3):
        work = make(size)
        size = min(
            max(1, round(size * seconds / min(_cpu_seconds(work) for _ in range(50)))), len(text)
        )
    return make(size)


def _cpu_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


class Turns:
    """An epoch of a loader with some workers that is gone through in turns."""

    def __init__(self, make: Callable[[], Any], workers: int, batch_seconds: float) -> None:
        self._workers = workers
        self._pause = _PAUSE * _PREFETCHED * batch_seconds if workers else 0.0
        # Of 32 bytes and of 48, the sizes of the numbers in `spin`.
        self._ballast = [
            2**bits + number for bits in (40, 70) for number in range(random.randrange(64))
        ]
        self._batches = iter(make())
        next(self._batches)
        time.sleep(self._pause)

    def take(self, count: int) -> float:
        """Go through some batches; return the seconds for each."""
        for _ in range(self._workers * _PREFETCHED):  # made while nobody counted
            next(self._batches)
        began = time.perf_counter()
        for _ in range(count):
            next(self._batches)
        seconds = time.perf_counter() - began
        time.sleep(self._pause)
        return seconds / count


def ratios(milliseconds: int, batch_size: int, kind: str, workers: int) -> list[float]:
    """Let both loaders take turns in this process.

    Return torch's time over ours, of each of the epochs.
    """
    torch.set_num_threads(1)
    batch_seconds = milliseconds / 1000
    count = round(_TURN_SECONDS / batch_seconds) * max(1, workers)
    batches = 1 + (_PAIRS + 1) * (count + workers * _PREFETCHED)  # one turn more, which never comes
    dataset: Any = Work(batches * batch_size, work_for(kind, batch_seconds / batch_size))
    options: dict[str, Any] = {"batch_size": batch_size, "shuffle": True, "num_workers": workers}
    if workers:  # the default in a process that was itself spawned is spawn
        options["multiprocessing_context"] = "fork"
    kinds = {"ours": DataLoader, "theirs": torch.utils.data.DataLoader}
    found = []
    for _ in range(_EPOCHS):
        names = random.sample(list(kinds), len(kinds))
        epochs = {
            name: Turns(partial(kinds[name], dataset, **options), workers, batch_seconds)
            for name in names
        }
        pairs = [
            {name: epochs[name].take(count) for name in random.sample(names, len(names))}
            for _ in range(_PAIRS)
        ]
        found.append(statistics.median(each["theirs"] / each["ours"] for each in pairs))
    return found


def all_ratios() -> list[list[float]]:
    """Return the ratios of each setting, measured in this process in random order."""
    found: list[list[float]] = [[] for _ in _SETTINGS]
    for place in random.sample(range(len(_SETTINGS)), len(_SETTINGS)):
        (milliseconds, batch_size, _), kind, workers = _SETTINGS[place]
        found[place] = ratios(milliseconds, batch_size, kind, workers)
    return found


def main() -> None:
    """Compare all settings and write the result."""
    options = read_options("loader_overhead", __doc__)
    processes = 1 if options.quick else _PROCESSES
    parameters = {
        "processes": processes,
        "epochs": _EPOCHS,
        "pairs": _PAIRS,
        "turn_seconds": _TURN_SECONDS,
    }
    result = Result(options=options, parameters=parameters)
    found: list[list[float]] = [[] for _ in _SETTINGS]
    for _ in range(processes):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            for each, more in zip(found, pool.submit(all_ratios).result(), strict=True):
                each += more
    for ((milliseconds, batch_size, least), kind, workers), each in zip(
        _SETTINGS, found, strict=True
    ):
        what = f"batches of {milliseconds} ms, {batch_size} samples, {kind}, {workers} workers"
        result.add_samples(f"throughput over torch's, {what}", "ratio", each, at_least=least)
    result.write()


if __name__ == "__main__":
    main()
