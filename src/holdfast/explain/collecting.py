"""From a run directory, or from a bare log, to the facts that a verdict is made from.

Of a directory that ``holdfast run`` made, one attempt: the end of its output, what its processes
    said last, what the
supervisor saw. Nothing that cannot be read ends it; it is named in `Facts.missing`. Does not:
judge.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from holdfast.core.errors import PolicyError, RunDirectoryError
from holdfast.core.events.event import Event
from holdfast.core.files import opened
from holdfast.explain.evidence import Ending, Facts, Learning, LoaderWait, Lost, Statement
from holdfast.explain.logs.keeping import Readable
from holdfast.explain.logs.text import LogText, read_log
from holdfast.explain.runs.curves import find_doubt, find_lost, lost_of_run
from holdfast.explain.runs.learning import (
    FEWEST_LOSSES,
    Reading,
    learning_of,
    learning_of_run,
    loader_wait_of_run,
    readings_of_guard,
    readings_of_process,
)
from holdfast.explain.runs.recordings import Recordings, open_recordings, unreadable
from holdfast.explain.runs.statements import (
    already_tried,
    how_closed,
    merged,
    of_exceptions,
    of_guards,
    same,
    text_of,
)
from holdfast.recorder.progress import Phase, Standing
from holdfast.recorder.run_files import ATTEMPT_LINE, OUTPUT_FILE, process_lives

NO_STATUS = (
    "no exit status: only a log (`--status 0`, or the one that it ended with, makes it surer)"
)
_CHUNK = 1 << 20
# Gzip, zstd, zip, xz, bzip2
_PACKED = (b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"PK\x03\x04", b"\xfd7zX", b"BZh")
_MOST_LAST = 300
_MOST_OUTPUT_BYTES = 4 << 30  # sixteen times what `holdfast run` keeps; a hole can be of any size


def collect_log(path: Path, *, status: int | None = None) -> Facts:
    """Return what a log file says, and the status of its command, if that is known (H733 if it
    is no log).
    """
    try:
        if not (path.is_file() or path.is_fifo()):
            path.stat()
            raise _no_log(path, "is a device or a socket", "name a file, or - for standard input.")
        with path.open("rb") as stream:
            if stream.peek(4).startswith(_PACKED):
                raise _no_log(path, "is packed", "unpack it: zcat LOG | holdfast explain -.")
            return collect_stream(stream, name=path.name, status=status)
    except OSError as error:
        raise unreadable(path, error) from error


def _no_log(path: Path, what: str, fix: str) -> RunDirectoryError:
    return RunDirectoryError(
        f"{path} {what}", limit="an explanation needs the text of a log", fix=fix, rule="H733"
    )


def collect_stream(stream: Readable, *, name: str, status: int | None = None) -> Facts:
    """Return what a log says.

    The name is for the sources, the status that of its command, if it is known.
    """
    log = read_log(stream, name=name, alone=True)
    missing = [NO_STATUS] if status is None else []
    if not log.complete:
        missing.append(
            f"of {log.total_lines} lines those in the middle were only searched for words of errors"
        )
    if log.total_lines == 0:
        missing.append("the log is empty")
    if log.cut_off:
        missing.append(f"the log ends inside a traceback, at {log.cut_off[:300]}")
    endings = (*log.endings, *([Ending(status=status)] if status is not None else []))
    return Facts(
        statements=log.statements,
        endings=endings,
        source=name,
        missing=tuple(missing),
        lost=find_lost(log.losses, log.norms, log=name) or find_doubt(log.losses, log=name),
        learning=(
            _printed_learning(log) if status == 0 and len(log.losses) >= FEWEST_LOSSES else None
        ),
        extra={"log_says_done": log.ended_well, "losses": len(log.losses)},
    )


def collect(run: Path, attempt: int | None = None) -> Facts:
    """Return all that is known of one attempt of a run.

    Args:
        run: A directory that ``holdfast run`` made, or one that was given to a Guard.
        attempt: None: the newest.

    Raises:
        RunDirectoryError: H731 if it holds no recording, H733 if it cannot be read, H734 if a newer
            holdfast made it.
        PolicyError: H105 if it has no such attempt.
    """
    recordings = open_recordings(run)
    return _Attempt(recordings, attempt).facts() if recordings.supervised else _of_guard(recordings)


def _printed_learning(log: LogText) -> Learning:
    """Return whether the loss that a log shows fell.

    Where it did not, it may be that of something else.
    """
    learning = learning_of([Reading(line, loss) for line, loss in log.losses])
    if learning.outcome in ("fell", "unclear"):
        return learning
    reason = "only a printed loss is known, and it did not fall, which may be that of a validation"
    return Learning(outcome="unclear", reason=reason)


def _of_guard(recordings: Recordings) -> Facts:
    folders = recordings.guards([])
    recordings.say_lost_steps({folder: f"guard {folder.name}" for folder in folders})
    events = _by_time(event for folder in folders for event in recordings.events(folder))
    marks = [mark for folder in folders if (mark := recordings.newest_step(folder)) is not None]
    newest = max(marks, key=lambda mark: mark.unix_seconds, default=None)
    statements = of_guards(events, last_step=newest.unix_seconds if newest is not None else 0.0)
    closed = how_closed(events)
    missing = [
        *recordings.missing,
        "no exit status and no output: it was not started with `holdfast run`",
    ]
    if closed is None and not any(each.fatal for each in statements):
        missing.append(
            "no word that a Guard closed it: it was cut off, or its script ends without"
            " `guard.close()`"
        )
    return Facts(
        statements=tuple(statements),
        events=tuple(events),
        tried=tuple(already_tried(events)),
        source=str(recordings.run),
        missing=tuple(missing),
        lost=lost_of_run([], folders, (0.0, math.inf))[0],
        extra={"guard_closed": closed, "steps": newest.global_step if newest else None},
    )


class _Attempt:
    """One attempt of a supervised run."""

    def __init__(self, recordings: Recordings, attempt: int | None) -> None:
        self._recordings = recordings
        self._all = recordings.supervisor()
        # A restart that was announced is no attempt yet: only where the supervisor was killed in
        # the wait before it.
        started = [
            each for each in self._all if each.kind != "restart" or recordings.lost() is not None
        ]
        numbers = [n for event in started if (n := _attempt_of(event)) is not None]
        self._number = attempt if attempt is not None else max(numbers, default=0)
        if self._number not in (numbers or [0]):
            raise PolicyError(
                f"attempt {self._number} of {recordings.run}",
                limit=(
                    f"attempts {min(numbers, default=0)} to {max(numbers, default=0)} are recorded"
                ),
                fix="pass one of these, or leave --attempt out for the newest.",
                rule="H105",
            )
        self._own = self._of_attempt()
        self._processes = [
            pair for pair in recordings.processes() if pair[1].attempt == self._number
        ]

    def facts(self) -> Facts:
        events_of = {info.pid: self._recordings.events(folder) for folder, info in self._processes}
        standings = {
            info.pid: self._recordings.standing(folder) for folder, info in self._processes
        }
        recorded = _by_time(event for events in events_of.values() for event in events)
        began, until = self._times()
        guards = self._recordings.guards(recorded)
        of_guard = [
            event
            for folder in guards
            for event in self._recordings.events(folder)
            if began <= event.unix_seconds < until
        ]
        marks = [
            mark for folder in guards if (mark := self._recordings.newest_step(folder)) is not None
        ]
        # The process says the same, unless its optimizer is compiled, so that only its guard sees
        # the steps.
        made = max(
            (mark.global_step for mark in marks if began <= mark.unix_seconds < until), default=None
        )
        log = self._log()
        raised = [
            each for _, info in self._processes for each in of_exceptions(events_of[info.pid], info)
        ]
        if self._ended_with_zero():
            died = self._died(raised, standings, events_of)
            raised = [replace(each, fatal=each.pid in died and each.fatal) for each in raised]
        raised += _of_guards_alone(of_guard, raised)
        endings = [*self._endings(standings), *(log.endings if log else ())]
        return Facts(
            statements=tuple(merged(raised, log.statements if log else ())),
            endings=tuple(endings),
            events=tuple(_by_time([*self._own, *recorded, *of_guard])),
            tried=(*_restarts(self._all, self._number), *already_tried(of_guard)),
            source=str(self._recordings.run),
            missing=tuple(self._missing(log, endings)),
            lost=self._lost(recorded, log),
            learning=self._learning(recorded, log),
            loader_wait=self._loader_wait(),
            extra=self._extra(log, standings, events_of, endings)
            | ({} if made is None else {"steps": made}),
        )

    def _died(
        self,
        raised: Sequence[Statement],
        standings: dict[int, Standing | None],
        events_of: dict[int, list[Event]],
    ) -> set[int | None]:
        """Return the training processes that an exception ended, and after which no training came
        to its end.

        Where status 0 hides a failure: that of a pipe, or of a parent that does not look at its
            child. A script that
        failed before its first step counts too; what a training starts beside itself, as a
        compiler, does not.
        """
        infos = [info for _, info in self._processes if info.torch and info.role != "loader worker"]
        parents = {info.pid for info in infos if info.role != "launcher"}
        training = [info for info in infos if info.role == "trainer" or info.ppid not in parents]
        fatal = {
            each.pid for each in raised if each.fatal and each.exception != "KeyboardInterrupt"
        }
        fatal -= {
            pid for pid, events in events_of.items() if _exit(events).get("exit_how") == "sys.exit"
        }
        stood = {
            pid: (each.since_seconds, each.phase)
            for pid, each in standings.items()
            if each is not None
        }
        unknown = 0.0, Phase.STARTING
        died = set[int | None]()
        for one in (each for each in training if each.pid in fatal):
            others = [each for each in training if each.pid not in fatal]
            if one.role == "trainer":
                others = [each for each in others if each.role == "trainer"]
            ended = [
                at
                for at, phase in (stood.get(each.pid, unknown) for each in others)
                if phase is Phase.ENDING
            ]
            if max(ended, default=0.0) <= stood.get(one.pid, unknown)[0]:
                died.add(one.pid)
        return died

    def _lost(self, recorded: list[Event], log: LogText | None) -> Lost | None:
        """Return how its training was lost.

        What was recorded of the steps counts before what was printed.
        """
        trainers = [pair for pair in self._processes if pair[1].role == "trainer"]
        lost, known = lost_of_run(trainers, self._recordings.guards(recorded), self._times())
        if lost is not None and not lost.exploded and _trains_by_reward(recorded):
            return None
        if log is None or known:
            return lost
        return find_lost(log.losses, log.norms, log=OUTPUT_FILE) or find_doubt(
            log.losses, log=OUTPUT_FILE
        )

    def _ended_with_zero(self) -> bool:
        return any(
            event.kind == "attempt_ended" and event.data.get("status") == 0 for event in self._own
        )

    def _learning(self, recorded: list[Event], log: LogText | None) -> Learning | None:
        """Return whether it learned, if it ended with status 0.

        From the first attempt on, which a later one resumes.

        What guards recorded counts before the samples of their processes: it is the mean of the
            whole step.
        """
        if not self._ended_with_zero():
            return None
        _, until = self._times()
        curves = [readings_of_guard(folder, until) for folder in self._recordings.guards(recorded)]
        if not any(curves):
            curves = self._curves()
        if not any(curves) and log is not None and len(log.losses) >= FEWEST_LOSSES:
            return _printed_learning(log)
        return learning_of_run(curves, by_reward=_trains_by_reward(recorded))

    def _curves(self) -> list[list[Reading]]:
        """Return the losses of each rank over all attempts.

        Of an attempt its newest process counts.
        """
        newest: dict[tuple[int | None, int], Path] = {}
        for folder, info in self._recordings.processes():
            if info.role == "trainer" and info.attempt <= self._number:
                newest[info.rank, info.attempt] = folder
        curves: dict[int | None, list[Reading]] = {}
        for (rank, _), folder in sorted(newest.items(), key=lambda pair: pair[0][1]):
            curves.setdefault(rank, []).extend(readings_of_process(folder))
        return list(curves.values())

    def _loader_wait(self) -> LoaderWait | None:
        if not self._ended_with_zero():
            return None
        return loader_wait_of_run(
            folder for folder, info in self._processes if info.role == "trainer"
        )

    def _of_attempt(self) -> list[Event]:
        """Return the supervisor's events from the start of this attempt to that of the next."""
        found: list[Event] = []
        current = (
            self._number if not any(event.kind == "attempt_started" for event in self._all) else -1
        )
        for event in self._all:
            if event.kind == "attempt_started":
                number = _attempt_of(event)
                current = current + 1 if number is None else number
            if current == self._number:
                found.append(event)
        return found

    def _times(self) -> tuple[float, float]:
        """Return when this attempt began, and when the next one did."""
        started = [event for event in self._all if event.kind == "attempt_started"]
        own = next(
            (event.unix_seconds for event in self._own if event.kind == "attempt_started"), 0.0
        )
        later = (
            event.unix_seconds for event in started if (_attempt_of(event) or 0) > self._number
        )
        return own, min(later, default=math.inf)

    def _endings(self, standings: dict[int, Standing | None]) -> Iterator[Ending]:
        infos = {info.pid: info for _, info in self._processes}
        trainer = next((info for info in infos.values() if info.role == "trainer"), None)
        for event in self._own:
            if event.kind == "process_ended":
                pid = _integer(event.data.get("pid"))
                info = infos.get(pid or -1)
                ending = _ending(event, standings.get(pid or -1))
                yield replace(
                    ending,
                    pid=pid,
                    rank=info.rank if info else None,
                    role=info.role if info else "other",
                )
            elif event.kind == "attempt_ended":
                by_us = event.data.get("signal_sent_by_us") is not None
                sender = (
                    "user"
                    if event.data.get("asked_by") is not None
                    else "supervisor"
                    if by_us
                    else None
                )
                ending = _ending(event, standings.get(trainer.pid) if trainer else None)
                yield replace(ending, role="command", sent_by=sender)

    def _missing(self, log: LogText | None, endings: Sequence[Ending]) -> list[str]:
        self._recordings.say_lost_steps(
            {at: f"process {p.pid}" for at, p in self._processes if p.role == "trainer"}
        )
        missing = list(self._recordings.missing)
        if log is None:
            missing.append("no output of the command")
        if not any(ending.role == "command" for ending in endings):
            missing.append("no exit status: the supervisor recorded no end of the attempt")
        if not self._processes:
            missing.append("no process of it was observed")
        return missing

    def _extra(
        self,
        log: LogText | None,
        standings: dict[int, Standing | None],
        events_of: dict[int, list[Event]],
        endings: Sequence[Ending],
    ) -> dict[str, Any]:
        infos = [info for _, info in self._processes]
        main = next((info for info in infos if info.role == "trainer"), None)
        standing = standings.get(main.pid) if main else None
        ended = [event for event in self._own if event.kind == "attempt_ended"]
        status = next((each.status for each in endings if each.role == "command"), None)
        left = (
            main and status and 0 < status < 126 and any(each.pid == main.pid for each in endings)
        )
        extra: dict[str, Any] = {
            **(_exit(events_of.get(main.pid, [])) if main and left else {}),
            "last_line": log.last_line or None if log and status and status > 0 else None,
            "changed": _changed(self._all, self._number),
            "asked_by": _integer(ended[0].data.get("asked_by")) if ended else None,
            "supervisor_lost": self._recordings.lost() if not ended else None,
            "log_says_done": log.ended_well if log else False,
            "observed": bool(self._processes),
            "stepless": (
                any(info.torch for info in infos)
                and not (
                    any(each.step for each in standings.values() if each is not None)
                    or (log and log.losses)
                )
            ),
            "alive": [info.pid for info in infos if process_lives(info.pid, info.ticks)],
            "steps": standing.step if standing else None,
            "phase": _phase(standing),
        }
        return {key: value for key, value in extra.items() if value is not None}

    def _log(self) -> LogText | None:
        try:
            with opened(self._recordings.run / OUTPUT_FILE, _MOST_OUTPUT_BYTES) as stream:
                start, end, number = _section(stream, self._number)
                stream.seek(start)
                return read_log(_Part(stream, end - start), name=OUTPUT_FILE, first_number=number)
        except OSError as error:
            self._recordings.missing.append(f"{OUTPUT_FILE}: {error.strerror or error}")
            return None


