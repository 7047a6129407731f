"""One epoch of a loader that a fault befalls.

Does it end, are its batches those of an undisturbed one, how fast.

    python -m benchmarks.loader_runs KIND SEED WORKERS

prints the outcome as JSON; for the kinds that change the process they run in, such as few file
descriptors.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.loader_cases import BATCH_SIZE, KINDS, LENGTH, Samples, fork_lock
from holdfast.core.events.data import EventData
from holdfast.core.events.run_events import LoaderHealed
from holdfast.loader.loader import DataLoader

TIMEOUT_SECONDS = 1.0
"""Given to every loader as torch's ``timeout`` where a fault hangs."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What came of an epoch.

    How it ended, the losses that were healed, and the seconds until the next batch.
    """

    ended: bool = False
    identical: bool = False
    struck: bool = False
    error: str | None = None
    causes: list[str] = field(default_factory=list)
    remedies: list[str] = field(default_factory=list)
    other_events: list[str] = field(default_factory=list)
    heal_seconds: list[float] = field(default_factory=list)


def digest(batch: Any) -> str:
    """Return the digest of a batch: types, shapes, dtypes and bits."""
    found = hashlib.blake2b(digest_size=16)

    def add(value: Any) -> None:
        if isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        elif isinstance(value, (torch.Tensor, np.ndarray)):
            array = np.ascontiguousarray(value)
            found.update(f"{type(value).__name__} {array.dtype} {array.shape} ".encode())
            found.update(array.tobytes())
        else:
            found.update(repr(value).encode())

    add(batch)
    return found.hexdigest()


def as_arrays(samples: list[Any]) -> Any:
    """Collate payloads to an array, which is pickled into the pipe; the rest as torch does."""
    first = torch.utils.data.default_collate([sample[:-1] for sample in samples])
    return [*first, np.stack([sample[-1] for sample in samples])]


def make_ours(dataset: Samples, *, seed: int, **options: Any) -> DataLoader:
    """Return holdfast's loader."""
    return DataLoader(dataset, shuffle=True, seed=seed, batch_size=BATCH_SIZE, **options)


def undisturbed(name: str, seed: int) -> list[str]:
    """Return the digests of holdfast's batches when nothing happens, without workers."""
    kind = KINDS[name]
    quiet = Samples(kind, -1, Path())
    options = {"collate_fn": as_arrays} if kind.as_numpy else {}
    return [digest(batch) for batch in make_ours(quiet, seed=seed, **options)]


def run_case(
    name: str,
    seed: int,
    workers: int,
    place: Path,
    *,
    make: Callable[..., Iterable[Any]] = make_ours,
    expected: list[str] | None = None,
) -> Outcome:
    """Let a fault, one of `KINDS`, befall one epoch of a loader.

    The seed chooses sample, order and moment.

    `make` returns the loader for a dataset, and `expected` are the digests of its undisturbed
    epoch, by default holdfast's own. The marker that it has struck lies in `place`.
    """
    kind, outcome, told = KINDS[name], Outcome(), threading.Event()
    if expected is None:
        expected = undisturbed(name, seed)
    marker = place / f"struck_{name.replace('/', '_')}_{seed}_{workers}"
    at = random.Random(f"{name} {seed}").randrange(LENGTH)
    losses: list[float] = []  # when each was noticed

    def record(event: EventData) -> None:
        if isinstance(event, LoaderHealed):
            losses.append(time.monotonic() - event.seconds)
            outcome.causes.append(event.cause)
            outcome.remedies.append(event.remedy)
            told.set()
            if kind.locks:
                with fork_lock:  # its holder has let go before the next workers are forked
                    pass
        else:
            outcome.other_events.append(event.kind)

    options: dict[str, Any] = {"collate_fn": as_arrays} if kind.as_numpy else {}
    if kind.hangs and workers:
        options["timeout"] = TIMEOUT_SECONDS
    found, kept = [], []
    try:
        with kind.around(marker, told) if kind.around is not None else contextlib.nullcontext():
            loader = make(Samples(kind, at, marker), seed=seed, num_workers=workers, **options)
            if isinstance(loader, DataLoader):
                loader.attach(record, place)
            asked = time.monotonic()
            for batch in loader:
                now = time.monotonic()
                outcome.heal_seconds += [round(now - max(noticed, asked), 4) for noticed in losses]
                losses.clear()
                found.append(digest(batch))
                if kind.keeps:
                    kept.append(batch)
                time.sleep(kind.pace_seconds)
                asked = time.monotonic()
            outcome.ended = True
    except Exception as error:  # noqa: BLE001 - whatever a loader raises ends its epoch
        outcome.error = f"{type(error).__name__}: {error}"[:300]
    outcome.identical = found == expected
    outcome.struck = marker.exists() or kind.strike is None
    return outcome


def main() -> None:
    """Run one case and print its outcome."""
    logging.disable()
    torch.set_num_threads(1)
    name, seed, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with tempfile.TemporaryDirectory() as place:
        print(json.dumps(asdict(run_case(name, seed, workers, Path(place)))))


if __name__ == "__main__":
    main()
