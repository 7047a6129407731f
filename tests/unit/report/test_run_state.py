"""Whether a run goes on: each rule of the table, and the order of the rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.report.live.run_state import SILENT_SECONDS, RunSigns, decide_state

NOTHING = RunSigns(
    supervisor_event="",
    lock_is_held=False,
    supervisor_is_lost=False,
    processes_alive=(),
    closed=False,
    silent_seconds=0.0,
)


def state(**signs: Any) -> str:
    return decide_state(replace(NOTHING, **signs))


def test_a_run_that_has_recorded_nothing_yet_is_running():
    """Silence says something only of a run that was seen before."""
    assert state(silent_seconds=1e6) == "running"


@pytest.mark.parametrize("lock_is_held", [True, None])
def test_an_announced_restart_counts_while_the_supervisor_may_live(lock_is_held):
    """The lock tells a supervisor that waits from one that is gone."""
    assert state(supervisor_event="restart", lock_is_held=lock_is_held) == "waits to restart"
    assert (
        state(supervisor_event="restart", lock_is_held=False, silent_seconds=SILENT_SECONDS)
        == "ended"
    )


def test_who_is_alive_counts_more_than_what_was_recorded():
    """A guard may close one run and the process go on with another."""
    assert state(processes_alive=(False, True), closed=True) == "running"
    assert state(lock_is_held=True, supervisor_event="stopped") == "running"


def test_processes_of_another_machine_may_live_unless_their_supervisor_is_lost():
    """Without a look at the processes only a recorded loss ends the run."""
    assert state(processes_alive=(None,), silent_seconds=1e6) == "running"
    assert state(processes_alive=(None,), supervisor_is_lost=True) == "ended"


@pytest.mark.parametrize(
    "end", [{"supervisor_event": "stopped"}, {"supervisor_is_lost": True}, {"closed": True}]
)
def test_a_recorded_end_needs_no_silence(end):
    """Nobody waits for what is certain."""
    assert state(processes_alive=(False,), **end) == "ended"


def test_a_run_whose_processes_are_gone_has_ended_after_some_seconds_of_silence():
    """The last records of a process that was killed may still arrive."""
    assert state(processes_alive=(False,), silent_seconds=SILENT_SECONDS - 0.1) == "running"
    assert state(processes_alive=(False,), silent_seconds=SILENT_SECONDS) == "ended"
