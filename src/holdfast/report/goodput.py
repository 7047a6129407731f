"""On what the time of a run was spent: the share of it that made steps, and what the rest was.

It is that of one process of each attempt, which has the time of each of its phases on its board;
where none was observed, that of a guard, as far back as its recording goes.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right

import numpy as np

from holdfast.recorder.progress import Phase
from holdfast.report.run_snapshot import Lane, ProcessSnapshot, RunSnapshot

_KINDS = {
    Phase.FORWARD_BACKWARD: "steps",
    Phase.OPTIMIZER: "steps",
    Phase.DATA_WAIT: "waiting for data",
    Phase.EVALUATION: "validation",
    Phase.SAVING: "saves",
    Phase.END_OF_EPOCH: "between epochs",
    Phase.STARTING: "start-up",
    Phase.FIRST_STEP: "start-up",
    Phase.ENDING: "ending",
}
COLOURS = {
    "steps": "#45a95a",
    "steps made again": "#e15759",
    "waiting for data": "#f28e2b",
    "validation": "#2aa8a8",
    "saves": "#4e8fd0",
    "between epochs": "#9d78c9",
    "start-up": "#8fa3b8",
    "ending": "#b8a26b",
    "down": "#8c3b3b",
    "between steps": "#8c8c8c",
}
# What a guard records while it works; its other events may come before a run that goes on says so.
_SIGNS = frozenset(
    {"resumed", "loop", "checkpoint_saved", "validated", "closed", "left_by_exception"}
)


def goodput(run: RunSnapshot) -> dict[str, float]:
    """Return seconds by what they were spent on, "steps" first.

    Empty where nobody recorded steps.
    """
    chosen: dict[int, ProcessSnapshot] = {}
    for seen in sorted(run.processes, key=lambda seen: (seen.info and seen.info.rank) or 0):
        if seen.info is not None and seen.role == "trainer" and any(seen.spent):
            chosen.setdefault(seen.info.attempt, seen)
    found, before = dict.fromkeys(COLOURS, 0.0), None if 0 in chosen else run.began
    again = _shares_again(
        run, [seen.lane for _, seen in sorted(chosen.items()) if seen.lane is not None]
    )
    times = {
        f"{each.event.kind} {each.event.data.get('attempt')}": each.event.unix_seconds
        for each in run.events
    }
    for attempt, seen in sorted(chosen.items()):
        assert seen.info is not None
        spent, end = list(seen.spent), times.get(f"attempt_ended {attempt}", seen.ended)
        lasted = max((end or 0.0) - seen.info.started, sum(spent))
        # What it was in when it ended, as long as that took: a hang is in it
        if seen.phase is not None:
            spent[seen.phase] += lasted - sum(spent)
        for phase, kind in _KINDS.items():
            found[kind] += spent[phase]
        made = seen.spent[Phase.FORWARD_BACKWARD] + seen.spent[Phase.OPTIMIZER]
        found["steps made again"] += made * again.get(seen.label, 0.0)
        begin = (
            run.began
            if not attempt and run.began
            else times.get(f"attempt_started {attempt}", seen.info.started)
        )
        # In between, Python starts and does not observe itself yet
        begin = min(begin, seen.info.started)
        found["start-up"] += seen.info.started - begin
        found["down"] += max(0.0, begin - (before or begin))
        before = seen.info.started + lasted
    if not found["steps"]:
        return _of_guard(run)
    found["steps"] -= found["steps made again"]
    return {kind: seconds for kind, seconds in found.items() if seconds > 0}


def _of_guard(run: RunSnapshot) -> dict[str, float]:
    """Return the same of a guard, which knows its steps, and when it went on after another
    process had gone.
    """
    lane = next(
        (lane for lane in run.lanes if lane.of_guard and lane.begun and not lane.rank), None
    )
    if lane is None:
        return {}
    signs, spent = _signs(run, lane), float(lane.made[1].sum())
    over = {
        each.event.unix_seconds for each in run.events if each.event.data.get("how") == "finished"
    }
    idle = [(begin, end - begin) for begin, end in breaks(run, lane)]
    worked = max(signs[-1] - signs[0] - sum(seconds for _, seconds in idle), spent)
    # Nothing is missed after the end of a run
    down = sum(seconds for begin, seconds in idle if begin not in over)
    again = spent * _shares_again(run, [lane])[lane.label]
    rest = {"steps made again": again, "between steps": worked - spent, "down": down}
    return {"steps": spent - again} | {
        kind: seconds for kind, seconds in rest.items() if seconds > 0
    }


def breaks(run: RunSnapshot, lane: Lane) -> list[tuple[float, float]]:
    """Return when nothing trained a guard's run.

    From the last sign of a process until the next has resumed.
    """
    resumed = {each.event.unix_seconds for each in run.events if each.event.kind == "resumed"}
    return [(last, at) for last, at in itertools.pairwise(_signs(run, lane)) if at in resumed]


def _signs(run: RunSnapshot, lane: Lane) -> list[float]:
    """Return when a guard is known to have worked."""
    own = (
        each.event for each in run.events if each.source == lane.label and each.event.kind in _SIGNS
    )
    return sorted(
        {lane.begun or 0.0, *lane.moments[0].tolist(), *(each.unix_seconds for each in own)}
    )


def _shares_again(run: RunSnapshot, lanes: list[Lane]) -> dict[str, float]:
    """Return by label which share of their steps lanes, earliest first, made after the run had
    been further.
    """
    back = sorted(
        each.event.unix_seconds
        for each in run.events
        if each.event.kind in ("resumed", "rolled_back")
    )
    shares, last, before, reached = dict[str, float](), 0.0, 0.0, 0.0
    for lane in lanes:
        again, total, known = 0.0, 0.0, -1
        # Count from this one on
        for at, step, count, took in np.transpose([*lane.moments, *lane.made]).tolist():
            if step < last or bisect_right(back, at) > known:
                # A script without a guard that counts anew may well have gone on.
                before = reached = reached if step > 1 or run.guards else 0.0
            last, known, reached = (
                step,
                bisect_right(back, at),
                max(reached, step + max(count, 1.0) - 1),
            )
            again += took * min(max((before - step + 1) / max(count, 1.0), 0.0), 1.0)
            total += took
        shares[lane.label] = again / (total or 1.0)
    return shares
