"""Collect the evidence about one attempt of a run that ``holdfast run`` supervised.

The sources are the recordings of the supervisor, the observed processes and their Guards, and the
section of ``output.log`` that the attempt's command printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from holdfast.core.events.event import Event
from holdfast.core.files import open_to_read
from holdfast.explain.evidence import (
    Divergence,
    Ending,
    Evidence,
    Learning,
    Statement,
    SupervisorLoss,
)
from holdfast.explain.flight.judging import read_flight_of_attempt
from holdfast.explain.logs.log_text import LogText, read_log
from holdfast.explain.runs.divergence import find_printed_divergence, find_recorded_divergence
from holdfast.explain.runs.guard_records import collect_guard_statements, describe_remedies
from holdfast.explain.runs.learning import (
    judge_learning_from_output,
    judge_learning_of_run,
)
from holdfast.explain.runs.observed_process import ObservedProcess, ProcessExit, pids_that_died
from holdfast.explain.runs.output_sections import SectionReader, find_section
from holdfast.explain.runs.recorded_steps import (
    LossReading,
    read_guard_losses,
    read_newest_guard_step,
    read_process_losses,
)
from holdfast.explain.runs.recordings import Recordings
from holdfast.explain.runs.statements import (
    collect_exceptions,
    is_same_exception,
    merge_statements,
)
from holdfast.explain.runs.supervision import (
    SupervisorRecord,
    read_integer,
    read_supervisor_record,
)
from holdfast.explain.speed.reading import collect_time_use
from holdfast.explain.speed.rules import find_causes
from holdfast.explain.speed_finding import SpeedFinding
from holdfast.recorder.progress import Standing
from holdfast.recorder.run_files import OUTPUT_FILE, process_lives

# Sixteen times the size to which `holdfast run` limits the output file. A limit is needed because a
# sparse file can have any size.
_MAX_OUTPUT_BYTES = 4 << 30
# Exit codes of at least this value are chosen by a shell, not by the script.
_FIRST_STATUS_OF_SHELL = 126


def collect_attempt(recordings: Recordings, requested: int | None) -> Evidence:
    """Return the evidence about one attempt of a supervised run.

    Args:
        recordings: The recordings in the run directory.
        requested: The number of the attempt, counted from 0, or None for the newest attempt.

    Raises:
        PolicyError: H105 if the run has no attempt with this number.
    """
    return _AttemptCollector(recordings, read_supervisor_record(recordings, requested)).evidence()


class _AttemptCollector:
    """Collects the evidence about one attempt.

    The constructor reads the recordings and the output. Each method then answers one question from
    what was read.
    """

    def __init__(self, recordings: Recordings, record: SupervisorRecord) -> None:
        self._recordings = recordings
        self._record = record
        self._processes = [
            ObservedProcess(
                folder=folder,
                info=info,
                events=recordings.events(folder),
                standing=recordings.standing(folder),
            )
            for folder, info in recordings.processes()
            if info.attempt == record.number
        ]
        self._trainers = [process for process in self._processes if process.is_trainer]
        self._process_events = _by_time(
            event for process in self._processes for event in process.events
        )
        self._guards = recordings.guards(self._process_events)
        self._guard_events = _by_time(
            event
            for folder in self._guards
            for event in recordings.events(folder)
            if record.covers(event.unix_seconds)
        )
        self._log = self._read_log()
        self._flight, self._flight_problems = read_flight_of_attempt(recordings.run, record.number)
        recordings.note_overwritten_steps(
            {process.folder: f"process {process.info.pid}" for process in self._trainers}
        )

    def evidence(self) -> Evidence:
        """Return all evidence about the attempt."""
        endings = list(self._endings())
        if self._log is not None:
            endings += self._log.endings
        exit_of_trainer = self._exit_of_trainer(endings)
        events = [*self._record.events, *self._process_events, *self._guard_events]
        return Evidence(
            source=str(self._recordings.run),
            missing=tuple(self._missing()),
            statements=tuple(self._statements()),
            endings=tuple(endings),
            events=tuple(_by_time(events)),
            tried=(
                *self._record.reasons_for_restarts(),
                *describe_remedies(self._guard_events),
            ),
            applied_changes=self._record.applied_changes(),
            divergence=self._divergence(),
            learning=self._learning(),
            speed=self._speed(),
            flight=self._flight,
            steps=self._steps(),
            phase=_phase_name(self._standing_of_trainer()),
            observed=bool(self._processes),
            made_no_step=self._made_no_step(),
            stop_signal=self._record.stop_signal,
            exit_call=exit_of_trainer.call,
            exit_message=exit_of_trainer.message,
            last_output_line=self._last_line_of_failure(),
            output_says_done=self._log is not None and self._log.says_done,
            living_pids=tuple(
                process.info.pid
                for process in self._processes
                if process_lives(process.info.pid, process.info.ticks)
            ),
            supervisor_loss=self._supervisor_loss(),
        )

    def _read_log(self) -> LogText | None:
        """Return the output of this attempt, or None if the file cannot be read.

        If the file cannot be read, the reason is added to `Recordings.missing`.
        """
        try:
            with open_to_read(self._recordings.run / OUTPUT_FILE, _MAX_OUTPUT_BYTES) as stream:
                section = find_section(stream, self._record.number)
                return read_log(
                    SectionReader(stream, section),
                    name=OUTPUT_FILE,
                    first_number=section.first_line,
                )
        except OSError as error:
            self._recordings.missing.append(f"{OUTPUT_FILE}: {error.strerror or error}")
            return None

    def _missing(self) -> list[str]:
        """Return one clause for each piece of evidence that is missing."""
        missing = list(self._recordings.missing)
        if self._log is None:
            missing.append("no output from the command")
        if self._record.end is None:
            missing.append("no exit status: the supervisor did not record the end of the attempt")
        if not self._processes:
            missing.append("none of the processes were observed")
        return [*missing, *self._flight_problems]

    # --- Exceptions and output --------------------------------------------------------------------

    def _statements(self) -> list[Statement]:
        """Return the recorded exceptions and the statements in the output, without duplicates."""
        raised = []
        for process in self._processes:
            raised += collect_exceptions(process.events, process.info)
        if self._record.status == 0:
            died = pids_that_died(self._processes, raised)
            raised = [
                replace(statement, fatal=statement.pid in died and statement.fatal)
                for statement in raised
            ]
        # Drop an error that ended a Guard if the process also recorded this error, as most
        # processes do.
        exceptions = [statement for statement in raised if statement.kind == "exception"]
        raised += [
            stop
            for stop in collect_guard_statements(self._guard_events)
            if not any(is_same_exception(stop, exception) for exception in exceptions)
        ]
        return merge_statements(raised, self._log.statements if self._log is not None else ())

    # --- How it ended -----------------------------------------------------------------------------

    def _endings(self) -> Iterator[Ending]:
        """Yield how each process and the command ended, according to the supervisor's events."""
        processes = {process.info.pid: process for process in self._processes}
        for event in self._record.events:
            if event.kind == "process_ended":
                pid = read_integer(event, "pid")
                process = processes.get(pid) if pid is not None else None
                ending = _ending(event, process.standing if process is not None else None)
                if process is not None:
                    ending = replace(ending, rank=process.info.rank, role=process.info.role)
                yield replace(ending, pid=pid)
            elif event.kind == "attempt_ended":
                ending = _ending(event, self._standing_of_trainer())
                yield replace(ending, role="command", sent_by=self._record.sender)

    def _supervisor_loss(self) -> SupervisorLoss | None:
        """Return the sentinel's record that the supervisor was killed, or None.

        Return None if there is no such record, or if the supervisor recorded the attempt's end.
        """
        note = self._recordings.supervisor_loss()
        if note is None or self._record.end is not None:
            return None
        killed = note.get("killed")
        seconds = note.get("unix_seconds")
        return SupervisorLoss(
            killed_processes=len(killed) if isinstance(killed, list) else 0,
            unix_seconds=seconds if isinstance(seconds, (int, float)) else None,
        )

    def _exit_of_trainer(self, endings: Sequence[Ending]) -> ProcessExit:
        """Return how the training process exited if its script chose the command's exit code.

        Otherwise, return an empty `ProcessExit`.

        Args:
            endings: How the processes and the command ended.
        """
        status = self._record.status
        if not self._trainers or not status or not 0 < status < _FIRST_STATUS_OF_SHELL:
            return ProcessExit()
        trainer = self._trainers[0]
        if all(ending.pid != trainer.info.pid for ending in endings):
            return ProcessExit()
        return trainer.exit()

    def _last_line_of_failure(self) -> str:
        """Return the last line of output if the command failed with an exit code, otherwise ""."""
        status = self._record.status
        if self._log is None or not status or status < 0:
            return ""
        return self._log.last_line

    # --- How far it got ---------------------------------------------------------------------------

    def _standing_of_trainer(self) -> Standing | None:
        """Return the last step and phase that the first training process published, or None."""
        return self._trainers[0].standing if self._trainers else None

    def _steps(self) -> int | None:
        """Return how many steps were completed, or None if unknown.

        A Guard's count is preferred to that of the observer, because only a Guard sees the steps of
        a compiled optimizer.
        """
        marks = [read_newest_guard_step(folder) for folder in self._guards]
        steps = [
            mark.global_step
            for mark in marks
            if mark is not None and self._record.covers(mark.unix_seconds)
        ]
        if steps:
            return max(steps)
        standing = self._standing_of_trainer()
        return standing.step if standing is not None else None

    def _made_no_step(self) -> bool:
        """Return whether a process loaded torch but no step was recorded.

        Return False if losses were printed, because they show that the run trained.
        """
        if not any(process.info.torch for process in self._processes):
            return False
        if self._log is not None and self._log.losses:
            return False
        return not any(
            process.standing is not None and process.standing.step for process in self._processes
        )

    # --- Whether it learned -----------------------------------------------------------------------

    def _trains_by_reward(self) -> bool:
        """Return whether a process imported a reinforcement-learning environment package.

        If one did, a policy is probably trained by reward, and its loss may rise although nothing
        is wrong.
        """
        return any(event.kind == "environments_imported" for event in self._process_events)

    def _divergence(self) -> Divergence | None:
        """Return how the training diverged, or None if it did not.

        The recorded steps decide this or, if they contain no losses, the output.
        """
        divergence, is_known = find_recorded_divergence(
            [(process.folder, process.info) for process in self._trainers],
            self._guards,
            began=self._record.began,
            until=self._record.until,
        )
        if divergence is not None and not divergence.exploded and self._trains_by_reward():
            return None
        if is_known or self._log is None:
            return divergence
        return find_printed_divergence(self._log, name=OUTPUT_FILE)

    def _learning(self) -> Learning | None:
        """Return whether the loss fell, or None if the command did not end with status 0.

        The losses that Guards recorded are preferred, because each of them is the mean over a whole
        step.
        """
        if self._record.status != 0:
            return None
        curves = [read_guard_losses(folder, self._record.until) for folder in self._guards]
        if not any(curves):
            curves = self._curves_of_processes()
        if not any(curves) and self._log is not None:
            learning = judge_learning_from_output(self._log)
            if learning is not None:
                return learning
        return judge_learning_of_run(curves, by_reward=self._trains_by_reward())

    def _curves_of_processes(self) -> list[list[LossReading]]:
        """Return one list with the recorded losses of each rank in all attempts up to this one.

        If a rank had several processes in an attempt, only the newest process is used.
        """
        newest: dict[tuple[int | None, int], Path] = {}
        for folder, info in self._recordings.processes():
            if info.role == "trainer" and info.attempt <= self._record.number:
                newest[info.rank, info.attempt] = folder
        curves: dict[int | None, list[LossReading]] = {}
        for (rank, _), folder in sorted(newest.items(), key=lambda entry: entry[0][1]):
            curves.setdefault(rank, []).extend(read_process_losses(folder))
        return list(curves.values())

    def _speed(self) -> tuple[SpeedFinding, ...]:
        """Return what the training loop spent its time on."""
        boards = [
            (process.info, None if process.standing is None else process.standing.loop)
            for process in self._trainers
        ]
        events = [*self._record.events, *self._guard_events]
        return find_causes(collect_time_use(boards, events, self._record.number))


def _ending(event: Event, standing: Standing | None) -> Ending:
    """Return the ending that an event recorded, with the process's last published progress."""
    return Ending(
        status=read_integer(event, "status"),
        unix_seconds=event.unix_seconds,
        oom_kills=read_integer(event, "oom_kills"),
        phase=_phase_name(standing),
        step=standing.step if standing is not None else None,
    )


def _phase_name(standing: Standing | None) -> str | None:
    """Return the name of the published phase as words in lower case, or None if unknown."""
    if standing is None:
        return None
    return standing.phase.name.lower().replace("_", " ")


def _by_time(events: Iterable[Event]) -> list[Event]:
    return sorted(events, key=lambda event: event.unix_seconds)
