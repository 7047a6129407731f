"""`holdfast simulate` as a user calls it: measured costs, given ones, text, JSON, and what makes no sense."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Self

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

import holdfast
from holdfast.checkpoint.goodput import effective_training_time_ratio
from holdfast.cli import simulate
from holdfast.core.events.event import Event
from holdfast.recorder.black_box import BlackBox, StepMark

_LLAMA = ("--mtbf", 54 * 86_400 / 419)
_app = typer.Typer()
_app.command()(simulate.run)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(_app, [str(argument) for argument in arguments])


def answer(*arguments: object) -> Any:
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


class Tape:
    """Records a run of 2 s a step whose saves hold the loop for 0.1 s and count after 4 s, at times of its own."""

    def __init__(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run_dir, self.now, self.step = run_dir, 1000.0, 0
        monkeypatch.setattr(time, "time_ns", lambda: int(self.now * 1e9))

    def __enter__(self) -> Self:
        self.box = BlackBox(self.run_dir / "recorder" / "rank0")
        return self

    def __exit__(self, *_: object) -> None:
        self.box.close()

    def saved(self, **facts: Any) -> None:
        self.box.event(
            Event(
                kind="checkpoint_saved", global_step=self.step, unix_seconds=self.now, data={"seconds": 4.0, **facts}
            )
        )

    def steps(self, count: int, save_every: int = 5) -> None:
        for _ in range(count):
            self.box.step(StepMark.BEGUN, self.step, 8, 0.0, 0.0, 0.0)
            self.now += 2.0
            self.step += 1
            self.box.step(StepMark.COMMITTED, self.step, 8, 1.0, 1.0, 1.5)
            if self.step % save_every == 0:
                self.saved(stall_seconds=0.1)
                self.now += 0.1


@pytest.fixture
def tape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tape:
    return Tape(tmp_path, monkeypatch)


def test_costs_given_by_hand_are_judged_by_the_formula() -> None:
    """The optimal interval, and where the time goes: the shares add to one."""
    found = answer(*_LLAMA, "--save-seconds", 60, "--restart-seconds", 1200)
    between = found["mean_seconds_between_failures"]
    assert between == pytest.approx(54 * 86_400 / 419)
    (row,) = found["intervals"]
    exact = effective_training_time_ratio(row["interval_seconds"], 60.0, between, 1200.0)
    assert (row["name"], row["ratio"]) == ("optimal", exact)
    assert sum(row[part] for part in ("ratio", "saving", "lost_work", "restarting")) == pytest.approx(1)
    shown = call(*_LLAMA, "--save-seconds", 60, "--restart-seconds", 1200).output
    assert "a failure every 3 h 5 min" in shown
    assert f"{exact:.2%}" in shown


def test_a_run_is_judged_by_what_it_recorded_and_options_replace_that(tape) -> None:
    """Save, stall, step and interval are those of the recording, but for what is given."""
    with tape:
        tape.saved(seconds=9.0)  # the first one is synchronous
        tape.steps(12)
        tape.saved(stall_seconds=0.1)
    found = answer(tape.run_dir, *_LLAMA)
    assert found["recorded"] == {
        "saves": 4,
        "save_seconds": 4.0,
        "stall_seconds": 0.1,
        "step_seconds": pytest.approx(2.0),
        "interval_seconds": pytest.approx(10.0),
    }
    mine, best = found["intervals"]
    assert [mine["name"], mine["interval_steps"]] == ["this run's", 5]
    exact = effective_training_time_ratio(10.0, 4.0, 54 * 86_400 / 419, 300.0, stall_seconds=0.1)
    assert mine["ratio"] == pytest.approx(exact)
    assert best["ratio"] > mine["ratio"]
    assert "this run's" in call(tape.run_dir, *_LLAMA).output
    given = answer(tape.run_dir, "--mtbf", "1d", "--restart-seconds", 30, "--save-seconds", 2)
    assert (given["save_seconds"], given["stall_seconds"], given["restart_seconds"]) == (2.0, 0.1, 30.0)


def test_no_interval_is_shorter_than_a_step_or_the_writer(tape) -> None:
    """An optimum of less than a step is a step, and one below the writer's time is that time."""
    with tape:
        tape.steps(12)
    short = (tape.run_dir, "--mtbf", "20s", "--restart-seconds", 1)
    assert answer(*short)["intervals"][1]["interval_seconds"] == 3.9
    assert answer(*short, "--save-seconds", 0.01)["intervals"][1]["interval_seconds"] == pytest.approx(2.0)


