"""Statements from events: what processes raised, what guards tried, and how guards ended.

A Guard's last event is ``closed``, or ``left_by_exception`` with what it writes while it closes.
Does not: judge.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdfast.core.events.event import Event
from holdfast.explain.evidence import Frame, Statement
from holdfast.explain.logs.lines import plain_text
from holdfast.explain.logs.text import read_log
from holdfast.recorder.run_files import ProcessInfo

_MOST_CHAIN = 20
_MOST_TEXT = 20_000
# Characters of the first line in which a log and a recording of one exception agree
_COMPARED = 120

# What a guard did against trouble, in words, by the kind of the event, and where that holds why it
# happened.
_REMEDIES = {
    "split": ("passed the batch in smaller parts for want of memory", "reason"),
    "recompute": ("recomputed activations for want of memory", "reason"),
    "retry": ("tried again after freeing memory", "reason"),
    "skip_step": ("skipped the step", "reason"),
    "roll_back": ("went back to a good checkpoint", "reason"),
    "loader_healed": ("replaced the workers of the loader", "cause"),
    "sample_quarantined": ("quarantined a sample that could not be loaded", "evidence"),
    "samples_dropped": ("left out samples with bad values", "reason"),
    "checkpoint_damaged": ("passed over a damaged checkpoint", "why"),
}
_MOST_REASON = 400  # characters


def of_exceptions(events: Iterable[Event], info: ProcessInfo) -> list[Statement]:
    """Return the exceptions that a process recorded, each with what it was raised from, the root
    first.
    """
    found: list[Statement] = []
    for event in events:
        if event.kind != "exception":
            continue
        common: dict[str, Any] = {
            "source": f"process {info.pid}",
            "rank": info.rank,
            "pid": info.pid,
        }
        common["unix_seconds"] = event.unix_seconds
        found += chain_of(
            event.data, fatal=event.data.get("fatal"), position=len(found), common=common
        )
    return found


def chain_of(
    facts: Mapping[str, Any], *, fatal: Any, position: int, common: Mapping[str, Any]
) -> list[Statement]:
    """Return an exception that was recorded as ``core.raised`` has it, after what it was raised
    from, the root first.

    `fatal`: whether it ended its process; anything but a bool: nobody knows. `position` is that of
        the first.
    """
    found: list[Statement] = []
    chain = facts.get("chain")  # the nearest first
    parts = [part for part in chain if isinstance(part, Mapping)] if isinstance(chain, list) else []
    for part in (*reversed(parts[:_MOST_CHAIN]), facts):
        raised = _raised(
            part,
            cause=part is not facts,
            fatal=fatal,
            position=position + len(found),
            common=common,
        )
        found += [*_nested(raised), raised]
    return found


def _nested(raised: Statement) -> list[Statement]:
    """Return the exceptions whose tracebacks a message repeats, as that of a loader's worker
    does, the root first.
    """
    if "raceback (most recent call last)" not in raised.text:
        return []
    inner = read_log(io.BytesIO(raised.text.encode(errors="replace")), name="").statements
    return [
        replace(raised, text=each.text, exception=each.exception, frames=each.frames, cause=True)
        for each in inner
        if each.kind == "exception"
    ]


def _raised(
    facts: Mapping[str, Any], *, cause: bool, fatal: Any, position: int, common: Mapping[str, Any]
) -> Statement:
    name = text_of(facts.get("type")).rpartition(".")[2]
    return Statement(
        text=text_of(facts.get("message")),
        kind="exception",
        exception=name or None,
        frames=_frames(facts.get("frames")),
        position=position,
        fatal=fatal if isinstance(fatal, bool) else None,
        cause=cause,
        **common,
    )


def _frames(value: Any) -> tuple[Frame, ...]:
    return tuple(
        Frame(file=text_of(entry[0]), line=entry[1], function=text_of(entry[2]))
        for entry in (value if isinstance(value, list) else ())
        if isinstance(entry, list) and len(entry) >= 3 and isinstance(entry[1], int)
    )


def text_of(value: Any) -> str:
    """Return a text of an event without escape sequences and not endless.

    An empty one for anything else.
    """
    return plain_text(value)[:_MOST_TEXT] if isinstance(value, str) else ""


def already_tried(events: Iterable[Event]) -> list[str]:
    """Return what guards did against trouble, one sentence for each kind, with samples and the
    newest's reason.
    """
    counted: Counter[str] = Counter()
    newest: dict[str, str] = {}
    samples: dict[str, None] = {}  # that are quarantined
    for event in events:
        counted[event.kind] += 1
        if event.kind == "sample_quarantined" and "sample" in event.data:
            samples[plain_text(str(event.data["sample"]))[:_COMPARED]] = None
        newest[event.kind] = text_of(
            event.data.get(_REMEDIES.get(event.kind, ("", "reason"))[1])
        ).strip()
    return [
        f"a Guard {words}"
        + (f", {counted[kind]} times" if counted[kind] > 1 else "")
        + (
            f" ({', '.join(samples)[:_MOST_TEXT]})"
            if samples and kind == "sample_quarantined"
            else ""
        )
        + (f": {newest[kind].splitlines()[-1][:_MOST_REASON]}" if newest[kind] else "")
        for kind, (words, _) in _REMEDIES.items()
        if counted[kind]
    ]


def merged(recorded: Sequence[Statement], logged: Sequence[Statement]) -> list[Statement]:
    """Return all statements, those of the log first; an exception that both know is one.

    The place in the log keeps its order; class, frames, time, rank and whether it was fatal come
    from the recording.
    """
    left = list(recorded)
    found: list[Statement] = []
    # From the end: of several exceptions that read alike, the newest recording is that of the
    # newest text.
    for statement in reversed(logged):
        twin = None
        if statement.kind == "exception":
            twin = next((each for each in reversed(left) if same(each, statement)), None)
        if twin is None:
            found.append(statement)
            continue
        left.remove(twin)
        found.append(
            replace(
                statement,
                frames=twin.frames or statement.frames,
                unix_seconds=twin.unix_seconds,
                rank=twin.rank if twin.rank is not None else statement.rank,
                pid=twin.pid,
                fatal=twin.fatal if twin.fatal is not None else statement.fatal,
                source=f"{statement.source} and {twin.source}",
            )
        )
    found.reverse()
    last = max((statement.position for statement in found), default=0)
    return found + [replace(each, position=last + 1 + index) for index, each in enumerate(left)]


def same(one: Statement, other: Statement) -> bool:
    """Return whether two statements are of one exception.

    Its class, its rank, and how its message begins.
    """
    if one.exception != other.exception or (
        None not in (one.rank, other.rank) and one.rank != other.rank
    ):
        return False
    first, second = (
        text.strip().split("\n")[0][:_COMPARED].rstrip() for text in (one.text, other.text)
    )
    return first == second


# What a Guard writes after the error that ends it, and while it closes. Any other event says that
# it went on.
_OF_AN_END = frozenset(
    {
        "checkpoint_saved",
        "closed",
        "finding",
        "left_by_exception",
        "not_saved",
        "note",
        "save_failed",
        "save_postponed",
        "save_refused",
        "steps_not_saved",
        "stop",
        "stop_requested",
    }
)
_BEGINS = ("loop", "resumed")


def how_closed(events: Sequence[Event]) -> dict[str, str] | None:
    """Return how a Guard closed, from events by time, or None: its newest event does not say so.

    ``how`` is "finished", "stopped" on request (``reason`` is such as "SIGTERM"), or "left" by a
    loop that broke off.
    """
    how = events[-1].data.get("how") if events and events[-1].kind == "closed" else None
    if not isinstance(how, str):
        return None
    begun = max((index for index, event in enumerate(events) if event.kind in _BEGINS), default=0)
    stops = [event for event in events[begun:] if event.kind == "stop_requested"]
    reason = (
        (stops[-1].data.get("signal") or stops[-1].data.get("reason"))
        if stops and how == "stopped"
        else ""
    )
    return {"how": how, "reason": text_of(reason)}


def of_guards(events: Sequence[Event], *, last_step: float | None = None) -> list[Statement]:
    """Return what guards stopped for and the errors that left them, each after what it was raised
    from.

    Of these events by time only the newest can have ended the run, and only if nothing, such as the
    `last_step`, went on after it.
    """
    ends = _ends(events)
    going = max(
        (index for index, event in enumerate(events) if event.kind not in _OF_AN_END), default=-1
    )
    closed = how_closed(events)
    if ends:
        at, newest = ends[-1]
        went_on = at < going or events[at].unix_seconds < (last_step or 0.0)
        ended = not went_on and (closed is None or closed["how"] == "left")
        ends[-1] = at, [replace(each, fatal=ended) for each in newest]
    found = [each for _, statements in ends for each in statements]
    return [replace(each, position=index) for index, each in enumerate(found)]


def _ends(events: Sequence[Event]) -> list[tuple[int, list[Statement]]]:
    """Return the ends that are recorded, each with the place of its last event.

    What only follows a stop is one.
    """
    ends: list[tuple[int, list[Statement]]] = []
    stop: int | None = None
    for index, event in enumerate(events):
        if event.kind == "stop":
            ends.append((index, [_stopped(event)]))
            stop = index
        elif event.kind == "left_by_exception" and event.data.get("exception") != "SystemExit":
            left = _left(event)
            rule = left[-1].rule
            follows = stop is not None and all(
                each.kind in _OF_AN_END for each in events[stop:index]
            )
            if follows and rule is not None and rule == ends[-1][1][-1].rule:
                ends.pop()  # the error says all of the stop and more
            ends.append((index, left))
            stop = None
    return ends


def _stopped(event: Event) -> Statement:
    return Statement(
        text=text_of(event.data.get("reason")),
        source="guard",
        unix_seconds=event.unix_seconds,
        fatal=False,
        rule=_rule_of(event),
    )


def _left(event: Event) -> list[Statement]:
    """Return the error that left a Guard, after what it was raised from."""
    common = {"source": "guard", "unix_seconds": event.unix_seconds}
    facts = event.data if event.data.get("type") else {"type": event.data.get("exception")}
    found = chain_of(facts, fatal=False, position=0, common=common)
    found[-1] = replace(found[-1], rule=_rule_of(event))
    return found


def _rule_of(event: Event) -> str | None:
    rule = event.data.get("rule")
    return rule if isinstance(rule, str) else None
