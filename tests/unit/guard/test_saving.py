"""Saves beside the training.

A true snapshot, one at a time, errors as events, and nobody reads a store half-way.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.guard.guarded import assert_same, events, kinds_of, tensors_of, the_event
from torch import nn

import holdfast
from holdfast.checkpoint.loading import read_components
from holdfast.checkpoint.saver import write as really_write
from holdfast.checkpoint.store import Store
from holdfast.core.events import run_events
from holdfast.guard.record import RunRecord
from holdfast.guard.saving import save_writer, writer_thread
from holdfast.testing import FakeClock

pytestmark = pytest.mark.usefixtures("unchecked_splits")


class Disk:
    """A disk that takes its time: writes in other threads wait until it is free."""

    def __init__(self) -> None:
        self.free = threading.Event()

    def write(self, *arguments: Any, **facts: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            assert self.free.wait(60)
        return really_write(*arguments, **facts)

    def free_soon(self) -> None:
        """Let writes go on while the main thread waits for them."""
        threading.Timer(0.2, self.free.set).start()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    slow = Disk()
    monkeypatch.setattr(save_writer, "write", slow.write)
    yield slow
    slow.free.set()


class Memory:
    """State of the caller's own, of every kind, that changes in place."""

    def __init__(self) -> None:
        self.average, self.history = torch.zeros(3), [0]

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "history": self.history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average.copy_(state["average"])
        self.history[:] = state["history"]


def make_parts() -> dict[str, Any]:
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}


def step(guard: holdfast.Guard, parts: dict[str, Any]) -> None:
    guard.step(torch.randn(4, 4), lambda x: parts["model"](x).square().mean())


def after(steps: int, run_dir: Path, **settings: Any) -> tuple[holdfast.Guard, dict[str, Any]]:
    """Return a guard that has made some steps in a loop that is not its own."""
    parts = make_parts()
    guard = holdfast.Guard(run_dir, **settings, **parts)
    for _ in range(steps):
        step(guard, parts)
    return guard, parts


def saved_steps(guard: holdfast.Guard) -> list[int]:
    return [event.global_step for event in events(guard, "checkpoint_saved")]


def test_what_changes_after_the_boundary_is_saved_as_it_was(tmp_path, disk):
    """Weights, moments and the caller's state move on while the writer waits.

    The file has the old ones.
    """
    parts, memory = make_parts(), Memory()
    guard = holdfast.Guard(tmp_path, save_interval_steps=1, state=memory, **parts)
    step(guard, parts)
    expected = tensors_of(**parts)
    step(guard, parts)  # the boundary between the two has begun the save
    memory.average += 1
    memory.history.append(1)
    assert saved_steps(guard) == [0], "the writer has not begun"
    disk.free.set()
    guard._session.saving.finish()
    entry, *_ = Store(tmp_path / "checkpoints").entries()
    assert entry.global_step == 1
    found = read_components(entry, ["model", "optimizer", "state.state"])
    tensors = list(found["model"].values())
    for state in found["optimizer"]["state"].values():
        tensors += state.values()
    assert_same(tensors, expected)
    assert found["state.state"]["average"].tolist() == [0, 0, 0]
    assert found["state.state"]["history"] == [0]
    guard.close()


def test_one_save_at_a_time_and_the_next_one_waits_for_a_boundary(tmp_path, disk):
    """What is due meanwhile is put off, and made at the first boundary after.

    Training never waits.
    """
    guard, parts = after(8, tmp_path, save_interval_steps=2)
    assert guard.global_step == 8, "nothing was waited for"
    assert guard.statistics().checkpoints_saved == 1
    disk.free.set()
    guard._session.saving.finish()
    step(guard, parts)
    guard._session.saving.finish()
    assert saved_steps(guard) == [0, 2, 8]
    guard.close()
    assert saved_steps(guard) == [0, 2, 8, 9]
    assert guard.statistics().checkpoints_saved == 4
    for event in events(guard, "checkpoint_saved"):
        assert 0 <= event.data["stall_seconds"] <= event.data["seconds"]


