"""Several runs side by side, what each was started with, and on what its time was spent."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.report.made_runs import (
    BEGAN,
    GONE,
    VERDICT,
    add_process,
    happened,
    make_run,
    sample,
    write_events,
)
from typer.testing import CliRunner

import holdfast
from holdfast.cli.main import make_app
from holdfast.core.clock import SystemClock
from holdfast.core.events.event import Event
from holdfast.recorder.black_box import BlackBox, StepMark
from holdfast.recorder.progress import ProcessPhase
from holdfast.recorder.run_files import write_settings
from holdfast.recorder.start import facts_of_start
from holdfast.report.live.watching import Runs
from holdfast.report.page.comparing import Comparison
from holdfast.report.page.environment import environment
from holdfast.report.page.gathering import gather
from holdfast.report.page.goodput import goodput
from holdfast.report.page.run_page import figures


def compared(*words: object) -> Any:
    return CliRunner().invoke(make_app("compare"), ["compare", *map(str, words)])


def two_runs(folder: Path) -> tuple[Path, Path]:
    """Make two runs of other settings.

    The second began again at step 201, and has a guard that validated.
    """
    git = {"commit": "1" * 40, "branch": "main", "dirty": False}
    first = make_run(folder / "runs" / "first", steps=300, git=git)
    second = make_run(
        folder / "runs" / "second", steps=250, git={**git, "dirty": True}, argv=["python", "<b>"]
    )
    (second / "verdict.json").write_text(
        json.dumps(VERDICT | {"title": "<script>alert(1)</script>", "cause": "H1602"})
    )
    later = [sample(step, unix_seconds=BEGAN + 60 + 0.1 * step) for step in range(201, 401)]
    add_process(second, later, pid=GONE + 5, attempt=1, started=BEGAN + 70)
    write_events(
        second / "recorder" / "rank0", happened("validated", 40, 100, loss=0.5, name="wer")
    )
    for run, rate in ((first, 0.1), (second, 0.2)):
        found = {
            "optimizer.0.lr": rate,
            "optimizer.0.eps": 1e-8,
            "policy.max_grad_norm": 1.0,
            "batch_size": 4,
        }
        write_settings(run / "processes" / f"{GONE}-7", found | {"odd": object(), "none": None})
    return first, second


def test_what_differs_and_what_came_of_them(tmp_path: Path) -> None:
    """Only what differs is listed, without what is another in each run.

    The verdicts stand side by side.
    """
    done = compared(*two_runs(tmp_path), "--json", "--out", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["facts"]["steps"] == ["300", "400"]
    assert [each["cause"] for each in said["verdicts"]] == ["H970", "H1602"]
    assert said["facts"]["last validation wer"] == ["", "0.5"]
    assert said["differs"] == {
        "command: word 2": ["train.py", "<b>"],
        "command: --epochs": ["3", ""],
        "code (git): dirty": ["false", "true"],
        "hyperparameters: optimizer.0.lr": ["0.1", "0.2"],
    }
    page = (tmp_path / "page.html").read_text()
    assert "<script>alert" not in page
    assert "<h1>first, second</h1>" in page
    table = compared(*two_runs(tmp_path / "again"), "--out", tmp_path / "page.html").stdout
    assert "optimizer.0.lr" in table
    assert table.index("first") < table.index("second")


def test_of_long_commands_the_arguments_that_differ_are_shown_and_rates_as_they_were_set(
    tmp_path: Path,
) -> None:
    """Not a whole line that is cut, nor the first rate of a warm-up.

    The one of a schedule, else the largest seen.
    """
    runs, many = [], [word for number in range(60) for word in (f"--same_{number}", "value")]
    for name, rate, own in (("a", "0.1", ["--fast"]), ("b", "0.2", ["lr.x=1", "-n", "-1", "2"])):
        line = " ".join(["train.py", *many, f"--learning_rate={rate}", "--token", "-S3cr", *own])
        runs.append(make_run(tmp_path / name, steps=300, argv=["bash", "-c", line]))
    settings = {"AdamW 1.0.lr": 1e-7, "AdamW 1.0.eps": 1e-8}
    write_settings(runs[0] / "processes" / f"{GONE}-7", settings | {"AdamW 1.0.initial_lr": 0.1})
    write_settings(runs[1] / "processes" / f"{GONE}-7", settings)
    out = tmp_path / "page.html"
    assert json.loads(compared(*runs, "--json", "--out", out).stdout)["differs"] == {
        "command: --learning_rate": ["0.1", "0.2"],
        "command: --fast": ["given", ""],
        "command: lr.x": ["", "1"],
        "command: -n": ["", "-1 2"],
        "hyperparameters: AdamW 1.0.lr": ["0.1", "0.001 (the largest seen)"],
    }
    assert "--learning_rate" in compared(*runs, "--out", out).stdout
    assert "S3cr" not in out.read_text()


def run_with_times(run: Path, seconds_per_step: Callable[[int], float]) -> Path:
    """Make a run whose steps take these times."""
    samples = []
    ended = BEGAN
    for step in range(1, 401):
        ended += seconds_per_step(step)
        samples.append(sample(step, unix_seconds=ended, seconds=seconds_per_step(step)))
    make_run(run, steps=1)
    add_process(run, samples)
    return run


@pytest.mark.parametrize(
    ("seconds_per_step", "exit_code", "slower_by"),
    [
        (lambda step: 0.11, 1, 0.1),
        (lambda step: 0.104, 0, 0.04),
        (lambda step: 0.05, 0, -0.5),
        # A pause in every tenth step, as for a save, is slower although the median step is not.
        (lambda step: 0.1 if step % 10 else 0.3, 1, 0.2),
        # Another job on the machine for a third of the run is no regression.
        (lambda step: 0.3 if 100 < step < 230 else 0.1, 0, 0.0),
    ],
)
def test_a_run_that_became_slower_fails_the_comparison(
    tmp_path: Path, seconds_per_step: Callable[[int], float], exit_code: int, slower_by: float
) -> None:
    """The exit code is 1 if the second run is slower by more than the limit."""
    runs = [
        run_with_times(tmp_path / "a", lambda step: 0.1),
        run_with_times(tmp_path / "b", seconds_per_step),
    ]
    words = [*runs, "--json", "--out", tmp_path / "page.html", "--fail-on-regression", "5%"]
    done = compared(*words)
    assert done.exit_code == exit_code, done.output
    assert json.loads(done.stdout)["regression"]["slower_by"] == pytest.approx(slower_by, abs=0.02)


@pytest.mark.parametrize(
    ("limit", "more"), [("five", []), ("0.05", []), ("-5%", []), ("5%", ["third"]), ("5%", [])]
)
def test_a_comparison_of_speed_that_cannot_be_made_is_refused(
    tmp_path: Path, limit: str, more: list[str]
) -> None:
    """A value that is no percentage, three runs, or runs that are too short end with code 2."""
    runs = [make_run(tmp_path / name, steps=30) for name in ("first", "second", *more)]
    out = tmp_path / "page.html"
    done = compared(*runs, "--json", "--out", out, f"--fail-on-regression={limit}")
    assert done.exit_code == 2, done.output
    assert json.loads(done.stdout)["error"]["rule"] == "H105"
    assert not out.exists()


def guarded(
    run: Path, monkeypatch: pytest.MonkeyPatch, steps: Iterable[tuple[float, int]], *events: Event
) -> Path:
    """Write what a guard records of steps of 0.5 s at their times; return its run directory."""
    at, box = [0.0], BlackBox(run / "recorder" / "rank0")
    monkeypatch.setattr("holdfast.recorder.ring.time_ns", lambda: round((BEGAN + at[0]) * 1e9))
    for at[0], step in steps:
        box.step(StepMark.COMMITTED, step, 8, 1.0, 0.5, seconds=0.5)
    box.close()
    write_events(run / "recorder" / "rank0", *events)
    return run


def test_a_guard_alone_has_its_pace_and_its_goodput(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that were made before and gaps before restarts are no progress.

    A script's saves are not counted.
    """
    steps = [*zip(range(1, 11), range(1, 11), strict=True), (66, 6), (67, 7)]
    # Killed at the step after a save, at 6
    steps += [(100 + number, 7 + number) for number in range(9)]
    events = [
        happened("epoch_ended", 10, 10, epochs=1, steps=10, batches=20, batch_size=4),
        happened("closed", 109),
    ]
    events += [happened("resumed", 65, 5), happened("resumed", 99, 6)]
    run = guarded(tmp_path / "guard", monkeypatch, steps, *events)
    done = compared(run, make_run(tmp_path / "script"), "--json", "--out", tmp_path / "p.html")
    facts = json.loads(done.stdout)["facts"]
    # From 0.5 to 109 s, of which 55 and 32 s down, 10.5 s in steps: 15 steps, and 6, 7 and 7 to 10
    # once more.
    assert goodput(gather(run)) == {
        "steps": 7.5,
        "repeated steps": 3.0,
        "between steps": 11.0,
        "down": 87.0,
    }
    assert facts["time in steps"][0] == f"{7.5 / 108.5:.1%}"
    assert (facts["steps per second"], facts["samples per second"]) == (["1", "10"], ["8", ""])
    assert (facts["checkpoints"], facts["attempts"]) == (["0", ""], ["3", "1"])
    drawn = {trace["name"]: trace for trace in figures(gather(run))["timeline"]["data"]}
    assert [round(length / 1000, 1) for length in drawn["training"]["x"]] == [9.5, 2.0, 9.0]
    assert len(drawn["resumed"]["x"]) == 2
    write_events(run / "recorder" / "rank0", happened("closed", 67, how="finished"))
    assert goodput(gather(run))["down"] == 55.0  # to begin a run again that was over misses nothing


