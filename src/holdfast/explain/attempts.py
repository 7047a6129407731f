"""The evidence about one attempt of a run that ``holdfast run`` supervised.

It combines the supervisor's events, the recordings of the observed processes and their Guards, and
the section of ``output.log`` that the attempt printed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.core.errors import PolicyError
from holdfast.core.events.event import Event
from holdfast.core.files import open_to_read
from holdfast.explain.evidence import (
    Ending,
    Evidence,
    Learning,
    LoaderWait,
    LostTraining,
    Statement,
    SupervisorLoss,
)
from holdfast.explain.logs.text import LogText, read_log
from holdfast.explain.output_sections import SectionReader, find_section
from holdfast.explain.printed_losses import learning_from_output, lost_from_output
from holdfast.explain.runs.curves import find_lost_training
from holdfast.explain.runs.learning import (
    Reading,
    learning_of_run,
    loader_wait_of_run,
    readings_of_guard,
    readings_of_process,
)
from holdfast.explain.runs.recordings import Recordings
from holdfast.explain.runs.statements import (
    already_tried,
    event_text,
    exceptions_of_process,
    is_same_exception,
    merge_statements,
    statements_of_guards,
)
from holdfast.recorder.progress import ProcessPhase, Standing
from holdfast.recorder.run_files import OUTPUT_FILE, ProcessInfo, process_lives

# Sixteen times what `holdfast run` keeps. A sparse file can claim any size.
_MOST_OUTPUT_BYTES = 4 << 30
_MOST_EXIT_MESSAGE = 300
# Exit codes from here on come from a shell rather than from the script.
_FIRST_STATUS_OF_SHELL = 126


def collect_attempt(recordings: Recordings, requested: int | None) -> Evidence:
    """Return all that is known about one attempt of a supervised run.

    Args:
        recordings: The run directory.
        requested: The number of the attempt, from 0. None: the newest.

    Raises:
        PolicyError: H105 if there is no such attempt.
    """
    all_events = recordings.supervisor_events()
    number = _choose_number(recordings, all_events, requested)
    return _Collector(recordings, all_events, number).evidence()


def _choose_number(
    recordings: Recordings, all_events: Sequence[Event], requested: int | None
) -> int:
    numbers = []
    for event in all_events:
        # An announced restart is not an attempt yet, unless the supervisor was killed while waiting
        # to start it.
        is_announcement = event.kind == "restart" and recordings.supervisor_loss() is None
        number = _attempt_number(event)
        if number is not None and not is_announcement:
            numbers.append(number)
    if requested is None:
        return max(numbers, default=0)
    if requested not in (numbers or [0]):
        oldest = min(numbers, default=0)
        newest = max(numbers, default=0)
        raise PolicyError(
            f"attempt {requested} of {recordings.run}",
            limit=f"attempts {oldest} to {newest} are recorded",
            fix="pass one of these, or leave --attempt out for the newest.",
            rule="H105",
        )
    return requested


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exit:
    """How a process that had loaded torch exited.

    Attributes:
        call: ``"sys.exit"``, ``"os._exit"``, another word of the observer, or None if unknown.
        message: The argument of `sys.exit`.
    """

    call: str | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    """An observed process of the attempt, and what it recorded."""

    folder: Path
    info: ProcessInfo
    events: Sequence[Event]
    standing: Standing | None

    @property
    def is_trainer(self) -> bool:
        return self.info.role == "trainer"

    @property
    def since_seconds(self) -> float:
        """Return when its last phase began, on the shared monotonic clock; 0 if unknown."""
        return self.standing.since_seconds if self.standing is not None else 0.0

    @property
    def finished(self) -> bool:
        return self.standing is not None and self.standing.phase is ProcessPhase.ENDING

    def exit(self) -> _Exit:
        """Return how it exited.

        A process that loaded torch but recorded no exit bypassed the interpreter's shutdown.
        """
        exiting = None
        for event in self.events:
            if event.kind == "exiting":
                exiting = event
        if exiting is not None:
            message = event_text(exiting.data.get("said"))[:_MOST_EXIT_MESSAGE]
            return _Exit(call=event_text(exiting.data.get("how")) or None, message=message)
        if any(event.kind == "torch_imported" for event in self.events):
            return _Exit(call="os._exit")
        return _Exit()


class _Collector:
    """Collects one attempt: reads everything once, then each method answers one question."""

    def __init__(
        self, recordings: Recordings, supervisor_events: Sequence[Event], number: int
    ) -> None:
        self._recordings = recordings
        self._number = number
        # Of all attempts.
        self._supervisor_events = supervisor_events
        self._own_events = _events_of_attempt(supervisor_events, number)
        self._began, self._until = self._time_range()
        self._processes = [
            _Process(
                folder=folder,
                info=info,
                events=recordings.events(folder),
                standing=recordings.standing(folder),
            )
            for folder, info in recordings.processes()
            if info.attempt == number
        ]
        self._trainers = [process for process in self._processes if process.is_trainer]
        self._process_events = _by_time(
            event for process in self._processes for event in process.events
        )
        self._guards = recordings.guards(self._process_events)
        self._guard_events = [
            event
            for folder in self._guards
            for event in recordings.events(folder)
            if self._began <= event.unix_seconds < self._until
        ]
        self._log = self._read_log()
        recordings.note_overwritten_steps(
            {process.folder: f"process {process.info.pid}" for process in self._trainers}
        )

    def evidence(self) -> Evidence:
        """Return all that is known."""
        endings = list(self._endings())
        if self._log is not None:
            endings += self._log.endings
        exit_of_trainer = self._exit_of_trainer(endings)
        return Evidence(
            source=str(self._recordings.run),
            missing=tuple(self._missing(endings)),
            statements=tuple(self._statements()),
            endings=tuple(endings),
            events=tuple(_by_time([*self._own_events, *self._process_events, *self._guard_events])),
            tried=(
                *_restarts(self._supervisor_events, self._number),
                *already_tried(self._guard_events),
            ),
            applied_changes=_applied_changes(self._supervisor_events, self._number),
            lost=self._lost(),
            learning=self._learning(),
            loader_wait=self._loader_wait(),
            steps=self._steps(),
            phase=_phase_name(self._standing_of_trainer()),
            observed=bool(self._processes),
            made_no_step=self._made_no_step(),
            stop_signal=self._stop_signal(),
            exit_call=exit_of_trainer.call,
            exit_message=exit_of_trainer.message,
            last_output_line=self._last_line_of_failure(endings),
            output_says_done=self._log is not None and self._log.ended_well,
            living_pids=tuple(
                process.info.pid
                for process in self._processes
                if process_lives(process.info.pid, process.info.ticks)
            ),
            supervisor_loss=self._supervisor_loss(),
        )

    # --- What was read ----------------------------------------------------------------------------

    def _time_range(self) -> tuple[float, float]:
        """Return the Unix times at which this attempt and the next one began."""
        began = 0.0
        for event in self._own_events:
            if event.kind == "attempt_started":
                began = event.unix_seconds
                break
        until = math.inf
        for event in self._supervisor_events:
            if event.kind == "attempt_started" and (_attempt_number(event) or 0) > self._number:
                until = min(until, event.unix_seconds)
        return began, until

    def _read_log(self) -> LogText | None:
        """Return the output of this attempt; if it cannot be read, note why and return None."""
        try:
            with open_to_read(self._recordings.run / OUTPUT_FILE, _MOST_OUTPUT_BYTES) as stream:
                section = find_section(stream, self._number)
                return read_log(
                    SectionReader(stream, section),
                    name=OUTPUT_FILE,
                    first_number=section.first_line,
                )
        except OSError as error:
            self._recordings.missing.append(f"{OUTPUT_FILE}: {error.strerror or error}")
            return None

    # --- What was raised and printed --------------------------------------------------------------

    def _statements(self) -> list[Statement]:
        """Return what was raised and printed, with exceptions seen by two sources merged."""
        raised = []
        for process in self._processes:
            raised += exceptions_of_process(process.events, process.info)
        if self._ended_with_status_0():
            died = self._pids_that_died(raised)
            raised = [
                replace(statement, fatal=statement.pid in died and statement.fatal)
                for statement in raised
            ]
        raised += self._stops_that_only_guards_recorded(raised)
        return merge_statements(raised, self._log.statements if self._log is not None else ())

    def _pids_that_died(self, raised: Sequence[Statement]) -> set[int]:
        """Return the PIDs of training processes that an exception ended for good.

        A process does not count if another training process finished normally after it. The result
        reveals failures behind a status of 0, which a shell pipeline or a parent that ignores its
        child can hide. A script that failed before its first step counts; helpers that the training
        script started, such as a compiler, do not.
        """
        ended_by_exception = self._pids_ended_by_exception(raised)
        failed = []
        survivors = []
        for process in self._training_processes():
            if process.info.pid in ended_by_exception:
                failed.append(process)
            else:
                survivors.append(process)
        return {
            process.info.pid
            for process in failed
            if process.since_seconds >= _newest_normal_end(process, survivors)
        }

    def _pids_ended_by_exception(self, raised: Iterable[Statement]) -> set[int | None]:
        """Return the PIDs of processes with a fatal exception that was not an ordinary exit."""
        called_sys_exit = {
            process.info.pid for process in self._processes if process.exit().call == "sys.exit"
        }
        return {
            statement.pid
            for statement in raised
            if statement.fatal
            and statement.exception != "KeyboardInterrupt"
            and statement.pid not in called_sys_exit
        }

    def _training_processes(self) -> list[_Process]:
        """Return the trainers, and the other torch processes whose parent has not loaded torch."""
        with_torch = [
            process
            for process in self._processes
            if process.info.torch and process.info.role != "loader worker"
        ]
        parents = {process.info.pid for process in with_torch if process.info.role != "launcher"}
        return [
            process
            for process in with_torch
            if process.is_trainer or process.info.ppid not in parents
        ]

    def _stops_that_only_guards_recorded(self, raised: Sequence[Statement]) -> list[Statement]:
        """Return the stops of Guards, without errors that their processes recorded too."""
        exceptions = [statement for statement in raised if statement.kind == "exception"]
        return [
            stop
            for stop in statements_of_guards(_by_time(self._guard_events))
            if not any(is_same_exception(stop, exception) for exception in exceptions)
        ]

    # --- How it ended -----------------------------------------------------------------------------

    def _end_of_attempt(self) -> Event | None:
        for event in self._own_events:
            if event.kind == "attempt_ended":
                return event
        return None

    def _ended_with_status_0(self) -> bool:
        return any(
            event.kind == "attempt_ended" and event.data.get("status") == 0
            for event in self._own_events
        )

    def _endings(self) -> Iterator[Ending]:
        """Yield how each process and the command ended, as the supervisor saw it."""
        processes = {process.info.pid: process for process in self._processes}
        for event in self._own_events:
            if event.kind == "process_ended":
                pid = _integer(event.data.get("pid"))
                process = processes.get(pid) if pid is not None else None
                ending = _ending(event, process.standing if process is not None else None)
                if process is not None:
                    ending = replace(ending, rank=process.info.rank, role=process.info.role)
                yield replace(ending, pid=pid)
            elif event.kind == "attempt_ended":
                ending = _ending(event, self._standing_of_trainer())
                yield replace(ending, role="command", sent_by=_sender(event))

    def _stop_signal(self) -> int | None:
        end = self._end_of_attempt()
        return _integer(end.data.get("asked_by")) if end is not None else None

    def _supervisor_loss(self) -> SupervisorLoss | None:
        """Return what the sentinel recorded when it noticed that the supervisor was gone."""
        note = self._recordings.supervisor_loss()
        if note is None or self._end_of_attempt() is not None:
            return None
        killed = note.get("killed")
        seconds = note.get("unix_seconds")
        return SupervisorLoss(
            killed_processes=len(killed) if isinstance(killed, list) else 0,
            unix_seconds=seconds if isinstance(seconds, (int, float)) else None,
        )

    def _exit_of_trainer(self, endings: Sequence[Ending]) -> _Exit:
        """Return how the trainer exited, if the command failed with the script's own exit code."""
        trainer = self._trainer()
        status = _status_of_command(endings)
        if trainer is None or not status or not 0 < status < _FIRST_STATUS_OF_SHELL:
            return _Exit()
        if all(ending.pid != trainer.info.pid for ending in endings):
            return _Exit()
        return trainer.exit()

    def _last_line_of_failure(self, endings: Sequence[Ending]) -> str:
        status = _status_of_command(endings)
        if self._log is None or not status or status < 0:
            return ""
        return self._log.last_line

    # --- How far it got ---------------------------------------------------------------------------

    def _trainer(self) -> _Process | None:
        return self._trainers[0] if self._trainers else None

    def _standing_of_trainer(self) -> Standing | None:
        trainer = self._trainer()
        return trainer.standing if trainer is not None else None

    def _steps(self) -> int | None:
        """Return how many steps were completed.

        The Guard's count is preferred: if the optimizer is compiled, only the Guard sees the steps.
        """
        marks = [self._recordings.newest_step(folder) for folder in self._guards]
        steps = [
            mark.global_step
            for mark in marks
            if mark is not None and self._began <= mark.unix_seconds < self._until
        ]
        if steps:
            return max(steps)
        standing = self._standing_of_trainer()
        return standing.step if standing is not None else None

    def _made_no_step(self) -> bool:
        if not any(process.info.torch for process in self._processes):
            return False
        if self._log is not None and self._log.losses:
            return False
        return not any(
            process.standing is not None and process.standing.step for process in self._processes
        )

    # --- What it learned --------------------------------------------------------------------------

    def _trains_by_reward(self) -> bool:
        """Return whether a process imported a reinforcement-learning environment package.

        In that case, a rising loss is not necessarily a fault.
        """
        return any(event.kind == "environments_imported" for event in self._process_events)

    def _lost(self) -> LostTraining | None:
        """Return how the training diverged, from the recorded steps or, without any, the output."""
        lost, is_known = find_lost_training(
            [(process.folder, process.info) for process in self._trainers],
            self._guards,
            (self._began, self._until),
        )
        if lost is not None and not lost.exploded and self._trains_by_reward():
            return None
        if is_known or self._log is None:
            return lost
        return lost_from_output(self._log, name=OUTPUT_FILE)

    def _learning(self) -> Learning | None:
        """Return whether it learned, if it ended with status 0.

        The Guards' losses are preferred, because they are means over the whole step.
        """
        if not self._ended_with_status_0():
            return None
        curves = [readings_of_guard(folder, self._until) for folder in self._guards]
        if not any(curves):
            curves = self._curves_of_processes()
        if not any(curves) and self._log is not None:
            learning = learning_from_output(self._log)
            if learning is not None:
                return learning
        return learning_of_run(curves, by_reward=self._trains_by_reward())

    def _curves_of_processes(self) -> list[list[Reading]]:
        """Return the losses of each rank over all attempts up to this one.

        If a rank had several processes in an attempt, the newest one counts.
        """
        newest: dict[tuple[int | None, int], Path] = {}
        for folder, info in self._recordings.processes():
            if info.role == "trainer" and info.attempt <= self._number:
                newest[info.rank, info.attempt] = folder
        curves: dict[int | None, list[Reading]] = {}
        for (rank, _), folder in sorted(newest.items(), key=lambda entry: entry[0][1]):
            curves.setdefault(rank, []).extend(readings_of_process(folder))
        return list(curves.values())

    def _loader_wait(self) -> LoaderWait | None:
        if not self._ended_with_status_0():
            return None
        return loader_wait_of_run(process.folder for process in self._trainers)

    # --- What is missing --------------------------------------------------------------------------

    def _missing(self, endings: Sequence[Ending]) -> list[str]:
        """Return what would have made the evidence more complete, one clause each."""
        missing = list(self._recordings.missing)
        if self._log is None:
            missing.append("no output from the command")
        if not any(ending.role == "command" for ending in endings):
            missing.append("no exit status: the supervisor recorded no end of the attempt")
        if not self._processes:
            missing.append("none of its processes were observed")
        return missing


