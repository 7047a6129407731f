"""A run whose lock file, or whole directory, is removed or replaced while it trains.

Two runs never write there.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.faults.small_run import guard_in, train
from tests.own_process import in_own_process

import holdfast
from holdfast.checkpoint.store import Store
from holdfast.core.lock import FileLock, LockHeldError
from holdfast.testing import FakeClock


def remove_the_lock(run_dir: Path) -> None:
    (run_dir / "lock").unlink()


def empty_the_directory(run_dir: Path) -> None:
    for path in run_dir.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def move_the_directory(run_dir: Path) -> None:
    run_dir.rename(run_dir.with_name("moved"))


def remove_the_directory(run_dir: Path) -> None:
    shutil.rmtree(run_dir)


def replace_the_directory(run_dir: Path) -> None:
    run_dir.rename(run_dir.with_name("moved"))
    run_dir.mkdir()


def lead_the_link_elsewhere(run_dir: Path) -> None:
    run_dir.rename(run_dir.with_name("moved"))
    run_dir.with_name("elsewhere").mkdir()
    run_dir.symlink_to("elsewhere")


LOST: list[Callable[[Path], None]] = [
    remove_the_lock,
    empty_the_directory,
    move_the_directory,
    remove_the_directory,
    replace_the_directory,
    lead_the_link_elsewhere,
]


def train_in_another_process(run_dir: Path, steps: int) -> None:
    """Run a second training, from its start to its end, in the same run directory."""
    train(run_dir, steps)


def take_lock(run_dir: Path) -> None:
    FileLock(run_dir / "lock").acquire()


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("lose", LOST)
def test_a_run_whose_place_another_one_took_writes_nothing_more(
    lose: Any, async_save: Any, tmp_path: Path
) -> None:
    """The first one ends with H301 before its next save, and every checkpoint there is the
    second one's.
    """
    run_dir = tmp_path / "run"
    guard, model = guard_in(run_dir, async_save=async_save)
    seconds = None

    with pytest.raises(holdfast.RunDirectoryError, match="H301"):
        for batch in guard.batches(max_steps=30):
            guard.step(batch, lambda x: model(x).square().mean())
            if guard.global_step == 5:
                guard._session.saving.finish()
                lose(run_dir)
                in_own_process(train_in_another_process, run_dir, 12)
                seconds = Store(run_dir / "checkpoints").entries()

    assert guard.global_step < 8
    assert seconds is not None
    assert seconds[0].global_step == 12
    assert Store(run_dir / "checkpoints").entries() == seconds
    assert not list(run_dir.glob("checkpoints/.tmp-*"))


def test_a_run_that_saves_nothing_finds_out_too(tmp_path: Path) -> None:
    """Both would write into one recording.

    The lock is looked at every few seconds, at a boundary.
    """
    clock = FakeClock()
    guard, model = guard_in(tmp_path / "run", save_interval_steps=None, clock=clock)

    with pytest.raises(holdfast.RunDirectoryError, match="H301"):
        for batch in guard.batches(max_steps=30):
            guard.step(batch, lambda x: model(x).square().mean())
            clock.advance(10)
            if guard.global_step == 5:
                remove_the_lock(tmp_path / "run")
                in_own_process(take_lock, tmp_path / "run")

    assert guard.global_step == 5


@pytest.mark.parametrize("lose", LOST)
def test_a_lock_that_nobody_else_has_had_is_taken_again(lose: Any, tmp_path: Path) -> None:
    """A clean-up of old files does not end a run.

    It saves to its end, and a second one is turned away as before.
    """
    run_dir = tmp_path / "run"
    guard, model = guard_in(run_dir)

    for batch in guard.batches(max_steps=9):
        guard.step(batch, lambda x: model(x).square().mean())
        if guard.global_step == 3:
            lose(run_dir)
        if guard.global_step == 7:
            with pytest.raises(LockHeldError):
                in_own_process(take_lock, run_dir)

    assert Store(run_dir / "checkpoints").entries()[0].global_step == 9
    in_own_process(take_lock, run_dir)
    restarted, _ = guard_in(run_dir)
    assert restarted.global_step == 9
    restarted.close()


def test_a_directory_that_cannot_be_looked_at_fails_saves_and_no_training(tmp_path: Path) -> None:
    """As on a network disk that is away for a while.

    Saves fail until it is back, and the last one is whole.
    """
    run_dir, moved = tmp_path / "run", tmp_path / "moved"
    guard, model = guard_in(run_dir)

    for batch in guard.batches(max_steps=9):
        guard.step(batch, lambda x: model(x).square().mean())
        if guard.global_step == 3:
            run_dir.rename(moved)
            run_dir.write_bytes(b"")
        if guard.global_step == 7:
            run_dir.unlink()
            moved.rename(run_dir)

    kinds = [event.kind for event in guard.events()]
    assert kinds.count("save_failed") == 2
    assert "not_saved" not in kinds
    assert Store(run_dir / "checkpoints").entries()[0].global_step == 9
