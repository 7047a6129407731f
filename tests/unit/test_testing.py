"""The tools for tests: their faults are real, and their checks can fail."""

from __future__ import annotations

import mmap
import os
import random
import resource
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recipes.demo.campaign import flip_random_bit
from torch.utils.data import DataLoader as TorchDataLoader

from holdfast.loader.loader import DataLoader
from holdfast.memory.oom import find_out_of_memory
from holdfast.testing import (
    FakeClock,
    check_resumable,
    data_segment_bytes,
    fill_disk,
    flip_bit,
    limit_memory,
    memory_limited,
)

_MIB = 2**20


def test_the_clock_moves_only_by_hand() -> None:
    """Both times stand still until they are advanced, and then move together."""
    clock = FakeClock()
    assert clock.unix_seconds() == clock.unix_seconds() == clock.monotonic_seconds() == 0.0
    clock.advance(2.5)
    clock.advance(0.5)
    assert clock.unix_seconds() == clock.monotonic_seconds() == 3.0


def test_memory_really_runs_out_and_comes_back() -> None:
    """Inside the limit a large allocation is refused by the kernel and a small one is not.

    After it both work.
    """
    # Far more than earlier tests can have left free in malloc's heap: that is not asked of the
    # kernel again.
    large_bytes = 4096 * _MIB
    with memory_limited(64 * _MIB):
        with pytest.raises(RuntimeError) as caught:
            torch.empty(large_bytes, dtype=torch.uint8)
        with pytest.raises(MemoryError):
            np.empty(large_bytes, dtype=np.uint8)
        assert torch.ones(_MIB, dtype=torch.uint8).sum() == _MIB
    assert find_out_of_memory(caught.value) is not None
    assert torch.empty(large_bytes, dtype=torch.uint8).nbytes == large_bytes


def test_the_limit_is_taken_away_after_an_error_too() -> None:
    """A test that fails inside the limit does not starve the tests after it."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with pytest.raises(LookupError), memory_limited(64 * _MIB):
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] < 2**40
        raise LookupError
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    limit_memory(None)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_the_data_segment_counts_what_is_allocated() -> None:
    """A block of 32 MiB shows in the figure that the limit is compared with."""
    before = data_segment_bytes()
    # From the system: the heap may hold as much, free and counted already.
    with mmap.mmap(-1, 32 * _MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS):
        assert data_segment_bytes() - before >= 31 * _MIB


def test_exactly_one_bit_is_flipped(tmp_path: Path) -> None:
    """The bit that was named changes, no other does, and a second flip undoes the first."""
    path = tmp_path / "data"
    path.write_bytes(b"\x00\xff\x55\xaa")
    before = int.from_bytes(path.read_bytes(), "little")
    for bit in (0, 7, 8, 19, 31):
        flip_bit(path, bit)
        assert int.from_bytes(path.read_bytes(), "little") ^ before == 1 << bit
        flip_bit(path, bit)
        assert int.from_bytes(path.read_bytes(), "little") == before


def test_every_bit_of_a_directory_is_as_likely(tmp_path: Path) -> None:
    """Over many flips each bit of each file, also in folders below, is hit, and larger files
    more often.
    """
    sizes = {"a": 1, "deep/b": 2, "empty": 0}
    for name, size in sizes.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    chance = random.Random(3)
    hits = Counter(flip_random_bit(tmp_path, chance) for _ in range(240))
    assert {(path.relative_to(tmp_path).as_posix(), bit) for path, bit in hits} == {
        (name, bit) for name, size in sizes.items() for bit in range(8 * size)
    }
    assert 130 < sum(count for (path, _), count in hits.items() if path.name == "b") < 190


def test_the_flip_that_is_reported_is_the_flip_that_was_made(tmp_path: Path) -> None:
    """Flipping the reported bit again restores the directory."""
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "b").write_bytes(b"defgh")
    path, bit = flip_random_bit(tmp_path, random.Random(1))
    assert {(tmp_path / "a").read_bytes(), (tmp_path / "b").read_bytes()} != {b"abc", b"defgh"}
    flip_bit(path, bit)
    assert ((tmp_path / "a").read_bytes(), (tmp_path / "b").read_bytes()) == (b"abc", b"defgh")


def test_a_disk_is_filled_up_to_what_shall_be_left(tmp_path: Path) -> None:
    """Asked to leave more than there is, nothing is written; the file is made anyway."""
    found = os.statvfs(tmp_path)
    fill_disk(tmp_path / "filler", leave_bytes=found.f_blocks * found.f_frsize)
    assert (tmp_path / "filler").stat().st_size == 0


def test_a_filled_disk_ends_without_an_error(tmp_path: Path) -> None:
    """When the system refuses more bytes, filling is done.

    Here a limit on the size of files refuses.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * _MIB + 5, hard))
    try:
        fill_disk(tmp_path / "filler")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "filler").stat().st_size == 3 * _MIB + 5


class _Forgetful:
    """A loader of torch with a position that does nothing."""

    def __init__(self, **options: Any) -> None:
        self._loader = TorchDataLoader(list(range(9)), batch_size=3, **options)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._loader)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class _OneTooFar(DataLoader):
    """A loader whose position is one batch ahead, as those that count what workers fetched."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "consumed": min(9, state["consumed"] + 3 * (state["consumed"] > 0))}


class _NoEpoch(DataLoader):
    """A loader that forgets in which epoch it was."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "epoch": 0}


@pytest.mark.parametrize(
    ("make_loader", "where"),
    [
        (_Forgetful, "stopped after 1 batches, batch 1"),
        (lambda: _OneTooFar(list(range(9)), batch_size=3), "stopped after 1 batches, batch 1"),
        (
            lambda: _NoEpoch(list(range(9)), batch_size=3, shuffle=True),
            "stopped after 4 batches, batch 4",
        ),
    ],
)
def test_the_check_of_loaders_finds_those_that_do_not_resume(
    make_loader: Callable[[], Any], where: str
) -> None:
    """A loader that forgets, runs ahead or loses the epoch fails with the first batch that
    differs.
    """
    with pytest.raises(AssertionError, match=where):
        check_resumable(make_loader, torch.equal)


def test_the_check_of_loaders_says_what_a_loader_needs() -> None:
    """Torch's own has no state: that is said before anything is read."""
    with pytest.raises(TypeError, match="a DataLoader without state_dict and load_state_dict"):
        check_resumable(lambda: torch.utils.data.DataLoader([1, 2]), torch.equal)


def test_the_check_of_loaders_passes_one_that_does() -> None:
    """A loader that resumes exactly passes."""
    check_resumable(lambda: DataLoader(list(range(9)), batch_size=3, shuffle=True), torch.equal)
