"""How much memory this process may still take on the host, as the kernel would decide.

The smallest of: what the machine has left, what the control group has left (version 2, then 1), and what the
process's own limits leave. Needs Linux's files; what cannot be read does not limit.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

_GROUPS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes that may still be allocated, or None if nothing limits them.

    Args:
        proc: The process file system.
        cgroup: The control group of this process, as it is mounted in a container.
    """
    return min(_left(proc, cgroup), default=None)


def _left(proc: Path, cgroup: Path) -> Iterator[int]:
    machine = _fields(proc / "meminfo")
    if "MemAvailable" in machine:
        yield machine["MemAvailable"]
    for limit, usage in _GROUPS:
        with contextlib.suppress(OSError, ValueError):  # no such version, or "max"
            yield int((cgroup / limit).read_text()) - int((cgroup / usage).read_text())
    mine = _fields(proc / "self" / "status")
    for kind, used in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY and used in mine:
            yield soft - mine[used]


def _fields(path: Path) -> dict[str, int]:
    """Return the ``Name: 123 kB`` lines of a file, in bytes; nothing if it cannot be read."""
    found = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            if value.endswith(" kB"):
                found[name] = int(value.removesuffix(" kB")) * 1024
    return found
