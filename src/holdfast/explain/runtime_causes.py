"""What the end of the processes says.

Exit statuses, signals, counters of the kernel, hangs, and what was predicted.

In the order of trust: a hang that the supervisor ended, the kernel's counter of kills for memory,
    the signal, the
plain status. Does not: read texts (see ``weighing``).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from holdfast.core.events.event import Event
from holdfast.core.text import size
from holdfast.explain.evidence import Ending, Facts
from holdfast.explain.remarks import (
    hang_left_alone,
    kills_counted,
    last_words,
    leak_place,
    not_saved,
)
from holdfast.explain.signatures import all_signatures, endings
from holdfast.explain.verdict import Exhibit
from holdfast.recorder.run_files import LOST_FILE

_SHELL = 128  # a shell reports signal n as status 128 + n
_BY_SIGNAL = {
    signal.SIGKILL: endings.KILLED,
    signal.SIGTERM: endings.TERMINATED,
    signal.SIGINT: endings.INTERRUPTED,
    signal.SIGHUP: endings.HUNG_UP,
    signal.SIGSEGV: endings.SEGMENTATION_FAULT,
    signal.SIGABRT: endings.ABORTED,
    signal.SIGBUS: endings.BUS_ERROR,
}
FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals that somebody else sends; the others a process brings upon itself."""
_SCHEDULERS_SEND = frozenset({signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGQUIT})
_CANNOT_EXECUTE = (126, 127)
_OF_A_STOP = frozenset(
    {
        "CalledProcessError",
        "ChildFailedError",
        "KeyboardInterrupt",
        "ProcessExitedException",
        "SIGTERMException",
        "SignalException",
        "SystemExit",
    }
)
"""Exceptions with which scripts and launchers end after a stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How the attempt ended, as far as that is known."""

    cause: str | None = None  # id of the signature for it, or None if nothing is known
    confidence: float = 0.0  # that it is this, if no text says more
    # that decides: of the command, or of the rank that a launcher saw fail first; None: unknown
    status: int | None = None
    well: bool = False  # whether the command ended with status 0
    why: str = ""  # short words for the summary
    exhibits: tuple[Exhibit, ...] = ()  # what it rests on
    hang: Event | None = None  # the event of the hang that was ended, or None
    # When the user, or the end of another host, asked it to end, or None
    asked: float | None = None
    first_rank: int | None = None  # that a launcher saw fail first, or None

    @property
    def signal(self) -> int | None:
        """Return the signal that ended it, or None."""
        return -self.status if self.status is not None and self.status < 0 else None


def find_end(facts: Facts) -> End:
    """Return how an attempt ended."""
    whole = [ending for ending in facts.endings if ending.pid is None and ending.role != "trainer"]
    command = whole[-1] if whole else None
    child = _first_failed(facts.endings)
    status = _as_signal(command.status) if command is not None else None
    if child is not None and (status is None or status > 0):
        status = _as_signal(child.status)
    kills = kills_counted(facts.endings)
    hang = _hang(facts.events, command)
    if status is None:
        end = _without_status(facts)
    elif status == 0 and hang is None:
        end = _with_zero(facts)
    else:
        first_rank = child.rank if child is not None else None
        asked = [event.unix_seconds for event in facts.events if event.kind == "signal"]
        by_user = asked[0] if asked and facts.extra.get("asked_by") is not None else None
        end = End(status=status, hang=hang, asked=by_user, first_rank=first_rank)
        if hang is not None:
            end = _of_hang(end, hang)
        elif not asked and (
            there := next((each for each in facts.events if each.kind == "ended_elsewhere"), None)
        ):
            why = f"another host has ended the attempt ({there.data.get('why')})"
            end = replace(
                end, cause=endings.ELSEWHERE, confidence=0.9, why=why, asked=there.unix_seconds
            )
        elif (stop := _stop_that_ended(facts, status, kills)) is not None:
            end = replace(end, **_of_stop(stop, status))
        else:
            cause, confidence, why = _of_status(
                status, kills, facts, _ended_by(status, command, first_rank)
            )
            end = replace(end, cause=cause, confidence=confidence, why=why)
    return replace(end, exhibits=(*end.exhibits, *_exhibits(command, child, kills, facts)))


def _first_failed(endings: Iterable[Ending]) -> Ending | None:
    """Return the trainer that failed first, as a launcher or the supervisor saw it."""
    failed = [ending for ending in endings if ending.role == "trainer" and ending.status]
    return min(failed, key=lambda ending: ending.unix_seconds or 0.0, default=None)


def _as_signal(status: int | None) -> int | None:
    if status is not None and _SHELL < status <= _SHELL + 64:
        return _SHELL - status
    return status