def test_of_a_long_run_the_steps_made_again_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ring holds the newest 32,768 steps; of those before, 64 are one row."""
    steps = [(0.6 * number, number - 970 * (number > 1000)) for number in range(1, 40_000)]
    run = guarded(tmp_path, monkeypatch, steps, happened("resumed", 600.3, 30))
    assert goodput(gather(run))["repeated steps"] == pytest.approx(0.5 * 970)


def test_attempts_are_one_curve_of_the_first_rank(tmp_path: Path) -> None:
    """Where the run went back there is a gap; other ranks are left out."""
    _, second = two_runs(tmp_path)
    run = gather(second)
    other = replace(run.lanes[0], rank=1, label="rank 1")
    (figure,) = _figures(Comparison([replace(run, lanes=(*run.lanes, other)), run]).page())
    losses = [
        trace for trace in figure["data"] if trace["mode"] == "lines" and trace["yaxis"] == "y"
    ]
    assert [trace["name"] for trace in losses] == ["second", "second"]
    assert losses[0]["x"] == [*range(1, 251), None, *range(201, 401), None]


def _figures(page: str) -> list[dict[str, Any]]:
    data = page.partition('<script type="application/json" id="figures">')[2].partition(
        "</script>"
    )[0]
    return list(json.loads(data).values())


@pytest.mark.parametrize("count", [1, 11])
def test_one_run_and_too_many_are_refused(tmp_path: Path, count: int) -> None:
    """A run that is named twice is one; the error says how many there may be."""
    runs = [make_run(tmp_path / f"{number}", steps=2) for number in range(count)]
    done = compared(runs[0], *runs)
    assert (done.exit_code, "2 to 10" in done.stderr) == (2, True)


def test_the_environment_is_in_groups(tmp_path: Path) -> None:
    """What is no plain value is left out, and a policy is without the name of its field's owner."""
    found = environment(gather(two_runs(tmp_path)[0]))
    assert found["code (git)"] == {"commit": "1" * 40, "branch": "main", "dirty": "false"}
    assert found["policy, where it is not the usual"] == {"max_grad_norm": "1.0"}
    assert found["hyperparameters"] == {
        "optimizer.0.lr": "0.1",
        "optimizer.0.eps": "1e-08",
        "batch_size": "4",
    }
    assert found["versions"]["torch"] == "2.13.0"
    assert found["machine"]["hostname"]


