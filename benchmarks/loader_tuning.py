"""The number of workers that is chosen from a few batches, against every number that could have been chosen.

What is measured: batches per second of a whole loop, steps included, with torch's own loader and 0 to 8 workers
(prefetch_factor 2), and with the choice that 8 batches in the training process gave. Six workloads: samples that
wait, samples that wait unevenly, samples that compute, rows of a compressed HDF5 file, tiny samples with a step of a
small model, and samples that compute with nothing else to wait for. The figure is the throughput of the best of all
points divided by that of the choice. To be reached: at most 1 / 0.95 for each workload.

How noise is kept out: in each round every point has a turn, in random order, and the choice is made anew; a point's
throughput is the median of its rounds. The best of nine noisy points looks better than it is, so the figure errs to
the bad side. Queues are filled before a run is timed, and loading goes on past its end. Wall time cannot be avoided
here.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.results_file import Result, read_options
from holdfast.data.tuning.choice import LoaderPlan, decide_workers, pace_of
from holdfast.data.tuning.machine import Machine
from holdfast.data.tuning.preflight import Load, weigh
from holdfast.data.tuning.probing import MOST_PROBES, measure_throughput, measure_transfer, probe

MOST_WORKERS = 8
TO_REACH = 1 / 0.95
_ENDLESS = 10**6  # samples: more than any run takes


class Waits(Dataset[Any]):
    """Samples that wait, as for a network: each for its time of a list."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds[index % len(self.seconds)])
        return torch.full((1000,), float(index))


class Computes(Dataset[Any]):
    """Samples that are computed: a spectrogram of noise, some milliseconds each."""

    def __init__(self, samples: int) -> None:
        self.signal = np.random.default_rng(0).standard_normal(samples)

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, index: int) -> torch.Tensor:
        frames = np.lib.stride_tricks.sliding_window_view(self.signal + index, 512)[::128]
        return torch.from_numpy(np.log1p(np.abs(np.fft.rfft(frames * np.hanning(512)))).astype(np.float32)).mean(0)


class Rows(Dataset[Any]):
    """Rows of a compressed HDF5 file, opened in the process that reads it."""

    def __init__(self, path: Path, rows: int) -> None:
        self.path, self.rows, self.file = path, rows, None

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.file is None:
            self.file = h5py.File(self.path, "r")
        return torch.from_numpy(self.file["features"][(index * 7919) % self.rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is loaded, and what is done with a batch."""

    name: str
    dataset: Dataset[Any]
    batch_size: int
    step: Callable[[Any], object] | None

    def loader(self, num_workers: int, prefetch_factor: int | None = None) -> DataLoader[Any]:
        """Return torch's loader over it."""
        depth = (prefetch_factor or 2) if num_workers else None
        return DataLoader(self.dataset, self.batch_size, num_workers=num_workers, prefetch_factor=depth)


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "This DataLoader will create")
    options = read_options("loader_tuning", __doc__ or "")
    rounds, seconds = (2, 0.5) if options.quick else (7, 1.5)
    result = Result(
        options=options,
        parameters={"workers": MOST_WORKERS, "probes": MOST_PROBES, "rounds": rounds, "seconds of a run": seconds},
    )
    with tempfile.TemporaryDirectory() as folder:
        for workload in workloads(Path(folder)):
            measure(result, workload, rounds, seconds)
    result.write()


def workloads(folder: Path) -> list[Workload]:
    rows = np.random.default_rng(0).standard_normal((512, 80, 200)).astype(np.float32)
    with h5py.File(folder / "features.h5", "w") as file:
        file.create_dataset("features", data=rows.round(1), chunks=(1, 80, 200), compression="gzip")
    uneven = [0.02 if number % 40 == 0 else 0.001 for number in range(400)]
    tiny = TensorDataset(torch.randn(200_000, 16), torch.randn(200_000, 1))
    return [
        Workload(name="samples that wait", dataset=Waits([0.004]), batch_size=8, step=_pause(0.012)),
        Workload(name="samples that wait unevenly", dataset=Waits(uneven), batch_size=16, step=_pause(0.012)),
        Workload(name="samples that compute", dataset=Computes(64_000), batch_size=8, step=_pause(0.015)),
        Workload(
            name="rows of HDF5", dataset=Rows(folder / "features.h5", 512), batch_size=16, step=_training(16_000)
        ),
        Workload(name="tiny samples", dataset=tiny, batch_size=32, step=_training(16)),
        Workload(name="samples that compute, no step", dataset=Computes(64_000), batch_size=8, step=None),
    ]


def _pause(seconds: float) -> Callable[[Any], object]:
    return lambda _: time.sleep(seconds)


def _training(features: int) -> Callable[[Any], object]:
    """Return a real step of a small model."""
    model = torch.nn.Sequential(torch.nn.Linear(features, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: Any) -> None:
        x = batch[0] if isinstance(batch, (list, tuple)) else batch
        optimizer.zero_grad()
        model(x.flatten(1)).square().mean().backward()
        optimizer.step()

    return step


def choose(workload: Workload) -> LoaderPlan:
    """Return what 8 batches in this process lead to."""
    samples, batch = probe(iter(workload.loader(0)), workload.step)
    size, tensors = weigh(batch)
    step_seconds = statistics.median(sample.step_seconds for sample in samples)
    pace = pace_of(samples, measure_transfer(batch, step_seconds=step_seconds))
    load = Load(num_workers=0, batch_bytes=size, batch_tensors=tensors)
    return decide_workers(pace, Machine.here(), load, most_workers=MOST_WORKERS)


def measure(result: Result, workload: Workload, rounds: int, seconds: float) -> None:
    drawn = random.Random(0)
    rates: dict[Any, list[float]] = {}
    chosen = []
    for _ in range(rounds):
        points: list[Any] = [*range(MOST_WORKERS + 1), "choice"]
        drawn.shuffle(points)
        for point in points:
            workers, prefetch = point, None
            if point == "choice":
                plan = choose(workload)
                workers, prefetch = plan.num_workers, plan.prefetch_factor
                chosen.append([workers, prefetch])
            rate = measure_throughput(workload.loader(workers, prefetch), workload.step, seconds)
            assert rate is not None
            rates.setdefault(point, []).append(rate)
    best = max(statistics.median(each) for point, each in rates.items() if point != "choice")
    ratios = [best / rate for rate in rates["choice"]]
    result.add_samples(f"{workload.name}: best of the grid / choice", "ratio", ratios, at_most=TO_REACH)
    result.samples[f"{workload.name}: chosen workers and prefetch"] = chosen
    result.samples[f"{workload.name}: of the best, by workers"] = [
        round(statistics.median(rates[number]) / best, 3) for number in range(MOST_WORKERS + 1)
    ]
    print("   ", chosen, result.samples[f"{workload.name}: of the best, by workers"], flush=True)


if __name__ == "__main__":
    main()
