"""Read the memory and CPU limits that Linux control groups (cgroups) impose on this process.

A limit that cannot be read is treated as no limit. The functions take the root of the file system
as an argument, so that tests can pass a copy of another machine's files.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
# In cgroup version 1, a limit of this many bytes or more means "unlimited": the kernel then reports
# the largest multiple of the page size below 2**63.
UNLIMITED_V1 = 1 << 60


@dataclass(frozen=True, slots=True)
class _MemoryFiles:
    """The names of the files in which a control group reports its memory limit and usage.

    Args:
        limit: The file that contains the limit in bytes or, in version 2, possibly "max".
        usage: The file that contains the number of bytes in use, including cached file pages.
        cache: The field of ``memory.stat`` that contains the size of the inactive file pages in
            bytes. The kernel can reclaim these pages, so they count as available (as in
            ``MemAvailable``).
    """

    limit: str
    usage: str
    cache: str


_MEMORY_FILES = (
    # Control groups version 2.
    _MemoryFiles("memory.max", "memory.current", "inactive_file"),
    # Control groups version 1.
    _MemoryFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def memory_available_bytes(root: Path = _ROOT) -> int | None:
    """Return how many bytes this process can still allocate, or None if that is unknown.

    The result is the minimum of the machine's available memory and what each control group of this
    process still allows.
    """
    available = []
    machine_kib = read_fields(root / "proc/meminfo").get("MemAvailable")
    if machine_kib is not None:
        available.append(machine_kib * 1024)
    for folder in group_folders(root, "memory"):
        available += _group_memory(folder)
    if not available:
        return None
    return max(0, min(available))


def _group_memory(folder: Path) -> Iterator[int]:
    """Yield how many bytes a control group still allows. Yield nothing if it has no limit."""
    cached_bytes = read_fields(folder / "memory.stat")
    for files in _MEMORY_FILES:
        # Only one version's files exist, and the limit may be "max".
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / files.limit).read_text())
            if limit < UNLIMITED_V1:
                used = int((folder / files.usage).read_text())
                yield limit - used + cached_bytes.get(files.cache, 0)


def cpu_quota(root: Path = _ROOT) -> float:
    """Return how many processors this process may use at once.

    The result is the minimum of the process's CPU affinity and its control groups' quotas. torch's
    own warning about too many loader workers considers only the affinity, and so ignores a limit
    set by ``docker --cpus``.
    """
    affinity = float(len(os.sched_getaffinity(0)))
    return min([affinity, *_group_quotas(root)])


def _group_quotas(root: Path) -> Iterator[float]:
    """Yield the CPU quota, in processors, of each of this process's control groups that has one."""
    for folder in group_folders(root, "cpu"):
        # Version 2. The file may not exist, and the quota may be "max".
        with contextlib.suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            yield int(quota) / int(period)
        # Version 1, in which -1 means no quota.
        with contextlib.suppress(OSError, ValueError):
            quota_us = int((folder / "cpu.cfs_quota_us").read_text())
            if quota_us > 0:
                yield quota_us / int((folder / "cpu.cfs_period_us").read_text())


def group_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the possible folders of this process's control groups and of the groups' ancestors.

    Some of these folders may not exist.

    Args:
        root: The root of the file system.
        controller: The version 1 controller, such as ``"memory"``. It is ignored in version 2,
            which has a single hierarchy for all controllers.
    """
    top = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            if not names:
                mounts = [top, top / "unified"]
            elif controller in names.split(","):
                mounts = [top / names, top / controller]
            else:
                continue
            # In a container, `path` is often the group's path on the host, but only the group's own
            # folder is mounted, as the root. Therefore the ancestors are tried too.
            group = Path(path.lstrip("/"))
            for mount in dict.fromkeys(mounts):
                for folder in (group, *group.parents):
                    yield mount / folder


def read_fields(path: Path) -> dict[str, int]:
    """Return a file's ``name value`` or ``name: value`` lines as a dict; empty if reading fails."""
    values = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            words = line.replace(":", " ").split()
            if len(words) >= 2 and words[1].isdigit():
                values[words[0]] = int(words[1])
    return values
