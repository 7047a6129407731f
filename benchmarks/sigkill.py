"""Runs that are killed at random moments and resumed.

Are they bit-identical to the run that nobody disturbed?

How: one run is 80 steps of a small convolutional network (see ``small_training``) with a checkpoint
every 7 steps. Each attempt is a forked process, which is killed by SIGKILL after 0 to 40 steps and
a random part of two steps more, up to 3 times, at any place: start, loading, forward, optimizer,
saving. Then it runs to the end. Compared are weights, BatchNorm statistics, AdamW moments and the
schedule, by digest, with a plain PyTorch loop over the same `holdfast.DataLoader`. 50 random
schedules, with 0 and with 2 loader workers.

Beside it: what most scripts do. A plain loop over `torch.utils.data.DataLoader` with ``torch.save``
of weights, optimizer, schedule and epoch every 7 steps, resumed at the beginning of that epoch,
against its own undisturbed run.

To reach: 100 of 100 bit-identical.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter as Tally
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.forks import Child, Counter, in_a_fork, single_threaded, wait_until
from benchmarks.results_file import Result, read_options, without_paths
from benchmarks.small_training import (
    BATCH_SIZE,
    SAVE_INTERVAL_STEPS,
    STEPS,
    Augmented,
    Training,
    train_guarded,
)
from holdfast import DataLoader

_MOST_KILLS = 3
_MOST_STEPS = 40  # before a kill
_LONGEST_DELAY_STEPS = 2.0
_Train = Callable[[Path, int, Counter], str]


def train_with_holdfast(run_dir: Path, num_workers: int, steps: Counter) -> str:
    return train_guarded(run_dir, num_workers, lambda *_: steps.set(steps.get() + 1)).digest()


def train_plainly(run_dir: Path, num_workers: int, steps: Counter) -> str:
    """Train to the end, resuming as most scripts do."""
    training, file = Training(), run_dir / "last.pt"
    run_dir.mkdir(exist_ok=True)
    loader = torch.utils.data.DataLoader(
        Augmented(), batch_size=BATCH_SIZE, shuffle=True, num_workers=num_workers
    )
    epoch, step = 0, 0
    if file.exists():
        saved = torch.load(file)
        training.load_plain_state(saved)
        epoch, step = saved["epoch"], saved["step"]
    while True:
        for batch in loader:
            training.bare_step(batch)
            step += 1
            steps.set(steps.get() + 1)
            if step >= STEPS:
                return training.digest()
            if step % SAVE_INTERVAL_STEPS == 0:
                torch.save({**training.plain_state(), "epoch": epoch, "step": step}, file)
        epoch += 1


def reference_digest() -> str:
    """Train with a plain loop over holdfast's loader, undisturbed."""
    training, loader, step = (
        Training(),
        DataLoader(Augmented(), batch_size=BATCH_SIZE, shuffle=True, seed=5),
        0,
    )
    while True:
        for batch in loader:
            training.bare_step(batch)
            step += 1
            if step >= STEPS:
                return training.digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one schedule."""

    digest: str | None  # of the last state; None if the last attempt failed
    how: str  # the last attempt ended
    planned_kills: int
    # Steps that each killed attempt had made; the end may come before the last planned kill
    kills: list[int]


def run_schedule(
    train: _Train, run_dir: Path, num_workers: int, chance: random.Random, step_seconds: float
) -> Outcome:
    """Kill up to 3 attempts of one run at random moments, then let it finish."""
    kills: list[int] = []
    planned = chance.randint(1, _MOST_KILLS)
    for _ in range(planned):
        steps = Counter()
        target = chance.randint(0, _MOST_STEPS)
        delay = chance.random() * _LONGEST_DELAY_STEPS * step_seconds
        child = Child(partial(train, run_dir, num_workers, steps))
        if wait_until(lambda: steps.get() >= target, child):  # noqa: B023 - called in this round only
            time.sleep(delay)
        child.kill()
        fate = child.finish()
        if fate.signal != "SIGKILL":
            return Outcome(
                digest=fate.value, how=fate.error or fate.how, planned_kills=planned, kills=kills
            )
        kills.append(steps.get())
    fate = in_a_fork(partial(train, run_dir, num_workers, Counter()))
    return Outcome(
        digest=fate.value, how=fate.error or fate.how, planned_kills=planned, kills=kills
    )


def measure(
    result: Result, train: _Train, name: str, num_workers: int, schedules: int
) -> tuple[int, int]:
    """Run all schedules of one kind.

    Return how many are bit-identical and how many could not be resumed.
    """
    kind = f"{name}, {num_workers} workers"
    chance = random.Random(num_workers)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        undisturbed = in_a_fork(
            partial(train, Path(folder) / "undisturbed", num_workers, Counter())
        ).value
        step_seconds = (time.perf_counter() - started) / STEPS
        if name == "holdfast" and undisturbed != in_a_fork(reference_digest).value:
            raise RuntimeError(f"{kind}: the undisturbed run differs from the plain loop")
        rows = [
            run_schedule(train, Path(folder) / str(number), num_workers, chance, step_seconds)
            for number in range(schedules)
        ]
    identical = sum(row.digest == undisturbed for row in rows)
    broken = sum(row.digest is None for row in rows)
    result.samples[f"{kind}: steps that each killed attempt had made, by run"] = [
        row.kills for row in rows
    ]
    result.samples[f"{kind}: how the last attempt ended"] = dict(
        Tally(without_paths(row.how) for row in rows)
    )
    killed, planned = sum(len(row.kills) for row in rows), sum(row.planned_kills for row in rows)
    result.add_count(f"{kind}: kills, of those planned", killed, planned)
    return identical, broken


def main() -> None:
    single_threaded()
    options = read_options("sigkill", __doc__ or "")
    schedules = 4 if options.quick else 50
    parameters = {
        "schedules_each": schedules,
        "num_workers": [0, 2],
        "steps": STEPS,
        "save_interval_steps": SAVE_INTERVAL_STEPS,
        "most_kills": _MOST_KILLS,
        "most_steps_before_a_kill": _MOST_STEPS,
        "longest_delay_steps": _LONGEST_DELAY_STEPS,
        "seed": "the number of workers",
    }
    result = Result(options=options, parameters=parameters)
    for train, name in ((train_with_holdfast, "holdfast"), (train_plainly, "torch.save")):
        ours = name == "holdfast"
        for num_workers in (0, 2):
            same, broken = measure(result, train, name, num_workers, schedules)
            kind, wanted = f"{name}, {num_workers} workers", schedules if ours else None
            result.add_count(
                f"{kind}: bit-identical to the undisturbed run", same, schedules, expected=wanted
            )
            result.add_count(
                f"{kind}: could not be resumed", broken, schedules, expected=0 if ours else None
            )
    result.write()


if __name__ == "__main__":
    main()
