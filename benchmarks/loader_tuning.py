"""The number of workers that ``num_workers="auto"`` chooses, against every number up to the processors.

What is measured: batches per second of a whole loop, steps included, with torch's own loader and 0 workers up to one
for each processor (prefetch_factor 2). Six workloads: samples that wait, samples that wait unevenly, samples that
compute, rows of a compressed HDF5 file, tiny samples with a step of a small model, and samples that compute with
nothing else to wait for. The figure is the throughput of the best of all points divided by that of the choice, which
the probe has made in the first batches of a `holdfast.DataLoader`. To be reached: at most 1 / 0.9 for each workload,
since a number of workers has to gain a tenth to be taken.

How noise is kept out: the epochs of all points are started in random order, are under way at once, and take turns of
a third of a second, in random order too. What a loader made while others had their turns is gone through uncounted,
and a turn takes equally many batches of each worker. Each round gives one ratio of turns that lie close together.
After some rounds all loaders and the choice are made anew. The best point is the one whose median of all rounds is
highest, which looks better than it is, so the figure errs to the bad side. Wall time cannot be avoided here.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import holdfast
from benchmarks.results_file import Result, read_options

MOST_WORKERS = len(os.sched_getaffinity(0))
TO_REACH = 1 / 0.9
_ENDLESS = 10**6  # samples: more than any run takes
_TURN_SECONDS = 0.33
_CHOICES = 8
_ROUNDS = 4  # with each choice
_PREFETCHED = 2  # batches of each worker, torch's default
_PAUSE = 1.5  # times as long as two processors take for what workers make ahead


class Made(Dataset[Any]):
    """Samples that a function makes of their index."""

    def __init__(self, make: Callable[[int], torch.Tensor]) -> None:
        self.make = make

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.make(index)


class Workload(NamedTuple):
    """What is loaded, in batches of which size, and what is done with a batch."""

    name: str
    dataset: Dataset[Any]
    batch_size: int
    step: Callable[[Any], object]


def waits(seconds: list[float]) -> Callable[[int], torch.Tensor]:
    """Return samples that wait, as for a network: each for its time of a list."""

    def make(index: int) -> torch.Tensor:
        time.sleep(seconds[index % len(seconds)])
        return torch.full((1000,), float(index))

    return make


def computes(index: int) -> torch.Tensor:
    """Return a spectrogram of noise, some milliseconds of computing."""
    frames = np.lib.stride_tricks.sliding_window_view(_SIGNAL + index, 512)[::128]
    return torch.from_numpy(np.log1p(np.abs(np.fft.rfft(frames * np.hanning(512)))).astype(np.float32)).mean(0)


_SIGNAL = np.random.default_rng(0).standard_normal(64_000)


def rows_of(path: Path) -> Callable[[int], torch.Tensor]:
    """Return rows of a compressed HDF5 file, opened in the process that reads it."""
    rows = np.random.default_rng(0).standard_normal((512, 80, 200)).astype(np.float32)
    with h5py.File(path, "w") as file:
        file.create_dataset("features", data=rows.round(1), chunks=(1, 80, 200), compression="gzip")
    opened: list[Any] = []

    def make(index: int) -> torch.Tensor:
        if not opened:
            opened.append(h5py.File(path, "r"))
        return torch.from_numpy(opened[0]["features"][(index * 7919) % 512])

    return make


def pause(seconds: float) -> Callable[[Any], object]:
    return lambda _: time.sleep(seconds)


def training(features: int) -> Callable[[Any], object]:
    """Return a real step of a small model."""
    model = torch.nn.Sequential(torch.nn.Linear(features, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: Any) -> None:
        x = batch[0] if isinstance(batch, (list, tuple)) else batch
        optimizer.zero_grad()
        model(x.flatten(1)).square().mean().backward()
        optimizer.step()

    return step


def workloads(folder: Path) -> list[Workload]:
    uneven = [0.02 if number % 40 == 0 else 0.001 for number in range(400)]
    tiny = TensorDataset(torch.randn(200_000, 16), torch.randn(200_000, 1))
    return [
        Workload("samples that wait", Made(waits([0.004])), 8, pause(0.012)),
        Workload("samples that wait unevenly", Made(waits(uneven)), 16, pause(0.012)),
        Workload("samples that compute", Made(computes), 8, pause(0.015)),
        Workload("rows of HDF5", Made(rows_of(folder / "features.h5")), 16, training(16_000)),
        Workload("tiny samples", tiny, 32, training(16)),
        Workload("samples that compute, no step", Made(computes), 8, lambda _: None),
    ]


def choose(workload: Workload) -> tuple[int, float]:
    """Return the workers that are chosen, and the seconds to load a batch without any."""
    loader = holdfast.DataLoader(workload.dataset, workload.batch_size, num_workers="auto")
    probe = loader.probe
    assert probe is not None
    for batch in loader:
        workload.step(batch)
        if probe.chosen is not None:
            break
    assert probe.chosen is not None
    return probe.chosen, probe.measured[0].wait_seconds


class Turns:
    """A loop over a loader with some workers that is gone through in turns."""

    def __init__(self, workload: Workload, batch_seconds: float, workers: int) -> None:
        self._workers = workers
        self._made_ahead = workers * _PREFETCHED
        self._step = workload.step
        self._pause = _PAUSE * batch_seconds * self._made_ahead / 2
        self._batches = iter(DataLoader(workload.dataset, workload.batch_size, num_workers=workers))
        self._next()
        time.sleep(self._pause)

    def rate(self) -> float:
        """Take a turn; return batches per second."""
        for _ in range(self._made_ahead):  # made while nobody counted
            self._next()
        count, began = 0, time.perf_counter()
        while (seconds := time.perf_counter() - began) < _TURN_SECONDS:
            for _ in range(max(1, self._workers)):  # they may all be ready at once
                self._next()
                count += 1
        time.sleep(self._pause)
        return count / seconds

    def _next(self) -> None:
        self._step(next(self._batches))


def measure(result: Result, workload: Workload, choices: int) -> None:
    rates: dict[Any, list[float]] = {}
    chosen = []
    for _ in range(choices):
        workers, seconds = choose(workload)
        chosen.append(workers)
        points = {**{each: each for each in range(MOST_WORKERS + 1)}, "choice": workers}
        started = random.sample(list(points), len(points))
        loops = {point: Turns(workload, seconds, points[point]) for point in started}
        for _ in range(_ROUNDS):
            for point in random.sample(list(loops), len(loops)):
                rates.setdefault(point, []).append(loops[point].rate())
    medians = [statistics.median(rates[workers]) for workers in range(MOST_WORKERS + 1)]
    best = max(range(MOST_WORKERS + 1), key=lambda workers: medians[workers])
    ratios = [most / rate for most, rate in zip(rates[best], rates["choice"], strict=True)]
    result.add_samples(f"{workload.name}: best of the grid / choice", "ratio", ratios, at_most=TO_REACH)
    result.samples[f"{workload.name}: chosen workers"] = chosen
    of_the_best = [round(median / medians[best], 3) for median in medians]
    result.samples[f"{workload.name}: of the best, by workers"] = of_the_best
    print("   ", chosen, of_the_best, flush=True)


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "This DataLoader will create")
    options = read_options("loader_tuning", __doc__ or "")
    choices = 2 if options.quick else _CHOICES
    parameters = {"workers": MOST_WORKERS, "choices": choices, "rounds with each": _ROUNDS}
    result = Result(options=options, parameters={**parameters, "seconds of a turn": _TURN_SECONDS})
    with tempfile.TemporaryDirectory() as folder:
        for workload in workloads(Path(folder)):
            measure(result, workload, choices)
    result.write()


if __name__ == "__main__":
    main()
