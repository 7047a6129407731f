"""What a machine has for workers, as Linux writes it on hosts and in containers, and what it has
not.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.core.control_groups import memory_available_bytes
from holdfast.core.errors import LoaderError
from holdfast.loader.loader import DataLoader
from holdfast.loader.machine import Load, Machine, concerns, cpu_quota

GIB = 2**30
MEMINFO = "MemTotal:       32879140 kB\nMemFree:         1048576 kB\nMemAvailable:   16777216 kB\n"
V1_GROUPS = "12:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n0::/system.slice\n"


def machine(root: Path, files: dict[str, str]) -> Path:
    """Write the files of a machine with 16 GiB available, and these besides."""
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def _version_1(folder: str, quota: str) -> dict[str, str]:
    return {
        "proc/self/cgroup": V1_GROUPS,
        f"sys/fs/cgroup/{folder}/docker/abc/cpu.cfs_quota_us": quota,
        f"sys/fs/cgroup/{folder}/docker/abc/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/cpuset/docker/abc/cpu.cfs_quota_us": "1000",
    }


_QUOTAS: dict[str, tuple[dict[str, str], float]] = {
    "affinity": ({}, 8),
    "a group above, in version 2": (
        {
            "proc/self/cgroup": "0::/kubepods/pod1/container\n",
            "sys/fs/cgroup/kubepods/pod1/container/cpu.max": "max 100000\n",
            "sys/fs/cgroup/kubepods/pod1/cpu.max": "250000 100000\n",
            "sys/fs/cgroup/kubepods/cpu.max": "600000 100000\n",
        },
        2.5,
    ),
    "a container that sees its group as the root": (
        {
            "proc/self/cgroup": "0::/docker/not-mounted-here\n",
            "sys/fs/cgroup/cpu.max": "150000 100000\n",
        },
        1.5,
    ),
    "version 1": (_version_1("cpu,cpuacct", "50000"), 0.5),
    "version 1 without a quota": (_version_1("cpu", "-1"), 8),
}


@pytest.mark.parametrize(("files", "expected"), _QUOTAS.values(), ids=_QUOTAS)
def test_affinity_and_the_smallest_quota_limit_the_processors(
    tmp_path: Path, files: dict[str, str], expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Linux writes them on hosts and in containers, with control groups of either version."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert cpu_quota(machine(tmp_path, files)) == expected


def test_a_container_that_sees_its_group_as_the_root_has_its_memory(tmp_path: Path) -> None:
    """Where the path is one of the host and only its root is mounted, the root's limit is read."""
    files = {
        "proc/self/cgroup": "0::/docker/not-mounted-here\n",
        "sys/fs/cgroup/memory.max": str(4 * GIB),
        "sys/fs/cgroup/memory.current": str(3 * GIB),
    }
    assert memory_available_bytes(machine(tmp_path, files)) == GIB


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(6 * GIB, 3 * GIB), (9223372036854771712, 16 * GIB), (4 * GIB, GIB), (2 * GIB, 0)],
)
def test_memory_is_what_the_tightest_group_leaves(
    tmp_path: Path, limit: int, expected: int
) -> None:
    """Version 1: idle file pages are no usage, the largest number is no limit, and the least is
    0.
    """
    files = {
        "proc/self/cgroup": V1_GROUPS,
        "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": str(limit),
        "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": str(5 * GIB),
        "sys/fs/cgroup/memory/docker/abc/memory.stat": (
            f"cache {4 * GIB}\ntotal_inactive_file {2 * GIB}\n"
        ),
    }
    assert memory_available_bytes(machine(tmp_path, files)) == expected


MACHINE = Machine(cpu_quota=4, shared_memory_free_bytes=100 * 2**20)


@pytest.mark.parametrize(
    ("load", "rule", "certain", "figures"),
    [
        (Load(num_workers=6), "H630", False, "num_workers=6 on 4 processors"),
        (
            Load(num_workers=4, batch_bytes=2**24),
            "H631",
            False,
            "144 MiB of shared memory, but /dev/shm has only 100 MiB",
        ),
        (Load(num_workers=1, batch_bytes=2**27), "H631", True, "384 MiB of shared memory"),
    ],
)
def test_what_the_machine_has_not_is_named_with_its_figures(
    load: Load, rule: str, certain: bool, figures: str
) -> None:
    """What is short, how much of it, and whether a single batch is too much already."""
    (found,) = concerns(load, MACHINE)
    assert (found.rule, found.certain) == (rule, certain)
    assert figures in found.what
    assert found.fix


def test_nothing_speaks_against_what_fits_or_cannot_be_known() -> None:
    """No workers need nothing; what cannot be read does not limit."""
    heavy = Load(num_workers=4, batch_bytes=2**40)
    assert not list(concerns(Load(num_workers=4, batch_bytes=2**20), MACHINE))
    assert not list(concerns(dataclasses.replace(heavy, num_workers=0), MACHINE))
    assert not list(concerns(heavy, Machine(cpu_quota=4)))


def test_a_view_weighs_what_it_looks_into() -> None:
    """It is sent with its whole memory; two views of one memory are sent once."""
    whole = torch.zeros(100, dtype=torch.float64)
    load = Load.of({"a": whole[:2], "b": [whole[3:], "text"], "c": torch.zeros(5)}, 2, None)
    assert (load.batch_bytes, load.prefetch_factor) == (820, 2)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_number_that_is_given_is_checked_against_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before workers start, and again when the size of a batch is known.

    Each rule is an event once.
    """
    machine = Machine(cpu_quota=1, shared_memory_free_bytes=50)
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: machine))
    loader = DataLoader(torch.zeros(24), batch_size=4, num_workers=2)
    rules: list[Any] = []
    loader._record = lambda data: rules.append(data.rule)
    batches = iter(loader)
    next(batches)
    assert rules == ["H630", "H631"]
    assert len(list(batches)) == 5
    list(loader)
    assert rules == ["H630", "H631"]


def test_workers_are_a_number() -> None:
    """Neither they nor what each prefetches is chosen here.

    The error says how a number is judged.
    """
    for options in ({"prefetch_factor": "auto"}, {"prefetch_factor": 0}, {"num_workers": "auto"}):
        with pytest.raises(LoaderError) as caught:
            DataLoader([1], **{"num_workers": 1, **options})
        assert caught.value.rule == "H607"
    assert "H630" in str(caught.value)