def _without_status(facts: Facts) -> End:
    alive, lost, closed = (
        facts.extra.get(key) for key in ("alive", "supervisor_lost", "guard_closed")
    )
    if alive:
        living = Exhibit(
            text=f"alive: {', '.join(f'process {pid}' for pid in alive)}", source="/proc"
        )
        return End(
            cause=endings.STILL_RUNNING,
            confidence=0.95,
            why="it is still running",
            exhibits=(living,),
        )
    if isinstance(lost, dict):
        left = f"left when it was killed: {len(lost.get('killed') or ())} processes"
        end = End(cause=endings.SUPERVISOR_LOST, confidence=0.95, why="the supervisor was killed")
        return replace(end, exhibits=(Exhibit(text=left, source=LOST_FILE),), asked=_lost_at(lost))
    if isinstance(closed, dict):
        return _unless_lost(_guard_closed(str(closed.get("how")), str(closed.get("reason"))), facts)
    if facts.extra.get("log_says_done"):
        done = Exhibit(text="its last lines say that the training is done", source=facts.source)
        end = End(
            cause=endings.ENDED_WELL, confidence=0.8, why="its last lines say so", exhibits=(done,)
        )
        return _unless_lost(end, facts)
    return End()


def _guard_closed(how: str, reason: str) -> End:
    """Return the end of a run of which only a Guard says that it closed.

    All was done, on request, or left early.
    """
    if how == "left":
        why = (
            "the loop over batches was left before its end, by `break` or by an error outside of"
            " the Guard"
        )
        return End(why=why, exhibits=(Exhibit(text=why, source="guard"),))
    cause, why = endings.ENDED_WELL, "a Guard came to its end and closed"
    if how == "stopped":
        cause = endings.STOPPED if not reason or _is_signal(reason) else endings.ENDED_WELL
        why = f"a Guard saved and stopped on request ({reason or 'not recorded'})"
    closing = Exhibit(text="its newest events are those of a Guard that closes", source="guard")
    return End(cause=cause, confidence=0.7, why=why, exhibits=(closing,))


def stop_requested(events: Iterable[Event]) -> Event | None:
    """Return the newest request upon which a Guard stopped, from events by time.

    None if a loop began after it.
    """
    request = None
    for event in events:
        if event.kind == "stop_requested":
            request = event
        elif event.kind in ("loop", "resumed"):
            request = None
    return request


def signal_of_stop(request: Event) -> str | None:
    """Return the name of the signal that a request came by.

    None for one that the program made itself.
    """
    for value in (request.data.get("signal"), request.data.get("reason")):
        if isinstance(value, str) and _is_signal(value):
            return value
    return None


def _is_signal(name: str) -> bool:
    return name in signal.Signals.__members__


def _stop_that_ended(facts: Facts, status: int, kills: int | None) -> Event | None:
    """Return the request that a run ended upon, whatever exit code its script or its launcher made
    of it.

    None if the Guard did not close in order after it, if what followed failed with an exception, or
    if it crashed.
    """
    request = stop_requested(facts.events)
    if request is None or not any(_closes(event, request) for event in facts.events):
        return None
    crashed = status < 0 and -status not in FROM_OUTSIDE | _SCHEDULERS_SEND
    if crashed or (kills and status == -signal.SIGKILL):
        return None
    raised = [each for each in facts.statements if each.kind == "exception" and each.fatal]
    if (last := last_words(facts)) is not None:
        raised.append(last)
    began = request.unix_seconds
    late = [each for each in raised if each.unix_seconds is None or each.unix_seconds > began]
    return None if any(each.exception not in _OF_A_STOP for each in late) else request


def _closes(event: Event, request: Event) -> bool:
    stopped = event.kind == "closed" and event.data.get("how") == "stopped"
    return stopped and event.unix_seconds >= request.unix_seconds


def _of_stop(request: Event, status: int) -> dict[str, Any]:
    """Return what a request to stop says about the end of a run."""
    reason = str(request.data.get("reason", "not recorded"))
    why = f"a Guard saved and stopped on request ({reason})"
    if status:
        why += f", and the command ended with {status_text(status)}"
    exhibit = Exhibit(
        text=f"stop requested: {reason}", source="guard", unix_seconds=request.unix_seconds
    )
    return {
        "cause": endings.STOPPED,
        "confidence": 0.95,
        "why": why,
        "asked": request.unix_seconds,
        "exhibits": (exhibit,),
    }


