"""What this machine gives to loader workers: processor time, shared memory, open files, memory.

Reads Linux's files and decides nothing. What cannot be read does not limit. Readers take the root of the file
system, so that tests can give them the files of other machines.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.core.control_groups import group_folders, memory_available_bytes

_ROOT = Path("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Facts about the machine, as far as they limit loading.

    Args:
        cpu_quota: Processors that this process may use at once; a fraction under a CFS quota.
        shared_memory_free_bytes: Free in /dev/shm, where batches of workers lie; None if unknown.
        shared_memory_total_bytes: Size of /dev/shm.
        open_files: Descriptors that this process has open.
        open_files_limit: Most that it may have open (``ulimit -n``); None if there is no limit.
        memory_available_bytes: What may still be allocated before the kernel kills or swaps; None if unknown.
    """

    cpu_quota: float
    shared_memory_free_bytes: int | None = None
    shared_memory_total_bytes: int | None = None
    open_files: int = 0
    open_files_limit: int | None = None
    memory_available_bytes: int | None = None

    @classmethod
    def of_this_rank(cls) -> Machine:
        """Return the part of this machine that is left to one of the processes that a launcher has started on it.

        How many there are is in LOCAL_WORLD_SIZE, as torchrun sets it; one, if that is no number of processes.
        """
        told = os.environ.get("LOCAL_WORLD_SIZE", "")
        return cls.here().shared_by(max(1, int(told)) if told.isdecimal() else 1)

    @classmethod
    def here(cls, root: Path = _ROOT) -> Machine:
        """Return the facts of the machine that this process runs on.

        Args:
            root: Where ``proc``, ``sys`` and ``dev`` are mounted.
        """
        free, total = _shared_memory(root)
        return cls(
            cpu_quota=cpu_quota(root),
            shared_memory_free_bytes=free,
            shared_memory_total_bytes=total,
            open_files=_open_files(root),
            open_files_limit=_open_files_limit(root),
            memory_available_bytes=memory_available_bytes(root),
        )

    def shared_by(self, processes: int) -> Machine:
        """Return the part of one of several training processes that load on this machine at once.

        Args:
            processes: How many there are (``LOCAL_WORLD_SIZE``), this one included.
        """
        return replace(
            self,
            cpu_quota=self.cpu_quota / processes,
            shared_memory_free_bytes=_part(self.shared_memory_free_bytes, processes),
            memory_available_bytes=_part(self.memory_available_bytes, processes),
        )


def cpu_quota(root: Path = _ROOT) -> float:
    """Return how many processors this process may use at once: the least of affinity and every group's quota.

    torch's own warning looks at the affinity only, and so misses the quota of ``docker --cpus``.
    """
    return min([float(_cores_allowed(root)), *_group_quotas(root)])


def _cores_allowed(root: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/status").read_text().splitlines():
            if line.startswith("Cpus_allowed_list:"):
                return sum(_range_length(part) for part in line.split(":")[1].strip().split(","))
    return len(os.sched_getaffinity(0))


def _range_length(part: str) -> int:
    """Return how many numbers ``"3"`` or ``"0-7"`` names."""
    first, _, last = part.partition("-")
    return int(last or first) - int(first) + 1


def _group_quotas(root: Path) -> Iterator[float]:
    for folder in group_folders(root, "cpu"):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            quota, period = (folder / "cpu.max").read_text().split()
            yield int(quota) / int(period)
        with contextlib.suppress(OSError, ValueError):
            quota_us = int((folder / "cpu.cfs_quota_us").read_text())
            if quota_us > 0:  # -1 is no quota
                yield quota_us / int((folder / "cpu.cfs_period_us").read_text())


def _shared_memory(root: Path) -> tuple[int | None, int | None]:
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError:
        return None, None
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


def _open_files(root: Path) -> int:
    try:
        return sum(1 for _ in (root / "proc/self/fd").iterdir())
    except OSError:
        return 0


def _open_files_limit(root: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/limits").read_text().splitlines():
            if line.startswith("Max open files"):
                return int(line.split()[3])  # the soft limit; "unlimited" is no number
    return None


def _part(value: int | None, parts: int) -> int | None:
    return None if value is None else value // parts
