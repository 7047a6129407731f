"""What saves cost the training is in the recording, as the run's own choice of the interval has it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tests.unit.guard.guarded import events, square_of

import holdfast
from holdfast.checkpoint.saver import write as really_write
from holdfast.guard.saving import saves as saving_module
from holdfast.testing import FakeClock


@pytest.mark.parametrize("interval", [20, "auto"])
def test_the_event_of_a_save_tells_what_those_before_it_cost(tmp_path, monkeypatch, interval) -> None:
    """Steps that take twice as long while a save is written are its cost, whoever set the interval.

    Eleven begin while it is written; an event tells of the saves before its own, since it does not wait for steps.
    """
    clock, free = FakeClock(), threading.Event()

    def write(*arguments: Any, **facts: Any) -> Any:
        assert threading.current_thread() is threading.main_thread() or free.wait(60)
        return really_write(*arguments, **facts)

    monkeypatch.setattr(saving_module, "write", write)
    model = torch.nn.Linear(4, 1)
    guard = holdfast.Guard(
        tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), clock=clock,
        save_interval_steps=interval, diagnose=False,
    )  # fmt: skip
    saving = guard._session.saving
    if interval == "auto":
        saving.chooser.steps = 20
    for number in range(35):
        if number == 31:
            free.set()
            saving._job.result()
        clock.advance(0.2 if 20 < number <= 30 else 0.1)
        guard.step(torch.ones(2, 4), square_of(model))
    guard.close()
    saved = events(guard, "checkpoint_saved")
    assert [event.global_step for event in saved] == [0, 20, 35]
    assert [event.data.get("save_costs_seconds") for event in saved] == [None, None, pytest.approx(1.1)]
    assert saving.chooser.costs[0] == (pytest.approx(1.1), pytest.approx(2.0))
    assert saved[1].data["stall_seconds"] == 0, "the loop itself was not held"
