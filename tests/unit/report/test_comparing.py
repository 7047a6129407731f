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
        "command: command": ["python train.py --epochs 3", "python <b>"],
        "code (git): dirty": ["false", "true"],
        "hyperparameters: optimizer.0.lr": ["0.1", "0.2"],
    }
    page = (tmp_path / "page.html").read_text()
    assert "<script>alert" not in page
    assert "<h1>first, second</h1>" in page
    table = compared(*two_runs(tmp_path / "again"), "--out", tmp_path / "page.html").stdout
    assert "optimizer.0.lr" in table
    assert table.index("first") < table.index("second")


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