def _trains_by_reward(recorded: Sequence[Event]) -> bool:
    """Return whether a process imported environments.

    Then a loss that rises need not be a fault.
    """
    return any(event.kind == "environments_imported" for event in recorded)


def _exit(events: Sequence[Event]) -> dict[str, str]:
    """Return how a process left that had loaded torch, and with which words.

    One that recorded nothing of it left past its interpreter.
    """
    data = next((event.data for event in reversed(events) if event.kind == "exiting"), None)
    if data is None:
        return (
            {"exit_how": "os._exit"}
            if any(event.kind == "torch_imported" for event in events)
            else {}
        )
    found = {
        "exit_how": text_of(data.get("how")),
        "exit_said": text_of(data.get("said"))[:_MOST_LAST],
    }
    return {key: text for key, text in found.items() if text}


def _changed(events: Iterable[Event], attempt: int) -> dict[str, Any]:
    """Return what was changed for an attempt, by restarts before it."""
    found: dict[str, Any] = {}
    for event in events:
        number, changes = _attempt_of(event), event.data.get("changes")
        if (
            event.kind == "restart"
            and isinstance(changes, dict)
            and number is not None
            and number <= attempt
        ):
            found.update(changes)
    return found


def _ending(event: Event, standing: Standing | None) -> Ending:
    return Ending(
        status=_integer(event.data.get("status")),
        unix_seconds=event.unix_seconds,
        oom_kills=_integer(event.data.get("oom_kills")),
        phase=_phase(standing),
        step=standing.step if standing else None,
    )


