"""Turn events into statements: what processes raised, what guards tried, and how guards ended.

A guard's last event is ``closed``, or ``left_by_exception`` followed by what the guard writes while
closing. ``explain.causes.weighing`` judges which statement matters.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from holdfast.core.events.event import Event
from holdfast.explain.evidence import Frame, Statement
from holdfast.explain.logs.lines import plain_text
from holdfast.explain.logs.text import read_log
from holdfast.recorder.run_files import ProcessInfo

# At most this many causes of an exception are used. A recursion inside handlers makes a longer
# chain.
_MOST_CAUSES = 20
_MOST_OF_A_TEXT = 20_000  # characters
_MOST_OF_A_REASON = 400  # characters
# A log and a recording show the same exception if this much of the first line agrees.
_COMPARED = 120  # characters


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
_KINDS_AT_THE_BEGINNING = ("loop", "resumed")


# --- exceptions -----------------------------------------------------------------------------------


def exceptions_of_process(events: Iterable[Event], info: ProcessInfo) -> list[Statement]:
    """Return the exceptions that a process recorded, each after its causes."""
    statements: list[Statement] = []
    for event in events:
        if event.kind != "exception":
            continue
        common = {
            "source": f"process {info.pid}",
            "rank": info.rank,
            "pid": info.pid,
            "unix_seconds": event.unix_seconds,
        }
        statements += exception_chain(
            event.data, fatal=event.data.get("fatal"), position=len(statements), common=common
        )
    return statements


def exception_chain(
    facts: Mapping[str, Any], *, fatal: Any, position: int, common: Mapping[str, Any]
) -> list[Statement]:
    """Return a recorded exception and its causes, the root first.

    Args:
        facts: The exception as ``core.raised`` records it.
        fatal: Whether it ended its process. Anything but a bool means that this is unknown.
        position: The position of the first statement.
        common: Fields that all statements share.
    """
    chain = facts.get("chain")
    # The nearest cause comes first.
    causes = chain if isinstance(chain, list) else []
    causes = [cause for cause in causes if isinstance(cause, Mapping)][:_MOST_CAUSES]
    statements: list[Statement] = []
    for recorded in (*reversed(causes), facts):
        raised = _statement_of(
            recorded,
            is_cause=recorded is not facts,
            fatal=fatal,
            position=position + len(statements),
            common=common,
        )
        statements += [*_nested_exceptions(raised), raised]
    return statements


def _statement_of(
    recorded: Mapping[str, Any],
    *,
    is_cause: bool,
    fatal: Any,
    position: int,
    common: Mapping[str, Any],
) -> Statement:
    """Return one exception of a chain as a statement."""
    name = event_text(recorded.get("type")).rpartition(".")[2]
    return Statement(
        text=event_text(recorded.get("message")),
        kind="exception",
        exception=name or None,
        frames=_frames_of(recorded.get("frames")),
        position=position,
        fatal=fatal if isinstance(fatal, bool) else None,
        cause=is_cause,
        **common,
    )


def _frames_of(value: Any) -> tuple[Frame, ...]:
    """Return recorded frames, ignoring malformed ones."""
    if not isinstance(value, list):
        return ()
    return tuple(
        Frame(file=event_text(entry[0]), line=entry[1], function=event_text(entry[2]))
        for entry in value
        if isinstance(entry, list) and len(entry) >= 3 and isinstance(entry[1], int)
    )


def _nested_exceptions(raised: Statement) -> list[Statement]:
    """Return the exceptions whose tracebacks are nested in a message, the root first.

    Exceptions from loader workers have such messages.
    """
    if "raceback (most recent call last)" not in raised.text:
        return []
    nested = read_log(io.BytesIO(raised.text.encode(errors="replace")), name="").statements
    return [
        replace(
            raised,
            text=statement.text,
            exception=statement.exception,
            frames=statement.frames,
            cause=True,
        )
        for statement in nested
        if statement.kind == "exception"
    ]


def event_text(value: Any) -> str:
    """Return an event's text, shortened and without escape sequences; empty for other values."""
    return plain_text(value)[:_MOST_OF_A_TEXT] if isinstance(value, str) else ""


# --- remedies -------------------------------------------------------------------------------------


def already_tried(events: Iterable[Event]) -> list[str]:
    """Return the remedies that guards applied, one sentence for each kind.

    A sentence says how often, which samples were quarantined, and the newest reason.
    """
    counts: Counter[str] = Counter()
    newest_reason: dict[str, str] = {}
    # An ordered set: a dict keeps the order and drops duplicates.
    quarantined: dict[str, None] = {}
    for event in events:
        remedy = _REMEDIES.get(event.kind)
        if remedy is None:
            continue
        counts[event.kind] += 1
        newest_reason[event.kind] = event_text(event.data.get(remedy.reason_key)).strip()
        if event.kind == "sample_quarantined" and "sample" in event.data:
            quarantined[plain_text(str(event.data["sample"]))[:_COMPARED]] = None
    sentences = []
    for kind, remedy in _REMEDIES.items():
        if not counts[kind]:
            continue
        sentence = f"a Guard {remedy.words}"
        if counts[kind] > 1:
            sentence += f", {counts[kind]} times"
        if kind == "sample_quarantined" and quarantined:
            sentence += f" ({', '.join(quarantined)[:_MOST_OF_A_TEXT]})"
        if newest_reason[kind]:
            last_line = newest_reason[kind].splitlines()[-1]
            sentence += f": {last_line[:_MOST_OF_A_REASON]}"
        sentences.append(sentence)
    return sentences


