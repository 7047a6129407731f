"""`close` writes what changed without a step, never weights that are not the training's, and
nothing twice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.guard.guarded import tensors_of
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import holdfast
from holdfast.checkpoint.store import Store

pytestmark = pytest.mark.usefixtures("unchecked_splits")


class Best:
    """The caller's own state."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.weights = torch.zeros(3)
        self.seen = {"a", "b", "c"}
        self.fails = False

    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            raise RuntimeError("not now")
        return {"losses": list(self.losses), "weights": self.weights, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses, self.weights, self.seen = (
            list(state["losses"]),
            state["weights"],
            set(state["seen"]),
        )


class Process:
    """One process of a run with everything that can change between steps."""

    def __init__(self, run_dir: Path, *, shuffled: bool = False, **policy: Any) -> None:
        torch.manual_seed(2)
        self.model = nn.Sequential(
            nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.plateau = ReduceLROnPlateau(self.optimizer, patience=0, factor=0.5)
        self.best = Best()
        data = [torch.randn(3) for _ in range(12)]
        loader: Any = torch.utils.data.DataLoader if shuffled else holdfast.DataLoader
        self.store = Store(run_dir / "checkpoints")
        self.guard = holdfast.Guard(
            run_dir,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.plateau,
            loader=loader(data, batch_size=4, shuffle=True),
            state={"best": self.best},
            **policy,
        )

    def train(self, **limits: int) -> None:
        for batch in self.guard.batches(**limits):
            self.guard.step(batch, lambda x: self.model(x).square().mean())

    def epoch(self, number: int, *, validate: bool = True) -> None:
        self.train(max_epochs=number)
        if validate:
            loss = float(number + torch.rand(()))  # drawn by the caller, and always worse
            self.guard.validated(loss)
            self.best.losses.append(loss)

    def facts(self) -> list[Any]:
        return [
            [
                tensor.tolist()
                for tensor in (*tensors_of(self.model, self.optimizer), self.best.weights)
            ],
            {key: value for key, value in self.plateau.state_dict().items() if key != "optimizer"},
            self.best.losses,
            self.optimizer.param_groups[0]["lr"],
        ]


@pytest.mark.parametrize("shuffled", [False, True], ids=["holdfast", "torch"])
@pytest.mark.parametrize("async_save", [False, True])
def test_what_follows_an_epoch_is_there_after_a_restart(
    async_save: bool, shuffled: bool, tmp_path: Path
) -> None:
    """Plateau, learning rate, state and what the caller drew.

    Four epochs in two processes are those of one.
    """
    whole = Process(tmp_path / "whole", shuffled=shuffled)
    for number in (1, 2, 3, 4):
        whole.epoch(number)
    first = Process(
        tmp_path / "parts", async_save=async_save, save_interval_steps=2, shuffled=shuffled
    )
    for number in (1, 2):
        first.epoch(number)
    first.guard.close()
    newest, before, *_ = first.store.entries()
    assert newest.global_step == 6 > before.global_step
    second = Process(tmp_path / "parts", shuffled=shuffled)
    assert second.guard.resumed_from == newest.path
    assert second.facts() == first.facts()
    for number in (3, 4):
        second.epoch(number)
    assert second.facts() == whole.facts()


def change_rate(process: Process, number: int) -> None:
    process.optimizer.param_groups[0]["lr"] = 0.01 * number


def change_scheduler(process: Process, number: int) -> None:
    process.guard.validated(5.0 * number)


def change_list(process: Process, number: int) -> None:
    process.best.losses.append(number)


def change_tensor(process: Process, number: int) -> None:
    process.best.weights[1] = number


def change_type(process: Process, number: int) -> None:
    process.best.weights = process.best.weights.to([torch.float64, torch.float16][number % 2])


@pytest.mark.parametrize(
    "change", [change_rate, change_scheduler, change_list, change_tensor, change_type]
)
def test_each_change_is_written_once(change: Any, tmp_path: Path) -> None:
    """In this process or in the next, before its loop.

    One more checkpoint of the step, and no second one.
    """
    process = Process(tmp_path)
    process.epoch(1, validate=False)
    process.guard.close()
    for number in (1, 2):
        before = process.store.next_save_id()
        change(process, number)
        for _ in range(2):
            process.guard.close()
            assert process.store.next_save_id() == before + 1
        changed = process.facts()
        process = Process(tmp_path)
        assert process.facts() == changed
    process.guard.close()
    assert process.store.next_save_id() == before + 1


def test_a_run_that_is_opened_and_closed_writes_nothing(tmp_path: Path) -> None:
    """As often as it is done, with and without its loop, no checkpoint is added, replaced or
    touched.
    """
    process = Process(tmp_path)
    for number in (1, 2):
        process.epoch(number)
    process.guard.close()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("checkpoints/*/*")}
    assert before
    for number in range(4):
        process = Process(tmp_path)
        if number % 2:
            process.epoch(2, validate=False)
        torch.rand(7)
        process.guard.close()
        process.guard.close()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("checkpoints/*/*")} == before