def test_a_guard_says_what_it_was_started_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Command without secrets, machine, versions, and the class of the optimizer.

    Nothing private, no rate twice.
    """
    monkeypatch.setattr("sys.orig_argv", ["python", "train.py", "--api-key", "S3cr", "--lr", "0.1"])
    optimizer = torch.optim.SGD((model := torch.nn.Linear(2, 1)).parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    with holdfast.Guard(
        tmp_path / "g", model=model, optimizer=optimizer, scheduler=scheduler
    ) as guard:
        guard.step(torch.ones(4, 2), lambda x: model(x).sum())
    found = environment(run := gather(tmp_path / "g"))
    assert (run.command, "torch" in found["versions"]) == (
        "python train.py --api-key *** --lr 0.1",
        True,
    )
    hyperparameters = found["hyperparameters"].items()
    assert ("optimizer", "SGD") in hyperparameters
    assert found.get("code (git)") == facts_of_start([], 0.0).get("git")
    (seen,) = Runs(tmp_path, SystemClock()).look()  # as soon as it has closed
    assert (seen.state, seen.command, seen.began) == ("ended", run.command, run.began)
    assert [name for name, value in hyperparameters if value == "0.1" or "._" in name] == [
        "optimizer.0.lr"
    ]


def test_the_commit_is_known_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a branch, packed or not; of a worktree without a branch; of no repository.

    Else no file that HEAD names.
    """
    config, said = ("git", "-c", "user.name=a", "-c", "user.email=a@b"), []
    for words in (
        "init -q -b a/b",
        "commit -q --allow-empty -m x",
        "pack-refs --all",
        "worktree add -q --detach w",
    ):
        subprocess.run([*config, *words.split()], cwd=tmp_path, check=True)
        monkeypatch.chdir(tmp_path / "w" if "worktree" in words else tmp_path)
        said.append(facts_of_start([], 0.0).get("git", {"branch": None})["branch"])
    assert said == [None, "a/b", "a/b", "(detached)"]
    assert facts_of_start([], 0.0)["git"]["commit"] in subprocess.check_output(
        ["git", "rev-parse", "a/b"], text=True
    )
    (tmp_path / ".git" / "worktrees" / "w" / "HEAD").write_text("ref: /etc/hostname")
    assert "git" not in facts_of_start([], 0.0)