def _newest_normal_end(process: _Process, survivors: Iterable[_Process]) -> float:
    """Return when the last survivor that could replace a failed process finished; 0 if none did.

    Only a trainer can replace a trainer.
    """
    replacements = [
        survivor for survivor in survivors if survivor.is_trainer or not process.is_trainer
    ]
    return max(
        (replacement.since_seconds for replacement in replacements if replacement.finished),
        default=0.0,
    )


# --- Events of the supervisor ---------------------------------------------------------------------


def _events_of_attempt(all_events: Sequence[Event], number: int) -> list[Event]:
    """Return the supervisor's events from the start of an attempt to the start of the next."""
    current = -1
    if not any(event.kind == "attempt_started" for event in all_events):
        # The recording is damaged or very old: assume that all events belong to this attempt.
        current = number
    events = []
    for event in all_events:
        if event.kind == "attempt_started":
            started = _attempt_number(event)
            current = current + 1 if started is None else started
        if current == number:
            events.append(event)
    return events


def _restarts_up_to(all_events: Iterable[Event], number: int) -> Iterator[Event]:
    """Yield the restarts that led to an attempt, including any without a recorded number."""
    for event in all_events:
        attempt = _attempt_number(event)
        if event.kind == "restart" and (attempt is None or attempt <= number):
            yield event


