"""Collecting facts: from run directories as supervisors, processes and guards write them, whole or damaged."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.errors import PolicyError
from holdfast.core.events import Event
from holdfast.explain.collecting import collect
from holdfast.explain.judging import judge
from holdfast.recorder.black_box import EVENTS_FILE, BlackBox
from holdfast.recorder.progress import Phase, ProgressBoard
from holdfast.recorder.run_files import (
    ATTEMPT_LINE,
    BOARD_FILE,
    OUTPUT_FILE,
    SUPERVISED_FILE,
    SUPERVISOR_FOLDER,
    ProcessInfo,
    write_process,
)

SHAPES = "mat1 and mat2 shapes cannot be multiplied (4x11 and 10x2)"
START = time.time() - 100


class SupervisedRun:
    """A run directory, written with the writers that supervisor and observer use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(exist_ok=True)
        (path / SUPERVISED_FILE).write_text(
            json.dumps({"format": 1, "argv": ["python", "train.py"], "started": START})
        )
        self._clock = START

    def tell(self, folder: Path, *events: tuple[str, dict[str, Any]]) -> None:
        box = BlackBox(folder)
        for kind, facts in events:
            self._clock += 1
            box.event(Event(kind=kind, global_step=0, unix_seconds=self._clock, data=facts))
        box.close()

    def supervisor(self, *events: tuple[str, dict[str, Any]]) -> None:
        self.tell(self.path / SUPERVISOR_FOLDER, *events)

    def process(self, pid: int, *events: tuple[str, dict[str, Any]], steps: int = 12, **more: Any) -> Path:
        info = ProcessInfo(pid=pid, ticks=1, ppid=1, argv=["python"], started=START, role="trainer", **more)
        folder = write_process(self.path, info)
        board = ProgressBoard(folder / BOARD_FILE)
        board.enter(Phase.FORWARD_BACKWARD)
        board.count(step=steps, micro_step=steps)
        board.close()
        self.tell(folder, *events)
        return folder

    def output(self, *attempts: str) -> None:
        text = "".join(f"{ATTEMPT_LINE.format(number=n)}\n{text}" for n, text in enumerate(attempts))
        (self.path / OUTPUT_FILE).write_bytes(text.replace("\n", "\r\n").encode())


def ended(status: int, **more: Any) -> tuple[str, dict[str, Any]]:
    return "attempt_ended", {"attempt": more.pop("attempt", 0), "status": status, "signal_sent_by_us": None, **more}


def traceback_of(message: str, exception: str = "RuntimeError") -> str:
    return f'Traceback (most recent call last):\n  File "train.py", line 9, in step\n    x\n{exception}: {message}\n'


@pytest.fixture
def run(tmp_path: Path) -> SupervisedRun:
    return SupervisedRun(tmp_path / "run")


def test_an_exception_in_the_log_and_in_the_recording_is_one(run):
    """The statement has its place in the log, and rank, time, frames and fatality from the process."""
    run.output("step 1\n" + traceback_of(SHAPES))
    frames = [["train.py", 3, "main"], ["train.py", 9, "step"]]
    exception = {"type": "RuntimeError", "message": SHAPES, "frames": frames, "fatal": True, "chain": []}
    run.process(7, ("exception", exception), rank=2)
    run.supervisor(
        ("attempt_started", {"attempt": 0}), ("process_ended", {"pid": 7, "status": 1}), ended(1, oom_kills=0)
    )
    facts = collect(run.path)
    (statement,) = facts.statements
    assert (statement.rank, statement.pid, statement.fatal) == (2, 7, True)
    assert statement.source == "output.log:6 and process 7"
    assert len(statement.frames) == 2
    verdict = judge(facts)
    assert (verdict.cause, verdict.rank, verdict.step) == ("H965", 2, 12)
    assert verdict.confidence > 0.95
    assert "phase forward backward" in verdict.summary


