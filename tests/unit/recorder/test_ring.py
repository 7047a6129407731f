"""The ring: fixed records in a mapped file that outlive the process and wrap around."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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


def test_a_full_ring_keeps_the_newest(path: Path) -> None:
    """A ring of four holds the last four records, oldest first, with their running numbers."""
    _fill(path, range(1, 12), capacity=4)
    assert _payloads(path) == [8, 9, 10, 11]
    assert [record.sequence for record in read_ring(path)] == [8, 9, 10, 11]


def test_a_writer_continues_after_the_newest_record(path: Path) -> None:
    """A ring that is opened again goes on counting, also after it wrapped."""
    _fill(path, range(1, 7), capacity=4)
    _fill(path, range(7, 9), capacity=4)
    assert _payloads(path) == [5, 6, 7, 8]
    assert [record.sequence for record in read_ring(path)] == [5, 6, 7, 8]


def test_another_layout_starts_a_new_ring(path: Path) -> None:
    """Records of another capacity are not mixed with new ones, and stay readable beside them."""
    _fill(path, range(1, 4), capacity=4)
    _fill(path, range(7, 9), capacity=5)
    assert _payloads(path) == [7, 8]
    assert _payloads(path.with_name("test.ring.old")) == [1, 2, 3]


def test_a_foreign_file_is_moved_and_not_destroyed(path: Path) -> None:
    """Bytes that are no ring lie under ``.old`` afterwards, whole, while a file of no bytes is just used."""
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


def test_the_space_is_allocated_at_the_start(path: Path) -> None:
    """The file has no holes, so a disk that fills up later cannot stop the recording."""
    RingWriter(path, payload_bytes=_PAYLOAD, capacity=1000).close()
    found = path.stat()
    assert found.st_size == HEADER_BYTES + 1000 * _SLOT_BYTES
    assert found.st_blocks * 512 >= found.st_size


def test_an_empty_record_is_a_record(path: Path) -> None:
    """A payload of no bytes is padded and read, while slots never written are not."""
    writer = RingWriter(path, payload_bytes=_PAYLOAD, capacity=4)
    writer.append(b"")
    writer.close()
    assert [record.payload for record in read_ring(path)] == [bytes(_PAYLOAD)]


def test_a_slot_whose_ends_differ_is_passed_over(path: Path) -> None:
    """A write that was killed in the middle costs that one record and no other."""
    _fill(path, range(1, 5), capacity=8)
    with path.open("r+b") as file:  # the fifth write got no further than its first number
        file.seek(HEADER_BYTES + 5 * _SLOT_BYTES)
        file.write((5).to_bytes(8, "little"))
    assert _payloads(path) == [1, 2, 3, 4]
    _fill(path, range(5, 6), capacity=8)
    assert _payloads(path) == [1, 2, 3, 4, 5]


def test_records_survive_a_kill_without_warning(path: Path) -> None:
    """What was appended is in the file after SIGKILL, without close and without a flush."""
    program = (
        "import os, signal, sys; from pathlib import Path; from holdfast.recorder.ring import RingWriter\n"
        f"ring = RingWriter(Path(sys.argv[1]), payload_bytes={_PAYLOAD}, capacity=64)\n"
        f"for n in range(1, 41): ring.append(n.to_bytes({_PAYLOAD}, 'little'))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert _payloads(path) == list(range(1, 41))


def test_a_ring_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    """A missing directory is an OSError when the ring is made, not at the first record."""
    with pytest.raises(FileNotFoundError):
        RingWriter(tmp_path / "absent" / "test.ring", payload_bytes=_PAYLOAD, capacity=4)
