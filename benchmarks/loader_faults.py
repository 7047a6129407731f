"""Faults in loader workers: which epochs end, with the batches of an undisturbed one, and how soon they go on.

How: each case is one epoch of 64 samples in batches of 4, shuffled, in a forked child; a fault of `loader_cases`
strikes at a sample, or a moment, that the seed chooses. Each sample draws from python's, numpy's and torch's random
numbers. An epoch is healed if it ends without an error, and identical if the digests of all its batches are those of
an epoch in which nothing happened: for holdfast one without workers, for the others, whose augmentation depends on
their workers, one of the same loader with the same seed and workers. Kinds that are exceptions apply without workers
too. A case in which the fault came too late to strike, as a kill from outside may, is not counted.

Where a fault hangs, every loader gets ``timeout=1``; a case that has not ended after 20 s is not healed. The time to
heal begins when the loss was noticed, or when the loop next asked for a batch if that was later, and ends with the
batch. Processes of a case that are alive 1 s after its child has ended are counted, and killed.

Then the child is killed by SIGKILL while its workers loop, sleep, are stopped or work, and what is alive 1 s later is
counted.

Beside it: ``torch.utils.data.DataLoader`` and torchdata's ``StatefulDataLoader`` (its own code, left out if it cannot
be had) on the same cases with the first seed.

To reach: all healed, all identical, 95th percentile of the time to heal at most 0.3 s, no process left.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import signal
import tempfile
import time
import warnings
from collections import Counter as Tally
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.forks import Child, Counter, single_threaded, wait_until
from benchmarks.loader_cases import BATCH_SIZE, KINDS, Kind, Samples, sessions_processes, why_not_here
from benchmarks.loader_runs import TIMEOUT_SECONDS, as_arrays, digest, make_ours, run_case
from benchmarks.peers import find_peer
from benchmarks.results_file import Result, percentile, read_options, without_paths

_SEEDS = 20
_SEEDS_OF_OTHERS = 1  # a loader that hangs takes long
_WORKERS = (2, 4)
_LIMIT_SECONDS = 20.0
_HEAL_SECONDS = 0.3
_LEFT_AFTER_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What came of one case.

    Args:
        loader: Whose.
        kind: Of fault.
        seed: Of the case.
        workers: Number of them.
        struck: Whether the fault took place.
        healed: Whether the epoch ended without an error.
        identical: Whether it had the batches of an undisturbed one.
        how: "ended", the error, "timeout" or the signal that killed the process.
        heal_seconds: Of each loss.
        left: Processes that were alive 1 s after the end.
    """

    loader: str
    kind: str
    seed: int
    workers: int
    struck: bool
    healed: bool
    identical: bool
    how: str
    heal_seconds: tuple[float, ...] = ()
    left: int = 0


def make_theirs(loader: Callable[..., Any], dataset: Any, *, seed: int, **options: Any) -> Any:
    """Return another library's loader, whose randomness the seed decides."""
    torch.manual_seed(seed)
    return loader(dataset, shuffle=True, batch_size=BATCH_SIZE, **options)


def one_case(make: Callable[..., Any], name: str, seed: int, workers: int, place: Path) -> Any:
    """Run a case in a session of its own, so that whatever it leaves behind can be found."""
    os.setsid()
    warnings.simplefilter("ignore")
    logging.disable()
    expected, kind = None, KINDS[name]
    if make is not make_ours:
        options = {"collate_fn": as_arrays} if kind.as_numpy else {}
        quiet = Kind(payload=kind.payload, as_numpy=kind.as_numpy)
        expected = [
            digest(batch)
            for batch in make(Samples(quiet, -1, place / "none"), seed=seed, num_workers=workers, **options)
        ]
    return run_case(name, seed, workers, place, make=make, expected=expected)


def left_behind(session: int) -> int:
    """Return how many processes of a session are alive a second after it should be over, and kill them."""
    until = time.monotonic() + _LEFT_AFTER_SECONDS
    while (found := sessions_processes(session)) and time.monotonic() < until:
        time.sleep(0.01)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(found)


def row_of(loader: str, make: Callable[..., Any], name: str, seed: int, workers: int) -> Row:
    """Run a case and say what came of it."""
    with tempfile.TemporaryDirectory() as folder:
        child = Child(partial(one_case, make, name, seed, workers, Path(folder)))
        fate = child.finish(_LIMIT_SECONDS)
        left = left_behind(child.pid)
    known: dict[str, Any] = {"loader": loader, "kind": name, "seed": seed, "workers": workers, "left": left}
    found = fate.value
    if found is None:
        return Row(**known, struck=True, healed=False, identical=False, how=fate.error or fate.how)
    return Row(
        **known,
        struck=found.struck,
        healed=found.ended,
        identical=found.ended and found.identical,
        how="ended" if found.ended else (found.error or "")[:100],
        heal_seconds=tuple(found.heal_seconds),
    )


# --- a parent that is killed ------------------------------------------------------------------------------------


def _loop() -> None:
    while True:
        pass


_STATES: dict[str, Callable[[], Any]] = {
    "loop": _loop,
    "sleep": lambda: time.sleep(1e6),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "work": lambda: None,
}
_READS = 2 * BATCH_SIZE