def test_an_exception_that_was_never_printed_is_known_from_the_recording(run):
    """The chain of a recorded exception, and what a worker's message repeats, are statements with the root first."""
    worker = "Caught ValueError in DataLoader worker process 0.\nOriginal " + traceback_of(SHAPES, "ValueError")
    chain = [{"type": "RuntimeError", "message": worker, "frames": []}]
    run.process(
        7, ("exception", {"type": "mine.Wrapped", "message": "x", "frames": [], "fatal": True, "chain": chain})
    )
    run.supervisor(("attempt_started", {"attempt": 0}), ended(1))
    found = collect(run.path).statements
    assert [(each.exception, each.cause) for each in found] == [
        ("ValueError", True),
        ("RuntimeError", True),
        ("Wrapped", False),
    ]
    assert found[0].text == SHAPES


def test_only_the_attempt_that_is_asked_for_is_told(run):
    """Each attempt has its own output with true line numbers, endings and processes; the newest is the default."""
    run.output("a\n" + traceback_of("Address already in use", "OSError"), "b\n" + traceback_of(SHAPES))
    run.process(7, attempt=0, steps=3)
    run.process(8, attempt=1, steps=5)
    change = {"attempt": 1, "cause": "H927", "why": "the port may be free later", "changes": {"A": "b"}}
    run.supervisor(
        ("attempt_started", {"attempt": 0}), ended(1), ("restart", change),
        ("attempt_started", {"attempt": 1}), ended(1, attempt=1),
    )  # fmt: skip
    newest, first = collect(run.path), collect(run.path, 0)
    assert [each.text for each in newest.statements] == [SHAPES]
    assert newest.statements[0].source == "output.log:12"
    assert [each.text for each in first.statements] == ["Address already in use"]
    assert (newest.extra["steps"], first.extra["steps"]) == (5, 3)
    assert newest.tried == ("restarted: the port may be free later; changed A=b",)
    assert first.tried == ()


def test_an_attempt_that_never_was_is_refused(run):
    """To judge all the output as that of an attempt that is not there would name a wrong cause."""
    run.output(traceback_of(SHAPES))
    run.supervisor(("attempt_started", {"attempt": 0}), ended(1))
    with pytest.raises(PolicyError, match="attempts 0 to 0 are recorded"):
        collect(run.path, 7)


def test_a_guard_of_the_next_attempt_is_not_told_of_this_one(run, tmp_path):
    """What a Guard stopped for counts for the attempt in which it did."""
    guard = tmp_path / "elsewhere"
    run.process(7, ("guard", {"path": str(guard)}), attempt=0)
    run.process(8, ("guard", {"path": str(guard)}), attempt=1)
    run.output("Address already in use\n", "b\n")
    run.supervisor(("attempt_started", {"attempt": 0}), ended(1), ("attempt_started", {"attempt": 1}))
    run.tell(guard / "recorder" / "rank0", ("stop", {"reason": "loss is NaN", "promise": "changes training"}))
    run.supervisor(ended(1, attempt=1))
    assert [each.text for each in collect(run.path, 0).statements if each.source == "guard"] == []
    assert [each.text for each in collect(run.path, 1).statements if each.source == "guard"] == ["loss is NaN"]


def test_what_a_guard_tried_is_told(run, tmp_path):
    """The events of a guard that a process has opened are part of the facts, from this attempt on."""
    guard = tmp_path / "elsewhere"
    run.process(7, ("guard", {"path": str(guard)}))
    run.supervisor(("attempt_started", {"attempt": 0}))
    run.tell(guard / "recorder" / "rank0", ("loader_healed", {}), ("skip_step", {}), ("skip_step", {}))
    run.supervisor(ended(-9, oom_kills=0))
    assert collect(run.path).tried == (
        "a Guard skipped the step, 2 times",
        "a Guard replaced the workers of the loader",
    )


