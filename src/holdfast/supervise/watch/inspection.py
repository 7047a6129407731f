"""Inspect a training process that was started without holdfast, and diagnose a hang.

The inspection never changes the process. Steps that the process records, because it has a Guard or
runs under `holdfast run`, show its progress for certain. Otherwise, progress is inferred from the
stacks and from the activity of the threads between two observations: from CPU time, waits and
transferred bytes, never from the time alone. A process that waits for a CPU is not stuck.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Literal

from holdfast.core.control_groups import read_fields
from holdfast.core.errors import PolicyError
from holdfast.explain.evidence import Frame, is_user_code
from holdfast.explain.hangs.blame import HangDiagnosis, diagnose_hang
from holdfast.explain.hangs.classification import thread_to_blame
from holdfast.explain.hangs.evidence import Examined
from holdfast.explain.hangs.frames import is_in_backward
from holdfast.supervise.process_tree import ProcessStat, descendants, read_table
from holdfast.supervise.watch.process_evidence import is_python, read_io_bytes
from holdfast.supervise.watch.py_spy import find_py_spy
from holdfast.supervise.watch.recorded_progress import RecordedProgress, read_recorded_progress
from holdfast.supervise.watch.stacks import (
    StackSampler,
    Subject,
    stays_at_same_lines,
    stays_in_same_functions,
)

_cannot_inspect = partial(PolicyError, rule="H741")

# CPU time per wait above which a thread counts as working rather than polling. In measurements,
# polling threads used up to 225,000 ns per wait, and small training steps 1,000,000 ns.
_WORK_NANOSECONDS_PER_WAIT = 400_000
_WORKER_PHASE = "makes batches"
_UNKNOWN_PHASE = "phase not known"
_OWN_CODE_PHASE = "in code of its own"
# Regular expressions that recognize a phase from the main thread's stack. The first match wins.
_PHASES = {
    _WORKER_PHASE: r":_worker_loop$",
    "data wait": r"/torch/utils/data/dataloader\.py:|/holdfast/loader/",
    "saving": (
        r"/torch/serialization\.py:|/torch/distributed/checkpoint/|/safetensors/|/holdfast/checkpoint/"
    ),
    "optimizer": r"/torch/optim/",
    "forward/backward": r"/torch/(?:autograd|nn)/|/torch/_tensor\.py:(?:\w+\.)?backward$",
}
IMPORT_FILE = "<frozen importlib"

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

    processes: tuple[Examined, ...]
    diagnosis: HangDiagnosis
    activity: Activity
    steps: int = 0

    @property
    def judged(self) -> tuple[Examined, ...]:
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
    judged_pids = [subject.about.pid for subject in subjects if subject.about.judged]
    threads = _ObservedThreads(judged_pids)
    progress_before = _read_recorded(judged_pids)

    def observe_threads(_: float) -> None:
        # Measure only during the pause, because the observations themselves cause activity.
        threads.observe(seconds)

    processes = StackSampler(folder, pause=observe_threads).take(subjects).processes
    progress = _read_recorded(judged_pids)
    processes = tuple(_with_progress(process, progress) for process in processes)
    judged = [process for process in processes if process.judged]
    if not judged:
        raise _cannot_inspect(
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
    activity = _judge_activity(processes, judged, diagnosis, threads)
    return Inspection(processes=processes, diagnosis=diagnosis, activity=activity)


def _judge_activity(
    processes: Sequence[Examined],
    judged: Sequence[Examined],
    diagnosis: HangDiagnosis,
    threads: _ObservedThreads,
) -> Activity:
    """Return what a process that records no progress did between the two observations.

    A training loop that mostly waits may show the same stack in both observations, so the activity
    of its threads and its loader workers also counts.
    """
    training_threads = _threads_of_training(judged)
    if threads.transferring & training_threads:
        return "working"
    if diagnosis.moving and diagnosis.kind in _COMPUTING_KINDS:
        return "computing"
    if threads.working & training_threads or (diagnosis.moving and not diagnosis.starved):
        return "working"
    if any(phase_of(process) == _WORKER_PHASE and process.io_rate > 0 for process in processes):
        return "working"
    if diagnosis.starved:
        # A process that had hardly any CPU time may be at another line of the same loop.
        stays = all(stays_in_same_functions(process) for process in judged)
        return "starved" if stays else "working"
    return "none" if all(stays_at_same_lines(process) for process in judged) else "working"


def _threads_of_training(judged: Sequence[Examined]) -> set[int]:
    """Return the thread IDs of the main threads and of the threads that a hang would be blamed on.

    In a backward pass, torch's own threads do the work, and no Python thread is to blame.
    """
    main_threads = {process.pid for process in judged}
    to_blame = {thread_to_blame(process).tid for process in judged if not is_in_backward(process)}
    return main_threads | to_blame


def _longest_without_progress(judged: Sequence[Examined]) -> Examined:
    """Return the process whose last progress is the longest ago, or the first of several."""
    return max(judged, key=lambda process: process.seconds)


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


def _with_progress(process: Examined, progress: dict[int, RecordedProgress]) -> Examined:
    """Return a process with the step, phase and time that it has recorded."""
    recorded = progress.get(process.pid)
    if recorded is None:
        return process
    seconds = process.seconds
    if recorded.since_seconds is not None:
        seconds = max(0.0, time.monotonic() - recorded.since_seconds)
    return replace(process, step=recorded.step, phase=recorded.phase, seconds=seconds)


def phase_of(process: Examined) -> str:
    """Return the phase of a process, recognized from the stack of its main thread."""
    frames = process.last.main.frames
    if not frames:
        return _UNKNOWN_PHASE
    if _is_importing(frames):
        return "starting"
    places = [f"{frame.file}:{frame.function}" for frame in frames]
    for phase, pattern in _PHASES.items():
        if any(re.search(pattern, place) for place in places):
            return phase
    return _OWN_CODE_PHASE


def _is_importing(frames: Sequence[Frame]) -> bool:
    """Return whether the script is executing an import statement."""
    called_by_script = takewhile(lambda frame: not is_user_code(frame), reversed(frames))
    return any(IMPORT_FILE in frame.file for frame in called_by_script)


# --- which processes are inspected ---


def find_subjects(pid: int, seconds: float) -> list[Subject]:
    """Return the processes to inspect: a process and its descendants, if they run Python.

    `Examined.judged` is set for the processes whose progress decides whether training makes
    progress.

    Args:
        pid: PID of the process.
        seconds: Time between the two observations, which is also reported as the time without
            progress.

    Raises:
        PolicyError: H741 if the process cannot be inspected.
    """
    table = read_table()
    _check_exists(pid, table)
    _check_traceable(pid)
    _check_py_spy()
    candidates = [pid, *sorted(descendants(table, [pid]))]
    pids = [candidate for candidate in candidates if is_python(candidate)]
    if not pids:
        program = Path(f"/proc/{pid}/comm").read_text().strip()
        raise _cannot_inspect(
            f"process {pid} ({program}) does not run Python",
            limit="nor does any of its descendants",
            fix="`pgrep -af python` lists processes that do.",
        )
    judged = _choose_judged(pids, table)
    return [
        Subject(
            about=Examined(
                pid=candidate,
                ppid=table[candidate].ppid,
                role="unobserved",
                rank=_read_rank(candidate),
                seconds=seconds if candidate in judged else 0.0,
                judged=candidate in judged,
            ),
            runs_python=True,
        )
        for candidate in pids
    ]


def _check_exists(pid: int, table: dict[int, ProcessStat]) -> None:
    if pid not in table or table[pid].state in "ZX":
        raise _cannot_inspect(
            f"no process with PID {pid}",
            limit="only a running process can be inspected",
            fix="`ps aux` lists the processes.",
        )


def _check_traceable(pid: int) -> None:
    try:
        Path(f"/proc/{pid}/mem").open("rb").close()
    except PermissionError as error:
        fix = (
            "run this as the user of the process, or with sudo; in a container, start the container"
            " with --cap-add SYS_PTRACE."
        )
        if Path("/proc/sys/kernel/yama/ptrace_scope").exists():
            fix += " `sudo sysctl kernel.yama.ptrace_scope=0` allows it for all processes."
        raise _cannot_inspect(
            f"no permission to trace process {pid}",
            limit="the stack is read from the memory of the process",
            fix=fix,
        ) from error


def _check_py_spy() -> None:
    if not find_py_spy():
        raise _cannot_inspect(
            "py-spy is not installed",
            limit="py-spy reads the stacks of other processes",
            fix="pip install py-spy",
        )


def _choose_judged(pids: Sequence[int], table: dict[int, ProcessStat]) -> list[int]:
    """Return the PIDs of the judged processes: the ranks or, without ranks, the users of torch.

    The children of a judged process are not judged. Neither is a launcher, because it has no rank
    and does not use torch. If no process uses torch, the first process is judged.
    """
    all_ranks = {pid: _read_rank(pid) for pid in pids}
    ranks = {pid: rank for pid, rank in all_ranks.items() if rank is not None}
    topmost_ranks = [pid for pid in ranks if ranks.get(table[pid].ppid) != ranks[pid]]
    if topmost_ranks:
        return topmost_ranks
    torch_users = [pid for pid in pids if b"libtorch" in _read_proc(pid, "maps")]
    topmost_torch_users = [pid for pid in torch_users if table[pid].ppid not in torch_users]
    return topmost_torch_users or list(pids[:1])


def _read_rank(pid: int) -> int | None:
    """Return the value of ``RANK`` in the environment of a process, or None if it is not set."""
    match = re.search(rb"(?:^|\0)RANK=(\d{1,9})\0", _read_proc(pid, "environ"))
    return int(match[1]) if match else None


def _read_proc(pid: int, name: str) -> bytes:
    """Read a file in ``/proc/<pid>``; return empty bytes if the process is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


