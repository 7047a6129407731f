"""Extract from the events of Guards which remedies the Guards applied and how they ended.

A Guard's last event is ``closed``. If an exception ended the Guard, the last events are
``left_by_exception`` and the events that the Guard records while it closes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from holdfast.core.events.event import Event
from holdfast.explain.evidence import GuardClosing, Statement
from holdfast.explain.logs.lines import plain_text
from holdfast.explain.observations import stop_request
from holdfast.explain.runs.statements import make_exception_chain, text_of_field

_MAX_SAMPLE_CHARACTERS = 120
_MAX_SAMPLES_CHARACTERS = 20_000
_MAX_REASON_CHARACTERS = 400


class _AppliedRemedy(NamedTuple):
    """How to describe a remedy that a Guard applied."""

    # What the Guard did, as the predicate of a sentence about the Guard.
    words: str
    # The field of the event that contains the reason for the remedy.
    reason_key: str


# The remedies, keyed by event kind, in the order in which they are reported.
_REMEDIES = {
    "split": _AppliedRemedy("split the batch into smaller parts because memory ran out", "reason"),
    "recompute": _AppliedRemedy("recomputed activations because memory ran out", "reason"),
    "retry": _AppliedRemedy("retried the step after freeing memory", "reason"),
    "skip_step": _AppliedRemedy("skipped the step", "reason"),
    "roll_back": _AppliedRemedy("rolled back to a good checkpoint", "reason"),
    "loader_healed": _AppliedRemedy("replaced the loader's workers", "cause"),
    "sample_quarantined": _AppliedRemedy(
        "quarantined a sample that could not be loaded", "evidence"
    ),
    "samples_dropped": _AppliedRemedy("dropped samples with bad values", "reason"),
    "checkpoint_damaged": _AppliedRemedy("skipped a damaged checkpoint", "why"),
}

# The kinds of events that a Guard may record while it closes after an error. An event of any other
# kind shows that the run continued.
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
        "stop_signal",
    }
)


def describe_remedies(events: Iterable[Event]) -> list[str]:
    """Return one sentence for each kind of remedy that Guards applied.

    The sentence says how often the remedy was applied, which samples were quarantined, and why the
    remedy was applied most recently.

    Args:
        events: The events of Guards, oldest first.
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
    """Return a sentence about a remedy that was applied at least once.

    Args:
        remedy: How to describe the remedy.
        applications: The events that record the applications of the remedy, oldest first.
    """
    sentence = f"a Guard {remedy.words}"
    if len(applications) > 1:
        sentence += f", {len(applications)} times"
    samples = _quarantined_samples(applications)
    if samples:
        sentence += f" ({', '.join(samples)[:_MAX_SAMPLES_CHARACTERS]})"
    reason = text_of_field(applications[-1].data.get(remedy.reason_key)).strip()
    if reason:
        last_line = reason.splitlines()[-1]
        sentence += f": {last_line[:_MAX_REASON_CHARACTERS]}"
    return sentence


def _quarantined_samples(events: Iterable[Event]) -> list[str]:
    """Return the quarantined samples without duplicates, in the order of the events."""
    samples = [
        plain_text(str(event.data["sample"]))[:_MAX_SAMPLE_CHARACTERS]
        for event in events
        if event.kind == "sample_quarantined" and "sample" in event.data
    ]
    # A dictionary removes duplicates and keeps the order.
    return list(dict.fromkeys(samples))


# --- How Guards ended -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _GuardEnd:
    """A Guard's decision to stop, or an error that ended a Guard."""

    # The index of the event that recorded the stop or the error.
    index: int
    # For a stop, one statement with the reason. For an error, the causes of the error, followed by
    # the error itself.
    statements: list[Statement]


