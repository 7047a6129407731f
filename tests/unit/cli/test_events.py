"""`holdfast events` as a user calls it: by time, filters, JSON, hostile and damaged recordings."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from holdfast.cli import events, explain
from holdfast.core.events.event import Event
from holdfast.recorder.black_box import EVENTS_FILE, BlackBox
from holdfast.recorder.run_files import SUPERVISOR_FOLDER, ProcessInfo, write_process

app = typer.Typer()
app.command("events")(events.run)
app.command("explain")(explain.run)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["events", *(str(argument) for argument in arguments)])


def write(folder: Path, *given: tuple[float, str, int, dict[str, object]]) -> None:
    box = BlackBox(folder)
    for seconds, kind, step, data in given:
        box.event(Event(kind=kind, global_step=step, unix_seconds=seconds, data=data))
    box.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write(
        tmp_path / SUPERVISOR_FOLDER,
        (1.0, "attempt_started", 0, {"attempt": 0, "argv": ["python", "train.py"]}),
        (4.0, "attempt_ended", 9, {}),
    )
    folder = write_process(
        tmp_path, ProcessInfo(pid=7, ticks=1, ppid=1, argv=[], role="trainer", rank=1)
    )
    write(
        folder,
        (2.0, "guard", 0, {"path": str(tmp_path / "g")}),
        (3.5, "exception", 9, {"message": "x"}),
    )
    write(tmp_path / "g" / "recorder" / "rank0", (3.0, "skip_step", 8, {}))
    return tmp_path


def test_events_of_all_processes_are_merged_by_time(run):
    """Supervisor, processes and guards are in one list, each with who recorded it."""
    found = json.loads(call(run, "--json").output)["events"]
    assert [(each["kind"], each["who"]) for each in found] == [
        ("attempt_started", "supervisor"),
        ("guard", "trainer 7 rank 1"),
        ("skip_step", "guard rank0"),
        ("exception", "trainer 7 rank 1"),
        ("attempt_ended", "supervisor"),
    ]
    lines = call(run).output.splitlines()
    assert lines[0].startswith("1970-01-01 00:00:01.000000  supervisor  step 0: attempt 0 ")
    assert lines[0].endswith("python train.py")
    assert len(lines) == 5


def test_a_guard_in_the_folder_of_the_run_is_listed_once(run, monkeypatch):
    """Its process names the folder in full, and people do not.

    A validation is said by its name, to people.
    """
    write(run / "recorder" / "rank0", (3.2, "validated", 8, {"loss": 0.4, "name": "accuracy"}))
    write(run / "processes" / "7-1", (2.5, "guard", 0, {"path": str(run)}))
    monkeypatch.chdir(run.parent)
    (found,) = json.loads(call(run.name, "--json", "--kind", "validated").output)["events"]
    assert found["data"] == {"loss": 0.4, "name": "accuracy"}
    (line,) = call(run, "--kind", "validated").output.splitlines()
    assert "guard rank0  step 8: " in line
    assert "accuracy is 0.4" in line


def test_kinds_choose(run):
    """--kind may be repeated."""
    found = json.loads(call(run, "--json", "--kind", "guard", "--kind", "exception").output)[
        "events"
    ]
    assert [each["kind"] for each in found] == ["guard", "exception"]
    assert "no such events; this run has " in call(run, "--kind", "gaurd").output


def test_events_that_make_no_sense_are_passed_over(run):
    """A step that is a text, or a time that is none, is no TypeError.

    NaN among the facts is strict JSON.
    """
    write(run / "g" / "recorder" / "rank0", (3.1, "odd", "7", {}), (math.nan, "odd", 7, {}))
    write(run / "g" / "recorder" / "rank0", (3.2, "spike", 8, {"loss": math.nan}))

    def refuse(name: str) -> None:
        raise AssertionError(name)

    output = call(run, "--json", "--kind", "odd", "--kind", "spike").output
    found = json.loads(output, parse_constant=refuse)
    (spike,) = found["events"]
    assert (spike["kind"], spike["data"]) == ("spike", {"loss": "NaN"})
    assert found["unread"] == ["2 events of guard rank0 without a time or a step"]


def test_damaged_rings_are_named_and_the_rest_is_found(run):
    """A ring of junk or of a newer holdfast is said on the standard error."""
    (run / SUPERVISOR_FOLDER / EVENTS_FILE).write_bytes(os.urandom(9_000))
    listed = call(run)
    assert listed.exit_code == 0
    assert "skip_step" in listed.output
    assert "not read: events of supervisor" in listed.output
    (run / "processes" / "7-1" / EVENTS_FILE).write_bytes(os.urandom(9_000))
    # Each once, though one is read twice
    assert len(json.loads(call(run, "--json").output)["unread"]) == 2


def test_hostile_events_cannot_command_the_terminal(run):
    """Escape sequences and line ends in kinds and facts are shown as text."""
    data = {
        "\x1b[2Jkey\n\r": "\x1b]0;x\x07\u202e\r",
        "type": "Bad\x1b[2J\rError",
        "long": "y" * 9_999,
    }
    write(run / "g" / "recorder" / "rank0", (3.2, "evil\x1b[31m\n\rkind", 8, data))
    output = call(run).output
    assert not {"\x1b", "\x07", "\u202e", "\r"} & set(output)
    assert len(output.splitlines()) == 6
    assert max(map(len, output.splitlines())) < 1_000


@pytest.mark.parametrize(("name", "rule"), [("empty", "H731"), ("nowhere", "H733")])
def test_what_is_no_run_is_said(tmp_path, name, rule):
    """A directory without recordings, and none at all, are exit code 2 with the fix."""
    (tmp_path / "empty").mkdir()
    failed = call(tmp_path / name, "--json")
    assert failed.exit_code == 2
    assert json.loads(failed.output)["error"]["rule"] == rule
