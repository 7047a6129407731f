"""Quote statements, events and exit statuses as pieces of evidence (`Exhibit`) for a verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from holdfast.core.events.event import Event
from holdfast.core.text import counted, size
from holdfast.explain import observations
from holdfast.explain.evidence import Ending, Evidence, Statement
from holdfast.explain.exit_status import status_text
from holdfast.explain.flight_finding import FlightFinding, RankLine
from holdfast.explain.verdict import Exhibit

# The exit statuses of a command that SIGKILL ended: its own, and that of a shell around it.
_STATUSES_OF_SIGKILL = (-9, 137)
_MAX_FAULTS = 3
_MAX_LOADER_WARNINGS = 3
_MAX_FLIGHT_RANKS = 4
_MAX_MEMORY_EVENTS = 4
_MAX_QUOTED_LINES = 6
# The maximum length of one line of a quotation.
_MAX_CHARACTERS = 300


def quote(statement: Statement, role: str) -> Exhibit:
    """Return the first lines of a statement as an exhibit.

    Args:
        statement: The statement to quote.
        role: The `Exhibit.role`.
    """
    return Exhibit(
        text="\n".join(_first_lines(statement, _MAX_QUOTED_LINES)),
        source=statement.source,
        role=role,
        unix_seconds=statement.unix_seconds,
        rank=statement.rank,
    )


def first_line(statement: Statement) -> str:
    """Return the first line of a statement, preceded by the exception's class, cut if too long.

    If the line announces the next one with a colon, both are returned as one.
    """
    first, *second = _first_lines(statement, 2)
    if first.endswith(":") and second and not second[0].lstrip().startswith('File "'):
        return f"{first} {second[0].strip()}"
    return first


def _first_lines(statement: Statement, most: int) -> list[str]:
    """Return up to `most` lines of a statement, cutting long lines.

    The first line starts with the exception's class, if the statement has one.
    """
    head = statement.exception or ""
    text = statement.text
    if head and not text and statement.frames and statement.frames[-1].code.startswith("assert "):
        # An assertion without a message: the line of code says what was expected.
        text = statement.frames[-1].code
    if head and text:
        head += ": "
    lines = (head + text).strip().splitlines() or [""]
    return [
        line if len(line) <= _MAX_CHARACTERS else f"{line[: _MAX_CHARACTERS - 3]}..."
        for line in lines[:most]
    ]


# --- How the attempt ended ------------------------------------------------------------------------


def exhibits_of_end(
    evidence: Evidence, command: Ending | None, first_failure: Ending | None
) -> Iterator[Exhibit]:
    """Yield exhibits that show how an attempt ended.

    They quote exit statuses, the kernel's out-of-memory kill counter, memory growth, divergence and
    a hang that was only reported.

    Args:
        evidence: The evidence about the attempt.
        command: How the command ended, or None if unknown.
        first_failure: How the process that failed first ended, or None if no process failed.
    """
    status_of_command = None if command is None else command.status
    if command is not None and status_of_command is not None:
        yield _exhibit_of_status("the command", command)
    # If the command exited with the same status as the process that failed first, it only passed
    # that status on.
    if first_failure is not None and first_failure.status not in (None, status_of_command):
        yield _exhibit_of_status("the process that failed first", first_failure)
    yield from _exhibits_of_kernel_kills(evidence, status_of_command)
    yield from _memory_exhibits(evidence)
    if evidence.divergence is not None:
        source = evidence.divergence.log or "recorded steps"
        yield Exhibit(text=evidence.divergence.clause(), source=source)
    hang = observations.ignored_hang(evidence)
    if hang is not None:
        for exhibit in exhibits_of_hang(hang):
            yield replace(exhibit, role="fact")


def _exhibits_of_kernel_kills(evidence: Evidence, status: int | None) -> Iterator[Exhibit]:
    """Yield an exhibit that says whether the kernel killed a process for lack of memory.

    That it did not is worth knowing only if the command was killed.

    Args:
        evidence: The evidence about the attempt.
        status: The exit status of the command, or None if unknown.
    """
    kills = observations.count_kernel_kills(evidence.endings)
    if kills:
        yield Exhibit(text=f"oom_kill rose by {kills}", source="control group", role="confirmation")
    elif kills == 0 and status in _STATUSES_OF_SIGKILL:
        yield Exhibit(text="oom_kill did not rise", source="control group")


def _exhibit_of_status(name: str, ending: Ending) -> Exhibit:
    """Return an exhibit for an exit status, with the phase and the number of completed steps."""
    status = ending.status or 0
    words = f"{name} ended with {status_text(status)}"
    if observations.was_stopped_by_holdfast(ending, status):
        words = f"holdfast stopped {name} with {status_text(status)}"
    if ending.phase not in (None, "ending"):
        words += f", in phase {ending.phase}"
    if ending.step:
        words += f", after {counted(ending.step, 'step')}"
    return Exhibit(
        text=words, source="exit status", unix_seconds=ending.unix_seconds, rank=ending.rank
    )


def exhibits_of_hang(hang: Event) -> Iterator[Exhibit]:
    """Yield an exhibit for the process that caused a hang, then one for each recorded rank.

    The first says how long which process made no progress, and where the blamed process hangs.
    """
    data = hang.data
    pid = data.get("pid")
    blamed_pid = data.get("blamed_pid", pid)
    rank = _rank_in(data, "rank")
    words = f"no progress for {data.get('seconds')} s in phase {data.get('phase')}"
    words += f" (limit {data.get('limit')} s)"
    if blamed_pid != pid:
        name = f"process {pid}" if rank is None else f"rank {rank} (process {pid})"
        words = f"{name} made {words}, while this process was"
        rank = _rank_in(data, "blamed_rank")
    words += f" at {data.get('frame') or 'an unknown line'}"
    yield Exhibit(
        text=words,
        source=f"watchdog, process {blamed_pid}",
        role="root",
        unix_seconds=hang.unix_seconds,
        rank=rank,
    )
    for standing in data.get("ranks") or ():
        if isinstance(standing, Mapping):
            yield _exhibit_of_rank(standing, hang.unix_seconds)


def _exhibit_of_rank(standing: Mapping[str, Any], unix_seconds: float) -> Exhibit:
    """Return an exhibit that says where one rank was when a hang was examined."""
    frame = standing.get("frame") or "an unknown line"
    return Exhibit(
        text=f"step {standing.get('step')}, phase {standing.get('phase')}, at {frame}",
        source=f"watchdog, process {standing.get('pid')}",
        unix_seconds=unix_seconds,
        rank=_rank_in(standing, "rank"),
    )


def _rank_in(facts: Mapping[str, Any], key: str) -> int | None:
    rank = facts.get(key)
    return rank if isinstance(rank, int) else None


# --- The flight recorder --------------------------------------------------------------------------


def exhibits_of_flight(finding: FlightFinding) -> Iterator[Exhibit]:
    """Yield an exhibit for the collective in which ranks differ, then one for each rank."""
    yield Exhibit(
        text=finding.sentence, source="flight recorder", role="confirmation", rank=finding.rank
    )
    for line in finding.ranks[:_MAX_FLIGHT_RANKS]:
        yield exhibit_of_flight_rank(line)


def exhibit_of_flight_rank(line: RankLine) -> Exhibit:
    """Return an exhibit with the newest collective of a rank."""
    return Exhibit(text=line.text, source=f"flight recorder, {line.file}", rank=line.rank)


# --- Memory ---------------------------------------------------------------------------------------


def _memory_exhibits(evidence: Evidence) -> list[Exhibit]:
    """Return exhibits for the most recent memory trends and leaks, sorted from oldest to newest."""
    exhibits = []
    for event in evidence.events:
        if event.kind == "memory_trend" and event.data.get("bytes_per_step"):
            exhibits.append(exhibit_of_memory_trend(event))
        elif event.kind == "leak":
            exhibits.append(exhibit_of_leak(event))
    return exhibits[-_MAX_MEMORY_EVENTS:]


def exhibit_of_memory_trend(trend: Event) -> Exhibit:
    """Return an exhibit that says how fast memory grew and, if known, when it would run out."""
    words = f"{trend.data.get('what', 'host')} memory grew by {growth_text(trend)}"
    minutes_left = trend.data.get("minutes_left")
    if isinstance(minutes_left, (int, float)):
        words += f", full in {minutes_left:.0f} minutes"
    return Exhibit(text=words, source="memory trend", unix_seconds=trend.unix_seconds)


def growth_text(trend: Event) -> str:
    """Return a memory trend's growth as text, such as ``"1 MiB per step"``."""
    growth = trend.data["bytes_per_step"]
    amount = size(growth) if isinstance(growth, (int, float)) else str(growth)
    return f"{amount} per step"


