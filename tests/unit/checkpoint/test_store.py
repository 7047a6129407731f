"""The store: what counts as a checkpoint, in which order, and what may be deleted."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.checkpoint.seal import Extent, Manifest
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
    return store.commit(draft, Manifest(save_id=save_id, global_step=global_step, unix_seconds=0.0, files=files))


def _spoil(entry: Entry) -> None:
    flip_bit(entry.path / "manifest.json", 100)


def _steps(store: Store) -> list[int]:
    return [entry.global_step for entry in store.entries()]


def _names(store: Store) -> list[str]:
    return sorted(path.name for path in store.directory.iterdir())


def test_a_store_that_was_never_used_is_empty(store: Store) -> None:
    """A missing folder holds no checkpoints, and asking, cleaning and pruning do not make it."""
    assert store.entries() == store.damaged() == []
    assert store.next_save_id() == 1
    store.clean_up()
    assert store.prune(1) == []
    assert not store.directory.exists()


def test_a_commit_is_one_rename(store: Store) -> None:
    """Until its commit a save is invisible; after it there is one complete directory and no draft."""
    draft, save_id = store.begin(600)
    write_file(draft / "data", b"")
    assert (store.entries(), save_id) == ([], 1)
    entry = _save(store, 600)
    assert _names(store) == ["000001-step00000600"]
    assert entry == store.entries()[0]
    assert entry.verify().global_step == 600


def test_the_newest_save_comes_first_also_after_a_rollback(store: Store) -> None:
    """Order is that of saving and not that of steps, so a run that rolled back continues from its newest."""
    for step in (100, 200, 150):
        _save(store, step)
    assert _steps(store) == [150, 200, 100]


def test_numbers_sort_as_numbers(store: Store) -> None:
    """Beyond the digits of the usual name, a larger number is still newer."""
    for name in ("999999-step00000001", "1000000-step00000002"):
        (store.directory / name).mkdir(parents=True)
    assert _steps(store) == [2, 1]
    assert store.next_save_id() == 1_000_001


def test_what_is_no_checkpoint_is_left_alone(store: Store) -> None:
    """Foreign files and directories are neither listed nor deleted."""
    _save(store, 1)
    (store.directory / "notes").mkdir()
    (store.directory / "step5").write_text("")
    (store.directory / "000001-step00000001.bak").mkdir()
    store.clean_up()
    store.prune(1)
    assert _steps(store) == [1]
    assert len(_names(store)) == 4


def test_leftovers_of_killed_saves_are_removed(store: Store) -> None:
    """Drafts and half-deleted directories go; complete checkpoints stay."""
    _save(store, 1)
    for name in (".tmp-000002-step00000002", ".tmp-doomed-000000-step00000000"):
        (store.directory / name / "deep").mkdir(parents=True)
        (store.directory / name / "deep" / "data").write_text("x")
    store.clean_up()
    assert _names(store) == ["000001-step00000001"]


def test_a_draft_under_the_same_name_is_begun_anew(store: Store) -> None:
    """A save that was killed does not leave its files in the next one."""
    draft, _ = store.begin(5)
    (draft / "old").write_text("half")
    again, _ = store.begin(5)
    assert again == draft
    assert list(again.iterdir()) == []


def test_what_is_set_aside_is_kept_but_not_tried_again(store: Store) -> None:
    """A damaged checkpoint leaves the list, keeps its files, and its number is not used again."""
    _save(store, 1)
    bad = _save(store, 2)
    path = store.set_aside(bad)
    assert _steps(store) == [1]
    assert [entry.path for entry in store.damaged()] == [path]
    assert (path / "data").exists()
    assert _save(store, 3).save_id == 3


def test_setting_aside_replaces_an_older_one_of_the_same_name(store: Store) -> None:
    """A name that was set aside before does not stop the run."""
    entry = _save(store, 1)
    (store.directory / f"damaged-{entry.path.name}").mkdir()
    assert (store.set_aside(entry) / "data").exists()


def test_the_newest_are_kept(store: Store) -> None:
    """Pruning to two keeps the two newest and tells what it deleted."""
    entries = [_save(store, step) for step in (1, 2, 3, 4)]
    deleted = store.prune(2, known_good=entries[-1])
    assert _steps(store) == [4, 3]
    assert deleted == [entries[1].path, entries[0].path]
    assert _names(store) == ["000003-step00000003", "000004-step00000004"]


@pytest.mark.parametrize("keep", [1, 0, -5])
def test_at_least_one_is_kept(keep: int, store: Store) -> None:
    """No number can ask for all checkpoints to be deleted."""
    for step in (1, 2):
        _save(store, step)
    store.prune(keep)
    assert _steps(store) == [2]


def test_the_last_good_one_is_never_deleted(store: Store) -> None:
    """If the newest are damaged, pruning keeps going back until a good one is among the kept."""
    entries = [_save(store, step) for step in (1, 2, 3, 4)]
    _spoil(entries[2])
    _spoil(entries[3])
    assert store.prune(1) == [entries[0].path]
    assert _steps(store) == [4, 3, 2]
    entries[1].verify()


def test_a_known_good_one_that_would_not_be_kept_does_not_count(store: Store) -> None:
    """A good old checkpoint is no reason to keep only damaged newer ones without it."""
    entries = [_save(store, step) for step in (1, 2, 3)]
    _spoil(entries[2])
    _spoil(entries[1])
    store.prune(1, known_good=entries[0])
    assert _steps(store) == [3, 2, 1]


def test_if_none_is_good_none_is_deleted(store: Store) -> None:
    """Damaged checkpoints are better than nothing."""
    for entry in [_save(store, step) for step in (1, 2, 3)]:
        _spoil(entry)
    assert store.prune(1) == []
    assert _steps(store) == [3, 2, 1]


def test_what_was_set_aside_goes_once_newer_good_ones_replaced_it(store: Store) -> None:
    """A damaged directory is deleted when `keep` newer checkpoints exist, and not before."""
    store.set_aside(_save(store, 1))
    second = _save(store, 2)
    store.prune(2, known_good=second)
    assert len(store.damaged()) == 1
    third = _save(store, 3)
    store.prune(2, known_good=third)
    assert store.damaged() == []
    assert _names(store) == ["000002-step00000002", "000003-step00000003"]


def test_a_damaged_entry_does_not_verify(store: Store) -> None:
    """Verification of an entry covers its manifest and its files."""
    entry = _save(store, 1)
    (entry.path / "data").write_text("more")
    with pytest.raises(CheckpointError):
        entry.verify()
