"""What the observer remembers of a W&B run, and for which stops it calls `mark_preempting`."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.core.events.event import Event
from holdfast.core.events.run_events import StopRequested
from holdfast.core.importing import ImportWatch
from holdfast.recorder import run_files
from holdfast.supervise.observe.wandb_history import RunHistory
from holdfast.supervise.observe.wandb_run import WandbObserver


def resumed_at(run_path: Path, position: int, run_id: str = "0123abcd") -> RunHistory:
    """Return the history of an online run that the server continues at a position."""
    run = SimpleNamespace(id=run_id, offline=False, starting_step=position)
    return RunHistory(run_path, run)


def log(history: RunHistory, *steps: int, guard: str = "", **more: Any) -> list[int]:
    """Log a loss at each step, and return the steps that are passed on to W&B."""
    values = {"loss": 0.5, **more}
    return [step for step in steps if not history.is_repeated(guard, values, step=step)]


def test_rows_that_the_server_has_not_received_are_logged_again(tmp_path: Path) -> None:
    """They come after the position at which it continues the history."""
    assert log(resumed_at(tmp_path, 0), 1, 2, 3, 4) == [1, 2, 3, 4]

    assert log(resumed_at(tmp_path, 3), 1, 2, 3, 4) == [3, 4]
    assert log(resumed_at(tmp_path, 5), 1, 2, 3, 4, 5) == [5]


def test_values_of_one_row_share_its_position(tmp_path: Path) -> None:
    """With `commit=False`, W&B waits for the rest of the row."""
    history = resumed_at(tmp_path, 0)
    for step in (1, 2):
        assert not history.is_repeated("", {"a": 1, "train/global_step": step}, commit=False)
        assert not history.is_repeated("", {"b": 1, "train/global_step": step})

    again = resumed_at(tmp_path, 1)

    assert again.is_repeated("", {"a": 1, "train/global_step": 1}, commit=False)
    assert again.is_repeated("", {"b": 1, "train/global_step": 1})
    assert not again.is_repeated("", {"a": 1, "train/global_step": 2}, commit=False)
    assert not again.is_repeated("", {"b": 1, "train/global_step": 2})


def test_other_values_of_a_step_are_no_repetition(tmp_path: Path) -> None:
    """The run was killed in the evaluation after the last step, which is then made at last."""
    log(resumed_at(tmp_path, 0), 1, 2)

    again = resumed_at(tmp_path, 3)

    assert log(again, 2) == []
    assert log(again, 2, accuracy=0.5) == [2]


def test_an_attempt_may_log_a_step_several_times(tmp_path: Path) -> None:
    """Only rows from before the state was restored count as repeated."""
    history = resumed_at(tmp_path, 0)
    assert log(history, 1, 1, 2) == [1, 1, 2]

    history.note_restored()

    assert log(history, 1, 2, 3, 3) == [3, 3]


def test_another_run_begins_with_no_rows(tmp_path: Path) -> None:
    """The script may choose another ID at each start."""
    log(resumed_at(tmp_path, 0), 1, 2)

    assert log(resumed_at(tmp_path, 0, run_id="other"), 1, 2) == [1, 2]


def test_steps_that_the_ring_does_not_hold_any_more_were_logged(tmp_path: Path) -> None:
    """It holds the newest 8,192 rows. Other values of these steps were not logged."""
    steps = range(1, 9001)
    assert log(resumed_at(tmp_path, 0), *steps) == list(steps)

    again = resumed_at(tmp_path, 9001)

    assert log(again, *steps, 9001) == [9001]
    assert log(again, 5, accuracy=0.5) == [5]


def test_the_steps_of_each_guard_are_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second fold of a cross-validation logs the steps of the first one again."""
    guard = SimpleNamespace(global_step=3)
    monkeypatch.setitem(run_files.guarded, 0, ("optimizer", lambda: guard))
    log(resumed_at(tmp_path, 0), 10, guard="fold-1")

    again = resumed_at(tmp_path, 11)

    assert log(again, 11, guard="fold-1") == []
    assert log(again, 11, guard="fold-2") == [11]


@pytest.mark.parametrize(
    ("stop", "is_marked"),
    [
        (StopRequested(reason="SIGTERM", signal="SIGTERM"), True),
        (StopRequested(reason="SIGUSR1", signal="SIGUSR1", asked_rank=1), True),
        (StopRequested(reason="max_time: 0 s until the job ends"), True),
        (StopRequested(reason="SIGINT", signal="SIGINT"), False),
        (StopRequested(reason="SIGHUP", signal="SIGHUP"), False),
        (StopRequested(reason="converged"), False),
    ],
)
def test_only_a_scheduler_preempts_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: StopRequested, is_marked: bool
) -> None:
    """Not a person, and not the script."""
    marks: list[str] = []
    run = SimpleNamespace(mark_preempting=lambda: marks.append("marked"))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))
    monkeypatch.setattr(run_files, "_event_listeners", [])
    monkeypatch.setattr(run_files, "_recording_listeners", [])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    errors: list[BaseException] = []
    monkeypatch.setattr(WandbObserver, "_wrap_init", lambda *_: None)
    WandbObserver(
        ImportWatch(errors.append), tmp_path, "0-0", lambda: 0, lambda _: None, errors.append
    )

    event = Event(kind=stop.kind, global_step=1, unix_seconds=1.0, data=stop.facts())
    run_files.announce_guard_event(stop, event)
    for thread in threading.enumerate():
        if thread.name == "holdfast-mark-preempting":
            thread.join()

    assert bool(marks) is is_marked
    assert not errors
