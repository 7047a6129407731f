"""Several optimizers.

The steps of each are curves, rows and metrics of their own, from a guard and as observed.
"""

from __future__ import annotations

import json

import torch
from tests.unit.report.made_runs import GONE, add_process, happened, sample
from typer.testing import CliRunner

from holdfast import Guard
from holdfast.cli.main import make_app
from holdfast.recorder.reader import read_steps
from holdfast.recorder.run_files import OPTIMIZERS_FILE, read_optimizers
from holdfast.report.page.gathering import gather
from holdfast.report.page.run_page import figures
from holdfast.report.verdicts import tone, verdict_from

_LOSSES = {"critic": 1.0, "generator": 100.0}


def _train(run, *, first: str, second: str) -> None:
    """Make five steps of each of two optimizers, whose losses are 1 and 100."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 1) for name in _LOSSES})
    optimizers = {name: torch.optim.SGD(part.parameters(), lr=1e-6) for name, part in model.items()}
    with Guard(run, model=model, optimizer=optimizers, check_split=False) as guard:
        for name in [first, second] * 5:
            guard.step(
                torch.ones(4, 2),
                lambda x, n=name: 0.0 * model[n](x).mean() + _LOSSES[n],
                optimizer=name,
            )
        guard.log(fid=4.5)


def _run(command: str, run, *options: str) -> str:
    result = CliRunner().invoke(make_app(command), [command, str(run), *options])
    assert result.exit_code == 0, result.output
    return result.output


def test_each_optimizer_of_a_guard_has_curves_of_its_own(tmp_path):
    """Page, watch and metrics name them as the guard does, also where a restart begins with the
    other.
    """
    run = tmp_path / "run"
    _train(run, first="critic", second="generator")
    _train(run, first="generator", second="critic")
    rings = run / "recorder" / "rank0"
    assert read_optimizers(rings) == ["critic", "generator"]
    assert {(mark.optimizer, mark.loss) for mark in read_steps(rings) if mark.loss is not None} == {
        (1, 1.0),
        (2, 100),
    }
    lanes = {lane.label: lane.curves for lane in gather(run).lanes}
    assert "loss" not in lanes["guard rank0"]
    assert {label for label, curves in lanes.items() if "logged: fid" in curves} == {"guard rank0"}
    for name, loss in _LOSSES.items():
        curve = lanes[f"guard rank0, {name}"]["loss"]
        assert (set(curve.values), len(curve.steps)) == ({loss}, 10)
        assert f"guard rank0, {name}" in _run("watch", run, "--once")
    lines = [json.loads(line) for line in _run("metrics", run, "--jsonl", "-").splitlines()[:-1]]
    assert [(line["step"], line["value"]) for line in lines if line["kind"] == "scalar"] == [
        (10, 4.5),
        (20, 4.5),
    ]
    points = [line for line in lines if line["kind"] == "step"]
    assert {name for point in points for name in point if name.startswith("loss")} == {
        "loss/critic",
        "loss/generator",
    }


def test_one_optimizer_and_many_in_turn_are_one_curve(tmp_path):
    """Nothing is named where there is nothing to tell apart, and new optimizers for each fold
    are no players.
    """
    for names in (["Adam 1"], [f"Adam {number}" for number in range(1, 20)]):
        folder = add_process(
            tmp_path / str(len(names)), [sample(1, optimizer=1), sample(2, optimizer=len(names))]
        )
        (folder / OPTIMIZERS_FILE).write_text(json.dumps(names))
        assert [lane.label for lane in gather(tmp_path / str(len(names))).lanes] == [
            f"trainer {GONE}"
        ]


def test_events_are_marks_on_the_first_panel_by_how_bad_they_are(tmp_path):
    """Each lies where its process stood then, says in words what it is, and what is no news is
    left out.
    """
    add_process(
        tmp_path,
        [sample(step) for step in range(1, 101)],  # 0.1 s each, from 5 s on
        happened("exiting", 9, 40),
        happened("skip_step", 10.01, 999, reason="the loss is NaN"),
        happened("checkpoint_saved", 7.01, 20, checkpoint="step-20"),
        happened(
            "finding", 12.01, 70, rule="H801", severity="error", what="weights stand still", fix="."
        ),
    )
    drawn = figures(gather(tmp_path))
    marks = {trace["name"]: trace for trace in drawn["steps"]["data"] if trace["yaxis"] == "y99"}
    assert {name: trace["x"] for name, trace in marks.items()} == {
        "error": [70],
        "warning": [50],
        "event": [20],
    }
    (text,) = marks["error"]["hovertext"]
    assert text.startswith(f"trainer {GONE}, step 70: weights stand still")
    assert "H801" in text
    assert drawn["steps"]["layout"]["yaxis99"]["overlaying"] == "y"
    colours = {trace["name"]: trace["marker"]["color"] for trace in drawn["timeline"]["data"]}
    assert [colours[name] for name in marks] == [
        trace["marker"]["color"] for trace in marks.values()
    ]
    assert [colours[name] for name in ("error", "warning", "event")] == [
        "#d64545",
        "#e08a1e",
        "#8c8c8c",
    ]


def test_colours_say_how_the_run_is_to_be_looked_at():
    """A run that did not learn is not green, and one that somebody stopped is not red."""
    fault = "ended well, but its training has a fault: the weights stand still"
    verdicts = [
        ("H1601", "ended well", "ended well"),
        ("H1601", "ended well", fault),
        ("H1625", "ended well", "finished, but the loss did not fall"),
        ("H1626", "ended well", "finished; learning was not judged"),
        ("H1603", "preempted", "terminated"),
        ("H1617", "numerics", "NaN"),
    ]
    tones = [
        tone(verdict_from({"cause": cause, "family": family, "title": title}))
        for cause, family, title in verdicts
    ]
    assert tones == ["well", "unknown", "unknown", "unjudged", "unknown", "failed"]
