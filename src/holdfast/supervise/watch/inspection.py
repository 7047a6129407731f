"""Inspect a training process that was started without holdfast, and diagnose a hang.

The inspection never changes the process. Steps that the process records, because it has a Guard or
runs under `holdfast run`, show its progress for certain. Otherwise, progress is inferred from the
stacks and from the activity of the threads between two observations: from CPU time, waits and
transferred bytes, never from the time alone. A process that waits for a CPU is not stuck.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from holdfast.explain.hangs.blame import HangDiagnosis, diagnose_hang
from holdfast.explain.hangs.classification import thread_to_blame
from holdfast.explain.hangs.frames import is_in_backward
from holdfast.explain.hangs.process_samples import ExaminedProcess
from holdfast.supervise.watch.inspected_processes import cannot_inspect, find_subjects
from holdfast.supervise.watch.recorded_progress import RecordedProgress, read_recorded_progress
from holdfast.supervise.watch.stack_phases import WORKER_PHASE, find_phase
from holdfast.supervise.watch.stacks import (
    StackSampler,
    stays_at_same_lines,
    stays_in_same_functions,
)
from holdfast.supervise.watch.thread_activity import ObservedThreads

# What a process did between two observations:
#   recorded    it recorded steps or other progress
#   working     its stack changed, it moved data, or its threads did work
#   computing   it used CPU time but stayed at one place, as an endless loop does, and as a long
#               computation does, too
#   starved     it was ready to run but got too little CPU time to show anything
#   none        it did nothing
Activity = Literal["recorded", "working", "computing", "starved", "none"]

# Kinds of hangs in which a process computes at one place.
_COMPUTING_KINDS = ("Python loop", "native code")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The result of inspecting a process and its descendants.

    Args:
        processes: The Python processes that still existed at the second observation.
        diagnosis: The most likely cause if there is no progress.
        activity: What the process and its descendants did between the two observations.
        steps: The number of steps recorded between the two observations; 0 if none are recorded.
    """

    processes: tuple[ExaminedProcess, ...]
    diagnosis: HangDiagnosis
    activity: Activity
    steps: int = 0

    @property
    def judged(self) -> tuple[ExaminedProcess, ...]:
        """Return the processes whose progress decides whether training makes progress."""
        return tuple(process for process in self.processes if process.judged)

    @property
    def is_moving(self) -> bool:
        """Return whether anything happened that a stuck process does not do."""
        return self.activity != "none"


def inspect_process(pid: int, seconds: float, folder: Path) -> Inspection:
    """Observe a process and its descendants twice, and compare the two observations.

    Args:
        pid: PID of the process.
        seconds: Time between the two observations.
        folder: An empty directory to which the stacks are written.

    Raises:
        PolicyError: H741 if the process cannot be inspected or ends during the inspection.
    """
    subjects = find_subjects(pid, seconds)
    judged_pids = [subject.process.pid for subject in subjects if subject.process.judged]
    threads = ObservedThreads(judged_pids)
    progress_before = _read_recorded(judged_pids)

    def observe_threads(_: float) -> None:
        # Measure only during the pause, because the observations themselves cause activity.
        threads.observe(seconds)

    processes = StackSampler(folder, pause=observe_threads).take(subjects).processes
    progress = _read_recorded(judged_pids)
    processes = tuple(_with_progress(process, progress) for process in processes)
    judged = [process for process in processes if process.judged]
    if not judged:
        raise cannot_inspect(
            f"process {pid} has ended",
            limit="only a running process can be inspected",
            fix="look for the cause in the output of the process.",
        )
    diagnosis = diagnose_hang(processes, _longest_without_progress(judged).pid)
    advanced = [pid for pid in judged_pids if _has_advanced(pid, progress_before, progress)]
    if advanced:
        steps = max(progress[pid].step - progress_before[pid].step for pid in advanced)
        return Inspection(
            processes=processes, diagnosis=diagnosis, activity="recorded", steps=max(0, steps)
        )
    training_threads = _threads_of_training(judged)
    observation = Observation(
        processes=processes,
        judged=judged,
        diagnosis=diagnosis,
        transferred=bool(threads.transferring & training_threads),
        worked=bool(threads.working & training_threads),
    )
    activity = judge_activity(observation)
    return Inspection(processes=processes, diagnosis=diagnosis, activity=activity)


