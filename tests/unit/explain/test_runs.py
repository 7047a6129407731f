"""Collecting facts.

From run directories as supervisors, processes and guards write them, whole or damaged.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.core.errors import PolicyError
from holdfast.core.events.event import Event
from holdfast.explain.collecting import collect
from holdfast.explain.evidence import Ending, Evidence, Statement
from holdfast.explain.judging import judge
from holdfast.explain.rules import all_rules
from holdfast.explain.runs.divergence import find_divergence
from holdfast.explain.runs.guard_records import describe_remedies
from holdfast.explain.signatures import UNJUDGED, WELL
from holdfast.explain.verdict import Verdict
from holdfast.recorder.black_box import EVENTS_FILE, BlackBox
from holdfast.recorder.progress import ProcessPhase, ProgressBoard, SampleRing, StepSample
from holdfast.recorder.run_files import (
    ATTEMPT_LINE,
    BOARD_FILE,
    OUTPUT_FILE,
    SAMPLES_FILE,
    SUPERVISED_FILE,
    SUPERVISOR_FOLDER,
    ProcessInfo,
    write_process,
)

SHAPES = "mat1 and mat2 shapes cannot be multiplied (4x11 and 10x2)"
START = time.time() - 100
NAN, INFINITE = math.nan, math.inf
PRINTED = yaml.safe_load(Path(__file__).with_name("wordings.yaml").read_text(encoding="utf-8"))[
    "printed"
]


SAMPLE = StepSample(
    step=0,
    micro_steps=1,
    loss=None,
    grad_norm=None,
    learning_rate=0.1,
    seconds=0.1,
    wait_seconds=0.0,
)


class SupervisedRun:
    """A run directory, written with the writers that supervisor and observer use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(exist_ok=True)
        (path / SUPERVISED_FILE).write_text(
            json.dumps({"format": 1, "argv": ["python", "train.py"], "started": START})
        )
        self._clock = START

    def write(self, folder: Path, *events: tuple[str, dict[str, Any]]) -> None:
        box = BlackBox(folder)
        for kind, facts in events:
            self._clock += 1
            box.event(Event(kind=kind, global_step=0, unix_seconds=self._clock, data=facts))
        box.close()

    def supervisor(self, *events: tuple[str, dict[str, Any]]) -> None:
        self.write(self.path / SUPERVISOR_FOLDER, *events)

    def process(
        self,
        pid: int,
        *events: tuple[str, dict[str, Any]],
        steps: int = 12,
        losses: Any = (),
        **more: Any,
    ) -> Path:
        info = ProcessInfo(
            pid=pid, ticks=1, ppid=1, argv=["python"], started=START, role="trainer", **more
        )
        folder = write_process(self.path, info)
        board = ProgressBoard(folder / BOARD_FILE)
        board.enter(ProcessPhase.FORWARD_BACKWARD)
        board.step = board.micro_step = steps
        board.enter(board.phase)
        board.close()
        ring = SampleRing(folder / SAMPLES_FILE)
        for step, loss in enumerate(losses, start=1):
            ring.write(*SAMPLE._replace(step=step, loss=loss)[:-2])
        ring.close()
        self.write(folder, *events)
        return folder

    def output(self, *attempts: str) -> None:
        text = "".join(
            f"{ATTEMPT_LINE.format(number=n)}\n{text}" for n, text in enumerate(attempts)
        )
        (self.path / OUTPUT_FILE).write_bytes(text.replace("\n", "\r\n").encode())


def ended(status: int, **more: Any) -> tuple[str, dict[str, Any]]:
    return "attempt_ended", {
        "attempt": more.pop("attempt", 0),
        "status": status,
        "signal_sent_by_us": None,
        **more,
    }


def traceback_of(message: str, exception: str = "RuntimeError") -> str:
    return (
        'Traceback (most recent call last):\n  File "train.py", line 9, in step\n   '
        f" x\n{exception}: {message}\n"
    )


