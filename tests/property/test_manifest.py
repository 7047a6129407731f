"""The manifest: no byte of a checkpoint can change without being noticed."""

from __future__ import annotations

import os
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.saver import snapshot, write
from holdfast.checkpoint.store import Entry, Store
from holdfast.core.errors import CheckpointError


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> Entry:
    """A small checkpoint with a file of tensors of odd shapes and types, and one of state."""
    tree = {
        "weight": torch.randn(2, 3),
        "half": torch.randn(7).bfloat16(),
        "odd bytes": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 2),
    }
    shot = snapshot({"model": tree, "run": {"step": 7, "seen": [1, 2]}}, 7)
    return write(Store(tmp_path_factory.mktemp("run")), shot, unix_seconds=1.0)


def _verifies(entry: Entry) -> bool:
    try:
        entry.verify()
    except CheckpointError:
        return False
    return True


def test_a_changed_bit_in_any_byte_is_detected(entry: Entry) -> None:
    """Every single byte of every file, the manifest included, is covered by a digest."""
    chance = random.Random(5)
    entry.verify()
    for path in sorted(entry.path.iterdir()):
        with path.open("r+b", buffering=0) as file:
            for place, byte in enumerate(path.read_bytes()):
                os.pwrite(file.fileno(), bytes([byte ^ (1 << chance.randrange(8))]), place)
                assert not _verifies(entry), f"byte {place} of {path.name} may change unnoticed"
                os.pwrite(file.fileno(), bytes([byte]), place)
    entry.verify()


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_other_content_of_a_file_is_detected(data: st.DataObject, entry: Entry) -> None:
    """Cut, extended, emptied, reordered or replaced by another file of the same checkpoint: it is noticed."""
    path = data.draw(st.sampled_from(sorted(entry.path.iterdir())), label="file")
    before = path.read_bytes()
    other = data.draw(st.sampled_from([found.read_bytes() for found in sorted(entry.path.iterdir())]))
    first, second = sorted(data.draw(st.tuples(*[st.integers(0, len(before))] * 2)))
    after = data.draw(
        st.sampled_from(
            [
                before[:first],
                before + b"\0",
                b"\0" + before,
                before[:first] + before[second:],
                before[first:] + before[:first],
                before[:first] + bytes(second - first) + before[second:],
                other,
            ]
        )
    )
    if after == before:
        return
    path.write_bytes(after)
    try:
        with pytest.raises(CheckpointError):
            entry.verify()
    finally:
        path.write_bytes(before)
    entry.verify()
