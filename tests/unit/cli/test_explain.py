"""`holdfast explain` as a user calls it: rules, runs, logs, standard input.

Exit codes, JSON, hostile text.
"""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from holdfast.cli.explain import print_verdict
from holdfast.cli.main import make_app
from holdfast.core.events.event import Event
from holdfast.explain.rules import catalogue
from holdfast.explain.signatures import WELL
from holdfast.explain.signatures.signature import FAMILIES
from holdfast.explain.verdict import Exhibit, Verdict
from holdfast.recorder.black_box import BlackBox
from holdfast.recorder.run_files import OUTPUT_FILE, SUPERVISOR_FOLDER, ProcessInfo, write_process

app = make_app()

SHAPES = "mat1 and mat2 shapes cannot be multiplied (4x11 and 10x2)"
LOG = (
    'step 1\nTraceback (most recent call last):\n  File "train.py", line 9, in step\nRuntimeError:'
    f" {SHAPES}\n"
)
WRONG_SHAPE = 10 + FAMILIES.index("shape or type")


def call(*arguments: object, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(
        app, ["explain", *(str(argument) for argument in arguments)], input=stdin
    )


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "train.log"
    path.write_text(LOG)
    return path


def supervised(path: Path, status: int) -> Path:
    box = BlackBox(path / SUPERVISOR_FOLDER)
    for kind, facts in (
        ("attempt_started", {"attempt": 0}),
        ("attempt_ended", {"attempt": 0, "status": status}),
    ):
        box.event(Event(kind=kind, global_step=0, unix_seconds=1.0, data=facts))
    box.close()
    (path / OUTPUT_FILE).write_text(f"--- holdfast: attempt 0 ---\n{LOG}")
    return path


def test_a_log_is_explained_with_evidence_and_fix(log):
    """Cause, certainty, the quoted line with its place and the fix are shown.

    The exit code is the class.
    """
    explained = call(log)
    assert explained.exit_code == WRONG_SHAPE
    for part in (
        "H965",
        "likely, from",
        SHAPES,
        "train.log:4",
        "What to change",
        "train.py:9 in step",
    ):
        assert part in explained.output


def test_an_exception_that_no_signature_knows_is_a_fact_without_advice(tmp_path):
    """The text shows neither a certainty nor a fix, and both are empty in JSON."""
    path = tmp_path / "train.log"
    path.write_text(LOG.replace(SHAPES, "no such head"))

    shown = call(path).output
    verdict = json.loads(call(path, "--json").output)

    assert "no such head" in shown
    assert "H1608" in shown
    assert "likely" not in shown
    assert "Do:" not in shown
    assert "What to change" not in shown
    assert (verdict["cause"], verdict["fix"], verdict["certainty"]) == ("H1608", "", None)


def test_an_exception_that_was_caught_is_only_inferred_to_be_the_cause(tmp_path):
    """Where the run continued after the exception, the text says how certain the cause is."""
    path = tmp_path / "train.log"
    progress = "".join(f"step {step} loss 0.5\n" for step in range(20))
    path.write_text(LOG.replace(SHAPES, "no such head") + progress)

    shown = call(path, "--status", 1).output

    assert "H1608" in shown
    assert "guess" in shown


def test_a_status_that_is_known_changes_the_verdict(log):
    """--status 0 makes everything before it history."""
    assert call(log, "--status", 0).exit_code == 0
    assert "ended well" in call(log, "--status", 0).output


def test_a_status_of_0_hides_no_failure_that_was_printed_last(log):
    """Whoever reads no further sees the exception and what to do about it, as a whole sentence
    of a line's length.
    """
    lines = call(log, "--status", 0).output.splitlines()
    assert "traceback" in lines[0]
    assert lines[1] == f"Seen: RuntimeError: {SHAPES} (train.log:4)"
    assert lines[2].startswith("Do: ")
    assert WELL.fix not in "\n".join(lines)


def test_what_to_do_is_a_sentence_that_is_cut_at_a_word():
    """A colon does not end it; what is too long for a line ends at a word."""
    for fix, shown in (
        ("Convert at the edge: `x.float()`. Then more.", "Do: Convert at the edge: `x.float()`."),
        ("word " * 50, "Do: " + "word " * 31 + "..."),
    ):
        out = Console(record=True, width=300, file=io.StringIO())
        print_verdict(
            out,
            Verdict(cause="H965", family="device", title="t", summary="", fix=fix),
            "x",
        )
        assert shown in out.export_text().splitlines()


def test_what_was_seen_goes_on_after_a_colon(tmp_path):
    """Of a state dict with other keys the first of them are shown, not only that there are some."""
    path = tmp_path / "a.log"
    missing = 'Missing key(s) in state_dict: "3.weight", "3.bias".'
    head = "RuntimeError: Error(s) in loading state_dict for Net:"
    path.write_text(LOG.replace(f"RuntimeError: {SHAPES}", f"{head}\n\t{missing} "))
    shown = call(path).output
    assert f"Seen: {head} {missing} (a.log:4)" in " ".join(shown.split())
    assert "H978" in shown


def test_standard_input_is_a_log():
    """``-`` reads a log from a pipe."""
    assert call("-", stdin=LOG).exit_code == WRONG_SHAPE


def test_a_run_directory_is_explained_also_through_a_link(tmp_path):
    """A directory, and a link such as runs/last, lead to the verdict of the newest attempt."""
    run = supervised(tmp_path / "run", 1)
    (tmp_path / "last").symlink_to("run")
    for path in (run, tmp_path / "last"):
        verdict = json.loads(call(path, "--json").output)
        assert (verdict["cause"], verdict["where"]) == ("H965", "train.py:9 in step")


def test_signatures_are_explained_like_rules():
    """Every id of the catalogue can be explained, and the list has them all."""
    assert "Example" in call("h965").output
    assert "an RLock" in call("H1402").output
    listed = call().output.splitlines()
    assert len(listed) == len(catalogue())
    assert any(line.startswith("H1600  ") for line in listed)


@pytest.mark.parametrize(
    ("what", "rule"),
    [("nowhere/at/all", "H732"), ("nowhere", "H732"), ("H9999", "H702"), ("101", "H702")],
)
def test_what_is_neither_rule_nor_run_nor_log_is_said(what, rule):
    """A typing error is exit code 2 with the fix, as text and as JSON."""
    failed = call(what, "--json")
    assert failed.exit_code == 2
    assert json.loads(failed.output)["error"]["rule"] == rule
    assert "Fix: " in call(what).output


def test_an_option_that_would_be_ignored_is_refused(tmp_path, log):
    """--status is for a log and --attempt for a run.

    Elsewhere each is an H105, and nothing is explained.
    """
    run = supervised(tmp_path / "run", 1)
    for arguments in (
        [run, "--status", 1],
        [log, "--attempt", 3],
        ["-", "--attempt", 0],
        ["H965", "--status", 1],
        ["--attempt", 0],
    ):
        refused = call(*arguments, "--json", stdin=LOG)
        assert (refused.exit_code, json.loads(refused.output)["error"]["rule"]) == (
            2,
            "H105",
        ), arguments
    assert call(run, "--attempt", 0).exit_code == WRONG_SHAPE


def test_directories_that_cannot_be_used_are_said(tmp_path):
    """An empty directory is H731 and one of a newer holdfast H734."""
    assert json.loads(call(tmp_path, "--json").output)["error"]["rule"] == "H731"
    (tmp_path / "supervised.json").write_text('{"format": 99}')
    assert json.loads(call(tmp_path, "--json").output)["error"]["rule"] == "H734"


@pytest.mark.parametrize(
    "junk", [b"", b"\x00" * 5_000, bytes(range(256)) * 40, "\u202e\u2028[bold]x[/]\n".encode()]
)
def test_junk_is_unknown_and_no_error(tmp_path, junk):
    """Whatever bytes a file holds, the answer is a verdict."""
    path = tmp_path / "junk"
    path.write_bytes(junk)
    explained = call(path)
    assert explained.exit_code == 10 + FAMILIES.index("unknown")
    assert "unknown" in explained.output


EVIL = "\x1b]0;title\x07\x1b[2J\u202e\u2066\x9b31m\rgone"
"""An escape sequence, a title, bidirectional controls and a carriage return."""


def is_harmless(shown: str) -> bool:
    return not {"\x1b", "\x07", "\u202e", "\u2066", "\x9b", "\r"} & set(shown)


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_hostile_recording_cannot_command_the_terminal(tmp_path, options):
    """Controls in a message, a file name and an exception type reach neither the text nor the
    JSON.
    """
    run = supervised(tmp_path / "run", 1)
    folder = write_process(run, ProcessInfo(pid=7, ticks=1, ppid=1, argv=[], role="trainer"))
    raised = {
        "type": f"Bad{EVIL}Error",
        "message": f"a{EVIL}b",
        "frames": [[f"t{EVIL}.py", 3, f"f{EVIL}"]],
        "fatal": True,
    }
    box = BlackBox(folder)
    box.event(Event(kind="exception", global_step=0, unix_seconds=0.5, data=raised))
    box.close()
    (run / OUTPUT_FILE).write_text("")
    shown = call(run, *options).output
    assert is_harmless(json.dumps(json.loads(shown), ensure_ascii=False) if options else shown)
    assert "Bad" in shown
    assert "t" in json.loads(call(run, "--json").output)["where"]


def test_each_piece_of_evidence_says_what_it_shows():
    """The roles of the JSON form are not printed: each is a few words behind the source."""
    verdict = Verdict(
        cause="H965",
        family="shape or type",
        title="matrix sizes do not match",
        summary="It failed.",
        fix="",
        evidence=(
            Exhibit(text="first", source="a.log:3", role="root", rank=1),
            Exhibit(text="second", source="a.log:9", role="cascade"),
            Exhibit(text="third", source="a.log:5", role="confirmation"),
            Exhibit(text="fourth", source="exit status"),
            Exhibit(text="fifth", source="damaged", role="[red]"),
        ),
    )
    out = io.StringIO()

    print_verdict(Console(file=out, width=100), verdict, "a.log")

    evidence = out.getvalue().partition("Evidence\n")[2].splitlines()[:10]
    assert [line.strip() for line in evidence[::2]] == [
        "a.log:3, rank 1 (the cause)",
        "a.log:9 (follows from another failure)",
        "a.log:5 (confirms the cause)",
        "exit status",
        "damaged",
    ]


def test_markup_in_a_verdict_stays_text():
    """What looks like markup of rich, or a link, is shown as it is.

    Controls in any field of a verdict are not.
    """
    evil = f"{EVIL}[red]x[/red][link=file:///etc]y[/link]"
    verdict = Verdict(
        cause="H965",
        family="shape or type",
        title=evil,
        summary=evil,
        fix=evil,
        certainty="likely",
        evidence=(Exhibit(text=evil, source=evil),),
        runner_up=("H901", evil),
        tried=(evil,),
        missing=(evil,),
    )
    out = Console(record=True, width=100, force_terminal=True, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    print_verdict(out, verdict, evil)
    shown = out.export_text(styles=False)
    out.file.close()
    assert "[red]x[/red]" in shown
    assert "[link=file:///etc]y[/link]" in shown
    assert is_harmless(shown)