def _longest_without_progress(judged: Sequence[ExaminedProcess]) -> ExaminedProcess:
    """Return the process whose last progress is the longest ago, or the first of several."""
    return max(judged, key=lambda process: process.seconds)


# --- activity that is not recorded ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What two observations show about a process that records no progress.

    Attributes:
        processes: The process and its descendants.
        judged: The processes whose progress decides whether training makes progress.
        diagnosis: The most likely cause if there is no progress.
        transferred: Whether a thread of the training loop read or wrote data.
        worked: Whether a thread of the training loop did more than wait.
    """

    processes: tuple[ExaminedProcess, ...]
    judged: Sequence[ExaminedProcess]
    diagnosis: HangDiagnosis
    transferred: bool
    worked: bool


def judge_activity(observation: Observation) -> Activity:
    """Return what a process that records no progress did between the two observations.

    A training loop that mostly waits may show the same stack in both observations, so the activity
    of its threads and its loader workers also counts.
    """
    for activity, applies in _ACTIVITIES:
        if applies(observation):
            return activity
    return "working"


def _transferred_data(observation: Observation) -> bool:
    return observation.transferred


def _computed_at_one_place(observation: Observation) -> bool:
    diagnosis = observation.diagnosis
    return diagnosis.moving and diagnosis.kind in _COMPUTING_KINDS


def _did_work(observation: Observation) -> bool:
    diagnosis = observation.diagnosis
    return observation.worked or (diagnosis.moving and not diagnosis.starved)


def _loader_worker_transferred_data(observation: Observation) -> bool:
    return any(
        find_phase(process) == WORKER_PHASE and process.io_rate > 0
        for process in observation.processes
    )


def _waited_for_a_cpu(observation: Observation) -> bool:
    """Return whether it lacked a CPU and its stack shows no progress.

    A process that had hardly any CPU time may be at another line of the same loop.
    """
    stays = all(stays_in_same_functions(process) for process in observation.judged)
    return observation.diagnosis.starved and stays


def _stayed_at_same_lines(observation: Observation) -> bool:
    return all(stays_at_same_lines(process) for process in observation.judged)


_ActivityRule: TypeAlias = tuple[Activity, Callable[[Observation], bool]]
# The first activity whose condition is met is reported, so conditions that prove work come first.
_ACTIVITIES: tuple[_ActivityRule, ...] = (
    ("working", _transferred_data),
    ("computing", _computed_at_one_place),
    ("working", _did_work),
    ("working", _loader_worker_transferred_data),
    ("starved", _waited_for_a_cpu),
    ("none", _stayed_at_same_lines),
)


def _threads_of_training(judged: Sequence[ExaminedProcess]) -> set[int]:
    """Return the thread IDs of the main threads and of the threads that a hang would be blamed on.

    In a backward pass, torch's own threads do the work, and no Python thread is to blame.
    """
    main_threads = {process.pid for process in judged}
    to_blame = {thread_to_blame(process).tid for process in judged if not is_in_backward(process)}
    return main_threads | to_blame


# --- recorded progress ---


def _read_recorded(pids: Sequence[int]) -> dict[int, RecordedProgress]:
    """Return the newest progress of each process that records it, by PID."""
    progress = {pid: read_recorded_progress(pid) for pid in pids}
    return {pid: newest for pid, newest in progress.items() if newest is not None}


def _has_advanced(
    pid: int, before: dict[int, RecordedProgress], after: dict[int, RecordedProgress]
) -> bool:
    """Return whether a process has recorded progress between two observations."""
    if pid not in before or pid not in after:
        return False
    return before[pid].mark != after[pid].mark


def _with_progress(
    process: ExaminedProcess, progress: dict[int, RecordedProgress]
) -> ExaminedProcess:
    """Return a process with the step, phase and time that it has recorded."""
    recorded = progress.get(process.pid)
    if recorded is None:
        return process
    seconds = process.seconds
    if recorded.since_seconds is not None:
        seconds = max(0.0, time.monotonic() - recorded.since_seconds)
    return replace(process, step=recorded.step, phase=recorded.phase, seconds=seconds)