def _phase(standing: Standing | None) -> str | None:
    return standing.phase.name.lower().replace("_", " ") if standing else None


def _restarts(events: Iterable[Event], attempt: int) -> list[str]:
    """Return what earlier attempts were restarted for, one sentence each."""
    found = []
    for event in events:
        number = _attempt_of(event)
        if event.kind != "restart" or (number is not None and number > attempt):
            continue
        changes = event.data.get("changes")
        changed = (
            ", ".join(f"{key}={value}" for key, value in changes.items())
            if isinstance(changes, dict)
            else ""
        )
        why = event.data.get("why") or event.data.get("cause") or "no reason recorded"
        found.append(f"restarted: {why}" + (f"; changed {changed}" if changed else ""))
    return found


def _section(stream: BinaryIO, attempt: int) -> tuple[int, int, int]:
    """Return where the output of an attempt begins and ends, and the number of its first line.

    The last line that announces it counts, since the command itself can print such a line.
    """
    own, following = (
        ATTEMPT_LINE.format(number=number).encode() for number in (attempt, attempt + 1)
    )
    start, first, end = 0, 1, None
    offset, number, rest = 0, 1, b""
    while chunk := stream.read(_CHUNK):
        data = rest + chunk
        place = data.rfind(own)
        if place >= 0:
            start, first, end = offset + place, number + data.count(b"\n", 0, place), None
        place = data.find(following, max(place, 0))
        if place >= 0 and end is None:
            end = offset + place
        rest = data[-len(following) :]
        passed = len(data) - len(rest)
        number += data.count(b"\n", 0, passed)
        offset += passed
    size = offset + len(rest)
    return start, size if end is None or end < start else end, first


class _Part:
    """The next so many bytes of a stream."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream = stream
        self._left = size

    def read(self, size: int = -1, /) -> bytes:
        data = self._stream.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(data)
        return data


def _of_guards_alone(events: Iterable[Event], raised: Sequence[Statement]) -> list[Statement]:
    """Return what guards stopped for, without the errors that their processes have recorded too."""
    known = [each for each in raised if each.kind == "exception"]
    return [
        each
        for each in of_guards(_by_time(events))
        if not any(same(each, other) for other in known)
    ]


def _by_time(events: Iterable[Event]) -> list[Event]:
    return sorted(events, key=lambda event: event.unix_seconds)


def _attempt_of(event: Event) -> int | None:
    return _integer(event.data.get("attempt"))


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
