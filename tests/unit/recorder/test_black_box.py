"""The black box: steps and events of one process, as they were written."""

from __future__ import annotations

import math
from pathlib import Path

from holdfast.core.events.event import Event
from holdfast.recorder.black_box import BlackBox, StepMark
from holdfast.recorder.reader import StepRecord, read_events, read_steps


def _event(step: int, **data: object) -> Event:
    return Event(kind="test", global_step=step, unix_seconds=0.25 * step, data=data)


def test_steps_come_back_with_all_their_facts(tmp_path: Path) -> None:
    """A mark of a step keeps its kind, numbers and NaNs.

    What was not read is None, which is no NaN.
    """
    box = BlackBox(tmp_path / "made" / "for-it")
    box.step(StepMark.BEGUN, 2**40, 16, math.nan, math.inf, 0.5)
    box.step(StepMark.SKIPPED, 3, 0, -0.0, 1e-300, 7.0)
    box.step(StepMark.COMMITTED, 4, 0, None, math.nan, 7.0)
    box.close()
    first, second, third = read_steps(tmp_path / "made" / "for-it")
    assert third.loss is None
    assert math.isnan(third.grad_norm)
    assert (first.mark, first.global_step, first.micro_batch_size) == (StepMark.BEGUN, 2**40, 16)
    assert math.isnan(first.loss)
    assert (first.grad_norm, first.seconds) == (math.inf, 0.5)
    assert second == StepRecord(
        mark=StepMark.SKIPPED,
        global_step=3,
        micro_batch_size=0,
        loss=-0.0,
        grad_norm=1e-300,
        seconds=7.0,
        unix_seconds=second.unix_seconds,
    )
    assert first.unix_seconds <= second.unix_seconds


def test_many_steps_do_not_push_out_an_event(tmp_path: Path) -> None:
    """Steps and events have rings of their own: after a wrap of the one, the other is complete."""
    box = BlackBox(tmp_path)
    box.event(_event(1, text="early"))
    for step in range(33_000):
        box.step(StepMark.COMMITTED, step, 1, 0.0, 0.0, 0.0)
    box.close()
    assert [event.data["text"] for event in read_events(tmp_path)] == ["early"]
    steps = [step.global_step for step in read_steps(tmp_path)]
    assert steps == list(range(33_000 - 32_768, 33_000))