@pytest.fixture
def run(tmp_path: Path) -> SupervisedRun:
    return SupervisedRun(tmp_path / "run")


def of_run(
    path: Path, status: int, *, output: str = "", losses: Any = (), said: tuple[Any, ...] = ()
) -> Verdict:
    """Return the verdict on a run of one attempt with one trainer."""
    run = SupervisedRun(path)
    run.output(output)
    run.process(7, ("torch_imported", {}), *said, steps=0, losses=losses)
    run.supervisor(
        ("attempt_started", {"attempt": 0}),
        ("process_ended", {"pid": 7, "status": status}),
        ended(status),
    )
    return judge(collect(path))


def event(kind: str, /, **data: Any) -> Event:
    return Event(kind=kind, global_step=0, unix_seconds=10.0, data=data)


@pytest.mark.parametrize(
    ("version", "steps", "said", "title"),
    [
        ("2.9", 0, traceback_of(SHAPES), "no step"),
        (
            "2.9",
            0,
            f"batch 1 left out: {SHAPES}\n" * 3,
            "no step",
        ),
        ("2.9", 0, f"left out: {SHAPES}\n", UNJUDGED.title),
        ("2.9", 0, "skipped: cannot identify image file 'a.jpg'\n" * 9, UNJUDGED.title),
        ("2.9", 3, traceback_of(SHAPES), UNJUDGED.title),
        ("2.9", 0, "wrote 100 samples\n", UNJUDGED.title),
        (None, 0, traceback_of(SHAPES), UNJUDGED.title),
    ],
)
def test_errors_that_were_caught_and_no_step_are_a_doubt(run, version, steps, said, title):
    """A loop that leaves out every batch ends with status 0.

    A script that only prepares data does too.
    """
    run.output(said + "all batches done, model saved\n")
    run.process(7, torch=version, steps=steps)
    run.supervisor(
        ("attempt_started", {"attempt": 0}), ("process_ended", {"pid": 7, "status": 0}), ended(0)
    )
    verdict = judge(collect(run.path))
    in_doubt = title != UNJUDGED.title
    assert verdict.cause == ("H1601" if in_doubt else "H1626")
    assert title in verdict.title
    assert (SHAPES in verdict.evidence[0].text) == in_doubt
    assert ("in_features" in verdict.fix) == in_doubt


def test_an_exception_in_the_log_and_in_the_recording_is_one(run):
    """The statement has its place in the log, and rank, time, frames and fatality from the
    process.
    """
    run.output("step 1\n" + traceback_of(SHAPES))
    frames = [["train.py", 3, "main"], ["train.py", 9, "step"]]
    exception = {
        "type": "RuntimeError",
        "message": SHAPES,
        "frames": frames,
        "fatal": True,
        "chain": [],
    }
    run.process(7, ("exception", exception), rank=2)
    run.supervisor(
        ("attempt_started", {"attempt": 0}),
        ("process_ended", {"pid": 7, "status": 1}),
        ended(1, oom_kills=0),
    )
    facts = collect(run.path)
    (statement,) = facts.statements
    assert (statement.rank, statement.pid, statement.fatal) == (2, 7, True)
    assert statement.source == "output.log:6 and process 7"
    assert len(statement.frames) == 2
    verdict = judge(facts)
    assert (verdict.cause, verdict.rank, verdict.step) == ("H965", 2, 12)
    assert verdict.certainty == "likely"
    assert "phase forward backward" in verdict.summary


def test_an_exception_that_was_never_printed_is_known_from_the_recording(run):
    """The chain of a recorded exception, and what a worker's message repeats, are statements
    with the root first.
    """
    worker = "Caught ValueError in DataLoader worker process 0.\nOriginal " + traceback_of(
        SHAPES, "ValueError"
    )
    chain = [{"type": "RuntimeError", "message": worker, "frames": []}]
    run.process(
        7,
        (
            "exception",
            {"type": "mine.Wrapped", "message": "x", "frames": [], "fatal": True, "chain": chain},
        ),
    )
    run.supervisor(("attempt_started", {"attempt": 0}), ended(1))
    found = collect(run.path).statements
    assert [(each.exception, each.led_to_another) for each in found] == [
        ("ValueError", True),
        ("RuntimeError", True),
        ("Wrapped", False),
    ]
    assert found[0].text == SHAPES


