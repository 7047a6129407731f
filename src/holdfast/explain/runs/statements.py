"""Convert recorded exceptions to statements, and merge them with the statements from the log.

``explain.causes.candidate_search`` judges which statements matter.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdfast.core.events.event import Event
from holdfast.explain.evidence import Frame, Statement
from holdfast.explain.logs.lines import plain_text
from holdfast.explain.logs.log_text import read_log
from holdfast.recorder.run_files import ProcessInfo

# At most this many causes of an exception are used. A chain of exceptions can be longer if
# exception handlers recurse.
_MAX_CAUSES = 20
_MAX_TEXT_CHARACTERS = 20_000
# How many characters of the first line are compared to determine whether a log and a recording
# contain the same exception.
_COMPARED_CHARACTERS = 120


def collect_exceptions(events: Iterable[Event], info: ProcessInfo) -> list[Statement]:
    """Return the exceptions that a process recorded, each preceded by its causes."""
    statements: list[Statement] = []
    for event in events:
        if event.kind != "exception":
            continue
        fatal = event.data.get("fatal")
        common = Statement(
            text="",
            source=f"process {info.pid}",
            position=len(statements),
            unix_seconds=event.unix_seconds,
            rank=info.rank,
            pid=info.pid,
            fatal=fatal if isinstance(fatal, bool) else None,
        )
        statements += make_exception_chain(event.data, common)
    return statements


def make_exception_chain(facts: Mapping[str, Any], common: Statement) -> list[Statement]:
    """Return a recorded exception and its causes as statements, root cause first.

    Args:
        facts: The exception, in the form in which ``core.raised`` records it.
        common: A statement with the values of the fields that all returned statements share, and
            with the position of the first of them.
    """
    chain = facts.get("chain")
    # The recorded chain starts with the direct cause, so it is reversed below.
    causes = chain if isinstance(chain, list) else []
    causes = [cause for cause in causes if isinstance(cause, Mapping)][:_MAX_CAUSES]
    statements: list[Statement] = []
    for recorded in (*reversed(causes), facts):
        raised = replace(
            common,
            text=text_of_field(recorded.get("message")),
            kind="exception",
            exception=text_of_field(recorded.get("type")).rpartition(".")[2] or None,
            frames=_parse_frames(recorded.get("frames")),
            position=common.position + len(statements),
            led_to_another=recorded is not facts,
        )
        statements += [*_nested_exceptions(raised), raised]
    return statements


def _parse_frames(value: Any) -> tuple[Frame, ...]:
    """Return the frames of a recorded exception, ignoring malformed entries."""
    if not isinstance(value, list):
        return ()
    return tuple(
        Frame(file=text_of_field(entry[0]), line=entry[1], function=text_of_field(entry[2]))
        for entry in value
        if isinstance(entry, list) and len(entry) >= 3 and isinstance(entry[1], int)
    )


def _nested_exceptions(raised: Statement) -> list[Statement]:
    """Return the exceptions whose tracebacks are part of an exception's message, root cause first.

    For example, if a loader worker fails, the exception in its parent contains the worker's
    traceback.
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
            led_to_another=True,
        )
        for statement in nested
        if statement.kind == "exception"
    ]


def text_of_field(value: Any) -> str:
    """Return the value of an event's field as text, shortened and without escape sequences.

    Return an empty string if the value is not a string.
    """
    return plain_text(value)[:_MAX_TEXT_CHARACTERS] if isinstance(value, str) else ""


# --- Exceptions in both a log and a recording -----------------------------------------------------


def merge_statements(recorded: Sequence[Statement], logged: Sequence[Statement]) -> list[Statement]:
    """Merge the statements of recordings with those of a log, without duplicate exceptions.

    If an exception is in both, the recording provides its frames, time, rank and PID, and
    determines whether it was fatal.

    Returns:
        The statements of the log in their order, followed by the statements that occur only in
        recordings.
    """
    remaining = list(recorded)
    statements: list[Statement] = []
    # If several exceptions are identical, iterating in reverse pairs the newest recording with the
    # newest statement in the log.
    for statement in reversed(logged):
        twin = _newest_twin(statement, remaining)
        if twin is not None:
            remaining.remove(twin)
            statement = _with_recorded_fields(statement, twin)
        statements.append(statement)
    statements.reverse()
    last = max((statement.position for statement in statements), default=0)
    appended = [
        replace(statement, position=last + 1 + index) for index, statement in enumerate(remaining)
    ]
    return statements + appended


def _newest_twin(statement: Statement, recorded: Sequence[Statement]) -> Statement | None:
    """Return the newest recorded statement for the same exception as a log statement, or None."""
    if statement.kind != "exception":
        return None
    return next(
        (other for other in reversed(recorded) if is_same_exception(other, statement)), None
    )


def _with_recorded_fields(logged: Statement, recorded: Statement) -> Statement:
    """Return an exception from the log, with the fields that its recording provides."""
    return replace(
        logged,
        frames=recorded.frames or logged.frames,
        unix_seconds=recorded.unix_seconds,
        rank=recorded.rank if recorded.rank is not None else logged.rank,
        pid=recorded.pid,
        fatal=recorded.fatal if recorded.fatal is not None else logged.fatal,
        source=f"{logged.source} and {recorded.source}",
    )


def is_same_exception(first: Statement, second: Statement) -> bool:
    """Return whether two statements describe the same exception.

    They do if the class, the rank (if known for both) and the beginning of the message agree.
    """
    if first.exception != second.exception:
        return False
    if first.rank is not None and second.rank is not None and first.rank != second.rank:
        return False
    return _compared_text(first) == _compared_text(second)


def _compared_text(statement: Statement) -> str:
    """Return the beginning of a statement's first line, by which exceptions are compared."""
    first_line = statement.text.strip().split("\n")[0]
    return first_line[:_COMPARED_CHARACTERS].rstrip()
