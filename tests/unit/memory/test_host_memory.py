"""How much may still be allocated: the least of what machine, control groups and the process's own limits leave."""

from __future__ import annotations

from pathlib import Path

from holdfast.memory.host_memory import available_bytes
from holdfast.testing import memory_limited


def test_a_real_limit_of_this_process_counts() -> None:
    """With the data segment limited to 64 MiB more than it has, no more than that is left."""
    before = available_bytes()
    assert before is not None
    with memory_limited(64 * 2**20):
        left = available_bytes()
    assert left is not None
    assert left <= min(64 * 2**20, before)


def test_what_cannot_be_read_does_not_limit(tmp_path: Path) -> None:
    """Where there are no such files, nothing is known."""
    assert available_bytes(tmp_path) is None