def _restarts(all_events: Iterable[Event], number: int) -> list[str]:
    """Return why earlier attempts were restarted, one clause each."""
    clauses = []
    for restart in _restarts_up_to(all_events, number):
        why = restart.data.get("why") or restart.data.get("cause") or "no reason recorded"
        clause = f"restarted: {why}"
        changes = restart.data.get("changes")
        if isinstance(changes, dict) and changes:
            clause += "; changed " + ", ".join(f"{key}={value}" for key, value in changes.items())
        clauses.append(clause)
    return clauses


def _applied_changes(all_events: Iterable[Event], number: int) -> dict[str, Any]:
    """Return the environment variables that restarts set for an attempt."""
    applied: dict[str, Any] = {}
    for restart in _restarts_up_to(all_events, number):
        changes = restart.data.get("changes")
        if isinstance(changes, dict) and _attempt_number(restart) is not None:
            applied.update(changes)
    return applied


def _ending(event: Event, standing: Standing | None) -> Ending:
    return Ending(
        status=_integer(event.data.get("status")),
        unix_seconds=event.unix_seconds,
        oom_kills=_integer(event.data.get("oom_kills")),
        phase=_phase_name(standing),
        step=standing.step if standing is not None else None,
    )


def _sender(end: Event) -> str | None:
    """Return who sent the signal that ended the command, as far as the supervisor knows."""
    if end.data.get("asked_by") is not None:
        return "user"
    if end.data.get("signal_sent_by_us") is not None:
        return "supervisor"
    return None


def _status_of_command(endings: Iterable[Ending]) -> int | None:
    for ending in endings:
        if ending.role == "command":
            return ending.status
    return None


def _phase_name(standing: Standing | None) -> str | None:
    if standing is None:
        return None
    return standing.phase.name.lower().replace("_", " ")


def _attempt_number(event: Event) -> int | None:
    return _integer(event.data.get("attempt"))


def _by_time(events: Iterable[Event]) -> list[Event]:
    return sorted(events, key=lambda event: event.unix_seconds)


def _integer(value: Any) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return None
