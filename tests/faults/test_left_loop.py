"""A loop that is left before its end names the steps that no checkpoint holds, and carries out
an announced stop.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.prepared import run_prepared

from holdfast.checkpoint.store import Store
from holdfast.recorder.reader import read_events

PROGRAM = Path(__file__).parent / "programs" / "left_loop.py"


def run(tmp_path: Path, leave: str, then: str = "nothing", **more: Any) -> Any:
    request = {"run_dir": str(tmp_path / "run"), "leave": leave, "then": then, **more}
    return run_prepared([PROGRAM, json.dumps(request)], timeout=300)


def newest_step(tmp_path: Path) -> int:
    return Store(tmp_path / "run" / "checkpoints").entries()[0].global_step


def data_of(kind: str, tmp_path: Path) -> list[Any]:
    return [
        event.data
        for event in read_events(tmp_path / "run" / "recorder" / "rank0")
        if event.kind == kind
    ]


def steps_named(ended: Any) -> list[list[int]]:
    """Return the numbers of the steps in each line that says which are in no checkpoint."""
    lines = [
        line for line in ended.stderr.splitlines() if "in no checkpoint" in line and "step" in line
    ]
    return [
        [int(step) for step in re.findall(r"\b\d+\b", line.partition(" of ")[0])] for line in lines
    ]


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("leave", ["break", "next", "no loop"])
def test_steps_that_nobody_saved_are_named_when_the_process_ends(
    leave: str, async_save: bool, tmp_path: Path
) -> None:
    """One line and one event name them, and the exit code stays 0."""
    ended = run(tmp_path, leave, async_save=async_save)

    assert ended.returncode == 0, ended.stderr
    from_step = newest_step(tmp_path) + 1
    assert steps_named(ended) == [sorted({from_step, 9})]
    assert data_of("steps_not_saved", tmp_path) == [{"from_step": from_step, "to_step": 9}]
    assert from_step == 9 or async_save


def test_steps_of_a_guard_that_is_gone_are_named_too(tmp_path: Path) -> None:
    """A training function that returns takes its guard with it."""
    ended = run(tmp_path, "break", "delete")

    assert steps_named(ended) == [[9]]


@pytest.mark.parametrize("then", ["close", "close at exit", "with", "train on"])
@pytest.mark.parametrize("leave", ["break", "next"])
def test_steps_that_are_saved_later_are_not_named(leave: str, then: str, tmp_path: Path) -> None:
    """By `close`, the end of a `with`, or another loop."""
    ended = run(tmp_path, leave, then)

    assert ended.returncode == 0, ended.stderr
    assert steps_named(ended) == []
    assert newest_step(tmp_path) == (12 if then == "train on" else 9)


@pytest.mark.parametrize("leave", ["break", "next"])
def test_a_new_guard_has_said_which_steps_it_leaves_behind(leave: str, tmp_path: Path) -> None:
    """It trains them again, so the end of the process does not name them a second time."""
    ended = run(tmp_path, leave, "new guard")

    assert ended.returncode == 0, ended.stderr
    assert len(data_of("steps_left_behind", tmp_path)) == 1
    assert [line for line in ended.stderr.splitlines() if line.startswith("holdfast:")] == []


def test_an_uncaught_exception_has_said_enough(tmp_path: Path) -> None:
    """Its traceback stays the last word on stderr."""
    ended = run(tmp_path, "error")

    assert ended.returncode == 1
    assert steps_named(ended) == []


# A guard without a loop that is deleted while its run is open saves nothing, so that pair is not
# among them.
@pytest.mark.parametrize(
    ("leave", "then"),
    [(leave, then) for leave in ("break", "next") for then in ("nothing", "close", "delete")]
    + [("no loop", "nothing"), ("no loop", "close")],
)
def test_a_stop_that_was_announced_ends_in_a_checkpoint(
    leave: str, then: str, tmp_path: Path
) -> None:
    """Also if SIGTERM comes in the last step, so that the loop has no boundary after it."""
    ended = run(tmp_path, leave, then, signal_at=9)

    assert ended.returncode == 0, ended.stderr
    assert newest_step(tmp_path) == 9
    assert steps_named(ended) == []


def test_a_stop_whose_loop_is_left_is_recorded(tmp_path: Path) -> None:
    """The recording says that the run stopped on request, as after a loop that has ended by
    itself.
    """
    run(tmp_path, "next", signal_at=9)

    assert [data["signal"] for data in data_of("stop_requested", tmp_path)] == ["SIGTERM"]
    assert [data["how"] for data in data_of("closed", tmp_path)] == ["stopped"]