def find_closing(events: Sequence[Event]) -> GuardClosing | None:
    """Return how a Guard closed, or None if the newest event does not record the closing.

    Args:
        events: The Guard's events, oldest first.
    """
    if not events or events[-1].kind != "closed":
        return None
    how = events[-1].data.get("how")
    if not isinstance(how, str):
        return None
    reason = ""
    request = stop_request(events)
    if how == "stopped" and request is not None:
        reason = text_of_field(request.data.get("signal") or request.data.get("reason"))
    return GuardClosing(how=how, reason=reason)


def collect_guard_statements(
    events: Sequence[Event], *, last_step: float | None = None
) -> list[Statement]:
    """Return statements about Guards' decisions to stop and about the errors that ended Guards.

    Causes come before the error that they led to. Only the newest stop or error can be fatal, and
    only if no later event or step shows that the run continued.

    Args:
        events: The events of Guards, oldest first.
        last_step: The Unix time of the run's last step, or None if unknown.
    """
    ends = _find_guard_ends(events)
    if ends:
        newest = ends[-1]
        is_fatal = _ended_the_run(newest, events, last_step or 0.0)
        fatal = [replace(statement, fatal=is_fatal) for statement in newest.statements]
        ends[-1] = replace(newest, statements=fatal)
    statements = [statement for end in ends for statement in end.statements]
    return [replace(statement, position=index) for index, statement in enumerate(statements)]


def _ended_the_run(end: _GuardEnd, events: Sequence[Event], last_step: float) -> bool:
    """Return whether a Guard's end was also the end of the run.

    Args:
        end: The newest end of a Guard.
        events: The events of Guards, oldest first.
        last_step: The Unix time of the run's last step, or 0 if unknown.
    """
    if events[end.index].unix_seconds < last_step:
        return False
    if any(event.kind not in _KINDS_AT_THE_END for event in events[end.index + 1 :]):
        return False
    closed = find_closing(events)
    return closed is None or closed.how == "left"


def _find_guard_ends(events: Sequence[Event]) -> list[_GuardEnd]:
    """Return the recorded ends of Guards, oldest first.

    If a Guard raised an error in order to stop, the stop and this error are a single end.
    """
    ends: list[_GuardEnd] = []
    # The index of the newest stop that no error has followed yet.
    stop: int | None = None
    for index, event in enumerate(events):
        if event.kind == "stop":
            reason = text_of_field(event.data.get("reason"))
            statement = replace(_make_empty_statement(event), text=reason, rule=_read_rule(event))
            ends.append(_GuardEnd(index=index, statements=[statement]))
            stop = index
        elif event.kind == "left_by_exception" and event.data.get("exception") != "SystemExit":
            error = _GuardEnd(index=index, statements=_make_error_statements(event))
            if stop is not None and _follows_from(error, ends[-1], events):
                # The error is more informative than the reason for the stop, so it replaces the
                # stop.
                ends.pop()
            ends.append(error)
            stop = None
    return ends


def _follows_from(error: _GuardEnd, stop: _GuardEnd, events: Sequence[Event]) -> bool:
    """Return whether an error was raised because of an earlier stop.

    This is the case if both have the same rule id and the run did not continue between them.
    """
    rule = error.statements[-1].rule
    if rule is None or rule != stop.statements[-1].rule:
        return False
    return all(event.kind in _KINDS_AT_THE_END for event in events[stop.index : error.index])


def _make_error_statements(event: Event) -> list[Statement]:
    """Return the causes of the error that ended a Guard, followed by the error itself."""
    facts = event.data if event.data.get("type") else {"type": event.data.get("exception")}
    statements = make_exception_chain(facts, _make_empty_statement(event))
    statements[-1] = replace(statements[-1], rule=_read_rule(event))
    return statements


def _make_empty_statement(event: Event) -> Statement:
    """Return a statement without text, with the fields that all statements of Guards share."""
    return Statement(text="", source="guard", unix_seconds=event.unix_seconds, fatal=False)


def _read_rule(event: Event) -> str | None:
    """Return the rule id that an event contains, or None."""
    rule = event.data.get("rule")
    return rule if isinstance(rule, str) else None
