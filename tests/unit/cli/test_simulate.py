"""`holdfast simulate` as a user calls it: measured costs, given ones, text, JSON, and what makes no sense."""

from __future__ import annotations

import json
import subprocess
import sys
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
from holdfast.core.events import Event
from holdfast.recorder.black_box import BlackBox, StepMark
from holdfast.recorder.run_files import ProcessInfo, write_process

_LLAMA = ("--gpus", 16_384, "--failures", "419/54d")
_app = typer.Typer()
_app.command()(simulate.run)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(_app, [str(argument) for argument in arguments])


def found_by(*arguments: object) -> Any:
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

    def event(self, kind: str, **facts: Any) -> None:
        self.box.event(Event(kind=kind, global_step=self.step, unix_seconds=self.now, data=facts))

    def steps(self, count: int, save_every: int = 5) -> None:
        for _ in range(count):
            self.box.step(StepMark.BEGUN, self.step, 8, 0.0, 0.0, 0.0)
            self.now += 2.0
            self.step += 1
            self.box.step(StepMark.COMMITTED, self.step, 8, 1.0, 1.0, 1.5)
            if self.step % save_every == 0:
                self.event("checkpoint_saved", seconds=4.0, stall_seconds=0.1, size_bytes=2**30)
                self.now += 0.1


@pytest.fixture
def tape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tape:
    return Tape(tmp_path, monkeypatch)


def test_costs_given_by_hand_are_held_against_formula_and_simulation() -> None:
    """The optimal interval and Young's, each by formula and within four standard errors of it by simulation."""
    found = found_by(*_LLAMA, "--save-seconds", 60, "--restart-seconds", 1200)
    assert found["mean_seconds_between_failures"] == pytest.approx(54 * 86_400 / 419)
    assert [row["name"] for row in found["intervals"]] == ["optimal", "Young's"]
    for row in found["intervals"]:
        exact = effective_training_time_ratio(row["interval_seconds"], 60.0, 54 * 86_400 / 419, 1200.0)
        played = row["simulation"]
        assert row["formula"] == exact == pytest.approx(0.81, abs=0.005)
        assert played["ratio"] == pytest.approx(exact, abs=4 * played["standard_error"])
        assert row["first_order"] > exact
        assert sum(played[part] for part in ("ratio", "saving", "lost_work", "restarting")) == pytest.approx(1)
    shown = call(*_LLAMA, "--save-seconds", 60, "--restart-seconds", 1200)
    assert shown.exit_code == 0
    assert "a failure every 3 h 5 min" in shown.output
    assert f"{found['intervals'][0]['formula']:.2%}" in shown.output


def test_failures_scale_with_the_gpus_that_they_were_counted_on() -> None:
    """Four times the devices fail four times as often, and --mtbf is of the job as it is."""
    four = found_by("--gpus", 65_536, "--failures", "419/54d", "--failures-gpus", 16_384, "--save-seconds", 5)
    assert four["mean_seconds_between_failures"] == pytest.approx(54 * 86_400 / 419 / 4)
    assert found_by("--gpus", 9, "--mtbf", "3.1h", "--save-seconds", 5)["mean_seconds_between_failures"] == 3.1 * 3600


def test_a_run_is_judged_by_what_it_recorded(tape) -> None:
    """Save, stall, step, interval and restart are those of the recording; a planned stop is no restart."""
    with tape:
        tape.event("checkpoint_saved", seconds=9.0, size_bytes=2**30)  # the first one is synchronous
        tape.steps(13)
        tape.now, tape.step = tape.now + 90, 10  # killed 3 steps after the save, back 90 s later
        tape.event("resumed")
        tape.steps(10)
        tape.now += 1e6  # stopped with its last step saved, and left alone for days
        tape.event("resumed")
        tape.steps(10)
        tape.box.step(StepMark.BEGUN, tape.step, 8, 0.0, 0.0, 0.0)
        tape.now += 70  # killed within a step, the one after a save
        tape.event("resumed")
        tape.steps(3)
    found = found_by(tape.run_dir, *_LLAMA)
    assert found["recorded"] == {
        "saves": 7,
        "save_seconds": 4.0,
        "stall_seconds": 0.1,
        "size_bytes": 2**30,
        "step_seconds": pytest.approx(2.0),
        "interval_seconds": pytest.approx(10.0),
        "restarts": 2,
        "restart_seconds": pytest.approx(70.0),
    }
    mine, best, young = found["intervals"]
    assert [mine["name"], mine["interval_steps"]] == ["this run's", 5]
    exact = effective_training_time_ratio(10.0, 4.0, 54 * 86_400 / 419, 70.0, stall_seconds=0.1)
    assert mine["formula"] == pytest.approx(exact)
    assert mine["simulation"]["ratio"] == pytest.approx(exact, abs=4 * mine["simulation"]["standard_error"])
    assert best["formula"] > mine["formula"]
    assert best["interval_seconds"] == pytest.approx(young["interval_seconds"], rel=0.1)
    assert "this run's" in call(tape.run_dir, *_LLAMA).output