def test_the_recording_of_a_real_run_is_read(tmp_path) -> None:
    """A guard's own recording is enough for the command."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = [torch.ones(4, 2)] * 6
    with holdfast.Guard(tmp_path, model=model, optimizer=optimizer, loader=data, save_interval_steps=2) as guard:
        for batch in guard.batches(max_epochs=1):
            guard.step(batch, lambda x: model(x).square().mean())
    found = answer(tmp_path, "--mtbf", "1d")
    assert found["recorded"]["saves"] >= 3
    assert 0 < found["stall_seconds"] <= found["save_seconds"]


def test_a_save_costs_what_the_run_itself_counted(tape) -> None:
    """Slower steps are part of the cost as the run's own chooser knew it last."""
    with tape:
        tape.saved(seconds=9.0, stall_seconds=9.0)
        tape.steps(10)
        for cost in (0.9, 1.3):
            tape.saved(stall_seconds=0.1, save_costs_seconds=cost)
    assert answer(tape.run_dir, "--mtbf", "1d")["stall_seconds"] == 1.3


@pytest.mark.parametrize(
    ("stalls", "seconds", "expected"),
    [
        ((0.50, 0.01, 0.52), (0.50, 0.30, 0.52), (0.30, 0.01)),
        ((0.50, 0.52), (0.50, 0.52), (0.50, 0.50)),
        ((None, 0.01, None), (0.5, 0.3, 0.5), (0.3, 0.01)),
    ],
)
def test_saves_that_the_loop_waits_for_count_only_where_there_are_no_others(tape, stalls, seconds, expected) -> None:
    """The loop waits for the first save and the last one, and the more a run saves the less these two say."""
    with tape:
        for stall, lasted in zip(stalls, seconds, strict=True):
            tape.saved(seconds=lasted, **({} if stall is None else {"stall_seconds": stall}))
            tape.steps(2, save_every=100)
    recorded = answer(tape.run_dir, "--mtbf", "1d")["recorded"]
    assert (recorded["save_seconds"], recorded["stall_seconds"]) == expected


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (("--save-seconds", 1, "--mtbf", "419/54d"), "H705"),
        (("--save-seconds", 1, "--mtbf", "0s"), "H706"),
        (("--save-seconds", "nan", "--mtbf", "1h"), "H706"),
        (("--save-seconds", 1, "--restart-seconds", -1, "--mtbf", "1h"), "H706"),
        (("--mtbf", "1h"), "H708"),
        (("nowhere", "--mtbf", "1h"), "H701"),
    ],
)
def test_nonsense_is_a_message_and_exit_code_2(arguments, rule, tmp_path, monkeypatch) -> None:
    """What cannot be read, cannot be, is missing or contradicts itself is an error with its rule and a fix."""
    monkeypatch.chdir(tmp_path)
    result = call(*arguments, "--json")
    assert result.exit_code == 2
    error = json.loads(result.output)["error"]
    assert error["rule"] == rule
    assert error["fix"]


def test_a_run_without_a_finished_save_or_another_interval_is_judged_by_what_is_given(tape) -> None:
    """A recording without a save is H708, and --save-seconds is enough to go on; an interval needs two saves."""
    with tape:
        tape.steps(3)
    assert "[H708]" in call(tape.run_dir, "--mtbf", "1h").output
    found = answer(tape.run_dir, "--mtbf", "1h", "--save-seconds", 1)
    assert [row["name"] for row in found["intervals"]] == ["optimal"]
    assert "this run's" not in call(tape.run_dir, "--mtbf", "1h", "--save-seconds", 1).output
