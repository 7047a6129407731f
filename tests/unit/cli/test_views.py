"""`holdfast watch`, `report` and `metrics` as a user calls them."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from tests.unit.report.made_runs import add_process, make_run, sample
from typer.testing import CliRunner, Result

from holdfast.cli.views import metrics, report, watch
from holdfast.recorder.progress import ProcessPhase

pytest.importorskip("plotly")


def call(command, *arguments: object) -> Result:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_once_prints_one_picture(tmp_path):
    """It holds the run, the process, its step and why it ended, without escape sequences in a
    pipe.
    """
    printed = call(watch, make_run(tmp_path / "train-1"), "--once")
    assert printed.exit_code == 0, printed.output
    for expected in (
        "train-1",
        "python train.py",
        "ended in forward backward",
        "300",
        "shapes differ",
        "[H970]",
    ):
        assert expected in printed.output, expected
    assert "\x1b" not in printed.output


@pytest.mark.slow
def test_in_a_terminal_it_ends_with_the_run(tmp_path: Path) -> None:
    """A real process on a real terminal redraws the picture, and leaves it when the process that
    trains is gone.
    """
    trainer = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    run = tmp_path / "run"
    folder = add_process(run, [sample(5)], phase=ProcessPhase.DATA_WAIT)
    ticks = Path(f"/proc/{trainer.pid}/stat").read_text().rpartition(")")[2].split()[19]
    process = json.loads((folder / "process.json").read_text())
    (folder / "process.json").write_text(
        json.dumps({**process, "pid": trainer.pid, "ticks": int(ticks)})
    )
    ours, theirs = pty.openpty()
    code = (
        "import typer; from holdfast.report.live import run_state; run_state.SILENT_SECONDS = 0.5; "
        "from holdfast.cli.views import watch; typer.run(watch)"
    )
    watching = subprocess.Popen(
        [sys.executable, "-c", code, str(run)], stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown = b""
    with trainer:
        while b"data wait" not in shown:
            shown += os.read(ours, 4096)
    try:
        while True:
            shown += os.read(ours, 4096)
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(ours)
    assert watching.wait(60) == 0
    assert b"ended in data wait" in shown


def test_report_writes_one_page_into_the_run(tmp_path):
    """Without options the page lies in the run directory, and a link such as runs/last is
    followed.
    """
    run = make_run(tmp_path / "train-1")
    (tmp_path / "last").symlink_to(run)
    written = call(report, tmp_path / "last")
    assert written.exit_code == 0, written.output
    page = run / "report.html"
    assert f"wrote {page}" in written.output
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert "<h1>train-1</h1>" in page.read_text()


def test_the_pages_of_a_folder_of_runs_share_the_plotting_script(tmp_path):
    """Each page is small and loads the one file beside the runs; a page to send contains it."""
    runs = [make_run(tmp_path / name, steps=30) for name in ("a", "b")]
    pages = {run / "report.html" for run in runs}
    for run in runs:
        assert call(report, run).exit_code == 0
    (script,) = tmp_path.glob("plotly-*.min.js")
    for page in pages:
        assert page.stat().st_size < 500_000
        assert f'["../{script.name}","{script.name}"]' in page.read_text()

    assert call(report, runs[0], "--self-contained").exit_code == 0
    assert (runs[0] / "report.html").stat().st_size > script.stat().st_size
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "only").mkdir()
    run = make_run(tmp_path / "only" / "run", steps=30)
    assert call(report, run, "-o", elsewhere / "page.html").exit_code == 0
    assert (elsewhere / "page.html").stat().st_size > script.stat().st_size
    assert not list((tmp_path / "only").glob("*.js"))


def test_the_script_is_not_written_into_the_current_directory(tmp_path, monkeypatch):
    """A run directory in a project keeps the script to itself."""
    run = make_run(tmp_path / "run", steps=3)
    monkeypatch.chdir(tmp_path)
    assert call(report, run).exit_code == 0
    (script,) = tmp_path.rglob("plotly-*.min.js")
    assert script.parent == run


def test_report_says_where_the_page_is_as_json(tmp_path):
    """For machines: the path, its size, and what was drawn."""
    written = call(
        report, make_run(tmp_path / "run", ranks=2), "-o", tmp_path / "page.html", "--json"
    )
    facts = json.loads(written.output)
    assert facts["page"] == str(tmp_path / "page.html")
    assert facts["bytes"] == (tmp_path / "page.html").stat().st_size
    assert (facts["processes"], facts["curves"], facts["events"], facts["problems"]) == (
        2,
        2,
        5,
        [],
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_place_that_cannot_be_written_is_exit_code_2(tmp_path):
    """The error is the system's own, and no half page is left."""
    run = make_run(tmp_path / "run")
    run.chmod(0o500)
    refused = call(report, run)
    run.chmod(0o700)
    assert refused.exit_code == 2
    assert not (run / "report.html").exists()


def test_metrics_copies_a_run_that_ended(tmp_path):
    """One call writes lines; with --follow it stops by itself, since the run has ended."""
    run = make_run(tmp_path / "run", steps=20)
    done = call(metrics, run, "--jsonl", tmp_path / "m.jsonl")
    assert (done.exit_code, done.output) == (0, "20 steps and 4 events\n")
    assert len((tmp_path / "m.jsonl").read_text().splitlines()) == 24
    followed = call(metrics, run, "--jsonl", tmp_path / "n.jsonl", "--follow", "--json")
    assert json.loads(followed.output) == {"points": 20, "events": 4, "failures": [], "gone": []}


def test_metrics_that_nobody_could_read_are_refused(tmp_path):
    """Without a target nothing is done."""
    refused = call(metrics, make_run(tmp_path / "run"), "--json")
    assert refused.exit_code == 2
    assert json.loads(refused.output)["error"]["rule"] == "H743"


def test_metrics_with_a_broken_target_are_exit_code_1(tmp_path):
    """The disk that is full is named, and the other target is complete."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    done = call(metrics, make_run(tmp_path / "run"), "--jsonl", "/dev/full", "--json")
    assert done.exit_code == 1
    assert "No space left" in json.loads(done.output)["failures"][0]
