"""What loading costs, measured: a few batches in the training process, and what sending one from a worker adds.

Decides nothing: `holdfast.loader.tuning.choice` does.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from holdfast.core.containers import children_of, rebuilt
from holdfast.loader.splitting import copied
from holdfast.loader.tuning.handover import PickleTrial
from holdfast.loader.tuning.machine import Machine
from holdfast.loader.tuning.preflight import Load, weigh

MOST_PROBES = 8
"""Batches to load in the training process before deciding."""
_FEWEST_TIMED, _MOST_TIMED = 3, 12  # batches
_FIXED = (str, bytes, bool, int, float, complex, type(None), np.generic, torch.device, torch.dtype)
_PAGE = 4096  # bytes that a tensor takes of shared memory at least
_LARGEST_COPIED = 64 * 2**20  # bytes of copies to measure a transfer with
_LONGEST_PAUSE = 0.005  # seconds; caches are as cold as they get


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The times of one batch that was loaded in the training process, and of the step that followed.

    Args:
        load_seconds: Wall time of loading it.
        load_cpu_seconds: CPU time of the process in it, all threads.
        step_seconds: Wall time from handing it out until the next one was asked for.
        step_cpu_seconds: CPU time of the process in it, all threads.
        queued_seconds: Part of `load_seconds` in which the thread was ready and had no processor: the work of others,
            not a disk.
    """

    load_seconds: float
    load_cpu_seconds: float
    step_seconds: float
    step_cpu_seconds: float
    queued_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """What the clocks show.

    Args:
        wall: Seconds of a monotonic clock.
        cpu: CPU seconds of this process.
        queued: Seconds that this thread was ready to run and did not, as far as the kernel tells.
    """

    wall: float
    cpu: float
    queued: float

    @classmethod
    def now(cls) -> Instant:
        """Read the clocks; takes some ten microseconds."""
        try:
            queued = int(Path("/proc/thread-self/schedstat").read_text().split()[1]) * 1e-9
        except (OSError, ValueError, IndexError):
            queued = 0.0
        return cls(wall=time.perf_counter(), cpu=time.process_time(), queued=queued)