def test_options_replace_what_was_recorded(tape) -> None:
    """Each cost and the interval can be given, and the rest stays as recorded, whenever the last save was made."""
    with tape:
        tape.steps(12)
        tape.event("checkpoint_saved", seconds=4.0, stall_seconds=0.1, size_bytes=2**30)
    found = found_by(tape.run_dir, "--mtbf", "1d", "--restart-seconds", 30, "--interval", "1min", "--save-seconds", 2)
    assert (found["save_seconds"], found["stall_seconds"], found["restart_seconds"]) == (2.0, 0.1, 30.0)
    assert (found["intervals"][0]["name"], found["intervals"][0]["interval_steps"]) == ("given", 30)
    assert found_by(tape.run_dir, "--mtbf", "1d")["restart_is"] == "assumed"
    assert found_by(tape.run_dir, "--mtbf", "1d")["intervals"][0]["interval_steps"] == 5
    assert found_by(tape.run_dir, "--mtbf", "1d", "--stall-seconds", 0.5)["stall_seconds"] == 0.5


def test_no_interval_is_shorter_than_a_step_or_the_writer(tape) -> None:
    """An optimum of less than a step is a step, and one below the writer's time is that time."""
    with tape:
        tape.steps(12)
    assert found_by(tape.run_dir, "--mtbf", "20s", "--restart-seconds", 1)["intervals"][1]["interval_seconds"] == 3.9
    fast = found_by(tape.run_dir, "--mtbf", "20s", "--restart-seconds", 1, "--save-seconds", 0.01)
    assert fast["intervals"][1]["interval_seconds"] == pytest.approx(2.0)


def test_a_recording_without_stalls_and_one_of_a_real_run(tmp_path) -> None:
    """A guard's own recording is read, whichever of the facts of a save it tells."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = [torch.ones(4, 2)] * 6
    with holdfast.Guard(tmp_path, model=model, optimizer=optimizer, loader=data, save_interval_steps=2) as guard:
        for batch in guard.batches(max_epochs=1):
            guard.step(batch, lambda x: model(x).square().mean())
    found = found_by(tmp_path, "--mtbf", "1d")
    assert found["recorded"]["saves"] >= 3
    assert 0 < found["stall_seconds"] <= found["save_seconds"]
    assert found["recorded"]["size_bytes"] > 0


def test_a_run_that_saved_once_has_no_interval(tape) -> None:
    """What the recording does not tell is said, and the other intervals are still judged."""
    with tape:
        tape.steps(6)
    shown = call(tape.run_dir, "--mtbf", "1d")
    assert shown.exit_code == 0
    assert "pass --interval" in shown.output
    assert "this run's" not in shown.output


def test_a_save_costs_what_the_run_itself_counted(tape) -> None:
    """Slower steps are part of the cost as the run's own chooser knew it last; its stall is for older recordings."""
    with tape:
        tape.event("checkpoint_saved", seconds=9.0, stall_seconds=9.0)
        tape.steps(10)
        tape.event("checkpoint_saved", seconds=4.0, stall_seconds=0.1, save_costs_seconds=0.9)
        tape.event("checkpoint_saved", seconds=4.0, stall_seconds=0.1, save_costs_seconds=1.3)
    found = found_by(tape.run_dir, "--mtbf", "1d")
    assert found["stall_seconds"] == found["recorded"]["stall_seconds"] == 1.3
    exact = effective_training_time_ratio(10.0, 4.0, 86_400.0, 300.0, stall_seconds=1.3)
    assert found["intervals"][0]["formula"] == pytest.approx(exact)


@pytest.mark.parametrize(
    ("stalls", "seconds", "expected"),
    [
        ((0.50, 0.01, 0.52), (0.50, 0.30, 0.52), (0.30, 0.01)),
        ((0.50, 0.52), (0.50, 0.52), (0.50, 0.50)),
        ((0.50, 0.0), (0.50, 0.3), (0.3, 0.0)),
        ((None, 0.01, None), (0.5, 0.3, 0.5), (0.3, 0.01)),
    ],
)
def test_saves_that_the_loop_waits_for_count_only_where_there_are_no_others(tape, stalls, seconds, expected) -> None:
    """The loop waits for the first save and the last one, and the more a run saves the less these two say."""
    with tape:
        for stall, lasted in zip(stalls, seconds, strict=True):
            facts = {} if stall is None else {"stall_seconds": stall}
            tape.event("checkpoint_saved", seconds=lasted, **facts)
            tape.steps(2, save_every=100)
    recorded = found_by(tape.run_dir, "--mtbf", "1d")["recorded"]
    assert (recorded["save_seconds"], recorded["stall_seconds"]) == expected
    assert recorded["saves"] == len(stalls)


