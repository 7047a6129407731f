"""Saves and stops on request: by `guard.save()`, inside a loop and outside, and by commands."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from tests.unit.guard.guarded import square_of
from torch import nn

import holdfast
from holdfast.checkpoint.loading import read_components
from holdfast.checkpoint.store import Store
from holdfast.core.run_requests import Action, Request, RequestFolder
from holdfast.guard import outside_requests
from holdfast.guard.saving import save_writer


class Counter:
    """Counts batches at the end of the loop body."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


def guard_of(run_dir: Path, model: nn.Module, **settings) -> holdfast.Guard:
    return holdfast.Guard(
        run_dir,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, fused=True),
        **{
            "loader": [torch.ones(4, 2) for _ in range(6)],
            "save_interval_steps": 1000,
            **settings,
        },
    )


def saved_steps(run_dir: Path) -> list[int]:
    return sorted(entry.global_step for entry in Store(run_dir / "checkpoints").entries())


@pytest.mark.parametrize("decide", ["now", "late"])
def test_a_save_in_the_loop_holds_the_whole_batch(tmp_path, decide):
    """It is made once the loop body has finished, so it includes what the body does later."""
    model = nn.Linear(2, 1)
    counter = Counter()
    guard = guard_of(tmp_path, model, state=counter, decide=decide)
    saved_at_step_3 = None
    for batch in guard.batches(max_epochs=1):
        if guard.global_step == 3:
            saved_at_step_3 = saved_steps(tmp_path)
        guard.step(batch, square_of(model))
        if guard.global_step == 3:
            guard.save()
        counter.batches += 1

    assert saved_at_step_3 == [0, 3]
    (entry,) = [
        entry for entry in Store(tmp_path / "checkpoints").entries() if entry.global_step == 3
    ]
    assert read_components(entry, ["state.state"])["state.state"] == {"batches": 3}


def test_a_save_survives_a_break(tmp_path):
    """The batch in which the script asks may be the last one that it trains on."""
    model = nn.Linear(2, 1)
    guard = guard_of(tmp_path, model)
    for batch in guard.batches(max_epochs=1):
        guard.step(batch, square_of(model))
        if guard.global_step == 2:
            guard.save()
            break

    assert saved_steps(tmp_path) == [0, 2]
    assert guard_of(tmp_path, nn.Linear(2, 1)).global_step == 2


def test_a_save_outside_a_loop_is_made_at_once(tmp_path):
    """In a loop of the script's own, and also after the guard was closed."""
    model = nn.Linear(2, 1)
    guard = guard_of(tmp_path, model, loader=None)
    for _ in range(3):
        guard.step(torch.ones(4, 2), square_of(model))
    guard.save()
    assert 3 in saved_steps(tmp_path)
    guard.close()
    guard.save()
    guard.step(torch.ones(4, 2), square_of(model))
    guard.close()
    guard.save()
    assert saved_steps(tmp_path)[-1] == 4


def test_a_save_that_cannot_be_made_is_refused(tmp_path):
    """A loss function would save in the middle of a step, and some runs save nothing."""
    model = nn.Linear(2, 1)
    guard = guard_of(tmp_path / "a", model)

    def saving_loss(batch):
        guard.save()
        return model(batch).square().mean()

    with pytest.raises(holdfast.BatchError) as in_step:
        guard.step(torch.ones(4, 2), saving_loss)
    assert in_step.value.rule == "H209"
    without = guard_of(tmp_path / "b", nn.Linear(2, 1), save_interval_steps=None)
    with pytest.raises(holdfast.PolicyError) as never:
        without.save()
    assert never.value.rule == "H105"


def ask(run_dir: Path, action: Action) -> Request:
    """Send a request to this process, as a command in another process does."""
    return RequestFolder(run_dir).send(action, f"process {os.getpid()} on {socket.gethostname()}")


def test_a_save_that_fails_is_answered_with_its_error(tmp_path, monkeypatch):
    """Training continues, and whoever has asked does not wait until the time is up."""
    monkeypatch.setattr(outside_requests, "_POLL_SECONDS", 0.0)
    model = nn.Linear(2, 1)
    guard = guard_of(tmp_path, model)
    request = None
    for batch in guard.batches(max_epochs=1):
        guard.step(batch, square_of(model))
        if guard.global_step == 2:
            monkeypatch.setattr(save_writer, "write", full_disk)
            request = ask(tmp_path, "save")
    answer = RequestFolder(tmp_path).answer_to(request)

    assert guard.global_step == 6
    assert answer.checkpoint is None
    assert "No space left on device" in answer.problem


def full_disk(*_: object, **__: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_stop_from_outside_ends_all_loops_of_a_script(tmp_path, monkeypatch):
    """As after a signal, the process ends when the next loop begins."""
    monkeypatch.setattr(outside_requests, "_POLL_SECONDS", 0.0)
    model = nn.Linear(2, 1)
    guard = guard_of(tmp_path, model)
    for batch in guard.batches(max_steps=4):
        guard.step(batch, square_of(model))
        if guard.global_step == 2:
            ask(tmp_path, "stop")
    with pytest.raises(SystemExit) as ended:
        next(iter(guard.batches(max_steps=6)))

    assert ended.value.code == 0
    assert guard.global_step == 2
    assert guard.stop_reason == "requested from outside"
    assert saved_steps(tmp_path)[-1] == 2