def sample_of(asked: Instant, loaded: Instant, stepped: Instant, handed: Instant | None = None) -> Sample:
    """Return the times of a batch from three readings in the thread that loads and trains.

    Args:
        asked: Before loading.
        loaded: When the batch is there.
        stepped: When the next one is asked for.
        handed: When the batch is handed out, if it was looked at before.
    """
    handed = handed or loaded
    return Sample(
        load_seconds=loaded.wall - asked.wall,
        load_cpu_seconds=loaded.cpu - asked.cpu,
        step_seconds=stepped.wall - handed.wall,
        step_cpu_seconds=stepped.cpu - handed.cpu,
        queued_seconds=loaded.queued - asked.queued,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What it costs to get one batch from a worker, beyond loading it.

    Args:
        hand_over_seconds: Wall time in the training process for a batch that lies ready.
        hand_over_cpu_seconds: CPU time of that.
        worker_seconds: CPU time of the worker to copy it into shared memory and to send it.
    """

    hand_over_seconds: float
    hand_over_cpu_seconds: float
    worker_seconds: float

    @classmethod
    def assumed(cls, batch_bytes: int, batch_tensors: int) -> Transfer:
        """Return what it costs if it was not measured: CPU times of one machine (docs/adr/0027).

        Args:
            batch_bytes: Bytes in shared memory.
            batch_tensors: Tensors; each has a descriptor that is sent.
        """
        hand_over = 110e-6 + 220e-6 * batch_tensors + 0.12e-9 * batch_bytes
        return cls(
            hand_over_seconds=2 * hand_over,  # it also waits for the worker, which sends the descriptors
            hand_over_cpu_seconds=hand_over,
            worker_seconds=220e-6 + 205e-6 * batch_tensors + 1e-9 * batch_bytes,
        )


def probe(
    batches: Iterator[Any], step: Callable[[Any], object] | None = None, count: int = MOST_PROBES
) -> tuple[list[Sample], Any]:
    """Load batches in this process, with a step after each, and return their times and the largest batch.

    Args:
        batches: Loads in this process: of a loader without workers.
        step: What is done with a batch; nothing by default.
        count: Load no more.

    Returns:
        One sample for each batch, none if there is no batch; and the batch with the most bytes, None likewise.
    """
    samples: list[Sample] = []
    largest, largest_bytes = None, -1
    asked = Instant.now()
    for batch in itertools.islice(batches, count):
        loaded = Instant.now()
        if step is not None:
            step(batch)
        samples.append(sample_of(asked, loaded, Instant.now()))
        if (size := weigh(batch)[0]) > largest_bytes:
            largest, largest_bytes = batch, size
        asked = Instant.now()
    return samples, largest


def measure_throughput(
    loader: DataLoader[Any], step: Callable[[Any], object] | None = None, seconds: float = 1.0
) -> float | None:
    """Return the batches per second of a loop over a loader, once its queues are full.

    Args:
        loader: Is started anew, and left before its end.
        step: What is done with a batch; nothing by default.
        seconds: Time to run for; less if the loader ends.

    Returns:
        None if it ends before there is anything to time.
    """
    do = step or (lambda _: None)
    batches = iter(loader)
    for batch in itertools.islice(batches, 4 + 2 * loader.num_workers * (loader.prefetch_factor or 0)):
        do(batch)
    start, passed, count = time.perf_counter(), 0.0, 0
    for batch in batches:
        do(batch)
        count += 1
        passed = time.perf_counter() - start
        if passed >= seconds:
            break
    return count / passed if count >= _FEWEST_TIMED else None


def without_workers(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return torch's plain loader of the same batches that loads in this process; the given one is left alone."""
    return with_workers(loader, 0, None)


def with_workers(loader: DataLoader[Any], num_workers: int, prefetch_factor: int | None) -> DataLoader[Any]:
    """Return torch's plain loader of the same batches with other workers; the given one is left alone.

    Args:
        loader: torch's, or holdfast's, of which order and healing are left out.
        num_workers: As torch.
        prefetch_factor: As torch; None without workers.
    """
    what: dict[str, Any] = {"batch_sampler": loader.batch_sampler}
    if isinstance(loader.dataset, IterableDataset):
        what = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    elif loader.batch_sampler is None:
        what = {"batch_size": None, "sampler": loader.sampler}
    return DataLoader(
        loader.dataset,
        **what,
        collate_fn=loader.collate_fn,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=context_of(loader) if num_workers else None,
        generator=torch.Generator(),
    )


def kept(batch: Any) -> Any:
    """Return the batch in containers of its own, its tensors cut off from any graph; their memory is shared.

    So it may be measured later, whatever a loop puts into its batch meanwhile.

    Returns:
        None if something in it is neither a container, a tensor or an array, nor a value that cannot be changed.
    """
    try:
        return _kept(batch)
    except Exception:  # noqa: BLE001 - whatever a user's container raises: a batch can also do without
        return None


def _kept(node: Any) -> Any:
    if isinstance(node, torch.Tensor):
        return node.detach()
    if isinstance(node, np.ndarray) and not node.dtype.hasobject:
        return node.view()
    children = children_of(node)
    if children is not None:
        return rebuilt(node, {key: _kept(child) for key, child in children.items()}, checked=False)
    if isinstance(node, _FIXED):
        return node
    raise TypeError(type(node))


def context_of(loader: DataLoader[Any]) -> Any:
    """Return what a loader's workers are started with; None: as python does."""
    # holdfast's own knows it before it has chosen workers, which torch's does not let it say.
    return loader.multiprocessing_context or getattr(loader, "start_method", None)


class _Copies(Dataset[Any]):
    """Gives copies of one batch, each with the CPU time of the worker so far."""

    def __init__(self, batch: Any, count: int) -> None:
        self.batch, self.count = batch, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[float, Any]:
        return time.process_time(), copied(self.batch)


def _as_it_is(sample: Any) -> Any:
    return sample


def measure_transfer(
    batch: Any, *, step_seconds: float = 0.0, start_method: str = "fork", machine: Machine | None = None
) -> Transfer:
    """Measure what it costs to get this batch from a worker: one is started, sends a few copies, and ends.

    Takes the start of one worker and some milliseconds. Draws no random number of the process. A batch that is too
    large to be copied a few times, also for what is free of shared memory and descriptors, or that cannot be sent,
    gets the assumed cost.

    Args:
        batch: One batch, as the loader gives it.
        step_seconds: Time of a training step: a process that pauses has cold caches and must be woken.
        start_method: As torch's ``multiprocessing_context``.
        machine: What there is; None to look.
    """
    size, tensors = weigh(batch)
    assumed = Transfer.assumed(size, tensors)
    if size > _LARGEST_COPIED or PickleTrial(batch).error is not None:
        return assumed
    count = _copies_that_fit(size, tensors, start_method, machine or Machine.here())
    if count < _FEWEST_TIMED:
        return assumed
    loader = DataLoader(
        _Copies(batch, count), batch_size=None, collate_fn=_as_it_is, num_workers=1, prefetch_factor=count,
        multiprocessing_context=start_method, generator=torch.Generator(), timeout=60,
    )  # fmt: skip
    batches = iter(loader)
    marks = [next(batches)[0]]
    time.sleep(0.01 + 2 * count * assumed.worker_seconds)  # until all of them lie ready
    walls, cpus = [], []
    for _ in range(count - 1):
        time.sleep(min(step_seconds, _LONGEST_PAUSE))
        wall, cpu = time.perf_counter(), time.process_time()
        marks.append(next(batches)[0])
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return Transfer(
        hand_over_seconds=statistics.median(walls),
        hand_over_cpu_seconds=statistics.median(cpus),
        worker_seconds=statistics.median(b - a for a, b in itertools.pairwise(marks)),
    )


def _copies_that_fit(size: int, tensors: int, start_method: str, machine: Machine) -> int:
    """Return how many copies of a batch can lie ready at once, 0 if too few: who finds no room for one sends none."""
    asked = Load(
        num_workers=1,
        batch_bytes=_PAGE * tensors + size,
        batch_tensors=tensors,
        start_method=start_method,
        sharing_strategy=torch.multiprocessing.get_sharing_strategy(),  # type: ignore[no-untyped-call]
    )
    most = max(_FEWEST_TIMED, min(_MOST_TIMED, _LARGEST_COPIED // max(size, 1)))
    fitting = (n for n in range(most, _FEWEST_TIMED - 1, -1) if replace(asked, prefetch_factor=n).fits(machine))
    return next(fitting, 0)