def test_a_trainer_that_left_in_order_ends_with_its_attempt(tmp_path: Path) -> None:
    """The interpreter leaves after the last event.

    That time is in the timeline, as it is in the goodput.
    """
    run = make_run(tmp_path, steps=10)
    add_process(run, [sample(1)], pid=GONE, phase=ProcessPhase.ENDING)
    write_events(run / "supervisor", happened("attempt_ended", 20, attempt=0, status=0))
    drawn = {trace["name"]: trace for trace in figures(gather(run))["timeline"]["data"]}
    assert drawn["ending"]["x"] == [pytest.approx(1000 * (20 - 6))]


def test_goodput_is_the_time_of_phases_without_what_was_lost(tmp_path: Path) -> None:
    """Steps that a later attempt made again, a hang at the end and the time between attempts are
    not steps.
    """
    run = gather(two_runs(tmp_path)[1])
    spent = {
        ProcessPhase.STARTING: 4.0,
        ProcessPhase.FORWARD_BACKWARD: 15.0,
        ProcessPhase.DATA_WAIT: 5.0,
        ProcessPhase.SAVING: 1.0,
    }
    times = tuple(spent.get(ProcessPhase(number), 0.0) if number else 0.0 for number in range(10))
    first, second = sorted(run.processes, key=lambda seen: seen.info.attempt if seen.info else 0)
    waits = replace(first, spent=times, phase=ProcessPhase.DATA_WAIT)
    seen = replace(run, processes=(waits, replace(second, spent=times, phase=None)))
    found = goodput(seen)
    # The first attempt lasted from 1 to 31 s, 5 s more than its phases say; the second 25 s from 70
    # s on: 15 s in 200 steps, 50 of them made again. The supervisor began 1 s before the first.
    expected = {
        "steps": 26.25,
        "repeated steps": 3.75,
        "waiting for data": 15,
        "saves": 2,
        "start-up": 9,
        "down": 39,
    }
    assert found == pytest.approx(expected, abs=0.11)
    assert goodput(replace(run, processes=())) == {}
    assert np.isclose(sum(found.values()), 95.0, atol=0.2)
