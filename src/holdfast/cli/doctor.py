"""`holdfast doctor`: check whether this machine is ready to train.

`CHECKS` lists the checks in output order. The docstring of each check is the question that it
answers. No check imports torch or creates a CUDA context.
"""

from __future__ import annotations

import math
import os
import resource
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from holdfast.cli.nvidia_smi import nvidia_smi
from holdfast.cli.output import Json, print_json
from holdfast.core.control_groups import cpu_quota, read_fields
from holdfast.core.text import moment, sanitise, size
from holdfast.memory.host_memory import allocation_can_fail, available_bytes
from holdfast.supervise.watch.py_spy import find_py_spy

_GIB = 1 << 30
# torch's DataLoader workers pass batches to the training process through this directory.
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - no file is created there
# Warn if less shared memory than this is free. Docker provides only 64 MiB by default.
_LEAST_SHARED_MEMORY_BYTES = _GIB
# Warn if less disk space than this is free. It is enough for about three checkpoints of a model
# with 124 million parameters and Adam's moments, at 1.5 GB each.
_LEAST_DISK_BYTES = 5 * _GIB
# Warn if a process may open fewer files than this. By default, torch's loader workers pass each
# tensor as an open file.
_LEAST_OPEN_FILES = 4096
# Bit mask of CAP_SYS_PTRACE in a capability set, from linux/capability.h.
_CAP_SYS_PTRACE = 1 << 19
# Advice for file systems on which a recording may be lost, keyed by the prefix of the file system
# type.
_FIX_BY_FILE_SYSTEM = {
    "nfs": (
        "renames and locks are unreliable unless it is mounted with the option hard and without"
        " nolock; change the mount options, or use another --run-dir"
    ),
    "overlay": "it is deleted with the container; mount a volume there, or pass a --run-dir on one",
    "tmpfs": "it is in memory and lost on a reboot; pass a --run-dir on a disk",
    # Google Drive in Colab, gcsfuse, mountpoint-s3, rclone and others. Some cannot rename a folder,
    # which is how a checkpoint is committed, some upload a file only when it is closed or later,
    # and locks hold on one machine only.
    "fuse.": (
        "locks do not keep other machines out, folders may not be renamed in one step, and files"
        " may be uploaded later; use a --run-dir on a local disk, and copy to this folder with"
        " Guard(mirror=) or `holdfast run --mirror`"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One result of a check, printed as one line."""

    # Subject of the check, such as "open files".
    what: str
    # What the check found on this machine, such as "1024 at most".
    value: str
    # Advice without a final period; empty if nothing is wrong.
    fix: str = ""


def run(
    run_dir: Annotated[
        Path, typer.Option(metavar="DIR", help="The directory of your runs, whose disk is checked.")
    ] = Path("runs"),
    as_json: Json = False,
) -> None:
    """Check whether this machine is ready to train.

    Print one line per check, with a fix if there is a problem. The exit code is always 0.
    """
    results: list[CheckResult] = []
    for check in CHECKS:
        results.extend(check(run_dir.absolute()))
    if as_json:
        print_json([asdict(result) for result in results])
        return
    for result in results:
        typer.echo(_line(result))


def _line(result: CheckResult) -> str:
    if not result.fix:
        return f"  {result.what:<14}{result.value}"
    return f"! {result.what:<14}{result.value}. Fix: {result.fix}."


# --- Checks ---------------------------------------------------------------------------------------

# A check receives the absolute path of the directory that contains the runs. It returns an empty
# list if it does not apply to this machine.
Check: TypeAlias = Callable[[Path], list[CheckResult]]


def processors(_run_dir: Path) -> list[CheckResult]:
    """How many processors may this process use, and would torch start more threads?"""
    quota = cpu_quota()
    usable = max(1, math.floor(quota))
    fix = ""
    # torch counts the processors in the affinity mask and ignores the container's CPU quota.
    if quota < len(os.sched_getaffinity(0)):
        fix = f"export OMP_NUM_THREADS={usable}, and use at most {usable} workers"
    value = f"{quota:g} of {os.cpu_count()}, by affinity and quota"
    return [CheckResult(what="processors", value=value, fix=fix)]


def memory(_run_dir: Path) -> list[CheckResult]:
    """How much host memory is available, and can an allocation fail before memory is exhausted?"""
    left_bytes = available_bytes()
    left = "unknown" if left_bytes is None else size(left_bytes)
    total_bytes = 1024 * read_fields(Path("/proc/meminfo")).get("MemTotal", 0)
    value = f"{left} available in this container; the machine has {size(total_bytes)}"
    fix = ""
    if allocation_can_fail():
        value += ", and allocations fail before it is exhausted"
        fix = "ulimit -v unlimited; ulimit -d unlimited; sysctl vm.overcommit_memory=0"
    return [CheckResult(what="memory", value=value, fix=fix)]


def shared_memory(_run_dir: Path) -> list[CheckResult]:
    """Is there enough shared memory for the batches of loader workers?"""
    try:
        usage = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return []
    free_bytes = usage.f_bavail * usage.f_frsize
    total_bytes = usage.f_blocks * usage.f_frsize
    value = (
        f"{size(free_bytes)} free of {size(total_bytes)}; loader workers pass batches through it"
    )
    fix = ""
    if free_bytes < _LEAST_SHARED_MEMORY_BYTES:
        fix = f"docker run --shm-size=8g, or mount -o remount,size=8G {_SHARED_MEMORY}"
    return [CheckResult(what="shared memory", value=value, fix=fix)]


def open_files(_run_dir: Path) -> list[CheckResult]:
    """How many files may a process open, and can the limit be raised?"""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fix = ""
    if soft < min(hard, _LEAST_OPEN_FILES):
        fix = f"ulimit -n {hard}"
    return [CheckResult(what="open files", value=f"{soft} at most", fix=fix)]


def clock(_run_dir: Path) -> list[CheckResult]:
    """Does the clock show a time before holdfast was installed?"""
    now = time.time()
    fix = ""
    if now < Path(__file__).stat().st_mtime:
        fix = "the clock is slow; set it, or start a time service"
    return [CheckResult(what="clock", value=f"{moment(now)} UTC", fix=fix)]


def disk_of_runs(run_dir: Path) -> list[CheckResult]:
    """Does the disk of the runs have space for checkpoints, and does it store them reliably?"""
    folder = next(path for path in (run_dir, *run_dir.parents) if path.is_dir())
    free_bytes = shutil.disk_usage(folder).free
    file_system = _file_system_of(folder)
    fix = ""
    if free_bytes < _LEAST_DISK_BYTES:
        fix = "free some space, or checkpoints cannot be written"
    else:
        for beginning, advice in _FIX_BY_FILE_SYSTEM.items():
            # The dot ends a type that has no subtype, such as "fuse" without the name of a program.
            if f"{file_system}.".startswith(beginning):
                fix = advice
    value = f"{size(free_bytes)} free, {sanitise(file_system)}, at {sanitise(folder)}"
    return [CheckResult(what="disk of runs", value=value, fix=fix)]


def _file_system_of(folder: Path) -> str:
    """Return the type of the file system that contains a directory, such as ``"ext4"``."""
    folder = folder.resolve()
    file_system = "unknown"
    depth = -1
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _device, mount_point, mounted_type, *_options = line.split()
        # The longest matching mount point is the one that contains the directory. If several file
        # systems are mounted there, the last one hides the others.
        if folder.is_relative_to(mount_point) and len(mount_point) >= depth:
            file_system = mounted_type
            depth = len(mount_point)
    return file_system


def gpus(_run_dir: Path) -> list[CheckResult]:
    """Which GPUs does the driver report, and can the installed torch use them?"""
    torch_version = version("torch")
    lines = nvidia_smi("--query-gpu=name,memory.total,driver_version")
    fix = ""
    if not lines:
        lines = ["nvidia-smi shows none"]
        if Path("/dev/nvidia0").exists():
            fix = "install the driver's nvidia-smi"
    elif "+cpu" in torch_version:
        fix = "this torch build supports only CPUs; install a CUDA build (pytorch.org/get-started)"
    return [
        CheckResult(what="GPU", value=f"{sanitise(line)}; torch {torch_version}", fix=fix)
        for line in lines
    ]


def stacks(_run_dir: Path) -> list[CheckResult]:
    """Can stack traces of other processes be read, as `holdfast attach` does?"""
    has_py_spy = bool(find_py_spy())
    value = "allowed"
    fix = ""
    if not has_py_spy:
        fix = "pip install py-spy"
    if not _may_trace_others():
        value = "not allowed; only processes under `holdfast run` can show their stacks"
        fix = "docker run --cap-add SYS_PTRACE, or sysctl kernel.yama.ptrace_scope=0"
    if not has_py_spy:
        value += "; py-spy is not installed"
    return [CheckResult(what="stacks", value=value, fix=fix)]


def _may_trace_others() -> bool:
    """Return whether this process may trace other processes of the same user; see ptrace(2)."""
    status = Path("/proc/self/status").read_text()
    capabilities = int(status.partition("CapEff:")[2].split()[0], 16)
    if capabilities & _CAP_SYS_PTRACE:
        return True
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    return not scope.exists() or scope.read_text().strip() == "0"


CHECKS: tuple[Check, ...] = (
    processors,
    memory,
    shared_memory,
    open_files,
    clock,
    disk_of_runs,
    gpus,
    stacks,
)
