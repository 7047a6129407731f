"""`close` writes what changed without a step, never weights that are not the training's, and nothing twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import holdfast
from holdfast.checkpoint.store import Store


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
        self.losses, self.weights, self.seen = list(state["losses"]), state["weights"], set(state["seen"])


class Life:
    """One process of a run with everything that can change between steps."""

    def __init__(self, run_dir: Path, *, shuffled: bool = False, **policy: Any) -> None:
        torch.manual_seed(2)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.plateau = ReduceLROnPlateau(self.optimizer, patience=0, factor=0.5)
        self.best = Best()
        data = [torch.randn(3) for _ in range(12)]
        loader: Any = holdfast.DataLoader(data, batch_size=4, shuffle=True)
        if shuffled:
            loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)  # type: ignore[arg-type]
        self.loader = loader
        self.store = Store(run_dir / "checkpoints")
        self.guard = holdfast.Guard(
            run_dir,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.plateau,
            loader=loader,
            state={"best": self.best},
            **policy,
        )

    def epoch(self, number: int, *, validate: bool = True) -> None:
        for batch in self.guard.batches(max_epochs=number):
            self.guard.step(batch, lambda x: self.model(x).square().mean())
        if validate:
            loss = float(number + torch.rand(()))  # drawn by the caller, and always worse
            self.guard.validated(loss)
            self.best.losses.append(loss)

    def facts(self) -> list[Any]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*self.model.state_dict().values(), *moments, self.best.weights]
        return [
            [tensor.tolist() for tensor in tensors],
            {key: value for key, value in self.plateau.state_dict().items() if key != "optimizer"},
            self.best.losses,
            self.optimizer.param_groups[0]["lr"],
        ]

    def events(self, kind: str) -> list[Any]:
        return [event for event in self.guard.events() if event.kind == kind]


@pytest.mark.parametrize("shuffled", [False, True], ids=["holdfast", "torch"])
@pytest.mark.parametrize("async_save", [False, True])
def test_what_follows_an_epoch_is_there_in_the_next_life(async_save: bool, shuffled: bool, tmp_path: Path) -> None:
    """Plateau, learning rate, state and what the caller drew: four epochs in two lives are those of one life."""
    whole = Life(tmp_path / "whole", shuffled=shuffled)
    for number in (1, 2, 3, 4):
        whole.epoch(number)
    first = Life(tmp_path / "parts", async_save=async_save, save_interval_steps=2, shuffled=shuffled)
    for number in (1, 2):
        first.epoch(number)
    first.guard.close()
    newest, before, *_ = first.store.entries()
    assert newest.global_step == 6 > before.global_step
    second = Life(tmp_path / "parts", shuffled=shuffled)
    assert second.guard.resumed_from == newest.path
    assert second.facts() == first.facts()
    for number in (3, 4):
        second.epoch(number)
    assert second.facts() == whole.facts()


def change_rate(life: Life, number: int) -> None:
    life.optimizer.param_groups[0]["lr"] = 0.01 * number


def change_scheduler(life: Life, number: int) -> None:
    life.guard.validated(5.0 * number)


def change_list(life: Life, number: int) -> None:
    life.best.losses.append(number)


def change_tensor(life: Life, number: int) -> None:
    life.best.weights[1] = number


def change_type(life: Life, number: int) -> None:
    life.best.weights = life.best.weights.to([torch.float64, torch.float16][number % 2])


CHANGES = [change_rate, change_scheduler, change_list, change_tensor, change_type]


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_written_once(change: Any, tmp_path: Path) -> None:
    """In this life or in the next, before its loop: one more checkpoint of the step, and no second one."""
    life = Life(tmp_path)
    life.epoch(1, validate=False)
    life.guard.close()
    for number in (1, 2):
        before = life.store.next_save_id()
        change(life, number)
        for _ in range(2):
            life.guard.close()
            assert life.store.next_save_id() == before + 1
        changed = life.facts()
        life = Life(tmp_path)
        assert life.facts() == changed
    life.guard.close()
    assert life.store.next_save_id() == before + 1


def test_a_run_that_is_opened_and_closed_writes_nothing(tmp_path: Path) -> None:
    """As often as it is done, with and without its loop, no checkpoint is added, replaced or touched."""
    life = Life(tmp_path)
    for number in (1, 2):
        life.epoch(number)
    life.guard.close()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("checkpoints/*/*")}
    assert before
    for number in range(4):
        life = Life(tmp_path)
        if number % 2:
            life.epoch(2, validate=False)
        torch.rand(7)
        life.guard.close()
        life.guard.close()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("checkpoints/*/*")} == before
    assert life.guard.statistics().checkpoints_saved == 0


@pytest.mark.parametrize("kind", ["average", "half", "statistics", "moments"])
def test_weights_of_something_else_never_become_the_training(kind: str, tmp_path: Path, caplog: Any) -> None:
    """An average in the place of the weights, or another type for an export: nothing is written, which is said."""
    life = Life(tmp_path)
    life.epoch(1)
    before = life.store.entries()
    if kind == "average":
        with torch.no_grad():
            life.model[0].weight.mul_(0.5)
    elif kind == "half":
        life.model.half()
    elif kind == "statistics":
        life.model[2].running_mean.add_(1)
    else:
        life.optimizer.state.clear()
    life.guard.close()
    assert life.store.entries() == before
    assert "changes_not_saved: why='the weights, buffers or moments were changed without a step" in caplog.text


def test_state_that_cannot_be_told_does_not_end_the_run(tmp_path: Path, caplog: Any) -> None:
    """An error of the caller's part is told, and what is saved stays."""
    life = Life(tmp_path)
    life.epoch(1)
    before = life.store.entries()
    life.best.fails = True
    life.guard.close()
    assert life.store.entries() == before
    assert "changes_not_saved: why='RuntimeError: not now'" in caplog.text