def test_an_error_that_the_process_and_its_guard_recorded_is_told_once(run, tmp_path):
    """What left the Guard and then the process is one statement; what the Guard alone saw is told too."""
    text = "a batch does not fit; may not split.\nFix: a smaller one.\n[H401] run `holdfast explain H401`"
    raised = {"type": "holdfast.core.errors.OutOfMemoryError", "message": text, "frames": [["train.py", 9, "step"]]}
    guard = tmp_path / "elsewhere"
    run.process(7, ("guard", {"path": str(guard)}), ("exception", {**raised, "fatal": True}))
    run.supervisor(("attempt_started", {"attempt": 0}))
    left = ("left_by_exception", {"exception": "OutOfMemoryError", "rule": "H401", **raised})
    run.tell(guard / "recorder" / "rank0", ("stop", {"reason": "may not split", "rule": "H401"}), left)
    run.supervisor(ended(1))
    facts = collect(run.path)
    assert [each.source for each in facts.statements] == ["process 7"]
    verdict = judge(facts)
    assert (verdict.cause, verdict.fix, verdict.where) == ("H401", "a smaller one.", "train.py:9 in step")
    (alone,) = collect(guard).statements
    assert (alone.rule, alone.fatal, alone.exception) == ("H401", True, "OutOfMemoryError")


def test_a_run_that_goes_on_is_still_running(run):
    """A process that lives and no end: still running, exit code 0."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    write_process(run.path, ProcessInfo(pid=os.getpid(), ticks=ticks, ppid=1, argv=[], role="trainer"))
    run.supervisor(("attempt_started", {"attempt": 0}))
    assert judge(collect(run.path)).cause == "H1611"


def test_a_supervisor_that_was_killed_is_told(run):
    """The note of the sentinel says that the supervisor is gone; without it nothing is claimed."""
    run.process(7)
    run.supervisor(("attempt_started", {"attempt": 0}))
    assert judge(collect(run.path)).cause == "H1600"
    (run.path / SUPERVISOR_FOLDER / "lost.json").write_text('{"unix_seconds": 1.0, "killed": [7], "left": []}')
    assert judge(collect(run.path)).cause == "H1616"


@pytest.mark.parametrize(
    ("status", "sent", "cause"), [(-2, 2, "H1604"), (1, 2, "H1604"), (-9, 15, "H1603"), (0, 15, "H1603")]
)
def test_what_the_user_asked_for_is_no_failure_of_the_run(run, status, sent, cause):
    """However the command ends after a signal that was passed on, the signal is the cause."""
    run.output(
        "step 1\n"
        + traceback_of("", "KeyboardInterrupt").replace(": \n", "\n")
        + traceback_of("Broken pipe", "BrokenPipeError")
    )
    run.supervisor(
        ("attempt_started", {"attempt": 0}), ("signal", {"number": sent, "from": "user"}),
        ended(status, asked_by=sent, signal_sent_by_us=9),
    )  # fmt: skip
    assert judge(collect(run.path)).cause == cause


def test_the_kernels_log_counts_only_for_our_own_processes(run):
    """A kill of a process of this run is evidence; one of another on the same machine is not."""
    line = "Out of memory: Killed process {} (python) total-vm:1kB"
    run.process(7)
    run.supervisor(
        ("attempt_started", {"attempt": 0}),
        ("kernel_log", {"lines": [line.format(7), line.format(4242), 5]}),
        ended(-9, oom_kills=None),
    )
    facts = collect(run.path)
    assert [each.text for each in facts.statements] == [line.format(7)]
    assert judge(facts).cause == "H909"


def test_damaged_files_are_named_and_end_nothing(run):
    """Rings that are cut, foreign or of a newer holdfast, and files of junk, leave the rest readable."""
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
        ("attempt_started", {"attempt": "x"}), ("hang", data), ("memory_trend", {"what": 3, "bytes_per_step": "x"}),
        ("leak", {}), ("kernel_log", {"lines": 3}), ("signal", {}),
        ("attempt_ended", {"status": "x", "oom_kills": "y"}),
    )  # fmt: skip
    judge(collect(run.path))


def test_a_marker_that_the_command_prints_itself_does_not_hide_its_output(run):
    """The attempts are told apart by the lines that the supervisor wrote, as long as the last is one of its own."""
    run.output("one\n" + traceback_of("Address already in use", "OSError"), "two\n" + traceback_of(SHAPES))
    run.supervisor(("attempt_started", {"attempt": 1}), ended(1, attempt=1))
    text = (run.path / OUTPUT_FILE).read_text()
    (run.path / OUTPUT_FILE).write_text("--- holdfast: attempt 1 ---\nfake\n" + text)
    assert [each.text for each in collect(run.path).statements] == [SHAPES]
