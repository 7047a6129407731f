"""What a checkpoint costs the training loop: saves beside the training against saves in the loop.

How: two guards of one process train the same model in turns, one with ``async_save=True``, one
without. The state is frozen tables of 16 MB beside a small head, so steps are short and the state
is as large as is said. A *stall* is the time from the end of one step to the beginning of the next,
less the usual one, where the save is due and where its result is taken in. Each round is one save
of both, and gives one ratio; which of the two goes first alternates. Apart from that: the stalls of
the first steps, in which the memory of the copies is made; how much longer steps take while the
writer works; and all that a save costs, stall and slower steps. The latter is what the processor
does for the save, if there is no core to spare.

To reach: the stall of an asynchronous save is at most 5 % of the time of a synchronous one, at 200
MB and at 2 GB.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.forks import single_threaded
from benchmarks.results_file import Result, read_options
from holdfast import Guard

_TABLE_ROWS, _WIDTH = 4096, 1024  # fp32: 16 MiB
_WARM_STEPS = 30


class Tables(nn.Module):
    """Frozen tables and a small head."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__()
        count = round(size_bytes / (4 * _TABLE_ROWS * _WIDTH))
        self.tables = nn.ModuleList(
            nn.Embedding(_TABLE_ROWS, _WIDTH) for _ in range(count)
        ).requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(_WIDTH, 512), nn.ReLU(), nn.Linear(512, 64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Look rows up in one of the tables."""
        return self.head(self.tables[0](rows))


class Run:
    """One guarded run, a step at a time, with the time of each step and of what lies between two
    steps.
    """

    def __init__(
        self, run_dir: Path, size_bytes: int, *, beside: bool, interval_steps: int
    ) -> None:
        torch.manual_seed(0)
        self.model = Tables(size_bytes)
        head = list(self.model.head.parameters())
        self.guard = Guard(
            run_dir,
            model=self.model,
            optimizer=torch.optim.AdamW(head, lr=0.0),
            loader=[torch.arange(256)] * 10**6,
            async_save=beside,
            save_interval_steps=interval_steps,
            snapshot_interval_steps=None,
            keep_latest_k=1,
            check_split=False,
            diagnose=False,
            spike_action="off",
        )
        self._interval = interval_steps
        self._batches: Iterator[Any] = self.guard.batches(max_epochs=1)
        self._batch: Any = None

    def between(self) -> float:
        """Ask for the next batch, and return the seconds until it was there."""
        started = time.perf_counter()
        self._batch = next(self._batches)
        return time.perf_counter() - started

    def step(self) -> float:
        """Make one step, and return its seconds."""
        started = time.perf_counter()
        self.guard.step(self._batch, lambda rows: self.model(rows).square().mean())
        return time.perf_counter() - started

    def one_save(self) -> dict[str, list[float]]:
        """Go on until one more save is finished.

        Return the seconds of steps and of gaps, before it and since.
        """
        found: dict[str, list[float]] = {
            "gaps": [],
            "usual gaps": [],
            "steps": [],
            "usual steps": [],
        }
        saved, is_due = self.guard.statistics().checkpoints_saved, False
        while self.guard.statistics().checkpoints_saved == saved:
            found["steps" if is_due else "usual steps"].append(self.step())
            is_due = is_due or self.guard.global_step % self._interval == 0
            found["gaps" if is_due else "usual gaps"].append(self.between())
        return found


def stall(found: dict[str, list[float]]) -> float:
    """Return how long the loop was held.

    Where the save was due, and where its result was taken in.
    """
    held = found["gaps"][:1] + found["gaps"][1:][-1:]
    return sum(held) - len(held) * statistics.median(found["usual gaps"])


def lost(found: dict[str, list[float]]) -> float:
    """Return the time that steps and gaps took beyond the usual, until the save was finished."""
    usual = len(found["steps"]) * statistics.median(found["usual steps"])
    usual += len(found["gaps"]) * statistics.median(found["usual gaps"])
    return sum(found["steps"]) + sum(found["gaps"]) - usual


def measure(result: Result, size_bytes: int, rounds: int, folder: Path) -> None:
    name = f"{size_bytes / 1e6:.0f} MB"
    # Steps of about 5 ms: longer than a write takes
    interval = 1000 if size_bytes < 10**9 else 3000
    runs = {
        beside: Run(folder / f"{name}-{beside}", size_bytes, beside=beside, interval_steps=interval)
        for beside in (True, False)
    }
    for run in runs.values():
        run.between()
    warm = [(runs[True].step(), runs[True].between()) for _ in range(_WARM_STEPS)]
    usual = statistics.median(gap for _, gap in warm)
    making = sum(gap - usual for _, gap in warm)
    result.samples[f"{name}: stalls while the memory is made, seconds"] = [round(making, 5)]
    ratios, stalls, whole, slower, share = [], [], [], [], []
    for number in range(rounds):
        order = (True, False) if number % 2 else (False, True)
        found = {beside: runs[beside].one_save() for beside in order}
        stalls.append(stall(found[True]))
        whole.append(stall(found[False]))
        ratios.append(stalls[-1] / whole[-1])
        if found[True]["steps"]:
            usual_step = statistics.median(found[True]["usual steps"])
            slower.append(statistics.median(found[True]["steps"]) / usual_step)
            share.append(lost(found[True]) / whole[-1])
    result.add_samples(
        f"{name}: stall of an asynchronous save, of the synchronous time",
        "ratio",
        ratios,
        at_most=0.05,
    )
    result.add_samples(f"{name}: stall of an asynchronous save", "s", stalls)
    result.add_samples(f"{name}: time of a synchronous save", "s", whole)
    result.add_samples(f"{name}: a step while the writer works, of the usual", "ratio", slower)
    result.add_samples(
        f"{name}: stall and slower steps together, of the synchronous time", "ratio", share
    )
    for run in runs.values():
        run.guard.close()


def main() -> None:
    single_threaded()
    options = read_options("async_saving", __doc__ or "")
    sizes = [200 * 10**6] if options.quick else [200 * 10**6, 2 * 10**9]
    rounds = 3 if options.quick else 9
    result = Result(
        options=options, parameters={"sizes_bytes": sizes, "rounds": rounds, "torch_threads": 1}
    )
    for size_bytes in sizes:
        with tempfile.TemporaryDirectory() as folder:
            measure(
                result, size_bytes, rounds if size_bytes < 10**9 else min(rounds, 5), Path(folder)
            )
    result.write()


if __name__ == "__main__":
    main()
