"""On what the time of a run was spent: the share of it that made steps, and what the rest was.

It is that of one process of each attempt, which has the time of each of its phases on its board; where none was
observed, that of a guard, as far back as its recording goes.
"""

from __future__ import annotations

import itertools

import numpy as np

from holdfast.recorder.progress import Phase
from holdfast.report.run_snapshot import Lane, ProcessSnapshot, RunSnapshot

_KINDS = {
    Phase.FORWARD_BACKWARD: "steps", Phase.OPTIMIZER: "steps", Phase.DATA_WAIT: "waiting for data",
    Phase.EVALUATION: "validation", Phase.SAVING: "saves", Phase.END_OF_EPOCH: "between epochs",
    Phase.STARTING: "start-up", Phase.FIRST_STEP: "start-up", Phase.ENDING: "ending",
}  # fmt: skip
COLOURS = {
    "steps": "#45a95a", "steps made again": "#e15759", "waiting for data": "#f28e2b", "validation": "#2aa8a8",
    "saves": "#4e8fd0", "between epochs": "#9d78c9", "start-up": "#8fa3b8", "ending": "#b8a26b", "down": "#8c3b3b",
    "between steps": "#8c8c8c",
}  # fmt: skip
# What a guard records while it works; its other events may come before a run that goes on says so.
_SIGNS = frozenset({"resumed", "loop", "checkpoint_saved", "validated", "closed", "left_by_exception"})


def goodput(run: RunSnapshot) -> dict[str, float]:
    """Return seconds by what they were spent on, "steps" first; empty where nobody recorded steps."""
    chosen: dict[int, ProcessSnapshot] = {}
    for seen in sorted(run.processes, key=lambda seen: (seen.info and seen.info.rank) or 0):
        if seen.info is not None and seen.role == "trainer" and any(seen.spent):
            chosen.setdefault(seen.info.attempt, seen)
    found, within, last = dict.fromkeys(COLOURS, 0.0), 0.0, 0.0
    ends = {each.event.data.get("attempt"): each.event for each in run.events if each.event.kind == "attempt_ended"}
    for attempt, seen in sorted(chosen.items()):
        assert seen.info is not None
        spent, end = list(seen.spent), ends[attempt].unix_seconds if attempt in ends else seen.ended
        lasted = max((end or 0.0) - seen.info.started, sum(spent))
        if seen.phase is not None:  # what it was in when it ended, as long as that took: a hang is in it
            spent[seen.phase] += lasted - sum(spent)
        for phase, kind in _KINDS.items():
            found[kind] += spent[phase]
        within, last = within + lasted, max(last, seen.info.started + lasted)
    if not found["steps"]:
        return _of_guard(run)
    found["down"] = max(0.0, last - run.began - within) if run.began is not None else 0.0
    again = min(_again([seen.lane for seen in chosen.values() if seen.lane is not None]), found["steps"])
    found["steps"], found["steps made again"] = found["steps"] - again, again
    return {kind: seconds for kind, seconds in found.items() if seconds > 0}


def _of_guard(run: RunSnapshot) -> dict[str, float]:
    """Return the same of a guard, which knows its steps, and when it went on after another process had gone."""
    lane = next((lane for lane in run.lanes if lane.spent and lane.begun and not lane.rank), None)
    if lane is None:
        return {}
    events = [(each.event.unix_seconds, each.event.kind) for each in run.events if each.event.kind in _SIGNS]
    signs = np.unique([lane.begun, *lane.moments[0], *(at for at, _ in events)])
    before = {float(at): float(at - last) for last, at in itertools.pairwise(signs)}
    down = sum(before.get(at, 0.0) for at, kind in events if kind == "resumed")
    worked = max(float(signs[-1] - signs[0]) - down, lane.spent)
    again = lane.spent * min(1.0, _again([lane]) / worked)
    rest = {"steps made again": again, "between steps": worked - lane.spent, "down": down}
    return {"steps": lane.spent - again} | {kind: seconds for kind, seconds in rest.items() if seconds > 0}


def _again(lanes: list[Lane]) -> float:
    """Return how long steps took that were made again later, since the run went back."""
    lanes = sorted(lanes, key=lambda lane: lane.begun or 0.0)
    times, steps = (np.concatenate([np.array([]), *(lane.moments[place] for lane in lanes)]) for place in (0, 1))
    seconds = 0.0
    for at in np.flatnonzero(np.diff(steps) < 0):
        if steps[at + 1] > 1:  # else a script without a guard began to count anew, and may well have gone on
            before = np.flatnonzero(steps[: at + 1] < steps[at + 1])
            seconds += float(times[at] - times[before[-1]]) if len(before) else 0.0
    return seconds
