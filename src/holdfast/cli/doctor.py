"""`holdfast doctor`.

What this machine gives to a training, and what of it will go wrong, before it does.
"""

from __future__ import annotations

import math
import os
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from holdfast.cli.nvidia_smi import nvidia_smi
from holdfast.cli.output import Json, print_json
from holdfast.core.control_groups import cpu_quota, fields_of
from holdfast.core.text import moment, sanitise, size
from holdfast.memory.host_memory import allocation_can_fail, available_bytes
from holdfast.supervise.watch.py_spy import find_py_spy

_GIB = 1 << 30
_TRACE_ANY = 1 << 19  # CAP_SYS_PTRACE
_KINDS = {
    "nfs": (
        "renames and locks are as good as its server: mount it with hard and without nolock, or"
        " record elsewhere"
    ),
    "overlay": "it goes with the container: mount a volume there, or pass a --run-dir on one",
    "tmpfs": "it is memory, and goes with the machine: pass a --run-dir on a disk",
}


class Row(NamedTuple):
    """One fact; `fix` is empty where nothing is wrong."""

    what: str
    value: str
    fix: str = ""


def run(
    run_dir: Annotated[
        Path, typer.Option(help="Where runs are recorded: its disk is looked at.")
    ] = Path("runs"),
    as_json: Json = False,
) -> None:
    """Say what this machine has for a training, and what will go wrong.

    One line each, with the fix. Exit code 0.
    """
    rows = [*_host(), _disk(run_dir.absolute()), *_gpus(), _tracing()]
    if as_json:
        print_json([row._asdict() for row in rows])
    for row in [] if as_json else rows:
        typer.echo(
            f"{'!' if row.fix else ' '} {row.what:<14}{row.value}"
            + (f". Fix: {row.fix}." if row.fix else "")
        )


def _host() -> Iterator[Row]:
    quota, affinity = cpu_quota(), len(os.sched_getaffinity(0))
    most = max(1, math.floor(quota))
    fix = (
        f"export OMP_NUM_THREADS={most}, and use at most {most} workers" if quota < affinity else ""
    )
    yield Row("processors", f"{quota:g} of {os.cpu_count()}, by affinity and quota", fix)
    left, total = available_bytes(), 1024 * fields_of(Path("/proc/meminfo")).get("MemTotal", 0)
    fix = (
        "ulimit -v unlimited; ulimit -d unlimited; sysctl vm.overcommit_memory=0"
        if allocation_can_fail()
        else ""
    )
    words = (
        f"{'unknown' if left is None else size(left)} left for this container, of {size(total)} of"
        " the machine"
    )
    yield Row(
        "memory", words + (", and allocations are refused before it is used up" if fix else ""), fix
    )
    with suppress(OSError):
        found = os.statvfs("/dev/shm")  # noqa: S108 - no file is made
        free = found.f_bavail * found.f_frsize
        fix = (
            "docker run --shm-size=8g, or mount -o remount,size=8G /dev/shm" if free < _GIB else ""
        )
        words = (
            f"{size(free)} free of {size(found.f_blocks * found.f_frsize)}; workers hand batches"
            " over in it"
        )
        yield Row("shared memory", words, fix)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield Row(
        "open files", f"{soft} at most", f"ulimit -n {hard}" if soft < min(hard, 4096) else ""
    )
    late = time.time() < Path(__file__).stat().st_mtime
    yield Row(
        "clock",
        f"{moment(time.time())} UTC",
        "it is behind: set it, or start a time service" if late else "",
    )


def _disk(folder: Path) -> Row:
    folder = next(each for each in (folder, *folder.parents) if each.is_dir())
    free, kind, longest = shutil.disk_usage(folder).free, "unknown", -1
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, name, *_ = line.split()
        if folder.resolve().is_relative_to(point) and len(point) >= longest:
            kind, longest = name, len(point)
    fix = next((text for start, text in _KINDS.items() if kind.startswith(start)), "")
    fix = "make room: a checkpoint that does not fit is not written" if free < 5 * _GIB else fix
    return Row("disk of runs", f"{size(free)} free, {sanitise(kind)}, at {sanitise(folder)}", fix)


def _gpus() -> Iterator[Row]:
    torch, lines = version("torch"), nvidia_smi("--query-gpu=name,memory.total,driver_version")
    blind = "+cpu" in torch
    fix = (
        "this torch is built for the CPU only: install one for CUDA (pytorch.org/get-started)"
        if blind
        else ""
    )
    if not lines:
        fix = "install the driver's nvidia-smi" if Path("/dev/nvidia0").exists() else ""
    for line in lines or ["nvidia-smi shows none"]:
        yield Row("GPU", f"{sanitise(line)}; torch {torch}", fix)


def _tracing() -> Row:
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    status = Path("/proc/self/status").read_text()
    able = int(status.partition("CapEff:")[2].split()[0], 16) & _TRACE_ANY
    barred = not able and scope.exists() and scope.read_text().strip() != "0"
    fix = "docker run --cap-add SYS_PTRACE, or sysctl kernel.yama.ptrace_scope=0" if barred else ""
    fix = fix or ("" if find_py_spy() else 'pip install "torch-holdfast[stacks]"')
    words = (
        "not allowed: only processes of `holdfast run` show their stacks" if barred else "allowed"
    )
    return Row("stacks", words + ("" if find_py_spy() else "; py-spy is not installed"), fix)