def test_a_directory_of_a_supervised_run_leads_to_its_guard(tmp_path, monkeypatch) -> None:
    """What `holdfast run` records names the guard's directory; two guards there are not told apart."""
    supervised = tmp_path / "runs" / "train-1"
    guards = [tmp_path / name for name in ("a", "b")]
    for guard in guards:
        with Tape(guard, monkeypatch) as tape:
            tape.steps(12)
    box = BlackBox(write_process(supervised, ProcessInfo(pid=7, ticks=1, ppid=1, argv=["python", "train.py"])))
    box.event(Event(kind="guard", global_step=0, unix_seconds=1.0, data={"path": str(guards[0])}))
    assert found_by(supervised, *_LLAMA)["run_dir"] == str(guards[0])
    box.event(Event(kind="guard", global_step=0, unix_seconds=2.0, data={"path": str(guards[1])}))
    box.close()
    assert "[H701]" in call(supervised, *_LLAMA).output


def test_the_seed_decides_the_simulation() -> None:
    """The same seed prints the same figures, another one others."""
    arguments = ("--mtbf", "1h", "--save-seconds", 5)
    assert call(*arguments).output == call(*arguments, "--seed", 0).output != call(*arguments, "--seed", 1).output


_NONSENSE = [
    (("--save-seconds", 1, "--failures", "419"), "H705"),
    (("--save-seconds", 1, "--mtbf", "soon"), "H705"),
    (("--save-seconds", 1, "--mtbf", "1h", "--interval", "-3"), "H705"),
    (("--save-seconds", 1, "--mtbf", "0.1s"), "H706"),
    (("--save-seconds", 1, "--mtbf", "1e999h"), "H706"),
    (("--save-seconds", 0, "--mtbf", "1h"), "H706"),
    (("--save-seconds", "nan", "--mtbf", "1h"), "H706"),
    (("--save-seconds", 1, "--stall-seconds", 2, "--mtbf", "1h"), "H706"),
    (("--save-seconds", 1, "--stall-seconds", -1, "--mtbf", "1h"), "H706"),
    (("--save-seconds", 1, "--restart-seconds", -1, "--mtbf", "1h"), "H706"),
    (("--save-seconds", 1, "--restart-seconds", 1e6, "--mtbf", "1h"), "H706"),
    (("--save-seconds", 1, "--mtbf", "1h", "--interval", "0s"), "H706"),
    (("--save-seconds", 1e-300, "--mtbf", "1h"), "H706"),
    (("--save-seconds", 1e-12, "--interval", "1e-12", "--mtbf", "1d"), "H706"),
    (("--save-seconds", 1e-300, "--stall-seconds", 0, "--mtbf", "1h"), "H706"),
    (("--save-seconds", 1), "H707"),
    (("--save-seconds", 1, "--failures", "1/d", "--mtbf", "1h"), "H707"),
    (("--mtbf", "1h"), "H708"),
    (("--save-seconds", 9, "--stall-seconds", 1, "--mtbf", "1h", "--interval", "2s"), "H709"),
    (("nowhere", "--mtbf", "1h"), "H701"),
]


def test_nonsense_is_a_message_and_exit_code_2() -> None:
    """What cannot be read, cannot be, is missing or contradicts itself is an error with its rule and a fix."""
    for arguments, rule in _NONSENSE:
        result = call(*arguments, "--json")
        assert result.exit_code == 2
        error = json.loads(result.output)["error"]
        assert error["rule"] == rule, arguments
        assert error["fix"]


def test_the_option_that_is_wrong_is_the_one_that_is_named() -> None:
    """A stall that cannot be is not told as a time of saving, which was given rightly."""
    for stall in (-1, "nan"):
        error = json.loads(call("--save-seconds", 60, "--stall-seconds", stall, "--mtbf", "1h", "--json").output)[
            "error"
        ]
        assert error["what"].startswith(f"stall_seconds={stall}")


def test_a_run_without_a_finished_save_says_so(tape) -> None:
    """A recording that tells of no save is H708, and --save-seconds is enough to go on."""
    with tape:
        tape.steps(3)
    assert "[H708]" in call(tape.run_dir, "--mtbf", "1h").output
    assert found_by(tape.run_dir, "--mtbf", "1h", "--save-seconds", 1)["recorded"]["saves"] == 0


def test_the_command_needs_no_torch() -> None:
    """Formulas, simulation and command are imported without torch."""
    code = "import sys; from holdfast.cli import simulate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
