"""Resident memory of this process as the kernel counts it (Linux)."""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")


def resident_bytes() -> int:
    """Return what is resident now."""
    return _read("VmRSS")


def peak_bytes() -> int:
    """Return the most that was resident since the start or the last `reset_peak`."""
    return _read("VmHWM")


def reset_peak() -> None:
    """Let the peak start again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def _read(key: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}")
