"""Resident memory of this process as the kernel counts it (Linux)."""

from __future__ import annotations

from pathlib import Path

from holdfast.core.control_groups import read_fields

_STATUS = Path("/proc/self/status")


def resident_bytes() -> int:
    """Return what is resident now."""
    return 1024 * read_fields(_STATUS)["VmRSS"]


def peak_bytes() -> int:
    """Return the most that was resident since the start or the last `reset_peak`."""
    return 1024 * read_fields(_STATUS)["VmHWM"]


def reset_peak() -> None:
    """Let the peak start again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