def test_a_save_that_fails_is_an_event_of_its_step_and_training_goes_on(tmp_path, disk):
    """The system refuses the bytes.

    An event at once, with the step of the save, and later saves succeed.
    """
    guard, _parts = after(2, tmp_path, save_interval_steps=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        disk.free.set()
        guard._session.saving._thread._job.result()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    failed = the_event(guard, "save_failed")
    assert (failed.global_step, guard.global_step) == (1, 2)
    assert "File too large" in failed.data["error"]
    guard.close()
    assert saved_steps(guard) == [0, 2]
    statistics = guard.statistics()
    assert (statistics.checkpoints_saved, statistics.checkpoints_failed) == (2, 1)


def test_weights_that_are_not_finite_never_become_a_checkpoint(tmp_path, disk):
    """The writer refuses the copies, no checkpoint appears, and the run returns to the last good
    one by itself.
    """
    parts = make_parts()
    data = [torch.randn(4, 4) for _ in range(12)]
    guard = holdfast.Guard(
        tmp_path, loader=data, save_interval_steps=3, nonfinite_patience=None, **parts
    )
    spoilt = False
    disk.free.set()
    for batch in guard.batches(max_epochs=1):
        guard.step(batch, lambda x: parts["model"](x).square().mean())
        if guard.global_step == 3 and not spoilt:
            spoilt = True
            with torch.no_grad():
                parts["model"][0].weight[0, 0] = torch.nan
    refused = the_event(guard, "save_refused")
    assert (refused.global_step, refused.data["nonfinite"], refused.data["count"]) == (
        3,
        ["0.weight"],
        1,
    )
    assert len(events(guard, "roll_back")) == 1
    assert all(torch.isfinite(tensor).all() for tensor in tensors_of(**parts))
    for entry in Store(tmp_path / "checkpoints").entries():
        entry.verify()
        found = read_components(entry, ["model"])["model"]
        assert all(torch.isfinite(tensor.float()).all() for tensor in found.values()), (
            entry.path.name
        )


def test_what_no_checkpoint_holds_as_it_is_must_be_finite_too(tmp_path):
    """A complex weight, which is stored in another form, is looked at in the loop."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    guard = holdfast.Guard(
        tmp_path, model=model, optimizer=optimizer, save_interval_steps=1, check_split=False
    )
    loss = lambda x: (model.weight * x).abs().square().mean()  # noqa: E731
    guard.step(torch.ones(3), loss)
    with torch.no_grad():
        model.weight[0] = complex(float("nan"), 0)
    guard._boundaries.boundary_outside()
    assert the_event(guard, "save_refused").data["nonfinite"] == ["weight"]
    assert torch.isfinite(model.weight.abs()).all(), "the run has returned to the checkpoint"
    guard.close()


@pytest.mark.parametrize("how", ["too little", "refused"])
def test_without_memory_for_the_copies_the_loop_waits_for_its_saves(tmp_path, monkeypatch, how):
    """Saving is synchronous then, as it was, and that is said once."""
    if how == "too little":
        monkeypatch.setattr(writer_thread, "_SPARE", 2.0**20)
        monkeypatch.setattr(writer_thread, "available_bytes", lambda: 1000)
    else:
        monkeypatch.setattr(writer_thread, "_SPARE", 2.0**38)
        monkeypatch.setattr(writer_thread, "available_bytes", lambda: None)
    guard, _parts = after(7, tmp_path, save_interval_steps=2)
    assert saved_steps(guard) == [0, 2, 4, 6]
    assert all(
        event.data["stall_seconds"] == event.data["seconds"]
        for event in events(guard, "checkpoint_saved")
    )
    assert len(events(guard, "saves_synchronous")) == 1
    guard.close()


def test_out_of_memory_takes_the_copies_back(tmp_path, disk):
    """The writer is waited for, the memory of the copies goes back for good, and the run goes on
    saving.
    """
    guard, parts = after(4, tmp_path, save_interval_steps=2)
    disk.free_soon()
    guard._session.reserves.free()
    assert saved_steps(guard) == [0, 2]
    assert guard._session.saving._thread._buffers is None
    for _ in range(3):
        step(guard, parts)
    assert saved_steps(guard) == [0, 2, 4, 6]
    assert len(events(guard, "saves_synchronous")) == 1
    guard.close()


def test_out_of_memory_takes_back_what_is_not_there_yet(tmp_path):
    """No memory is asked for later that was short before the first save was near."""
    guard, parts = after(4, tmp_path, save_interval_steps="auto")
    guard._session.reserves.free()
    assert len(events(guard, "saves_synchronous")) == 1
    step(guard, parts)
    guard.close()


def test_closing_waits_for_the_writer_and_saves_what_it_lacks(tmp_path, disk):
    """After `close` the save under way is finished, the last step is saved, and the numbers say
    so.
    """
    guard, parts = after(4, tmp_path, save_interval_steps=2)
    disk.free_soon()
    guard.close()
    assert saved_steps(guard) == [0, 2, 4]
    assert guard.statistics().checkpoints_saved == 3
    again, again_parts = after(0, tmp_path)
    assert again.global_step == 4
    assert_same(tensors_of(**parts), tensors_of(**again_parts))
    again.close()


def test_a_guard_that_was_given_up_finishes_its_save_first(tmp_path, disk):
    """Without `close`, as in a notebook.

    The next guard waits for the writer, and goes on from what it wrote.
    """
    guard, _parts = after(3, tmp_path, save_interval_steps=2)
    del guard
    disk.free_soon()
    again = holdfast.Guard(tmp_path, **make_parts())
    assert again.global_step == 2
    again.close()


def test_workers_that_are_forked_while_a_save_is_written_do_their_work(tmp_path, disk):
    """A loader starts its workers while the writer is in the middle of a save, and all samples
    come.
    """
    guard, _parts = after(2, tmp_path, save_interval_steps=1)
    assert guard._session.saving._thread._job is not None
    loader = torch.utils.data.DataLoader(list(range(20)), batch_size=2, num_workers=2, timeout=60)
    assert sorted(int(each) for batch in loader for each in batch) == list(range(20))
    disk.free.set()
    guard.close()
    assert saved_steps(guard) == [0, 1, 2]


def test_a_forked_process_records_nothing_and_does_not_hang(tmp_path):
    """A lock that another thread holds at the fork does not stop the child, whose events would
    spoil the ring.
    """
    record = RunRecord(tmp_path, FakeClock())
    record.open()
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        with record._lock:
            held.set()
            go.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        record.emit(run_events.SavePostponed(why="in the child"))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    go.set()
    thread.join()
    record.emit(run_events.Closed(how="finished"))
    assert kinds_of(record) == ["closed"]
    record.close()


def test_a_state_that_cannot_be_given_later_is_an_event(tmp_path):
    """A part of the caller's that fails in the middle of a run costs a checkpoint or a snapshot,
    not the run.
    """
    memory = Memory()
    guard, parts = after(
        1, tmp_path, state=memory, save_interval_steps=2, snapshot_interval_steps=3
    )
    memory.state_dict, whole = lambda: {"bad": object(), 1j: len(None)}, memory.state_dict
    for _ in range(4):
        step(guard, parts)
    assert [event.global_step for event in events(guard, "save_failed")] == [2, 4]
    assert [event.global_step for event in events(guard, "snapshot_failed")] == [3]
    memory.state_dict = whole
    guard.close()
    assert saved_steps(guard)[-1] == 5
