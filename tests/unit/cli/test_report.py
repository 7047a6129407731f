"""`holdfast report` and `holdfast metrics` as a user calls them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import typer
from tests.unit.report.made_runs import make_run
from typer.testing import CliRunner, Result

from holdfast.cli import metrics, report

pytest.importorskip("plotly")


def call(command, *arguments: object) -> Result:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_report_writes_one_page_into_the_run(tmp_path):
    """Without options the page lies in the run directory, and a link such as runs/last is followed."""
    run = make_run(tmp_path / "train-1")
    (tmp_path / "last").symlink_to(run)
    written = call(report.run, tmp_path / "last")
    assert written.exit_code == 0, written.output
    page = run / "report.html"
    assert f"wrote {page}" in written.output
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert "<h1>train-1</h1>" in page.read_text()


def test_report_says_where_the_page_is_as_json(tmp_path):
    """For machines: the path, its size, and what was drawn."""
    written = call(report.run, make_run(tmp_path / "run", ranks=2), "-o", tmp_path / "page.html", "--json")
    facts = json.loads(written.output)
    assert facts["page"] == str(tmp_path / "page.html")
    assert facts["bytes"] == (tmp_path / "page.html").stat().st_size
    assert (facts["processes"], facts["curves"], facts["events"], facts["problems"]) == (2, 2, 5, [])


@pytest.mark.parametrize("command", [report.run, metrics.run])
def test_what_is_no_run_is_exit_code_2(tmp_path, command):
    """The error says what is missing."""
    refused = call(command, tmp_path, "--json")
    assert refused.exit_code == 2
    assert json.loads(refused.output)["error"]["rule"] == "H741"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_place_that_cannot_be_written_is_exit_code_2(tmp_path):
    """The error is the system's own, and no half page is left."""
    run = make_run(tmp_path / "run")
    run.chmod(0o500)
    refused = call(report.run, run)
    run.chmod(0o700)
    assert refused.exit_code == 2
    assert not (run / "report.html").exists()


def test_metrics_copies_a_run_that_ended(tmp_path):
    """One call writes lines; with --follow it stops by itself, since the run has ended."""
    run = make_run(tmp_path / "run", steps=20)
    done = call(metrics.run, run, "--jsonl", tmp_path / "m.jsonl")
    assert (done.exit_code, done.output) == (0, "20 steps and 4 events\n")
    assert len((tmp_path / "m.jsonl").read_text().splitlines()) == 24
    followed = call(metrics.run, run, "--jsonl", tmp_path / "n.jsonl", "--follow", "--json")
    assert json.loads(followed.output) == {"points": 20, "events": 4, "lost": 0, "failures": [], "gone": []}


def test_metrics_that_nobody_could_read_are_refused(tmp_path):
    """Without a target nothing is done."""
    refused = call(metrics.run, make_run(tmp_path / "run"), "--json")
    assert refused.exit_code == 2
    assert json.loads(refused.output)["error"]["rule"] == "H743"


def test_metrics_with_a_broken_target_are_exit_code_1(tmp_path):
    """The disk that is full is named, and the other target is complete."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    done = call(metrics.run, make_run(tmp_path / "run"), "--jsonl", "/dev/full", "--json")
    assert done.exit_code == 1
    assert "No space left" in json.loads(done.output)["failures"][0]