class Placed:
    """Samples that put their worker into a state once it has read a few of them."""

    def __init__(self, state: str) -> None:
        self.state = state
        self.reads = 0

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> int:
        time.sleep(0.001)
        self.reads += 1
        if self.reads > _READS and self.state != "work":
            time.sleep(0.2)  # until earlier batches are on their way
            _STATES[self.state]()
        return index


def endless_parent(make: Callable[..., Any], state: str, workers: int, batches: Counter) -> None:
    """Read from a loader until killed."""
    os.setsid()
    warnings.simplefilter("ignore")
    for number, _ in enumerate(make(Placed(state), seed=0, num_workers=workers)):
        batches.set(number + 1)


def left_by_killed_parent(make: Callable[..., Any], state: str, workers: int, seed: int) -> tuple[int, int]:
    """Kill a parent at a random moment; return how many workers it had, and how many are alive 1 s later."""
    batches = Counter()
    child = Child(partial(endless_parent, make, state, workers, batches))
    wait_until(lambda: batches.get() >= workers, child)
    time.sleep(0.2 + random.Random(f"{state} {seed}").random() * 0.2)
    had = len(sessions_processes(child.pid)) - 1
    child.kill()
    child.finish()
    return had, left_behind(child.pid)


# --- the result -------------------------------------------------------------------------------------------------


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
    expected = len(rows) if ours else None
    result.add_count(f"{loader}: epochs that end", sum(row.healed for row in rows), len(rows), expected=expected)
    result.add_count(
        f"{loader}: epochs with the undisturbed batches", sum(row.identical for row in rows), len(rows),
        expected=expected,
    )  # fmt: skip
    result.add_count(
        f"{loader}: cases that leave processes behind", sum(row.left > 0 for row in rows), len(rows),
        expected=0 if ours else None,
    )  # fmt: skip
    table = {}
    for name in dict.fromkeys(row.kind for row in rows):
        of_kind = [row for row in rows if row.kind == name]
        table[name] = {
            "cases": len(of_kind),
            "ended": sum(row.healed for row in of_kind),
            "identical": sum(row.identical for row in of_kind),
            "how": dict(Tally(without_paths(_without_numbers(row.how)) for row in of_kind)),
        }
    result.samples[f"{loader}: by kind"] = table
    if ours:
        seconds = sorted(each for row in rows for each in row.heal_seconds)
        result.add_samples("time from noticing a loss to the next batch", "s", seconds)
        if seconds:
            p95 = percentile(seconds, 0.95)
            result.add_samples("its 95th percentile", "s", [p95], at_most=_HEAL_SECONDS)


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "N", text)


def add_killed_parents(result: Result, loader: str, make: Callable[..., Any], seeds: int, *, ours: bool) -> None:
    """Add how many parents that are killed leave workers behind."""
    found = {
        f"{state}, {workers} workers, seed {seed}": left_by_killed_parent(make, state, workers, seed)
        for state in _STATES
        for workers in _WORKERS
        for seed in range(seeds)
    }
    assert all(had for had, _ in found.values()), "a parent without workers proves nothing"
    result.samples[f"{loader}: workers of a killed parent, and those alive 1 s later"] = found
    left = sum(left > 0 for _, left in found.values())
    what = f"{loader}: killed parents that leave workers behind"
    result.add_count(what, left, len(found), expected=0 if ours else None)


def main() -> None:
    """Run all cases and write the result."""
    options = read_options("loader_faults", __doc__)
    single_threaded()
    seeds = 1 if options.quick else _SEEDS
    others_seeds = 1 if options.quick else _SEEDS_OF_OTHERS
    skipped = {name: reason for name in KINDS if (reason := why_not_here(name)) is not None}
    result = Result(
        options=options,
        parameters={
            "kinds": len(KINDS), "seeds": seeds, "seeds_of_others": others_seeds, "workers": _WORKERS,
            "limit_seconds": _LIMIT_SECONDS, "timeout_seconds": TIMEOUT_SECONDS,
        },
    )  # fmt: skip
    result.notes += [f"{name} left out: {reason}" for name, reason in skipped.items()]
    with tempfile.TemporaryDirectory() as folder:
        stateful, version = find_peer(
            "torchdata.stateful_dataloader", "StatefulDataLoader", "torchdata==0.11.0", Path(folder)
        )
        result.notes.append(f"StatefulDataLoader: torchdata {version}")
        loaders: dict[str, Callable[..., Any]] = {
            "holdfast": make_ours, "torch": partial(make_theirs, torch.utils.data.DataLoader)
        }  # fmt: skip
        if stateful is not None:
            loaders["torchdata"] = partial(make_theirs, stateful)
        for loader, make in loaders.items():
            ours = make is make_ours
            rows = [row_of(loader, make, *case) for case in cases(seeds if ours else others_seeds)]
            add_rows(result, loader, rows, ours=ours)
            add_killed_parents(result, loader, make, 1 if options.quick else others_seeds, ours=ours)
            if ours:
                failed = [row for row in rows if row.struck and not (row.identical and not row.left)]
                result.samples["holdfast: cases that fail"] = [asdict(row) for row in failed]
    result.write()


if __name__ == "__main__":
    main()