# --- exceptions in both a log and a recording -----------------------------------------------------


def merge_statements(recorded: Sequence[Statement], logged: Sequence[Statement]) -> list[Statement]:
    """Merge the statements of recordings and of a log, with each shared exception only once.

    The log decides the order; statements that only recordings have follow. For a shared exception,
    class, frames, time, rank and whether it was fatal come from the recording.
    """
    remaining = list(recorded)
    statements: list[Statement] = []
    # Go backwards, so that among identical exceptions the newest recording pairs with the newest
    # text.
    for statement in reversed(logged):
        twin = _newest_twin(statement, remaining)
        if twin is not None:
            remaining.remove(twin)
            statement = _completed(statement, twin)
        statements.append(statement)
    statements.reverse()
    last = max((statement.position for statement in statements), default=0)
    appended = [
        replace(statement, position=last + 1 + index) for index, statement in enumerate(remaining)
    ]
    return statements + appended


def _newest_twin(statement: Statement, recorded: Sequence[Statement]) -> Statement | None:
    """Return the newest recording of an exception in the log, or None."""
    if statement.kind != "exception":
        return None
    return next(
        (other for other in reversed(recorded) if is_same_exception(other, statement)), None
    )


def _completed(logged: Statement, recorded: Statement) -> Statement:
    """Return a logged exception completed from its recording."""
    return replace(
        logged,
        frames=recorded.frames or logged.frames,
        unix_seconds=recorded.unix_seconds,
        rank=recorded.rank if recorded.rank is not None else logged.rank,
        pid=recorded.pid,
        fatal=recorded.fatal if recorded.fatal is not None else logged.fatal,
        source=f"{logged.source} and {recorded.source}",
    )


def is_same_exception(one: Statement, other: Statement) -> bool:
    """Return whether two statements show the same exception.

    The class, the rank (if both have one) and the beginning of the message must agree.
    """
    if one.exception != other.exception:
        return False
    if one.rank is not None and other.rank is not None and one.rank != other.rank:
        return False
    return _compared_text(one) == _compared_text(other)


def _compared_text(statement: Statement) -> str:
    first_line = statement.text.strip().split("\n")[0]
    return first_line[:_COMPARED].rstrip()


# --- how guards ended -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _GuardEnd:
    """A guard's decision to stop, or the error that ended it."""

    # The index of its event.
    index: int
    # For an error: its causes, then the error itself.
    statements: list[Statement]


def how_closed(events: Sequence[Event]) -> dict[str, str] | None:
    """Return how a guard closed, or None if its newest event does not tell.

    Args:
        events: Its events by time.

    Returns:
        ``how`` is "finished", "stopped" on request, or "left" if the loop was left early. For
            "stopped", ``reason`` is the request, such as "SIGTERM".
    """
    if not events or events[-1].kind != "closed":
        return None
    how = events[-1].data.get("how")
    if not isinstance(how, str):
        return None
    return {"how": how, "reason": _newest_request(events) if how == "stopped" else ""}


def _newest_request(events: Sequence[Event]) -> str:
    """Return the reason of the newest request to stop since a guard began, or an empty text."""
    for event in reversed(events):
        if event.kind == "stop_requested":
            return event_text(event.data.get("signal") or event.data.get("reason"))
        if event.kind in _KINDS_AT_THE_BEGINNING:
            break
    return ""


def statements_of_guards(
    events: Sequence[Event], *, last_step: float | None = None
) -> list[Statement]:
    """Return statements for the stops of guards and for the errors that ended them.

    The causes of an error come before it. Only the newest stop or error can be fatal, and only if
    nothing shows that the run continued after it.

    Args:
        events: The events of guards by time.
        last_step: The Unix time of the last step, if it is known.
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
    """Return whether a guard's end was the end of the run: nothing shows that it continued."""
    if events[end.index].unix_seconds < last_step:
        return False
    if any(event.kind not in _KINDS_AT_THE_END for event in events[end.index + 1 :]):
        return False
    closed = how_closed(events)
    return closed is None or closed["how"] == "left"


def _ends_of_guards(events: Sequence[Event]) -> list[_GuardEnd]:
    """Return the recorded ends of guards; a stop and the error it leads to count as one."""
    ends: list[_GuardEnd] = []
    # The index of the newest stop that was not followed by an error yet.
    stop: int | None = None
    for index, event in enumerate(events):
        if event.kind == "stop":
            ends.append(_GuardEnd(index=index, statements=[_stop_statement(event)]))
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


def _stop_statement(event: Event) -> Statement:
    return Statement(
        text=event_text(event.data.get("reason")),
        source="guard",
        unix_seconds=event.unix_seconds,
        fatal=False,
        rule=_rule_of(event),
    )


def _error_statements(event: Event) -> list[Statement]:
    """Return the error that ended a guard, preceded by its causes."""
    common = {"source": "guard", "unix_seconds": event.unix_seconds}
    facts = event.data if event.data.get("type") else {"type": event.data.get("exception")}
    statements = exception_chain(facts, fatal=False, position=0, common=common)
    statements[-1] = replace(statements[-1], rule=_rule_of(event))
    return statements


def _rule_of(event: Event) -> str | None:
    rule = event.data.get("rule")
    return rule if isinstance(rule, str) else None
