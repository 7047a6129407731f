"""How recordings of guards end: closed in order, left by an error, or cut off.

A Guard's last event is ``closed``, or ``left_by_exception`` with what it writes while it closes. Does not: judge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from holdfast.core.events import Event
from holdfast.explain.evidence import Statement
from holdfast.explain.runs.statements import chain_of, text_of

# What a Guard writes after the error that ends it, and while it closes. Any other event says that it went on.
_OF_AN_END = frozenset(
    {
        "stop",
        "left_by_exception",
        "closed",
        "stop_requested",
        "checkpoint_saved",
        "save_failed",
        "save_refused",
        "save_postponed",
        "not_saved",
        "finding",
        "note",
        "gradient_flow",
    }
)
_BEGINS = ("loop", "resumed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """How a Guard closed.

    Args:
        how: ``"finished"``, ``"stopped"`` on request, or ``"left"``: its loop was left early, nobody knows why.
        reason: Of a request to stop, such as ``"SIGTERM"``, or an empty text.
    """

    how: str
    reason: str = ""


def how_closed(events: Sequence[Event]) -> Closed | None:
    """Return how a Guard closed, or None: its newest event does not say so.

    Args:
        events: By time.
    """
    how = events[-1].data.get("how") if events and events[-1].kind == "closed" else None
    if not isinstance(how, str):
        return None
    begun = max((index for index, event in enumerate(events) if event.kind in _BEGINS), default=0)
    stops = [event for event in events[begun:] if event.kind == "stop_requested"]
    return Closed(how=how, reason=text_of(stops[-1].data.get("reason")) if stops and how == "stopped" else "")


def of_guards(events: Sequence[Event], *, last_step: float | None = None) -> list[Statement]:
    """Return what guards stopped for and the errors that left them, each after what it was raised from.

    Only the newest can have ended the run, and only if nothing went on after it.

    Args:
        events: By time.
        last_step: When the newest step was marked, if the marks of steps were read.
    """
    ends = _ends(events)
    going = max((index for index, event in enumerate(events) if event.kind not in _OF_AN_END), default=-1)
    closed = how_closed(events)
    if ends:
        at, newest = ends[-1]
        went_on = at < going or events[at].unix_seconds < (last_step or 0.0)
        ended = not went_on and (closed is None or closed.how == "left")
        ends[-1] = at, [replace(each, fatal=ended) for each in newest]
    found = [each for _, statements in ends for each in statements]
    return [replace(each, position=index) for index, each in enumerate(found)]


def _ends(events: Sequence[Event]) -> list[tuple[int, list[Statement]]]:
    """Return the ends that are recorded, each with the place of its last event; what only follows a stop is one."""
    ends: list[tuple[int, list[Statement]]] = []
    stop: int | None = None
    for index, event in enumerate(events):
        if event.kind == "stop":
            ends.append((index, [_stopped(event)]))
            stop = index
        elif event.kind == "left_by_exception" and event.data.get("exception") != "SystemExit":
            left = _left(event)
            rule = left[-1].rule
            follows = stop is not None and all(each.kind in _OF_AN_END for each in events[stop:index])
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
    facts = event.data if "type" in event.data else {"type": event.data.get("exception")}
    found = chain_of(facts, fatal=False, position=0, common=common)
    found[-1] = replace(found[-1], rule=_rule_of(event))
    return found


def _rule_of(event: Event) -> str | None:
    rule = event.data.get("rule")
    return rule if isinstance(rule, str) else None