def test_only_the_attempt_that_is_asked_for_is_said(run):
    """Each attempt has its own output with true line numbers, endings and processes.

    The newest is the default.
    """
    run.output(
        "a\n" + traceback_of("Address already in use", "OSError"), "b\n" + traceback_of(SHAPES)
    )
    run.process(7, attempt=0, steps=3)
    run.process(8, attempt=1, steps=5)
    change = {
        "attempt": 1,
        "cause": "H927",
        "why": "the port may be free later",
        "changes": {"A": "b"},
    }
    run.supervisor(
        ("attempt_started", {"attempt": 0}),
        ended(1),
        ("restart", change),
        ("attempt_started", {"attempt": 1}),
        ended(1, attempt=1),
    )
    newest, first = collect(run.path), collect(run.path, 0)
    assert [each.text for each in newest.statements] == [SHAPES]
    assert newest.statements[0].source == "output.log:12"
    assert [each.text for each in first.statements] == ["Address already in use"]
    assert (newest.steps, first.steps) == (5, 3)
    assert newest.tried == ("restarted: the port may be free later; changed A=b",)
    assert first.tried == ()


def test_an_attempt_that_never_was_is_refused(run):
    """To judge all the output as that of an attempt that is not there would name a wrong cause."""
    run.output(traceback_of(SHAPES))
    run.supervisor(("attempt_started", {"attempt": 0}), ended(1))
    with pytest.raises(PolicyError, match="attempts 0 to 0 are recorded"):
        collect(run.path, 7)


def test_a_guard_of_the_next_attempt_is_not_said_of_this_one(run, tmp_path):
    """What a Guard stopped for counts for the attempt in which it did."""
    guard = tmp_path / "elsewhere"
    run.process(7, ("guard", {"path": str(guard)}), attempt=0)
    run.process(8, ("guard", {"path": str(guard)}), attempt=1)
    run.output("Address already in use\n", "b\n")
    run.supervisor(
        ("attempt_started", {"attempt": 0}), ended(1), ("attempt_started", {"attempt": 1})
    )
    run.write(
        guard / "recorder" / "rank0",
        ("stop", {"reason": "loss is NaN", "promise": "changes training"}),
    )
    run.supervisor(ended(1, attempt=1))
    assert [each.text for each in collect(run.path, 0).statements if each.source == "guard"] == []
    assert [each.text for each in collect(run.path, 1).statements if each.source == "guard"] == [
        "loss is NaN"
    ]


def test_an_error_that_the_process_and_its_guard_recorded_is_said_once(run, tmp_path):
    """What left the Guard and then the process is one statement.

    What the Guard alone saw is one too.
    """
    text = (
        "a batch does not fit; may not split.\nFix: a smaller one.\n[H401] run `holdfast explain"
        " H401`"
    )
    raised = {
        "type": "holdfast.core.errors.OutOfMemoryError",
        "message": text,
        "frames": [["train.py", 9, "step"]],
    }
    guard = tmp_path / "elsewhere"
    run.process(7, ("guard", {"path": str(guard)}), ("exception", {**raised, "fatal": True}))
    run.supervisor(("attempt_started", {"attempt": 0}))
    left = ("left_by_exception", {"exception": "OutOfMemoryError", "rule": "H401", **raised})
    run.write(
        guard / "recorder" / "rank0", ("stop", {"reason": "may not split", "rule": "H401"}), left
    )
    run.supervisor(ended(1))
    facts = collect(run.path)
    assert [each.source for each in facts.statements] == ["process 7"]
    verdict = judge(facts)
    assert (verdict.cause, verdict.fix, verdict.where) == (
        "H401",
        "a smaller one.",
        "train.py:9 in step",
    )
    (alone,) = collect(guard).statements
    assert (alone.rule, alone.fatal, alone.exception) == ("H401", True, "OutOfMemoryError")