def _lost_at(lost: dict[str, Any]) -> float | None:
    """Return when the supervisor was lost.

    Its pipes close before the sentinel sees it, and prints fail meanwhile.
    """
    seconds = lost.get("unix_seconds")
    return seconds - 1.0 if isinstance(seconds, (int, float)) else None


def _with_zero(facts: Facts) -> End:
    request = stop_requested(facts.events)
    asked = facts.extra.get("asked_by")
    if request is not None:
        by_signal = isinstance(asked, int) or signal_of_stop(request) is not None
        end = End(status=0, well=True, **_of_stop(request, 0))
        return _unless_lost(
            end if by_signal else replace(end, cause=endings.ENDED_WELL, asked=None), facts
        )
    if isinstance(asked, int):
        cause = next(
            (cause for number, cause in _BY_SIGNAL.items() if number == asked), endings.TERMINATED
        )
        why = f"it ended with status 0 after it was asked to by {_signal_name(asked)}"
        return End(cause=cause, confidence=0.85, status=0, well=True, why=why)
    if any(each.fatal and each.pid is not None for each in facts.statements):
        return End(status=0)  # of a shell or a parent, whose training process died
    end = End(
        cause=endings.ENDED_WELL, confidence=0.97, status=0, well=True, why="it ended with status 0"
    )
    return _unless_lost(end, facts)


def _unless_lost(end: End, facts: Facts) -> End:
    """Return the end, which is no good one if the training was lost before it, or its result was
    not saved.
    """
    if end.cause == endings.ENDED_WELL and not_saved(facts) is not None:
        return replace(end, cause=endings.NOT_SAVED)
    if end.cause != endings.ENDED_WELL or facts.lost is None or not facts.lost.exploded:
        return end
    confidence = min(end.confidence, 0.8 if facts.lost.log else 0.95)
    return replace(
        end,
        cause=endings.TRAINING_LOST,
        confidence=confidence,
        why=f"{end.why}, but {facts.lost.sentence()}",
    )


def _by_holdfast(ending: Ending, status: int) -> bool:
    return ending.sent_by == "supervisor" and status in (-signal.SIGTERM, -signal.SIGKILL)


def _ended_by(status: int, command: Ending | None, rank: int | None) -> str:
    """Return the beginning of a sentence about the signal that ended a process."""
    name = _signal_name(-status) or status_text(status)
    if command is not None and _by_holdfast(command, status):
        return f"it was ended by holdfast with {name}"
    return f"{'it' if rank is None else f'rank {rank}'} was ended by {name}"


def _of_status(status: int, kills: int | None, facts: Facts, ended: str) -> tuple[str, float, str]:
    """Return id, confidence and words for a status that is not 0."""
    if status == os.EX_IOERR and not_saved(facts) is not None:
        return (
            endings.NOT_SAVED,
            0.97,
            f"it came to its end with status {status}, since its Guard could not save",
        )
    asked = facts.extra.get("asked_by")
    if isinstance(asked, int):
        cause = next(
            (cause for each, cause in _BY_SIGNAL.items() if each == asked), endings.TERMINATED
        )
        how = "was ended by it" if status == -asked else f"ended with {status_text(status)}"
        return cause, 0.95, f"{_signal_name(asked)} was sent by the user, and the command {how}"
    if status > 0:
        started = facts.extra.get("phase") is not None
        if status in _CANNOT_EXECUTE and not started:
            return endings.NEVER_STARTED, 0.8, f"it ended with status {status}"
        return endings.STATUS_ONLY, 0.5, f"it ended with status {status}"
    number = -status
    if number == signal.SIGKILL and kills:
        return (
            endings.OUT_OF_MEMORY_KILL,
            0.95,
            f"{ended}, and the kernel's counter of kills for memory rose by {kills}",
        )
    if number == signal.SIGKILL and kills is None and _predicted(facts.events):
        return endings.KILLED_UNCOUNTED, 0.75, f"{ended} while memory was running out"
    confidence = 0.75
    if number == signal.SIGKILL:
        # Without the counter it may have been the kernel, for memory
        confidence = 0.7 if kills == 0 else 0.5
    cause = next(
        (cause for each, cause in _BY_SIGNAL.items() if each == number), endings.OTHER_SIGNAL
    )
    return cause, confidence, ended


def _predicted(events: Iterable[Event]) -> Event | None:
    trends = [
        event
        for event in events
        if event.kind == "memory_trend" and event.data.get("what") == "host"
    ]
    if trends and isinstance(trends[-1].data.get("minutes_left"), (int, float)):
        return trends[-1]
    return None


