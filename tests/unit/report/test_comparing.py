"""Several runs side by side, what each was started with, and on what its time was spent."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.report.made_runs import BEGAN, GONE, VERDICT, add_process, happened, make_run, sample, write_events
from typer.testing import CliRunner

from holdfast.cli.main import make_app
from holdfast.recorder.black_box import BlackBox, StepMark
from holdfast.recorder.progress import Phase
from holdfast.recorder.run_files import write_settings
from holdfast.report.comparing import Comparison
from holdfast.report.environment import environment
from holdfast.report.gathering import gather
from holdfast.report.goodput import goodput


def compared(*words: object) -> Any:
    return CliRunner().invoke(make_app("compare"), ["compare", *map(str, words)])


def two_runs(folder: Path) -> tuple[Path, Path]:
    """Make two runs of other settings; the second began again at step 201, and has a guard that validated."""
    git = {"commit": "1" * 40, "branch": "main", "dirty": False}
    first = make_run(folder / "runs" / "first", steps=300, git=git)
    second = make_run(folder / "runs" / "second", steps=250, git={**git, "dirty": True}, argv=["python", "<b>"])
    (second / "verdict.json").write_text(
        json.dumps(VERDICT | {"title": "<script>alert(1)</script>", "cause": "H1602"})
    )
    later = [sample(step, unix_seconds=BEGAN + 60 + 0.1 * step) for step in range(201, 401)]
    add_process(second, later, pid=GONE + 5, attempt=1, started=BEGAN + 70)
    write_events(second / "recorder" / "rank0", happened("validated", 40, 100, loss=0.5, name="wer"))
    for run, rate in ((first, 0.1), (second, 0.2)):
        found = {"optimizer.0.lr": rate, "optimizer.0.eps": 1e-8, "policy.max_grad_norm": 1.0, "batch_size": 4}
        write_settings(run / "processes" / f"{GONE}-7", found | {"odd": object(), "none": None})
    return first, second


def test_what_differs_and_what_came_of_them(tmp_path: Path) -> None:
    """Only what differs is listed, without what is another in each run; the verdicts stand side by side."""
    done = compared(*two_runs(tmp_path), "--json", "--out", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["facts"]["steps"] == ["300", "400"]
    assert [each["cause"] for each in said["verdicts"]] == ["H970", "H1602"]
    assert said["facts"]["newest validation wer"] == ["", "0.5"]
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


def test_of_long_commands_the_arguments_that_differ_are_shown_and_rates_as_they_were_set(tmp_path: Path) -> None:
    """Not a whole line that is cut, nor the first rate of a warm-up: the one of a schedule, else the largest seen."""
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
        "hyperparameters: AdamW 1.0.initial_lr": ["0.1", ""],
    }
    assert "--learning_rate" in compared(*runs, "--out", out).stdout
    assert "S3cr" not in out.read_text()


def test_a_guard_alone_has_its_pace_and_its_goodput(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that a restart made again, and the gap before it, are no progress; a script's saves are not counted."""
    script, folder, at = make_run(tmp_path / "script"), tmp_path / "guard" / "recorder" / "rank0", [0.0]
    monkeypatch.setattr("holdfast.recorder.ring.time_ns", lambda: round((BEGAN + at[0]) * 1e9))
    box = BlackBox(folder)
    for number in [*range(1, 11), *range(66, 76)]:
        at[0], step = number, number if number <= 10 else number - 60
        box.step(StepMark.COMMITTED, step, 8, 1.0, 0.5, seconds=0.5)
    box.close()
    ended = happened("epoch_ended", 10, 10, epochs=1, steps=10, batches=20, batch_size=4)
    write_events(folder, ended, happened("resumed", 65, 5), happened("closed", 76, 15, how="finished"))
    facts = json.loads(compared(folder.parents[1], script, "--json", "--out", tmp_path / "p.html").stdout)["facts"]
    again = 10 * 5 / 20.5  # from 0.5 to 76 s, of which 55 s down, 10 s in steps
    expected = {"steps": 10 - again, "steps made again": again, "between steps": 10.5, "down": 55}
    assert goodput(gather(folder.parents[1])) == pytest.approx(expected)
    assert facts["time that made steps"][0] == f"{(10 - again) / 75.5:.1%}"
    assert (facts["steps a second"], facts["samples a second"]) == (["1", "10"], ["8", ""])
    assert facts["checkpoints"] == ["0", ""]


def test_attempts_are_one_curve_of_the_first_rank(tmp_path: Path) -> None:
    """Where the run went back there is a gap; other ranks are left out."""
    _, second = two_runs(tmp_path)
    run = gather(second)
    other = replace(run.lanes[0], rank=1, label="rank 1")
    (figure,) = _figures(Comparison([replace(run, lanes=(*run.lanes, other)), run]).page())
    losses = [trace for trace in figure["data"] if trace["mode"] == "lines" and trace["yaxis"] == "y"]
    assert [trace["name"] for trace in losses] == ["second", "second"]
    assert losses[0]["x"] == [*range(1, 251), None, *range(201, 401), None]


def _figures(page: str) -> list[dict[str, Any]]:
    data = page.partition('<script type="application/json" id="figures">')[2].partition("</script>")[0]
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
    assert found["hyperparameters"] == {"optimizer.0.lr": "0.1", "optimizer.0.eps": "1e-08", "batch_size": "4"}
    assert found["versions"]["torch"] == "2.13.0"
    assert found["machine"]["hostname"]


def test_goodput_is_the_time_of_phases_without_what_was_lost(tmp_path: Path) -> None:
    """Steps that a later attempt made again, a hang at the end and the time between attempts are not steps."""
    run = gather(two_runs(tmp_path)[1])
    spent = {Phase.STARTING: 4.0, Phase.FORWARD_BACKWARD: 15.0, Phase.DATA_WAIT: 5.0, Phase.SAVING: 1.0}
    times = tuple(spent.get(Phase(number), 0.0) if number else 0.0 for number in range(10))
    first, second = sorted(run.processes, key=lambda seen: seen.info.attempt if seen.info else 0)
    waits = replace(first, spent=times, phase=Phase.DATA_WAIT)
    seen = replace(run, processes=(waits, replace(second, spent=times, phase=None)))
    found = goodput(seen)
    # The first attempt lasted from 1 to 31 s, 5 s more than its phases say; the second 25 s from 70 s on.
    expected = {
        "steps": 25.0, "steps made again": 5.0, "waiting for data": 15.0, "saves": 2.0, "start-up": 8.0, "down": 40.0,
    }  # fmt: skip
    assert found == pytest.approx(expected, abs=0.11)
    assert goodput(replace(run, processes=())) == {}
    assert np.isclose(sum(found.values()), 95.0, atol=0.2)
