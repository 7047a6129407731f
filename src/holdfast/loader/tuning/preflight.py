"""What will go wrong with loader workers, told before they start: figures against the machine, and what they inherit.

Pure over facts, except that a dataset is looked through. Nothing is started, opened or changed. Names concerns and
remedies; whether to stop, warn or obey is for the loader to decide.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from holdfast.core.errors import LoaderError
from holdfast.loader.tuning.handover import (
    PickleTrial,
    culprit,
    is_held,
    is_shared_file,
    kind_of_handle,
    main_can_be_imported,
    reachable,
)
from holdfast.loader.tuning.machine import Machine

Severity = Literal["error", "warning"]

FILES_PER_WORKER = 4  # descriptors in the parent, counted with torch 2.13: two for the queue, two for its death
_FILES_OF_LOADER = 8  # the result queue, and torch's listener for descriptors
# Private memory of an idle worker of torch 2.13 on x86-64 Linux: 48-88 MB after fork, 203-217 MB after spawn or
# forkserver, which import torch anew (Private_Dirty of smaps_rollup).
_WORKER_BYTES = {"fork": 90 * 2**20, "spawn": 220 * 2**20, "forkserver": 220 * 2**20}
_MOST_TENSORS = 10_000  # counted in a batch
_MANY_ITEMS = 100_000  # a list whose reference counts are worth a thought


@dataclass(frozen=True, slots=True, kw_only=True)
class Concern:
    """One thing that will or may go wrong.

    Args:
        what: What was found, with its figures.
        limit: What it breaks, as the rest of the sentence.
        fix: One action.
        severity: ``"error"`` only where loading certainly fails.
        rule: Rule id, known to ``holdfast explain``.
        num_workers: The most workers that avoid it, if fewer do.
        prefetch_factor: The prefetch factor that avoids it, if a smaller one does.
    """

    what: str
    limit: str
    fix: str
    severity: Severity
    rule: str
    num_workers: int | None = None
    prefetch_factor: int | None = None

    def error(self) -> LoaderError:
        """Return the concern as an error to raise."""
        return LoaderError(self.what, limit=self.limit, fix=self.fix, rule=self.rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What workers would need.

    Args:
        num_workers: As torch.
        prefetch_factor: As torch: batches under way for each worker.
        batch_bytes: Bytes of the largest batch, from `weigh`; 0 if unknown.
        batch_tensors: Tensors in it, each with memory of its own.
        start_method: ``"fork"``, ``"spawn"`` or ``"forkserver"``.
        sharing_strategy: From ``torch.multiprocessing.get_sharing_strategy()``.
    """

    num_workers: int
    prefetch_factor: int = 2
    batch_bytes: int = 0
    batch_tensors: int = 0
    start_method: str = "fork"
    sharing_strategy: str = "file_descriptor"

    @property
    def shared_memory_bytes(self) -> int:
        """Bytes in /dev/shm at most: all batches under way, and the one that is being trained on."""
        return (self.num_workers * self.prefetch_factor + 1) * self.batch_bytes if self.num_workers else 0

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory at most; batches in /dev/shm are memory too."""
        return self.shared_memory_bytes + self.num_workers * _WORKER_BYTES.get(self.start_method, 0)

    @property
    def files(self) -> int:
        """Descriptors in the parent at most, beyond those that are open: with one for each tensor kept."""
        if not self.num_workers:
            return 0
        kept = 0
        if self.sharing_strategy == "file_descriptor":  # the batch in use, the next one, and all that overtook it
            kept = self.batch_tensors * (self.num_workers * self.prefetch_factor + 2)
        return kept + FILES_PER_WORKER * self.num_workers + _FILES_OF_LOADER

    def fits(self, machine: Machine) -> bool:
        """Say whether shared memory, memory and descriptors suffice."""
        return next(_shortages(self, machine), None) is None


def weigh(batch: Any) -> tuple[int, int]:
    """Return the bytes that a batch takes in shared memory, and the number of its tensors with memory of their own.

    A view is sent with the whole memory that it looks into.
    """
    storages = {}
    for _, each in reachable(batch, "batch", most_items=_MOST_TENSORS):
        if isinstance(each, torch.Tensor) and each.layout is torch.strided:
            storage = each.untyped_storage()
            storages[storage.data_ptr() or id(each)] = storage.nbytes()
    return sum(storages.values()), len(storages)


def preflight(
    load: Load,
    machine: Machine,
    *,
    dataset: Any = None,
    collate_fn: Any = None,
    worker_init_fn: Any = None,
    batch: Any = None,
) -> tuple[Concern, ...]:
    """Return what will or may go wrong with these workers, errors first; nothing without workers.

    Args:
        load: The workers, and the batches that they send.
        machine: What there is.
        dataset: Is looked through, up to some thousand objects.
        collate_fn: As `dataset`.
        worker_init_fn: As `dataset`.
        batch: One that was loaded in this process, if there is one: workers must be able to send it.
    """
    if load.num_workers < 1:
        return ()
    handed_over = {"dataset": dataset, "collate_fn": collate_fn, "worker_init_fn": worker_init_fn}
    found = [*_more_than_the_processors(load, machine)]
    found += _shortages(load, machine)
    for name, part in handed_over.items():
        if part is not None:
            look = _inherited if load.start_method == "fork" else _unpicklable
            found += look(name, part, load, machine)
    if batch is not None:
        found += unsendable(batch)
    return tuple(sorted(found, key=lambda concern: concern.severity))


def _more_than_the_processors(load: Load, machine: Machine) -> Iterator[Concern]:
    if load.num_workers > machine.cpu_quota:
        most = max(1, math.floor(machine.cpu_quota))
        yield Concern(
            what=f"num_workers={load.num_workers} on {machine.cpu_quota:g} processors (affinity and quota)",
            limit="workers that compute get slower beyond that; workers that wait for a disk or a network do not",
            fix=f"pass num_workers={most} if loading computes, or num_workers='auto' to have it measured.",
            severity="warning",
            rule="H630",
            num_workers=most,
        )


def _shortages(load: Load, machine: Machine) -> Iterator[Concern]:
    asked = (
        f"{load.num_workers} workers x prefetch_factor={load.prefetch_factor}, batches of {_mib(load.batch_bytes)}"
    )
    shared, memory = machine.shared_memory_free_bytes, machine.memory_available_bytes
    if shared is not None and load.shared_memory_bytes > shared:
        what = f"{asked}: {_mib(load.shared_memory_bytes)} of shared memory, and /dev/shm has {_mib(shared)} free"
        fewer = _nearest(load, lambda less: less.shared_memory_bytes <= shared)
        yield Concern(
            what=what,
            limit="a worker that finds it full fails",
            fix=f"make /dev/shm larger (docker run --shm-size=8g), or pass {_named(fewer)}.",
            severity="error" if load.batch_bytes > shared else "warning",
            rule="H631",
            **fewer,
        )
    if memory is not None and load.memory_bytes > memory:
        fewer = _nearest(load, lambda less: less.memory_bytes <= memory)
        yield Concern(
            what=f"{asked}: {_mib(load.memory_bytes)} with the workers themselves, and {_mib(memory)} are available",
            limit="the kernel kills a worker or the training when memory runs out",
            fix=f"give the job more memory, or pass {_named(fewer)}.",
            severity="warning",
            rule="H633",
            **fewer,
        )
    if machine.open_files_limit is not None and load.files > (room := machine.open_files_limit - machine.open_files):
        fewer = _nearest(load, lambda less: less.files <= room)
        yield Concern(
            what=f"{asked} in {load.batch_tensors} tensors: up to {load.files} descriptors, and {room} are left of "
            f"{machine.open_files_limit} (ulimit -n)",
            limit="each tensor that is kept holds one",
            fix="call torch.multiprocessing.set_sharing_strategy('file_system'), raise ulimit -n, or pass "
            f"{_named(fewer)}.",
            severity="error" if load.batch_tensors > room else "warning",
            rule="H632",
            **fewer,
        )


def _nearest(load: Load, suffices: Callable[[Load], bool]) -> dict[str, int]:
    """Return the setting nearest to the one asked for that suffices: prefetching is given up before workers."""
    for prefetch in range(load.prefetch_factor, 0, -1):
        if suffices(replace(load, prefetch_factor=prefetch)):
            return {"num_workers": load.num_workers, "prefetch_factor": prefetch}
    for workers in range(load.num_workers - 1, 0, -1):
        if suffices(replace(load, num_workers=workers, prefetch_factor=1)):
            return {"num_workers": workers, "prefetch_factor": 1}
    return {"num_workers": 0}


def _named(setting: dict[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in setting.items())


def _inherited(name: str, part: Any, load: Load, machine: Machine) -> Iterator[Concern]:
    """Yield what forked workers would share with the parent, or find in a state that they cannot leave."""
    objects = 0
    for path, each in reachable(part, name):
        kind = kind_of_handle(each)
        if kind is not None:
            yield Concern(
                what=f"{path} is {kind}, open before the workers are forked",
                limit="all workers share what is behind it, and it was not made for that",
                fix="open it in the first __getitem__ of each worker, or in worker_init_fn, and not before.",
                severity="warning",
                rule="H635",
            )
        elif is_shared_file(each):
            yield Concern(
                what=f"{path} is a file that is open for reading ({getattr(each, 'name', '?')!r})",
                limit="forked workers share its position: with seek and read, samples are silently mixed up",
                fix="open it in the first __getitem__ of each worker, or read with os.pread.",
                severity="warning",
                rule="H636",
            )
        elif isinstance(each, torch.Tensor) and each.is_cuda:
            yield Concern(
                what=f"{path} is a tensor on {each.device}",
                limit="CUDA cannot be used in a forked process",
                fix="keep it on the CPU and move the batch, or pass multiprocessing_context='spawn'.",
                severity="warning",
                rule="H637",
            )
        elif is_held(each):
            yield Concern(
                what=f"{path} is a lock that is held now",
                limit="in a forked worker nobody will ever release it",
                fix="start the workers when no other thread uses the dataset, or make the lock in the worker.",
                severity="warning",
                rule="H638",
            )
        elif isinstance(each, (list, tuple, dict)) and len(each) >= _MANY_ITEMS:
            first = next(iter(each.values() if isinstance(each, dict) else each))
            objects += len(each) * sys.getsizeof(first)
    room = machine.memory_available_bytes
    if room is not None and objects and load.memory_bytes + load.num_workers * objects > room:
        yield _copies(name, objects, load, room, "counting references un-shares their pages (pytorch#13246)")


def _unpicklable(name: str, part: Any, load: Load, machine: Machine) -> Iterator[Concern]:
    """Yield what keeps a part from being sent to workers that are not forked."""
    trial = PickleTrial(part)
    room = machine.memory_available_bytes
    if trial.error is not None:
        path, error = culprit(part, name, trial.error)
        yield Concern(
            what=f"{path} cannot be pickled ({_in_a_line(error)})",
            limit=f"workers that are started by {load.start_method} get everything as a pickle",
            fix="use a function of a module for a lambda, open files in __getitem__, or pass "
            "multiprocessing_context='fork'.",
            severity="error",
            rule="H634",
        )
    elif trial.of_main and not main_can_be_imported():
        yield Concern(
            what=f"{name} uses {trial.of_main[0]}, which was defined interactively",
            limit=f"workers that are started by {load.start_method} cannot import it",
            fix="move it into a file and import it from there, or pass multiprocessing_context='fork'.",
            severity="error",
            rule="H639",
        )
    elif room is not None and load.memory_bytes + load.num_workers * trial.copied_bytes > room:
        yield _copies(name, trial.copied_bytes, load, room, f"{load.start_method} gives each worker a copy")


def unsendable(batch: Any) -> Iterator[Concern]:
    """Yield why no worker can send a batch, if none can."""
    error = PickleTrial(batch).error
    if error is not None:
        path, inner = culprit(batch, "batch", error)
        yield Concern(
            what=f"{path} cannot be pickled ({_in_a_line(inner)})",
            limit="a worker cannot send it, and torch's loader then waits for ever (pytorch#142884)",
            fix="return tensors, arrays, numbers and strings from __getitem__ and collate_fn.",
            severity="error",
            rule="H641",
            num_workers=0,
        )


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:160]}".replace("\n", " ")


def _copies(name: str, count: int, load: Load, room: int, why: str) -> Concern:
    most = max(0, (room - load.batch_bytes) // (count + load.memory_bytes // load.num_workers))
    return Concern(
        what=f"{name} holds about {_mib(count)} that each of {load.num_workers} workers may hold again; "
        f"{_mib(room)} are available",
        limit=why,
        fix=f"keep samples in arrays, a memory map or a file rather than in lists, or pass num_workers={most}.",
        severity="warning",
        rule="H640",
        num_workers=most,
    )


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f} MiB" if count >= 2**20 else f"{count} bytes"
