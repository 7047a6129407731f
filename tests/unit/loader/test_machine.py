"""What is read of a machine: files as Linux writes them, of hosts, containers and both versions of control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.loader.machine import Machine, cpu_quota, memory_available_bytes

GIB = 2**30
STATUS = "Name:\tpython\nUmask:\t0022\nCpus_allowed:\tff\nCpus_allowed_list:\t{}\nMems_allowed_list:\t0\n"
MEMINFO = "MemTotal:       32879140 kB\nMemFree:         1048576 kB\nMemAvailable:   16777216 kB\n"
LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max processes             127411               127411               processes
Max open files            1024                 1048576              files
"""
V1_GROUPS = "12:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n0::/system.slice\n"


def machine(root: Path, files: dict[str, str]) -> Path:
    """Write the files of a machine with 8 processors and 16 GiB available, and these besides."""
    for name, text in {"proc/self/status": STATUS.format("0-7"), "proc/meminfo": MEMINFO, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(("allowed", "count"), [("0-7", 8), ("3", 1), ("0-1,4-6,63", 6)])
def test_affinity_limits_the_processors(tmp_path: Path, allowed: str, count: int) -> None:
    """Without a quota, as many processors count as the affinity names."""
    assert cpu_quota(machine(tmp_path, {"proc/self/status": STATUS.format(allowed)})) == count


def test_the_smallest_quota_of_the_groups_above_counts(tmp_path: Path) -> None:
    """A group without a quota of its own is limited by the one above it, in version 2."""
    files = {
        "proc/self/cgroup": "0::/kubepods/pod1/container\n",
        "sys/fs/cgroup/kubepods/pod1/container/cpu.max": "max 100000\n",
        "sys/fs/cgroup/kubepods/pod1/cpu.max": "250000 100000\n",
        "sys/fs/cgroup/kubepods/cpu.max": "600000 100000\n",
    }
    assert cpu_quota(machine(tmp_path, files)) == 2.5


def test_a_container_sees_its_own_group_at_the_root(tmp_path: Path) -> None:
    """Where the path is one of the host and only its root is mounted, the root's quota and limit are read."""
    files = {
        "proc/self/cgroup": "0::/docker/not-mounted-here\n",
        "sys/fs/cgroup/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/memory.max": str(4 * GIB),
        "sys/fs/cgroup/memory.current": str(3 * GIB),
    }
    root = machine(tmp_path, files)
    assert cpu_quota(root) == 1.5
    assert memory_available_bytes(root) == GIB


@pytest.mark.parametrize("folder", ["cpu,cpuacct", "cpu"])
@pytest.mark.parametrize(("quota", "expected"), [("50000", 0.5), ("-1", 8.0)])
def test_version_1_quotas_are_read(tmp_path: Path, folder: str, quota: str, expected: float) -> None:
    """Version 1 writes a quota of -1 for none, under either name that systems give the folder."""
    files = {
        "proc/self/cgroup": V1_GROUPS,
        f"sys/fs/cgroup/{folder}/docker/abc/cpu.cfs_quota_us": quota,
        f"sys/fs/cgroup/{folder}/docker/abc/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/cpuset/docker/abc/cpu.cfs_quota_us": "1000",
    }
    assert cpu_quota(machine(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("limit", "expected"), [(6 * GIB, 3 * GIB), (9223372036854771712, 16 * GIB), (4 * GIB, GIB), (2 * GIB, 0)]
)
def test_memory_is_what_the_tightest_group_leaves(tmp_path: Path, limit: int, expected: int) -> None:
    """Version 1: idle file pages are no usage, the largest number is no limit, and the least is 0."""
    files = {
        "proc/self/cgroup": V1_GROUPS,
        "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": str(limit),
        "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": str(5 * GIB),
        "sys/fs/cgroup/memory/docker/abc/memory.stat": f"cache {4 * GIB}\ntotal_inactive_file {2 * GIB}\n",
    }
    assert memory_available_bytes(machine(tmp_path, files)) == expected


def test_descriptors_and_shared_memory_are_read(tmp_path: Path) -> None:
    """The soft limit counts, and the space of what is mounted as shared memory."""
    root = machine(tmp_path, {"proc/self/limits": LIMITS, **{f"proc/self/fd/{n}": "" for n in range(7)}})
    (root / "dev/shm").mkdir(parents=True)
    found = Machine.here(root)
    assert (found.open_files, found.open_files_limit) == (7, 1024)
    assert found.shared_memory_total_bytes == os.statvfs(root).f_blocks * os.statvfs(root).f_frsize
    assert 0 < (found.shared_memory_free_bytes or 0) <= found.shared_memory_total_bytes


def test_what_cannot_be_read_does_not_limit(tmp_path: Path) -> None:
    """A system without these files gives its processors and no other fact."""
    assert Machine.here(tmp_path) == Machine(cpu_quota=len(os.sched_getaffinity(0)))


def test_the_real_machine_answers() -> None:
    """On the machine of the tests the facts agree with what the system says by other means."""
    found = Machine.here()
    assert 0 < found.cpu_quota <= len(os.sched_getaffinity(0))
    with Path(os.devnull).open() as _:
        assert Machine.here().open_files == found.open_files + 1


def test_processes_share_a_machine() -> None:
    """Of four training processes each gets a quarter; descriptors are counted for each process anyway."""
    whole = Machine(cpu_quota=6, shared_memory_free_bytes=100, memory_available_bytes=1000, open_files_limit=64)
    part = whole.shared_by(4)
    assert (part.cpu_quota, part.shared_memory_free_bytes, part.memory_available_bytes) == (1.5, 25, 250)
    assert (part.open_files_limit, part.shared_memory_total_bytes) == (64, None)
