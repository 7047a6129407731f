"""When a run is saved: early, at an interval, and never too often for what saves cost."""

from __future__ import annotations

from itertools import count, pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
from tests.unit.guard.guarded import square_of

import holdfast
from holdfast.guard.saving import save_writer
from holdfast.testing import FakeClock

pytestmark = pytest.mark.usefixtures("unchecked_splits")


def saved_steps(
    run_dir: Path,
    steps: int,
    *,
    driven: bool = True,
    costs: float = 0.0,
    computes: float = 0.0,
    **fields: object,
) -> list[int]:
    """Return at which steps a run was saved whose steps take 0.1 s, and whose writer computes
    for some seconds.
    """
    with mock.patch.object(save_writer.time, "thread_time", count(0.0, computes).__next__):
        return _saved_steps(run_dir, steps, driven=driven, costs=costs, **fields)


def _saved_steps(
    run_dir: Path, steps: int, *, driven: bool, costs: float, **fields: object
) -> list[int]:
    torch.manual_seed(0)
    clock, model = FakeClock(), torch.nn.Linear(3, 1)
    # Asked by each save, and by no step
    model.register_state_dict_post_hook(lambda *_: clock.advance(costs))
    batch = torch.randn(4, 3)
    guard = holdfast.Guard(
        run_dir,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        clock=clock,
        loader=[batch] * steps,
        async_save=False,
        **fields,
    )
    for each in guard.batches(max_epochs=1) if driven else [batch] * steps:
        guard.step(each, square_of(model))
        clock.advance(0.1)
    return [event.global_step for event in guard.events() if event.kind == "checkpoint_saved"]


@pytest.mark.parametrize("driven", [True, False])
def test_a_run_is_saved_after_seconds_and_never_loses_more_than_about_half(driven, tmp_path):
    """With "auto", which had saved nothing of 303 steps in half a minute.

    In a loop of the caller's, too.
    """
    steps = saved_steps(tmp_path, 303, driven=driven)[1:]
    assert 45 <= steps[0] <= 55
    ages = [*steps, 303]
    assert all(then <= now <= 2.1 * then for then, now in pairwise(ages))
    assert len(steps) <= 5


def test_an_early_save_waits_until_what_its_writer_computes_is_a_hundredth_of_the_time(tmp_path):
    """Of 0.1 s for the first save later ones are expected to take three times as much.

    30 s, not 5.
    """
    first, early, *_ = saved_steps(tmp_path, 310, computes=0.1)
    assert (first, 295 <= early <= 305) == (0, True)


def test_an_early_save_waits_for_what_ten_saves_take(tmp_path):
    """Steps of 0.1 s and saves of 4 s.

    A young run is saved after 40 s, of which it saved 8, and not after 5.
    """
    first, early, *_ = saved_steps(tmp_path, 600, costs=4.0)
    assert (first, 310 <= early <= 330) == (0, True)


def test_the_most_minutes_between_saves_are_kept_with_any_interval(tmp_path):
    """save_interval_minutes is an upper limit beside a number of steps, and needs saves that are
    not switched off.
    """
    fields = {"save_interval_steps": 1000, "save_interval_minutes": 0.95 / 60}
    assert saved_steps(tmp_path / "a", 25, **fields) == [0, 10, 20, 25]
    with pytest.raises(holdfast.PolicyError, match="H109"):
        holdfast.Policy(save_interval_steps=None, save_interval_minutes=15)