def spoil(process: Process, kind: str) -> None:
    if kind == "average":
        process.model[0].weight.data.mul_(0.5)
    elif kind == "half":
        process.model.half()
    elif kind == "statistics":
        process.model[2].running_mean.add_(1)
    elif kind == "moments":
        process.optimizer.state.clear()
    else:
        process.best.fails = True


@pytest.mark.parametrize("kind", ["average", "half", "statistics", "moments", "no state"])
def test_what_may_not_be_saved_changes_nothing_and_is_said(
    kind: str, tmp_path: Path, caplog: Any
) -> None:
    """An average in the place of the weights, another type for an export, or state that cannot
    be given.
    """
    process = Process(tmp_path)
    process.epoch(1)
    before = process.store.entries()
    spoil(process, kind)
    process.guard.close()
    assert process.store.entries() == before
    why = (
        "RuntimeError: not now"
        if kind == "no state"
        else "the weights, buffers or moments were changed"
    )
    assert why in caplog.text


def test_a_run_that_went_on_elsewhere_is_left_alone(tmp_path: Path) -> None:
    """A guard that gave its directory back does not write over what another one has trained
    since.
    """
    first = Process(tmp_path)
    first.epoch(1)
    second = Process(tmp_path)
    second.epoch(2)
    second.guard.close()
    before = second.store.entries()
    first.guard.close()
    assert first.store.entries() == before


def test_in_the_middle_of_an_epoch_the_random_state_is_that_of_the_batch(tmp_path: Path) -> None:
    """What the caller draws after a loop that stopped there is no part of an undisturbed run."""
    expected = Process(tmp_path / "whole")
    expected.train(max_steps=9)
    stopped = Process(tmp_path / "parts")
    stopped.train(max_steps=4)
    torch.rand(5)
    stopped.best.losses.append(1.0)
    stopped.guard.close()
    waiting = Process(tmp_path / "parts")
    torch.rand(3)
    waiting.best.losses.append(2.0)
    waiting.guard.close()
    went_on = Process(tmp_path / "parts")
    went_on.train(max_steps=9)
    assert went_on.best.losses == [1.0, 2.0]
    went_on.best.losses.clear()
    assert went_on.facts() == expected.facts()


def test_what_is_done_with_half_of_a_batch_is_not_saved(tmp_path: Path) -> None:
    """An error before the step, with ``close()`` in a ``finally``.

    The next process gets that batch anew.
    """
    process = Process(tmp_path)
    process.epoch(1, validate=False)
    before = process.store.entries()
    batches = process.guard.batches(max_epochs=2)
    next(batches)
    change_list(process, 1)
    batches.close()
    process.guard.close()
    assert process.store.entries() == before


def test_a_kill_while_the_same_step_is_saved_again_leaves_the_first(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """The older checkpoint of the step is complete until the newer one is."""
    process = Process(tmp_path, keep_latest_k=1)
    process.epoch(1)
    (before,) = process.store.entries()

    class Killed(BaseException):
        pass

    def kill(*_: Any) -> None:
        before.verify()
        raise Killed

    monkeypatch.setattr("holdfast.checkpoint.store.rename_directory", kill)
    with pytest.raises(Killed):
        process.guard.close()
    monkeypatch.undo()
    process.guard.close()
    (after,) = process.store.entries()
    assert after.save_id > before.save_id
    assert after.verify().global_step == before.global_step
