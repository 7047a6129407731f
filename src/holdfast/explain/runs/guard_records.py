"""Read what Guards recorded: the remedies that they applied, and how they ended.

A guard's last event is ``closed``, or ``left_by_exception`` followed by the events that the guard
records while closing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from holdfast.core.events.event import Event
from holdfast.explain.evidence import GuardClosing, Statement
from holdfast.explain.logs.lines import plain_text
from holdfast.explain.observations import stop_request
from holdfast.explain.runs.statements import event_text, exception_chain

_MAX_SAMPLE_CHARACTERS = 120
_MAX_SAMPLES_CHARACTERS = 20_000
_MAX_REASON_CHARACTERS = 400


class _AppliedRemedy(NamedTuple):
    """A remedy that a guard applied."""

    # The rest of a sentence that begins with the guard.
    words: str
    # The event field that says why.
    reason_key: str


# By event kind, in the order in which they are reported.
_REMEDIES = {
    "split": _AppliedRemedy("split the batch into smaller parts because memory ran out", "reason"),
    "recompute": _AppliedRemedy("recomputed activations because memory ran out", "reason"),
    "retry": _AppliedRemedy("retried the step after freeing memory", "reason"),
    "skip_step": _AppliedRemedy("skipped the step", "reason"),
    "roll_back": _AppliedRemedy("rolled back to a good checkpoint", "reason"),
    "loader_healed": _AppliedRemedy("replaced the workers of the loader", "cause"),
    "sample_quarantined": _AppliedRemedy(
        "quarantined a sample that could not be loaded", "evidence"
    ),
    "samples_dropped": _AppliedRemedy("left out samples with bad values", "reason"),
    "checkpoint_damaged": _AppliedRemedy("passed over a damaged checkpoint", "why"),
}

# Events that a guard may record after the error that ends it and while it closes. Any other kind
# shows that it continued.
_KINDS_AT_THE_END = frozenset(
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


def already_tried(events: Iterable[Event]) -> list[str]:
    """Return the remedies that guards applied, one sentence for each kind.

    A sentence says how often, which samples were quarantined, and the newest reason.
    """
    events_by_kind: dict[str, list[Event]] = {kind: [] for kind in _REMEDIES}
    for event in events:
        if event.kind in _REMEDIES:
            events_by_kind[event.kind].append(event)
    return [
        _describe_remedy(_REMEDIES[kind], applications)
        for kind, applications in events_by_kind.items()
        if applications
    ]


def _describe_remedy(remedy: _AppliedRemedy, applications: Sequence[Event]) -> str:
    """Return a sentence about all applications of one remedy, which are ordered by time."""
    sentence = f"a Guard {remedy.words}"
    if len(applications) > 1:
        sentence += f", {len(applications)} times"
    samples = _quarantined_samples(applications)
    if samples:
        sentence += f" ({', '.join(samples)[:_MAX_SAMPLES_CHARACTERS]})"
    reason = event_text(applications[-1].data.get(remedy.reason_key)).strip()
    if reason:
        last_line = reason.splitlines()[-1]
        sentence += f": {last_line[:_MAX_REASON_CHARACTERS]}"
    return sentence


def _quarantined_samples(events: Iterable[Event]) -> list[str]:
    """Return the samples that were quarantined, each once, in the order of the events."""
    samples = [
        plain_text(str(event.data["sample"]))[:_MAX_SAMPLE_CHARACTERS]
        for event in events
        if event.kind == "sample_quarantined" and "sample" in event.data
    ]
    # A dict keeps the order and drops duplicates.
    return list(dict.fromkeys(samples))


# --- How guards ended -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _GuardEnd:
    """A guard's decision to stop, or the error that ended it."""

    # The index of its event.
    index: int
    # For an error: its causes, then the error itself.
    statements: list[Statement]


def how_closed(events: Sequence[Event]) -> GuardClosing | None:
    """Return how a guard closed, or None if its newest event does not say.

    Args:
        events: The events of the guard, oldest first.
    """
    if not events or events[-1].kind != "closed":
        return None
    how = events[-1].data.get("how")
    if not isinstance(how, str):
        return None
    reason = ""
    request = stop_request(events)
    if how == "stopped" and request is not None:
        reason = event_text(request.data.get("signal") or request.data.get("reason"))
    return GuardClosing(how=how, reason=reason)


def statements_of_guards(
    events: Sequence[Event], *, last_step: float | None = None
) -> list[Statement]:
    """Return statements for the stops of guards and for the errors that ended them.

    The causes of an error come before it. Only the newest stop or error can be fatal, and only if
    nothing shows that the run continued after it.

    Args:
        events: The events of guards, oldest first.
        last_step: The Unix time of the last step; None if unknown.
    """
    ends = _ends_of_guards(events)
    if ends:
        newest = ends[-1]
        is_fatal = _ended_the_run(newest, events, last_step or 0.0)
        fatal = [replace(statement, fatal=is_fatal) for statement in newest.statements]
        ends[-1] = replace(newest, statements=fatal)
    statements = [statement for end in ends for statement in end.statements]
    return [replace(statement, position=index) for index, statement in enumerate(statements)]


def _ended_the_run(end: _GuardEnd, events: Sequence[Event], last_step: float) -> bool:
    """Return whether a guard's end was the end of the run: it did not continue afterwards."""
    if events[end.index].unix_seconds < last_step:
        return False
    if any(event.kind not in _KINDS_AT_THE_END for event in events[end.index + 1 :]):
        return False
    closed = how_closed(events)
    return closed is None or closed.how == "left"


def _ends_of_guards(events: Sequence[Event]) -> list[_GuardEnd]:
    """Return the recorded ends of guards; a stop and the error it leads to count as one."""
    ends: list[_GuardEnd] = []
    # The index of the newest stop that was not followed by an error yet.
    stop: int | None = None
    for index, event in enumerate(events):
        if event.kind == "stop":
            reason = event_text(event.data.get("reason"))
            statement = replace(_statement_of_guard(event), text=reason, rule=_rule_of(event))
            ends.append(_GuardEnd(index=index, statements=[statement]))
            stop = index
        elif event.kind == "left_by_exception" and event.data.get("exception") != "SystemExit":
            error = _GuardEnd(index=index, statements=_error_statements(event))
            if stop is not None and _follows_from(error, ends[-1], events):
                # The error includes everything in the stop's reason, and more.
                ends.pop()
            ends.append(error)
            stop = None
    return ends


def _follows_from(error: _GuardEnd, stop: _GuardEnd, events: Sequence[Event]) -> bool:
    """Return whether an error has the rule of an earlier stop and nothing happened in between."""
    rule = error.statements[-1].rule
    if rule is None or rule != stop.statements[-1].rule:
        return False
    return all(event.kind in _KINDS_AT_THE_END for event in events[stop.index : error.index])


def _error_statements(event: Event) -> list[Statement]:
    """Return the error that ended a guard, preceded by its causes."""
    facts = event.data if event.data.get("type") else {"type": event.data.get("exception")}
    statements = exception_chain(facts, _statement_of_guard(event))
    statements[-1] = replace(statements[-1], rule=_rule_of(event))
    return statements


def _statement_of_guard(event: Event) -> Statement:
    """Return the part of a statement that all events of guards share."""
    return Statement(text="", source="guard", unix_seconds=event.unix_seconds, fatal=False)


def _rule_of(event: Event) -> str | None:
    rule = event.data.get("rule")
    return rule if isinstance(rule, str) else None
