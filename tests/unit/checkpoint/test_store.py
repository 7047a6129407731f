"""The store: what counts as a checkpoint, in which order, and what may be deleted."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.checkpoint.manifest import Extent, Manifest
from holdfast.checkpoint.newest import move_aside
from holdfast.checkpoint.store import Entry, Store
from holdfast.core.durable import write_file
from holdfast.core.errors import CheckpointError
from holdfast.testing import flip_bit

_EMPTY_SHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "checkpoints")


def _save(store: Store, global_step: int) -> Entry:
    draft, save_id = store.begin(global_step)
    write_file(draft / "data", b"")
    files = {"data": {"all": Extent(begin=0, end=0, sha256=_EMPTY_SHA256)}}
    return store.commit(
        draft, Manifest(save_id=save_id, global_step=global_step, unix_seconds=0.0, files=files)
    )


def _spoil(entry: Entry) -> None:
    flip_bit(entry.path / "manifest.json", 100)


def _steps(store: Store) -> list[int]:
    return [entry.global_step for entry in store.entries()]


def _names(store: Store) -> list[str]:
    return sorted(path.name for path in store.directory.iterdir())


def test_a_commit_is_one_rename(store: Store) -> None:
    """Until its commit a save is invisible.

    After it there is one complete directory and no draft.
    """
    draft, save_id = store.begin(600)
    write_file(draft / "data", b"")
    assert (store.entries(), save_id) == ([], 1)
    entry = _save(store, 600)
    assert _names(store) == ["000001-step00000600"]
    assert entry == store.entries()[0]
    assert entry.verify().global_step == 600


def test_the_newest_save_comes_first_also_after_a_rollback(store: Store) -> None:
    """Order is that of saving and not that of steps, so a run that rolled back continues from
    its newest.
    """
    for step in (100, 200, 150):
        _save(store, step)
    assert _steps(store) == [150, 200, 100]


def test_what_is_no_checkpoint_is_left_alone(store: Store) -> None:
    """Foreign files and directories are neither listed nor deleted.

    Drafts and half-deleted ones go.
    """
    _save(store, 1)
    for name in (".tmp-000002-step00000002", ".tmp-doomed-000000-step00000000"):  # of killed saves
        (store.directory / name / "deep").mkdir(parents=True)
    (store.directory / "notes").mkdir()
    (store.directory / "step5").write_text("")
    (store.directory / "000001-step00000001.bak").mkdir()
    store.clean_up()
    store.prune(1)
    assert _steps(store) == [1]
    assert len(_names(store)) == 4


def test_the_newest_good_one_is_found_and_damaged_ones_are_moved_aside(store: Store) -> None:
    """They leave the list, keep their files, and their numbers are not used again.

    If all are damaged, none moves.
    """
    entries = [_save(store, step) for step in (1, 2, 3)]
    (store.directory / f"damaged-{entries[2].path.name}").mkdir()  # of an earlier attempt
    _spoil(entries[2])
    said: list[tuple[str, str]] = []
    good = store.newest_good(lambda path, why: said.append((path.name, why)))
    assert good == entries[1]
    assert [name for name, _ in said] == [entries[2].path.name]
    assert (_steps(store), [entry.global_step for entry in store.damaged()]) == ([2, 1], [3])
    assert (store.damaged()[0].path / "data").exists()
    assert _save(store, 4).save_id == 4
    assert store.newest_good(lambda *_: None, before_step=1) == entries[0]
    for entry in store.entries():
        _spoil(entry)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="H312"):
            store.newest_good(lambda *_: None)
    assert store.newest_good(lambda *_: None, before_step=2) is None
    assert _steps(store) == [4, 2, 1]


@pytest.mark.parametrize("keep", [1, 0, -5])
def test_at_least_one_is_kept(keep: int, store: Store) -> None:
    """The newest stay, the others are named as deleted, and no number can ask for all of them to
    go.
    """
    entries = [_save(store, step) for step in (1, 2, 3)]
    assert store.prune(keep) == [entries[1].path, entries[0].path]
    assert _names(store) == ["000003-step00000003"]


def test_the_last_good_one_is_never_deleted(store: Store) -> None:
    """If the newest are damaged, pruning keeps going back until a good one is among the kept."""
    entries = [_save(store, step) for step in (1, 2, 3, 4)]
    _spoil(entries[2])
    _spoil(entries[3])
    assert store.prune(1) == [entries[0].path]
    assert _steps(store) == [4, 3, 2]
    entries[1].verify()
    _spoil(entries[1])
    assert store.prune(1) == [], "damaged ones are better than nothing"
    assert _steps(store) == [4, 3, 2]


def test_a_known_good_one_that_would_not_be_kept_does_not_count(store: Store) -> None:
    """A good old checkpoint is no reason to keep only damaged newer ones without it."""
    entries = [_save(store, step) for step in (1, 2, 3)]
    _spoil(entries[2])
    _spoil(entries[1])
    store.prune(1, known_good=entries[0])
    assert _steps(store) == [3, 2, 1]


def test_what_was_moved_aside_goes_once_newer_good_ones_replaced_it(store: Store) -> None:
    """A damaged directory is deleted when `keep` newer checkpoints exist, and not before."""
    move_aside(_save(store, 1).path)
    second = _save(store, 2)
    store.prune(2, known_good=second)
    assert len(store.damaged()) == 1
    third = _save(store, 3)
    store.prune(2, known_good=third)
    assert store.damaged() == []
    assert _names(store) == ["000002-step00000002", "000003-step00000003"]