# --- activity of threads ---


class _ObservedThreads:
    """The threads of some processes, and which of them were active between two observations.

    Args:
        pids: PIDs of the processes.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        # IDs of the threads that read or wrote data.
        self.transferring: set[int] = set()
        # IDs of the threads that did more than wait.
        self.working: set[int] = set()

    def observe(self, seconds: float) -> None:
        """Observe the threads twice, this many seconds apart."""
        before = _read_activities(self._pids)
        time.sleep(seconds)
        after = _read_activities(self._pids)
        for tid in before.keys() & after.keys():
            if after[tid].io_bytes != before[tid].io_bytes:
                self.transferring.add(tid)
            if after[tid].has_worked_since(before[tid]):
                self.working.add(tid)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ThreadActivity:
    """A thread's activity since its start: bytes read and written, number of waits, CPU time."""

    io_bytes: int
    waits: int
    cpu_nanoseconds: int

    def has_worked_since(self, before: _ThreadActivity) -> bool:
        """Return whether the thread has done more than wait.

        A blocked thread starts no new waits, and a polling thread uses little CPU time per wait.
        """
        if self.io_bytes != before.io_bytes:
            return True
        waits = self.waits - before.waits
        cpu_nanoseconds = self.cpu_nanoseconds - before.cpu_nanoseconds
        return waits > 1 and cpu_nanoseconds > _WORK_NANOSECONDS_PER_WAIT * waits


def _read_activities(pids: Sequence[int]) -> dict[int, _ThreadActivity]:
    """Return the activity of each thread of these processes, by thread ID."""
    activities = {}
    for pid in pids:
        for folder in Path(f"/proc/{pid}/task").glob("*"):
            scheduler_words = _read_proc(pid, f"task/{folder.name}/schedstat").split()
            activities[int(folder.name)] = _ThreadActivity(
                io_bytes=read_io_bytes(folder),
                waits=read_fields(folder / "status").get("voluntary_ctxt_switches", 0),
                cpu_nanoseconds=int(scheduler_words[0]) if scheduler_words else 0,
            )
    return activities
