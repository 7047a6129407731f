"""The saver: trees go through real files and come back; a save that fails changes nothing; no byte changes unseen."""

from __future__ import annotations

import os
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.checkpoint import saver
from holdfast.checkpoint.saver import Snapshot, encode, read_components, snapshot, write
from holdfast.checkpoint.store import Entry, Store
from holdfast.core.errors import CheckpointError
from holdfast.testing import memory_limited


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "run" / "checkpoints")


def _save(store: Store, step: int = 1, **components: Any) -> Entry:
    return write(store, snapshot(components, step), unix_seconds=7.5)


def _saved(store: Store, tree: Any) -> Any:
    return read_components(_save(store, part=tree), ["part"])["part"]


@contextmanager
def _largest_file(size_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("dtype", [*saver._DTYPES, torch.complex64, torch.complex128], ids=str)
def test_every_type_of_tensor_comes_back(dtype: torch.dtype, store: Store) -> None:
    """Vectors, scalars and empty tensors of every type keep type, shape and values."""
    tree = {
        "v": torch.tensor([0.0, 1.0, 3.0]).to(dtype),
        "s": torch.ones(()).to(dtype),
        "e": torch.ones(2, 0).to(dtype),
    }
    found = _saved(store, tree)
    for name, tensor in tree.items():
        assert (found[name].dtype, found[name].shape) == (dtype, tensor.shape)
        assert torch.equal(found[name].to(torch.complex128), tensor.to(torch.complex128))


def test_state_that_holds_itself_is_refused() -> None:
    """A circle is an H310 that names the component, not the end of python's stack."""
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(CheckpointError, match="counters holds itself") as caught:
        encode({"counters": {"seen": circle}})
    assert caught.value.rule == "H310"


def test_state_that_needs_pickle_fails_before_anything_is_written(store: Store) -> None:
    """An object in the state is an H310 that names the component, and the disk is untouched."""
    with pytest.raises(CheckpointError, match=r"scheduler\['lr_lambda'\]") as caught:
        _save(store, scheduler={"lr_lambda": object()})
    assert caught.value.rule == "H310"
    assert not store.directory.exists()


@pytest.mark.parametrize("limit_bytes", [100, 8192])
def test_a_write_that_fails_leaves_the_older_checkpoint(limit_bytes: int, store: Store) -> None:
    """When the system refuses the bytes, the draft is gone, the older one verifies, and the next save works."""
    old = _save(store, 1, model={"a": torch.ones(5)})
    with _largest_file(limit_bytes), pytest.raises(OSError):
        _save(store, 2, model={"a": torch.ones(50_000)})
    assert [path.name for path in store.directory.iterdir()] == [old.path.name]
    old.verify()
    assert _save(store, 3, model={"a": torch.ones(50_000)}).save_id == 2


def test_too_little_room_is_said_before_the_write(store: Store) -> None:
    """A checkpoint larger than the free space is refused with both figures and without a draft."""
    free = os.statvfs("/").f_blocks * os.statvfs("/").f_frsize
    huge = torch.empty(1, dtype=torch.uint8).expand(2**50)
    shot = Snapshot(global_step=1, tensors={"model": {"huge": huge}}, state={})
    assert shot.size_bytes() > free
    with pytest.raises(OSError, match=r"needs \d+ bytes and \d+ are free"):
        write(store, shot, unix_seconds=0.0)
    assert list(store.directory.iterdir()) == []


class _Interrupted(dict[str, dict[str, torch.Tensor]]):
    """Components during whose writing somebody presses Ctrl-C."""

    def items(self) -> Any:
        yield next(iter(super().items()))
        raise KeyboardInterrupt


def test_an_interrupt_leaves_no_draft(store: Store) -> None:
    """Ctrl-C after the first of two files removes what was written, and is passed on."""
    shot = snapshot({"a": {"x": torch.ones(2)}, "b": {"x": torch.ones(2)}}, 1)
    interrupted = Snapshot(global_step=1, tensors=_Interrupted(shot.tensors), state=shot.state)
    with pytest.raises(KeyboardInterrupt):
        write(store, interrupted, unix_seconds=0.0)
    assert list(store.directory.iterdir()) == []


@pytest.mark.parametrize(
    "tree",
    [
        {"a": np.zeros(0)},
        {"a": torch.zeros(4)[4::2]},
        {"__metadata__": torch.ones(2)},
    ],
    ids=["empty array", "empty view", "name of the format's own"],
)
def test_odd_tensors_are_saved(store: Store, tree: Any) -> None:
    """Empty arrays and views, and a name that the file format uses itself, do not keep a run from being saved."""
    found = _saved(store, tree)
    assert list(found) == list(tree)
    assert all(found[key].shape == value.shape for key, value in tree.items())


def test_live_tensors_are_overwritten_where_they_lie(store: Store) -> None:
    """Of the saved type and shape, in any layout; others are made anew and leave the live ones alone."""
    saved = {
        "plain": torch.randn(3, 4),
        "turned": torch.randn(3, 4),
        "channels last": torch.randn(2, 3, 4, 5),
        "other type": torch.randn(2),
        "other shape": torch.randn(2),
        "empty": torch.ones(0, 3),
    }
    entry = _save(store, part=saved)
    live = {
        "plain": torch.zeros(3, 4),
        "turned": torch.zeros(4, 3).T,
        "channels last": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "other type": torch.zeros(2, dtype=torch.float64),
        "other shape": torch.zeros(3),
        "empty": torch.ones(0, 3),
    }
    found = read_components(entry, ["part"], {"part": live})["part"]
    assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())
    assert [name for name in live if found[name] is live[name]] == ["plain", "turned", "channels last", "empty"]
    assert not live["other type"].any()
    assert not live["other shape"].any()


def test_reading_in_place_needs_no_memory(store: Store) -> None:
    """48 MiB come back where the kernel grants 8 more: the file is not mapped, and nothing is copied."""
    weight = torch.randn(12 * 2**20)
    entry = _save(store, part={"weight": weight})
    live = torch.zeros_like(weight)
    with memory_limited(8 * 2**20):
        read_components(entry, ["part"], {"part": {"weight": live}})
    assert torch.equal(live, weight)


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