def test_a_run_that_went_on_elsewhere_is_left_alone(tmp_path: Path) -> None:
    """A guard that gave its directory back does not write over what another one has trained since."""
    first = Life(tmp_path)
    first.epoch(1)
    second = Life(tmp_path)
    second.epoch(2)
    second.guard.close()
    before = second.store.entries()
    first.guard.close()
    assert first.store.entries() == before


def test_in_the_middle_of_an_epoch_the_random_state_is_that_of_the_batch(tmp_path: Path) -> None:
    """What the caller draws after a loop that stopped there is no part of an undisturbed run."""

    def life(run_dir: Path, *steps: int) -> Life:
        found = Life(run_dir)
        for batch in found.guard.batches(max_steps=steps[0]):
            found.guard.step(batch, lambda x: found.model(x).square().mean())
        return found

    expected = life(tmp_path / "whole", 9)
    stopped = life(tmp_path / "parts", 4)
    torch.rand(5)
    stopped.best.losses.append(1.0)
    stopped.guard.close()
    assert stopped.guard.statistics().checkpoints_saved == 3
    waiting = Life(tmp_path / "parts")
    torch.rand(3)
    waiting.best.losses.append(2.0)
    waiting.guard.close()
    assert waiting.guard.statistics().checkpoints_saved == 1
    went_on = life(tmp_path / "parts", 9)
    assert went_on.best.losses == [1.0, 2.0]
    went_on.best.losses.clear()
    assert went_on.facts() == expected.facts()


def test_changes_take_no_older_step_away(tmp_path: Path) -> None:
    """Else a rollback, or damage to the newest, would find no other state after a few of them."""
    life = Life(tmp_path, keep_latest_k=2)
    life.epoch(1, validate=False)
    life.epoch(2, validate=False)
    steps = [entry.global_step for entry in life.store.entries()]
    assert len(set(steps)) == 2
    for number in (1, 2, 3):
        change_rate(life, number)
        life.guard.close()
        assert [entry.global_step for entry in life.store.entries()] == steps


def test_a_directory_that_is_in_use_does_not_end_a_training_that_is_over(tmp_path: Path, caplog: Any) -> None:
    """What changed after its loop is then not saved, which is said."""
    life = Life(tmp_path)
    life.epoch(1, validate=False)
    other = Life(tmp_path)
    change_rate(life, 1)
    life.guard.close()
    assert "changes_not_saved" in caplog.text
    other.guard.close()


def test_what_is_done_with_half_of_a_batch_is_not_saved(tmp_path: Path) -> None:
    """An error before the step, with ``close()`` in a ``finally``: the next life gets that batch anew."""
    life = Life(tmp_path)
    life.epoch(1, validate=False)
    before = life.store.entries()
    batches = life.guard.batches(max_epochs=2)
    next(batches)
    change_list(life, 1)
    batches.close()
    life.guard.close()
    assert life.store.entries() == before


def test_a_kill_while_the_same_step_is_saved_again_leaves_the_first(tmp_path: Path, monkeypatch: Any) -> None:
    """The older checkpoint of the step is complete until the newer one is."""
    life = Life(tmp_path, keep_latest_k=1)
    life.epoch(1)
    (before,) = life.store.entries()
    seen: list[bool] = []

    class Killed(BaseException):
        pass

    def kill(*_: Any) -> None:
        before.verify()
        seen.append(True)
        raise Killed

    monkeypatch.setattr("holdfast.checkpoint.store.rename_directory", kill)
    with pytest.raises(Killed):
        life.guard.close()
    monkeypatch.undo()
    assert seen == [True]
    life.guard.close()
    (after,) = life.store.entries()
    assert after.save_id > before.save_id
    assert after.verify().global_step == before.global_step
