"""The saver: trees go through real files and come back; a save that fails changes nothing.

No byte changes unseen.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.core.test_durable import largest_file

from holdfast.checkpoint.export import export
from holdfast.checkpoint.loading import read_components
from holdfast.checkpoint.saver import Snapshot, encode, snapshot, write
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


def test_state_that_holds_itself_is_refused() -> None:
    """A circle is an H310 that names the component, not the end of python's stack."""
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(CheckpointError, match="counters contains itself") as caught:
        encode({"counters": {"seen": circle}})
    assert caught.value.rule == "H310"


@pytest.mark.parametrize("limit_bytes", [100, 8192])
def test_a_write_that_fails_leaves_the_older_checkpoint(limit_bytes: int, store: Store) -> None:
    """When the system refuses the bytes, the draft is gone, the older one verifies, and the next
    save works.
    """
    old = _save(store, 1, model={"a": torch.ones(5)})
    with largest_file(limit_bytes), pytest.raises(OSError):
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
    with pytest.raises(OSError, match=r"needs [\d,]+ bytes, but only [\d,]+ are free"):
        write(store, shot, unix_seconds=0.0)
    assert list(store.directory.iterdir()) == []


def test_live_tensors_are_overwritten_where_they_lie(store: Store) -> None:
    """Of the saved type and shape, in any layout.

    Others are made anew and leave the live ones alone.
    """
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
    assert [name for name in live if found[name] is live[name]] == [
        "plain",
        "turned",
        "channels last",
        "empty",
    ]
    assert not live["other type"].any()
    assert not live["other shape"].any()


def test_reading_in_place_needs_no_memory(store: Store) -> None:
    """48 MiB come back where the kernel grants 8 more.

    The file is not mapped, and nothing is copied.
    """
    weight = torch.randn(12 * 2**20)
    entry = _save(store, part={"weight": weight})
    live = torch.zeros_like(weight)
    with memory_limited(8 * 2**20):
        read_components(entry, ["part"], {"part": {"weight": live}})
    assert torch.equal(live, weight)


@pytest.mark.parametrize("averaged", [False, True])
def test_an_export_without_weights_is_refused(store: Store, tmp_path: Path, averaged: bool) -> None:
    """A model without a tensor gives H310 and no file, as do averages that nobody kept."""
    entry = _save(store, **{"model": {}, "state.averaged": {"n_averaged": 3}})
    with pytest.raises(CheckpointError) as caught:
        export(entry, tmp_path / "weights.safetensors", averaged=averaged)
    assert caught.value.rule == "H310"
    assert not (tmp_path / "weights.safetensors").exists()
