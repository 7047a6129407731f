"""Warn if the machine has too few resources for the loader's workers.

The machine's limits are read from Linux system files. A limit that cannot be read counts as
unlimited. This module only reports problems and changes nothing.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.core.control_groups import cpu_quota
from holdfast.core.events.run_events import Preflight
from holdfast.core.text import size
from holdfast.loader.splitting import tensors_in

# The file system for shared memory. holdfast only reads its size and creates no files in it.
_SHARED_MEMORY_FOLDER = "/dev/shm"  # noqa: S108

# torch's default for loaders with workers.
_DEFAULT_PREFETCH_FACTOR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine's limits that affect loading.

    Args:
        cpu_quota: Number of processors that this process may use. May be a fraction, because of a
            CFS quota.
        shared_memory_free_bytes: Free bytes in /dev/shm, or None if unknown.
    """

    cpu_quota: float
    shared_memory_free_bytes: int | None = None

    @classmethod
    def here(cls) -> Machine:
        """Return the limits of the machine on which this process runs."""
        free_bytes = None
        with contextlib.suppress(OSError):
            file_system = os.statvfs(_SHARED_MEMORY_FOLDER)
            free_bytes = file_system.f_bavail * file_system.f_frsize
        return cls(cpu_quota=cpu_quota(), shared_memory_free_bytes=free_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The resources that workers need.

    Args:
        num_workers: Number of workers.
        prefetch_factor: Number of batches that each worker loads in advance.
        batch_bytes: Size of one batch, or 0 if unknown.
    """

    num_workers: int
    prefetch_factor: int = _DEFAULT_PREFETCH_FACTOR
    batch_bytes: int = 0

    @classmethod
    def of(cls, batch: Any, num_workers: int, prefetch_factor: int | None) -> Load:
        """Return the resources needed for batches of the same size as this batch."""
        # Workers send whole storages, even for a view. A storage shared by several tensors is sent
        # only once.
        storage_bytes = {}
        for tensor in tensors_in(batch):
            if tensor.layout is torch.strided and not tensor.is_nested:
                # The address identifies a storage, except that several storages may have address 0.
                storage = tensor.untyped_storage()
                storage_bytes[storage.data_ptr() or id(tensor)] = storage.nbytes()
        return cls(
            num_workers=num_workers,
            prefetch_factor=prefetch_factor or _DEFAULT_PREFETCH_FACTOR,
            batch_bytes=sum(storage_bytes.values()),
        )

    @property
    def shared_memory_bytes(self) -> int:
        """Bytes needed in /dev/shm, for all prefetched batches and the current one."""
        if self.num_workers == 0:
            return 0
        return (self.num_workers * self.prefetch_factor + 1) * self.batch_bytes


def concerns(load: Load, machine: Machine) -> Iterator[Preflight]:
    """Yield a warning for each resource of the machine that is insufficient for the workers."""
    if load.num_workers > machine.cpu_quota:
        whole_processors = max(1, math.floor(machine.cpu_quota))
        yield Preflight(
            what=(
                f"num_workers={load.num_workers} on {machine.cpu_quota:g} processors (CPU affinity"
                " and quota)"
            ),
            limit=(
                "having more workers than processors slows down loading if it is CPU-bound, but"
                " not if it waits for a disk or a network"
            ),
            fix=f"pass num_workers={whole_processors} if loading is CPU-bound.",
            rule="H630",
        )
    free_bytes = machine.shared_memory_free_bytes
    if free_bytes is not None and load.shared_memory_bytes > free_bytes:
        yield Preflight(
            what=(
                f"{load.num_workers} workers x prefetch_factor={load.prefetch_factor} with batches"
                f" of {size(load.batch_bytes)} need {size(load.shared_memory_bytes)} of shared"
                f" memory, but /dev/shm has only {size(free_bytes)} free"
            ),
            limit="a worker fails when /dev/shm is full",
            fix=(
                "enlarge /dev/shm (docker run --shm-size=8g), or lower prefetch_factor or"
                " num_workers."
            ),
            rule="H631",
            certain=load.batch_bytes > free_bytes,
        )