def exhibit_of_leak(leak: Event) -> Exhibit:
    """Return an exhibit that names leaked objects, what keeps them alive, and where in the code."""
    words = f"{leak.data.get('what', 'objects')} are kept alive"
    if leak.data.get("held_by"):
        words += f" by {leak.data['held_by']}"
    place = observations.leak_place(leak)
    if place:
        words += f", at {place}"
    return Exhibit(text=words, source="leak trace", unix_seconds=leak.unix_seconds)


# --- Guards ---------------------------------------------------------------------------------------


def exhibits_of_training(evidence: Evidence) -> Iterator[Exhibit]:
    """Yield exhibits for training faults that a Guard found, then for its data loader warnings."""
    for fault in observations.training_faults(evidence)[:_MAX_FAULTS]:
        yield _exhibit_of_finding(fault)
    warnings = [
        event
        for event in evidence.events
        if event.kind == "preflight" and isinstance(event.data.get("rule"), str)
    ]
    for warning in warnings[:_MAX_LOADER_WARNINGS]:
        yield _exhibit_of_finding(warning)


def exhibit_of_repetition(repetition: Event) -> Exhibit:
    """Return an exhibit that quotes the event about a repeated step that gave other bits."""
    return Exhibit(
        text=repetition.sentence(),
        source=f"guard, step {repetition.global_step}",
        unix_seconds=repetition.unix_seconds,
    )


def _exhibit_of_finding(finding: Event) -> Exhibit:
    """Return an exhibit that quotes a Guard's finding, its rule and its fix."""
    words = f"{finding_text(finding, 'what')} [{finding.data['rule']}]"
    fix = finding_text(finding, "fix")
    if fix:
        words += f"\nFix: {fix}"
    return Exhibit(
        text=words,
        source=f"guard, step {finding.global_step}",
        unix_seconds=finding.unix_seconds,
    )


def finding_text(finding: Event, key: str) -> str:
    """Return the first line of a field of a finding, cut if too long, without the final period.

    Args:
        finding: The event that records the finding.
        key: The name of a field in the event's data, such as ``"fix"``.

    Returns:
        The line, or an empty string if the field does not contain text.
    """
    value = finding.data.get(key)
    if not isinstance(value, str):
        return ""
    first, _, _ = value.strip().partition("\n")
    return first[:_MAX_CHARACTERS].rstrip(".")
