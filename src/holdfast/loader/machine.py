"""What this machine gives to loader workers, and what will go wrong with more than it has.

Reads Linux's files and decides nothing. What cannot be read does not limit.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Facts about the machine, as far as they limit loading.

    None where something is unknown or without a limit.

    `cpu_quota` is a fraction under a CFS quota, `shared_memory_free_bytes` is of /dev/shm.
    """

    cpu_quota: float
    shared_memory_free_bytes: int | None = None

    @classmethod
    def here(cls) -> Machine:
        """Return the facts of the machine that this process runs on."""
        free = None
        with contextlib.suppress(OSError):
            found = os.statvfs("/dev/shm")  # noqa: S108 - no file is made
            free = found.f_bavail * found.f_frsize
        return cls(cpu_quota=cpu_quota(), shared_memory_free_bytes=free)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What workers would need, with batches of these bytes."""

    num_workers: int
    prefetch_factor: int = 2
    batch_bytes: int = 0

    @classmethod
    def of(cls, batch: Any, num_workers: int, prefetch_factor: int | None) -> Load:
        """Return the load of batches like this one.

        A view is sent with the whole memory that it looks into.
        """
        storages = {}
        for tensor in tensors_in(batch):
            if tensor.layout is torch.strided and not tensor.is_nested:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr() or id(tensor)] = storage.nbytes()
        size_bytes = sum(storages.values())
        return cls(
            num_workers=num_workers, prefetch_factor=prefetch_factor or 2, batch_bytes=size_bytes
        )

    @property
    def shared_memory_bytes(self) -> int:
        """Bytes in /dev/shm at most.

        All batches under way, and the one that is being trained on.
        """
        return (
            (self.num_workers * self.prefetch_factor + 1) * self.batch_bytes
            if self.num_workers
            else 0
        )


def concerns(load: Load, machine: Machine) -> Iterator[Preflight]:
    """Yield what will or may go wrong with these workers; nothing without workers."""
    if load.num_workers > machine.cpu_quota:
        most = max(1, math.floor(machine.cpu_quota))
        yield Preflight(
            what=(
                f"num_workers={load.num_workers} on {machine.cpu_quota:g} processors (affinity and"
                " quota)"
            ),
            limit=(
                "workers that compute get slower beyond that; workers that wait for a disk or a"
                " network do not"
            ),
            fix=f"pass num_workers={most} if loading computes.",
            rule="H630",
        )
    asked = (
        f"{load.num_workers} workers x prefetch_factor={load.prefetch_factor}, batches of"
        f" {size(load.batch_bytes)}"
    )
    free = machine.shared_memory_free_bytes
    if free is not None and load.shared_memory_bytes > free:
        yield Preflight(
            what=(
                f"{asked}: {size(load.shared_memory_bytes)} of shared memory, and /dev/shm has"
                f" {size(free)} free"
            ),
            limit="a worker that finds it full fails",
            fix=(
                "make /dev/shm larger (docker run --shm-size=8g), or lower prefetch_factor, then"
                " num_workers."
            ),
            rule="H631",
            certain=load.batch_bytes > free,
        )
