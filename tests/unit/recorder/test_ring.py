"""The ring: fixed records in a mapped file that outlive the process and wrap around."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.recorder.reader import read_ring
from holdfast.recorder.ring import HEADER_BYTES, RingWriter, slot_struct

_PAYLOAD = 8
_SLOT_BYTES = slot_struct(_PAYLOAD).size


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "test.ring"


def _payloads(path: Path) -> list[int]:
    return [int.from_bytes(record.payload, "little") for record in read_ring(path)]


def _fill(path: Path, numbers: range, *, capacity: int) -> None:
    writer = RingWriter(path, payload_bytes=_PAYLOAD, capacity=capacity)
    for number in numbers:
        writer.append(number.to_bytes(_PAYLOAD, "little"))
    writer.close()


def test_another_layout_starts_a_new_ring(path: Path) -> None:
    """Records of another capacity are not mixed with new ones, and stay readable beside them."""
    _fill(path, range(1, 4), capacity=4)
    _fill(path, range(7, 9), capacity=5)
    assert _payloads(path) == [7, 8]
    assert _payloads(path.with_name("test.ring.old")) == [1, 2, 3]


def test_a_foreign_file_is_moved_and_not_destroyed(path: Path) -> None:
    """Bytes that are no ring lie under ``.old`` afterwards, whole, while a file of no bytes is
    just used.
    """
    path.write_bytes(b"something of yours")
    _fill(path, range(1, 3), capacity=4)
    assert path.with_name("test.ring.old").read_bytes() == b"something of yours"
    empty = path.with_name("empty.ring")
    empty.touch()
    _fill(empty, range(1, 3), capacity=4)
    assert _payloads(path) == _payloads(empty) == [1, 2]
    assert not path.with_name("empty.ring.old").exists()


def test_a_cut_file_starts_a_new_ring(path: Path) -> None:
    """A writer never maps less than it will write, so a cut file cannot end in a SIGBUS."""
    _fill(path, range(1, 4), capacity=4)
    os.truncate(path, HEADER_BYTES + 10)
    _fill(path, range(7, 9), capacity=4)
    assert _payloads(path) == [7, 8]
    assert path.stat().st_size == HEADER_BYTES + 4 * _SLOT_BYTES


def test_a_ring_without_a_header_is_read_as_empty_and_then_used(path: Path) -> None:
    """A process that ends right after allocating the file leaves only zeros.

    A reader finds no records in it, and the next writer uses it.
    """
    path.write_bytes(bytes(HEADER_BYTES + 4 * _SLOT_BYTES))
    assert read_ring(path) == []
    _fill(path, range(1, 3), capacity=4)
    assert _payloads(path) == [1, 2]
    assert not path.with_name("test.ring.old").exists()


def test_the_space_is_allocated_at_the_start(path: Path) -> None:
    """The file has no holes, so a disk that fills up later cannot stop the recording."""
    RingWriter(path, payload_bytes=_PAYLOAD, capacity=1000).close()
    found = path.stat()
    assert found.st_size == HEADER_BYTES + 1000 * _SLOT_BYTES
    assert found.st_blocks * 512 >= found.st_size