def _hang(events: Iterable[Event], command: Ending | None) -> Event | None:
    """Return the hang for which the attempt was ended; None if it went on."""
    if command is None or command.sent_by != "supervisor":
        return None
    hangs = [
        event for event in events if event.kind == "hang" and event.data.get("remedy") != "wait"
    ]
    return hangs[-1] if hangs else None


def _of_hang(end: End, event: Event) -> End:
    named, given, sentence = (
        event.data.get(key) for key in ("signature", "confidence", "sentence")
    )
    known = isinstance(named, str) and named in all_signatures()
    confidence = float(given) if isinstance(given, (int, float)) else 0.7
    return replace(
        end,
        cause=named if known else endings.STUCK,
        confidence=min(max(confidence, 0.05), 0.99),
        why=(
            sentence
            if isinstance(sentence, str)
            else f"nothing moved in phase {event.data.get('phase')}"
        ),
        exhibits=(_hang_exhibit(event),),
    )


def _hang_exhibit(event: Event) -> Exhibit:
    data = event.data
    place = f" at {data['frame']}" if data.get("frame") else ""
    limit = f"in phase {data.get('phase')} (limit {data.get('limit')} s)"
    rank = data.get("rank")
    return Exhibit(
        text=f"no progress for {data.get('seconds')} s {limit}{place}",
        source=f"watchdog, process {data.get('blamed_pid', data.get('pid'))}",
        role="root",
        unix_seconds=event.unix_seconds,
        rank=rank if isinstance(rank, int) else None,
    )


def _exhibits(
    command: Ending | None, child: Ending | None, kills: int | None, facts: Facts
) -> tuple[Exhibit, ...]:
    found = []
    if child is not None and command is not None and child.status == command.status:
        child = None  # the command itself: said once
    for ending, who in ((command, "the command"), (child, "the process that failed first")):
        if ending is not None and ending.status is not None:
            place = f", in phase {ending.phase}" if ending.phase not in (None, "ending") else ""
            step = (
                f", after {ending.step} step{'s' if ending.step > 1 else ''}" if ending.step else ""
            )
            how = "was ended by holdfast with" if _by_holdfast(ending, ending.status) else "ended:"
            text = f"{who} {how} {status_text(ending.status)}{place}{step}"
            found.append(
                Exhibit(
                    text=text,
                    source="exit status",
                    unix_seconds=ending.unix_seconds,
                    rank=ending.rank,
                )
            )
    if kills is not None:
        role = "confirmation" if kills else "fact"
        found.append(Exhibit(text=f"oom_kill rose by {kills}", source="control group", role=role))
    for event in facts.events:
        if event.kind == "memory_trend" and event.data.get("bytes_per_step"):
            found.append(exhibit_of_trend(event))
        elif event.kind == "leak":
            found.append(exhibit_of_leak(event))
    return (*found[:2], *found[2:][-4:], *_beside(facts))


def exhibit_of_trend(event: Event) -> Exhibit:
    """Return how fast memory grew, as an event says it."""
    return Exhibit(
        text=_trend_text(event.data), source="memory trend", unix_seconds=event.unix_seconds
    )


def exhibit_of_leak(event: Event) -> Exhibit:
    """Return what memory is held by, as the event of a trace says it."""
    return Exhibit(text=_leak_text(event), source="leak trace", unix_seconds=event.unix_seconds)


def _beside(facts: Facts) -> Iterable[Exhibit]:
    """Yield what the samples and the watchdog say that need not have ended it."""
    lost, hang = facts.lost, hang_left_alone(facts)
    if lost is not None:
        yield Exhibit(text=lost.sentence(), source=lost.log or "recorded steps")
    if hang is not None:
        yield replace(_hang_exhibit(hang), role="fact")


def _trend_text(data: Any) -> str:
    left = data.get("minutes_left")
    until = f", full in {left:.0f} minutes" if isinstance(left, (int, float)) else ""
    grows = data["bytes_per_step"]
    amount = size(grows) if isinstance(grows, (int, float)) else str(grows)
    return f"{data.get('what', 'host')} memory grew by {amount} a step{until}"


def _leak_text(event: Event) -> str:
    data = event.data
    held = f" by {data['held_by']}" if data.get("held_by") else ""
    place = leak_place(event)
    return f"{data.get('what', 'objects')} are kept{held}" + (f", at {place}" if place else "")


def status_text(status: int) -> str:
    """Return a status in words, such as ``"SIGKILL (status 137 in a shell)"``."""
    number = -status if status < 0 else status - _SHELL if _SHELL < status <= _SHELL + 64 else 0
    name = _signal_name(number) if number else ""
    if name:
        return f"{name} (status {_SHELL + number} in a shell)"
    return f"signal {-status}" if status < 0 else f"status {status}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""
