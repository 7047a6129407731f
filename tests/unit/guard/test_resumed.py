"""What a run that goes on after a restart keeps, and what it says about a script that has
changed.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.guard.guarded import kinds_of, square_of
from torch import nn

import holdfast
from holdfast.testing import flip_bit

pytestmark = pytest.mark.usefixtures("unchecked_splits")

X = torch.randn(100, 4, generator=torch.Generator().manual_seed(1))


def make(rate: float = 0.1) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), rate)}


def loss_of(model: nn.Module) -> Any:
    return lambda x: (model(x) - x[:, :1]).square().mean()


class Drawn:
    """An iterable that draws its batches from a generator of its own, or one ahead."""

    def __init__(self, kind: str) -> None:
        self.own: Any = {
            "torch": lambda: torch.Generator().manual_seed(3),
            "numpy": lambda: np.random.default_rng(3),
            "numpy, as it was": lambda: np.random.RandomState(3),
            "python": lambda: random.Random(3),
            "global, one ahead": lambda: None,
        }[kind]()

    def __iter__(self) -> Iterator[torch.Tensor]:
        ahead = torch.randint(0, 100, (8,))
        for _ in range(5):
            if self.own is None:
                now, ahead = ahead, torch.randint(0, 100, (8,))
                yield X[now]
            elif isinstance(self.own, torch.Generator):
                yield X[torch.randint(0, 100, (8,), generator=self.own)]
            elif isinstance(self.own, random.Random):
                yield X[self.own.sample(range(100), 8)]
            else:
                yield X[torch.from_numpy(self.own.permutation(100)[:8])]


@pytest.mark.parametrize(
    "kind", ["torch", "numpy", "numpy, as it was", "python", "global, one ahead"]
)
def test_a_generator_that_is_the_loader_s_own_goes_on_where_it_was(tmp_path, kind):
    """A stop in the second epoch, whose first batches are read again, changes no batch, nor does
    dropout between.
    """

    def run(folder: Path, *stops: int | None) -> torch.Tensor:
        for stop in stops:
            parts = make()
            guard = holdfast.Guard(folder, loader=Drawn(kind), **parts)
            for batch in guard.batches(max_epochs=3):
                guard.step(batch, loss_of(nn.Sequential(nn.Dropout(), parts["model"])))
                if guard.global_step == stop:
                    guard.request_stop()
        return parts["model"].weight.detach()

    assert torch.equal(run(tmp_path / "whole", None), run(tmp_path / "stopped", 8, None))


def test_an_evaluation_that_a_stop_cuts_off_is_made_after_the_restart(tmp_path):
    """The pattern of the guide: each epoch is evaluated once, whatever comes between."""
    told = []

    def run(stop_at: int | None) -> None:
        guard = holdfast.Guard(tmp_path, loader=[X[:8]] * 3, **(parts := make()))
        for batch in guard.batches(max_epochs=3):
            if guard.epochs_validated < guard.epoch:
                if guard.epoch == stop_at:
                    guard.request_stop()
                    continue
                guard.validated(1.0)
                told.append(guard.epoch)
            guard.step(batch, loss_of(parts["model"]))
        if stop_at is None:
            assert guard.epochs_validated == 2

    run(2)
    run(None)
    assert told == [1, 2]


def test_a_script_that_sets_up_another_rate_is_told_that_the_run_keeps_its_own(tmp_path):
    """Each time, and not where a schedule has changed the rate."""
    for rate in (0.1, 0.1, 0.01, 0.01):
        parts = make(rate)
        schedule = torch.optim.lr_scheduler.StepLR(parts["optimizer"], 1, 0.5)
        with holdfast.Guard(tmp_path, loader=[X[:8]] * 2, scheduler=schedule, **parts) as guard:
            for batch in guard.batches(max_epochs=guard.epoch + 1):
                guard.step(batch, loss_of(parts["model"]))
        said = [event.data["changed"] for event in guard.events() if event.kind == "settings_kept"]
    assert len(said) == 2
    assert "optimizer.0.lr: 0.1 stays, not 0.01" in said[0]


def test_a_loop_of_ones_own_is_told_after_a_restart_that_it_begins_anew(tmp_path):
    """Once; and never in guard.batches."""
    for restart, own in enumerate((True, False, True)):
        parts = make()
        with holdfast.Guard(tmp_path, loader=[X[:8]] * 2, **parts) as guard:
            for batch in [X[:8]] * 2 if own else guard.batches(max_epochs=restart + 1):
                guard.step(batch, loss_of(parts["model"]))
        assert kinds_of(guard).count("position_not_kept") == (restart == 2)


def test_groups_that_are_added_on_the_way_are_warned_of_before_a_resume_is_refused(tmp_path):
    """The event comes with the next save."""
    parts = make()
    head = nn.Linear(4, 1)
    parts["model"] = {"body": parts["model"], "head": head}
    guard = holdfast.Guard(tmp_path, loader=[X[:8]] * 2, **parts)
    for batch in guard.batches(max_epochs=1):
        guard.step(batch, loss_of(parts["model"]["body"]))
    parts["optimizer"].add_param_group({"params": head.parameters()})
    for batch in guard.batches(max_epochs=2):
        guard.step(batch, loss_of(nn.Sequential(*parts["model"].values())[:1]))
    assert "groups_changed" in kinds_of(guard)


def test_the_newest_checkpoint_that_verifies_is_asked_for_without_a_change(tmp_path):
    """None before there is one; of damaged ones the next older; an error where none is left."""
    assert holdfast.latest(tmp_path / "nowhere") is None
    for steps in (2, 4, 6):
        guard = holdfast.Guard(tmp_path, loader=[X[:8]] * 6, **(parts := make()))
        for batch in guard.batches(max_epochs=1, max_steps=steps):
            guard.step(batch, loss_of(parts["model"]))
    for steps in (6, 4, 2):
        newest = holdfast.latest(str(tmp_path))
        assert (newest.global_step, newest.path.parent) == (steps, tmp_path / "checkpoints")
        assert not list(newest.path.parent.glob("damaged-*"))
        flip_bit(newest.path / "state.json", 3)
    with pytest.raises(holdfast.CheckpointError, match="H312"):
        holdfast.latest(tmp_path)


def test_no_thread_is_the_first_to_ask_for_a_square_root(tmp_path, monkeypatch):
    """What is asked first by several threads at a time may be wrong by 1e-4.

    That cannot be had at will.
    """
    called: list[Any] = []
    monkeypatch.setattr(torch, "sqrt", called.append)
    holdfast.Guard(tmp_path / "run", **make())
    assert [(each.dtype, each.numel()) for each in called] == [
        (torch.float32, 1),
        (torch.float64, 1),
    ]


def train_cell(run_dir, *, leave=None, how="break", **parts):
    """Run the cell of a notebook that makes a guard and trains, and is left at a step."""
    parts = parts or parts_with_a_loader()
    guard = holdfast.Guard(run_dir, save_interval_steps=4, async_save=False, **parts)
    for batch in guard.batches(max_steps=12):
        guard.step(batch, square_of(parts["model"]))
        if guard.global_step == leave and how == "break":
            break
        if guard.global_step == leave:
            raise KeyboardInterrupt
    return guard


def parts_with_a_loader():
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    loader = holdfast.DataLoader(torch.arange(12.0)[:, None], 2, shuffle=True)
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.001),
        "loader": loader,
    }


@pytest.mark.parametrize("same_objects", [False, True])
@pytest.mark.parametrize("how", ["break", "KeyboardInterrupt"])
def test_a_cell_that_is_run_again_says_which_steps_it_leaves_behind(tmp_path, how, same_objects):
    """Steps that were in memory only are an event of the next guard in this process, which ends
    as undisturbed.
    """
    undisturbed = parts_with_a_loader()
    train_cell(tmp_path / "undisturbed", **undisturbed)
    parts = parts_with_a_loader()
    if how == "break":
        train_cell(tmp_path / "run", leave=7, how=how, **parts)
    else:
        with pytest.raises(KeyboardInterrupt) as raised:  # the notebook keeps the traceback too
            train_cell(tmp_path / "run", leave=7, how=how, **parts)
        assert raised.traceback

    again = parts if same_objects else parts_with_a_loader()
    guard = train_cell(tmp_path / "run", **again)

    (event,) = [event for event in guard.events() if event.kind == "steps_left_behind"]
    assert (event.data["from_step"], event.data["to_step"]) == (7, 4)
    assert torch.equal(again["model"].weight, undisturbed["model"].weight)


def test_a_cell_that_is_run_again_after_a_save_has_nothing_to_say(tmp_path):
    """After the end of the loop, a `close`, or in a directory that was made anew, no step is
    left behind.
    """
    train_cell(tmp_path / "closed", leave=7).close()
    train_cell(tmp_path / "closed")
    guard = train_cell(tmp_path / "closed")
    assert not [event for event in guard.events() if event.kind == "steps_left_behind"]

    train_cell(tmp_path / "removed", leave=7)
    shutil.rmtree(tmp_path / "removed")
    guard = train_cell(tmp_path / "removed")
    assert not [event for event in guard.events() if event.kind == "steps_left_behind"]


def test_a_loop_that_is_still_suspended_keeps_its_directory(tmp_path):
    """While the loop of another guard in this process is neither left nor closed, a new guard is
    H301.
    """
    parts = parts_with_a_loader()
    guard = holdfast.Guard(tmp_path, **parts)
    batches = guard.batches(max_steps=12)
    guard.step(next(batches), square_of(parts["model"]))
    with pytest.raises(holdfast.RunDirectoryError) as raised:
        holdfast.Guard(tmp_path, **parts)
    assert raised.value.rule == "H301"

    guard.close()
    again = holdfast.Guard(tmp_path, **parts)
    assert again.global_step == 1
    assert not [event for event in again.events() if event.kind == "steps_left_behind"]
