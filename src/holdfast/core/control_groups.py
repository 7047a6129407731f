"""What the kernel's control groups and its memory leave to this process.

Linux; what cannot be read does not limit.

Readers take the root of the file system, so that tests can give them the files of other machines.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
UNLIMITED_V1 = 1 << 60
"""From here on a limit is none.

Version 1 writes the largest multiple of a page that fits 63 bits for that.
"""


def memory_available_bytes(root: Path = _ROOT) -> int | None:
    """Return what may still be allocated: the least of the machine's memory and every group's.

    None if unknown.

    File pages that nobody has used for a while count as available, as they do in ``MemAvailable``.
    """
    machine = fields_of(root / "proc/meminfo").get("MemAvailable")
    left = [] if machine is None else [machine * 1024]
    for folder in group_folders(root, "memory"):
        inactive = fields_of(folder / "memory.stat")
        for limit, usage, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            with contextlib.suppress(OSError, ValueError):  # the other version, or "max"
                most = int((folder / limit).read_text())
                if most < UNLIMITED_V1:
                    left.append(most - int((folder / usage).read_text()) + inactive.get(cache, 0))
    return max(0, min(left)) if left else None


def cpu_quota(root: Path = _ROOT) -> float:
    """Return how many processors this process may use at once.

    The least of affinity and every group's quota.

    torch's own warning looks at the affinity only, and so misses the quota of ``docker --cpus``.
    The root of the file system is passed by tests, which have the files of other machines.
    """
    return min([float(len(os.sched_getaffinity(0))), *_group_quotas(root)])


def _group_quotas(root: Path) -> Iterator[float]:
    for folder in group_folders(root, "cpu"):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            quota, period = (folder / "cpu.max").read_text().split()
            yield int(quota) / int(period)
        with contextlib.suppress(OSError, ValueError):
            quota_us = int((folder / "cpu.cfs_quota_us").read_text())
            if quota_us > 0:  # -1 is no quota
                yield quota_us / int((folder / "cpu.cfs_period_us").read_text())


def group_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups, and of those above them, of both
    versions.

    In a container the path of /proc/self/cgroup is often one of the host, and only the root of it
    is mounted.
    """
    top = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            mounts = [top, top / "unified"] if not names else [top / names, top / controller]
            if names and controller not in names.split(","):
                continue
            inner = Path(path.lstrip("/"))
            for mount in dict.fromkeys(mounts):
                yield from (mount / part for part in (inner, *inner.parents))


def fields_of(path: Path) -> dict[str, int]:
    """Return the ``name value`` lines of a file; nothing if it cannot be read."""
    found = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            words = line.replace(":", " ").split()
            if len(words) >= 2 and words[1].isdigit():
                found[words[0]] = int(words[1])
    return found