def test_a_run_that_goes_on_is_still_running(run):
    """A process that is alive and no end: still running, exit code 0."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    write_process(
        run.path, ProcessInfo(pid=os.getpid(), ticks=ticks, ppid=1, argv=[], role="trainer")
    )
    run.supervisor(("attempt_started", {"attempt": 0}))
    assert judge(collect(run.path)).cause == "H1611"


def test_a_supervisor_that_was_killed_is_said(run):
    """The note of the sentinel says that the supervisor is gone; without it nothing is claimed."""
    run.process(7)
    run.supervisor(("attempt_started", {"attempt": 0}))
    assert judge(collect(run.path)).cause == "H1600"
    (run.path / SUPERVISOR_FOLDER / "lost.json").write_text(
        '{"unix_seconds": 1.0, "killed": [7], "left": []}'
    )
    assert judge(collect(run.path)).cause == "H1616"


@pytest.mark.parametrize(
    ("status", "sent", "cause"),
    [(-2, 2, "H1604"), (1, 2, "H1604"), (-9, 15, "H1603"), (0, 15, "H1603")],
)
def test_what_the_user_asked_for_is_no_failure_of_the_run(run, status, sent, cause):
    """However the command ends after a signal that was passed on, the signal is the cause."""
    run.output(
        "step 1\n"
        + traceback_of("", "KeyboardInterrupt").replace(": \n", "\n")
        + traceback_of("Broken pipe", "BrokenPipeError")
    )
    run.supervisor(
        ("attempt_started", {"attempt": 0}),
        ("signal", {"number": sent, "sender": "user"}),
        ended(status, asked_by=sent, signal_sent_by_us=9),
    )
    assert judge(collect(run.path)).cause == cause


def test_damaged_files_are_named_and_end_nothing(run):
    """Rings that are cut, foreign or of a newer holdfast, and files of junk, leave the rest
    readable.
    """
    run.output(traceback_of(SHAPES))
    folder = run.process(7)
    run.supervisor(("attempt_started", {"attempt": 0}), ended(1))
    ring = bytearray((folder / EVENTS_FILE).read_bytes())
    ring[8:12] = (99).to_bytes(4, "little")
    (folder / EVENTS_FILE).write_bytes(ring)
    (folder / BOARD_FILE).write_bytes(b"\0" * 10)
    (run.path / "processes" / "9-9").mkdir()
    (run.path / "processes" / "9-9" / "process.json").write_bytes(b"\xff{")
    facts = collect(run.path)
    assert any("version 99" in words for words in facts.missing)
    assert judge(facts).cause == "H965"
    (run.path / SUPERVISOR_FOLDER / EVENTS_FILE).write_bytes(os.urandom(5000))
    (run.path / SUPERVISED_FILE).write_text("[")
    facts = collect(run.path)
    assert any("no exit status" in words for words in facts.missing)
    assert judge(facts).cause == "H965"


@pytest.mark.parametrize(
    "data", [{"chain": "x", "frames": 3}, {"frames": [["a"], [1, 2, 3]], "type": 5}, {"cut": "..."}]
)
def test_events_of_another_shape_are_survived(run, data):
    """Facts that are not what this version writes make no error."""
    run.process(7, ("exception", data), ("last_words", {"text": 5}), ("guard", {"path": "a\0b"}))
    run.supervisor(
        ("attempt_started", {"attempt": "x"}),
        ("hang", data),
        ("memory_trend", {"what": 3, "bytes_per_step": "x"}),
        ("leak", {}),
        ("signal", {}),
        ("attempt_ended", {"status": "x", "oom_kills": "y"}),
    )
    judge(collect(run.path))


@pytest.mark.parametrize(
    ("losses", "since"),
    [
        ((NAN,), 1),
        ((INFINITE, NAN, NAN), 1),
        ((1.0, 0.9, *[NAN] * 5), 3),
        ((1.0, 0.9, 0.8, INFINITE, NAN), 4),
        ((*[1.0] * 20, *[INFINITE, NAN] * 4), 21),
        ((2.3, 1e9, 1e18, 1e27, 1e36), 2),  # the first is all that is left of its level
        ((*[0.5] * 300, *[10.0**power for power in range(37)]), 307),
        ((3e5, *[0.01] * 60, *[4e7] * 10), 62),
        ((*[1.0] * 20, *[1e9, NAN] * 4), 21),
        # Of a GAN
        ([value for step in range(100) for value in (0.7 + 0.01 * step, -30.0 * step)], None),
        ((1.0, 0.9, NAN), None),  # one batch
        ((1.0, NAN, 0.9, 0.8), None),  # it came back
        ((1e-12, 0.1, *[1.0] * 30), None),  # a loss that begins at 0
        ((*[0.002] * 50, *[2000.0] * 50), None),  # a part of it was switched on
        ((-1.0, -20.0, *[-1e9] * 50), None),  # a return that grows
        ((*[1.0] * 50, 1e12, 1.0), None),  # a spike
        # Of single samples, not scaled
        ([1e10 * (number % 7 / 7) ** 8 for number in range(200)], None),
        ((), None),
    ],
)
def test_a_training_is_lost_if_nothing_good_comes_after_losses_that_are_not_finite_or_exploded(
    losses, since
):
    """The end decides; what is legitimate, such as a GAN's losses or a curriculum's, is not
    lost.
    """
    lost = find_divergence(list(enumerate(losses, start=1)))
    assert (None if lost is None else lost.since) == since


def test_a_run_whose_training_was_lost_did_not_end_well(tmp_path):
    """Status 0 is no good end where the loss was lost, from the first step or later.

    No value at all says nothing.
    """
    verdict = of_run(tmp_path / "run", 0, losses=(1.0, 0.8, 0.7, *[NAN] * 20))
    assert (verdict.cause, verdict.family, verdict.exit_code) == ("H1617", "numerics", 19)
    assert "since step 4" in verdict.title
    assert "since step 4" in verdict.summary
    assert "holdfast.watch" in verdict.fix
    assert any("since step 4" in each.text for each in verdict.evidence)
    assert "from the beginning" in of_run(tmp_path / "first", 0, losses=[NAN] * 3).title
    assert (
        "rose from 1 to 1e+36, since step 3"
        in of_run(tmp_path / "up", 0, losses=(1.0, 1.0, *[1e36] * 9)).title
    )
    assert of_run(tmp_path / "unread", 0, losses=[None] * 30).cause == "H1626"
    well = of_run(tmp_path / "well", 0, losses=[1.0 / step for step in range(1, 40)])
    assert (well.cause, well.fix) == (WELL.id, WELL.fix)
    assert "caught" not in well.summary


@pytest.mark.parametrize(("output", "lost"), PRINTED)
def test_a_loss_that_is_only_printed_says_that_a_training_was_lost(tmp_path, output, lost):
    """Where nobody saw a loss the lines of the log count, but not those of an evaluation."""
    verdict = of_run(tmp_path / "run", 0, output=output)
    assert verdict.cause == ("H1617" if lost else "H1626"), verdict.title
    assert lost in verdict.title


def test_what_was_recorded_of_a_loss_is_surer_than_what_was_printed(tmp_path):
    """A printed NaN is no lost training where the recorded losses are good."""
    assert (
        of_run(tmp_path / "seen", 0, output="loss nan\nloss nan\n", losses=(0.5, 0.4)).cause
        == "H1626"
    )


FINDING = {
    "rule": "H825",
    "severity": "advice",
    "about": "cause",
    "certainty": "likely",
    "what": "the weights moved too far",
    "fix": "lower the learning rate.",
    "where": "",
}


def test_a_fault_of_the_training_is_said_of_a_run_that_ended_well():
    """What a Guard found stands in title, summary, evidence and fix, a cause before a symptom
    however severe.
    """
    symptom = {
        **FINDING,
        "rule": "H804",
        "severity": "error",
        "about": "symptom",
        "what": "NaN in w",
    }
    warning = event("preflight", rule="H630", what="num_workers=64 on 2 processors", fix="pass 2.")
    events = (
        event("finding", **symptom),
        event("finding", **FINDING),
        event("note", **FINDING),
        warning,
    )
    verdict = judge(Evidence(events=events, endings=(Ending(status=0),)))
    assert (verdict.cause, verdict.exit_code) == ("H1601", 0)
    assert all_rules()["H825"].title in verdict.title
    assert f"{FINDING['what']} [H825]" in verdict.summary
    assert verdict.fix.lower().startswith(FINDING["fix"])
    quoted = [each.text for each in verdict.evidence]
    assert [text.partition("]")[0][-4:] for text in quoted if "[H" in text] == [
        "H825",
        "H804",
        "H630",
    ]
    broken = (
        event("finding", rule=["H825"], what=None),
        event("preflight", rule=5),
        event("finding", rule="H9", what=""),
    )
    assert judge(Evidence(events=broken, endings=(Ending(status=0),))).exit_code == 0, (
        "damaged events cost no verdict"
    )


def test_what_a_guard_did_is_said_with_the_newest_reason():
    """The last line of why stands behind what was done, whatever key an event keeps it under."""
    events = [
        event("skip_step", reason="first"),
        event("skip_step", reason="NaN in the batch; sample 4"),
        event("sample_quarantined", evidence="Traceback\n  File\nValueError: 7.png cannot be read"),
        event("sample_quarantined", sample="a.wav", evidence="ValueError: no sound"),
        event("sample_quarantined", sample=[7], evidence="ValueError: 7.png is cut short"),
        event("loader_healed", cause="worker 1 was killed by SIGKILL"),
        event("retry", reason=None),
    ]
    retried, skipped, healed, quarantined = describe_remedies(events)
    assert "memory" in retried
    assert ":" not in retried
    assert "2 times" in skipped
    assert skipped.endswith(": NaN in the batch; sample 4")
    assert healed.endswith(": worker 1 was killed by SIGKILL")
    assert "3 times (a.wav, [7])" in quarantined
    assert quarantined.endswith(": ValueError: 7.png is cut short")


def test_how_a_process_left_is_said_as_it_was_recorded(tmp_path):
    """The message of sys.exit is quoted, past progress bars.

    One that never ended in order left as by os._exit.
    """
    text = (
        "step 1\n\x1b[31mno more data\x1b[0m\n\repoch 1:  34%|###   | 10/29 [00:00<00:00,"
        " 282.50it/s]"
    )
    exiting = ("exiting", {"how": "sys.exit", "status": 1})
    verdict = of_run(tmp_path / "exit", 1, output=text, said=(exiting,))
    assert verdict.cause == "H1607"
    assert "`sys.exit`" in verdict.summary
    assert "no more data" in verdict.summary
    assert "os._exit" in of_run(tmp_path / "os", 7, output=text).summary


def test_changes_that_the_attempt_had_are_not_offered_again():
    """A verdict offers what is new only."""
    failed = Statement(
        text="CUDA out of memory. Tried to allocate 2 GiB", kind="exception", fatal=True
    )
    facts = Evidence(statements=(failed,), endings=(Ending(status=1),))
    first = judge(facts)
    again = judge(replace(facts, applied_changes=dict(first.changes)))
    assert first.changes
    assert (again.cause, again.changes) == (first.cause, ())
