"""Faults in loader workers.

Which epochs end, with the batches of an undisturbed one, and how soon they go on.

How: each case is one epoch of 64 samples in batches of 4, shuffled, in a forked child; a fault of
`loader_cases` strikes at a sample, or a moment, that the seed chooses. Each sample draws from
python's, numpy's and torch's random numbers. An epoch is healed if it ends without an error, and
identical if the digests of all its batches are those of an epoch in which nothing happened: for
holdfast one without workers, for torch, whose augmentation depends on its workers, one of the same
loader with the same seed and workers. Kinds that are exceptions apply without workers too. A case
in which the fault came too late to strike, as a kill from outside may, is not counted.

Where a fault hangs, every loader gets ``timeout=1``; a case that has not ended after 20 s is not
healed. The time to heal begins when the loss was noticed, or when the loop next asked for a batch
if that was later, and ends with the batch. Processes of a case that are alive 1 s after its child
has ended are counted, and killed.

Beside it: ``torch.utils.data.DataLoader`` on the same cases with the first seed.

To reach: all healed, all identical, 95th percentile of the time to heal at most 0.3 s, no process
left.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import tempfile
import time
import warnings
from collections import Counter as Tally
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.forks import Child, single_threaded
from benchmarks.loader_cases import (
    BATCH_SIZE,
    KINDS,
    Kind,
    Samples,
    sessions_processes,
    why_not_here,
)
from benchmarks.loader_runs import TIMEOUT_SECONDS, as_arrays, digest, make_ours, run_case
from benchmarks.results_file import Result, percentile, read_options, without_paths

_SEEDS = 20
_SEEDS_OF_TORCH = 1  # a loader that hangs takes long
_WORKERS = (2, 4)
_LIMIT_SECONDS = 20.0
_HEAL_SECONDS = 0.3
_LEFT_AFTER_SECONDS = 1.0


class Row(NamedTuple):
    """What came of one case, and how many processes were alive 1 s after its end."""

    kind: str
    seed: int
    workers: int
    struck: bool
    healed: bool
    identical: bool
    how: str
    left: int
    heal_seconds: tuple[float, ...] = ()


def make_theirs(dataset: Any, *, seed: int, **options: Any) -> Any:
    """Return torch's loader, whose randomness the seed decides."""
    torch.manual_seed(seed)
    return torch.utils.data.DataLoader(dataset, shuffle=True, batch_size=BATCH_SIZE, **options)


def one_case(make: Callable[..., Any], name: str, seed: int, workers: int, place: Path) -> Any:
    """Run a case in a session of its own, so that whatever it leaves behind can be found."""
    os.setsid()
    warnings.simplefilter("ignore")
    logging.disable()
    expected, kind = None, KINDS[name]
    if make is not make_ours:
        options = {"collate_fn": as_arrays} if kind.as_numpy else {}
        quiet = Samples(Kind(payload=kind.payload, as_numpy=kind.as_numpy), -1, place / "none")
        expected = [
            digest(batch) for batch in make(quiet, seed=seed, num_workers=workers, **options)
        ]
    return run_case(name, seed, workers, place, make=make, expected=expected)


def left_behind(session: int) -> int:
    """Return how many processes of a session are alive a second after it should be over, and
    kill them.
    """
    until = time.monotonic() + _LEFT_AFTER_SECONDS
    while (found := sessions_processes(session)) and time.monotonic() < until:
        time.sleep(0.01)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(found)


def row_of(make: Callable[..., Any], name: str, seed: int, workers: int) -> Row:
    """Run a case and return what came of it."""
    with tempfile.TemporaryDirectory() as folder:
        child = Child(partial(one_case, make, name, seed, workers, Path(folder)))
        fate = child.finish(_LIMIT_SECONDS)
        left = left_behind(child.pid)
    found = fate.value
    if found is None:
        return Row(name, seed, workers, True, False, False, fate.error or fate.how, left)
    identical, seconds = found.ended and found.identical, tuple(found.heal_seconds)
    how = "ended" if found.ended else (found.error or "")[:100]
    return Row(name, seed, workers, found.struck, found.ended, identical, how, left, seconds)


def cases(seeds: int) -> list[tuple[str, int, int]]:
    """Return kind, seed and workers of all cases that can be made here."""
    return [
        (name, seed, workers)
        for name, kind in KINDS.items()
        if why_not_here(name) is None
        for seed in range(seeds)
        for workers in ((0, *_WORKERS) if kind.alone else _WORKERS)
    ]


def add_rows(result: Result, loader: str, rows: list[Row], *, ours: bool) -> None:
    """Add what came of the cases of one loader."""
    rows = [row for row in rows if row.struck]
    for what, count, expected in (
        ("epochs that end", sum(row.healed for row in rows), len(rows)),
        ("epochs with the undisturbed batches", sum(row.identical for row in rows), len(rows)),
        ("cases that leave processes behind", sum(row.left > 0 for row in rows), 0),
    ):
        result.add_count(f"{loader}: {what}", count, len(rows), expected=expected if ours else None)
    table = {}
    for name in dict.fromkeys(row.kind for row in rows):
        of_kind = [row for row in rows if row.kind == name]
        table[name] = {
            "cases": len(of_kind),
            "ended": sum(row.healed for row in of_kind),
            "identical": sum(row.identical for row in of_kind),
            "how": dict(Tally(without_paths(re.sub(r"\d+", "N", row.how)) for row in of_kind)),
        }
    result.samples[f"{loader}: by kind"] = table
    if ours:
        seconds = sorted(each for row in rows for each in row.heal_seconds)
        result.add_samples("time from noticing a loss to the next batch", "s", seconds)
        if seconds:
            result.add_samples(
                "its 95th percentile", "s", [percentile(seconds, 0.95)], at_most=_HEAL_SECONDS
            )
        failed = [row._asdict() for row in rows if row.left or not row.identical]
        result.samples["holdfast: cases that fail"] = failed


def main() -> None:
    """Run all cases and write the result."""
    options = read_options("loader_faults", __doc__)
    single_threaded()
    seeds = 1 if options.quick else _SEEDS
    parameters = {
        "kinds": len(KINDS),
        "seeds": seeds,
        "seeds_of_torch": _SEEDS_OF_TORCH,
        "workers": _WORKERS,
    }
    limits = {"limit_seconds": _LIMIT_SECONDS, "timeout_seconds": TIMEOUT_SECONDS}
    result = Result(options=options, parameters={**parameters, **limits})
    result.notes += [
        f"{name} left out: {why}" for name in KINDS if (why := why_not_here(name)) is not None
    ]
    add_rows(result, "holdfast", [row_of(make_ours, *case) for case in cases(seeds)], ours=True)
    add_rows(
        result, "torch", [row_of(make_theirs, *case) for case in cases(_SEEDS_OF_TORCH)], ours=False
    )
    result.write()


if __name__ == "__main__":
    main()
