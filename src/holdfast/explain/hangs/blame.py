"""Find the process and the line of code that are to blame for a hang.

This module answers three questions in turn: Which rank are the other ranks waiting for? Is that
rank waiting for a loader worker? And how does the blamed process hang (see ``classification``)?

All functions are pure: their results depend only on the observations in `Examined`. ``supervise``
inspects the processes and decides when one of them has made no progress for too long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from holdfast.explain.certainty import Certainty, rank_of
from holdfast.explain.evidence import Frame
from holdfast.explain.hangs.classification import (
    HangKind,
    ProcessHang,
    classify_process,
    is_stopped,
)
from holdfast.explain.hangs.evidence import Examined, clean
from holdfast.explain.hangs.frames import (
    call_of_guard,
    collective_called,
    has_own_loader,
    is_idle_worker,
    is_in_backward,
    is_in_worker_loop,
    shortened,
    user_frame,
    waits_for_workers,
)

# How the supervisor responds to a hang:
#   wait      nothing, because the process may still finish
#   continue  send SIGCONT to the blamed process
#   restart   send SIGTERM to all processes, so that a Guard can save if its loop still responds,
#             and then kill and restart the processes
#   end       kill all processes without a restart, because training is complete and only the
#             shutdown hangs
Remedy = Literal["wait", "continue", "restart", "end"]

KINDS: tuple[HangKind, ...] = get_args(HangKind)
SIGNATURES_OF: dict[HangKind, str] = {kind: f"H{1401 + index}" for index, kind in enumerate(KINDS)}

# A child process that reads and writes more than this is treated as if it used one whole CPU.
_BUSY_BYTES_PER_SECOND = 65_536
# A process that uses at least this fraction of a CPU is working. A waiting process wakes up a few
# times per second and uses less than 1%.
_WORKING_SHARE = 0.2
# Kinds of hangs in which a process waits for another process. The waiting process is not to blame
# while the other process is working.
_WAITS_FOR_PROCESSES = ("process", "queue", "pipe", "socket")
# The values of `ThreadLook.waits` for an idle loader worker.
_IDLE_WAITS = ("futex", "poll", "pipe read", "socket", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class HangDiagnosis:
    """The explanation of a hang: the process to blame, and where and how it hangs."""

    # How the blamed process hangs.
    kind: HangKind
    # How certain the diagnosis is.
    certainty: Certainty
    # The process to blame.
    process: Examined
    # The frame in which the blamed process hangs, in user code if possible; None if unknown.
    frame: Frame | None
    # The rank that the other ranks wait for, or None if there is no such rank.
    odd_one_out: int | None
    # Whether the blamed process uses CPU time or reads or writes data, so that it may still finish.
    moving: bool
    # Whether the blamed process is ready to run but gets too little CPU time to show progress.
    starved: bool
    # Whether the hang may resolve itself because the process waits for holdfast's loader, which
    # replaces stuck workers.
    heals: bool
    # The diagnosis in words.
    sentence: str
    # The part of `sentence` that explains the lack of progress, without stating it.
    explanation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blame:
    """The blamed process, and the processes with which it was compared."""

    # The process that exceeded its time limit without progress.
    noticed: Examined
    # The processes that train together and still exist.
    group: tuple[Examined, ...]
    # The ranks whose processes have ended.
    gone_ranks: tuple[int, ...]
    # The rank that the other ranks wait for, or None if there is no such rank.
    odd_one_out: int | None
    # The process to blame.
    process: Examined
    # How the blamed process hangs.
    hang: ProcessHang
    # Whether the blamed process is a loader worker.
    in_worker: bool = False


def diagnose_hang(
    processes: Sequence[Examined], suspect: int, *, gone_ranks: Sequence[int] = ()
) -> HangDiagnosis:
    """Explain a hang: find the process to blame, and where and how it hangs.

    Args:
        processes: All inspected processes of the run.
        suspect: The PID of the process that exceeded its time limit without progress. It must be
            the PID of one of `processes`.
        gone_ranks: The ranks whose processes have ended.
    """
    noticed = next(process for process in processes if process.pid == suspect)
    group = tuple(process for process in processes if process.judged)
    trainer, odd_one_out = _find_odd_one_out(group, noticed, gone_ranks)
    blame = _Blame(
        noticed=noticed,
        group=group,
        gone_ranks=tuple(gone_ranks),
        odd_one_out=odd_one_out,
        process=trainer,
        hang=classify_process(trainer, group_size=len(group) + len(gone_ranks)),
    )
    blame = _blame_loader_worker(blame, processes)
    blame = _excuse_wait_for_busy_child(blame, processes)
    waits_for_loader = blame.in_worker or blame.hang.kind == "loader"
    explanation = _explain(blame)
    return HangDiagnosis(
        kind=blame.hang.kind,
        certainty=blame.hang.certainty,
        process=blame.process,
        frame=blame.hang.frame,
        odd_one_out=odd_one_out,
        moving=blame.hang.moving,
        starved=blame.hang.starved,
        heals=waits_for_loader and has_own_loader(trainer),
        sentence=f"{_lack_of_progress(noticed)} {explanation}",
        explanation=explanation,
    )


# --- Which rank is the odd one out ----------------------------------------------------------------


def _find_odd_one_out(
    group: Sequence[Examined], noticed: Examined, gone_ranks: Sequence[int]
) -> tuple[Examined, int | None]:
    """Return the process to examine, and the rank that the others wait for, or None.

    If a rank has ended, the others wait for that rank, and the process to examine is the one that
    exceeded its time limit.
    """
    if gone_ranks:
        return noticed, gone_ranks[0]
    if len(group) < 2:
        return noticed, None
    odd: Examined | None
    in_collective, outside = _split_by_collective(group)
    if in_collective and outside:
        # The ranks in a collective wait for the ranks outside it. Among the latter, blame the rank
        # with the fewest steps and then the rank that has made no progress for the longest time.
        odd = min(outside, key=lambda process: (process.step, -process.seconds))
    elif in_collective:
        odd = _odd_one_among_collectives(group)
    else:
        odd = _odd_one_by_phase(group)
    if odd is None:
        return noticed, None
    return odd, odd.rank


def _split_by_collective(
    group: Sequence[Examined],
) -> tuple[list[Examined], list[Examined]]:
    """Split a group into the processes that wait in a collective and all other processes."""
    in_collective = []
    outside = []
    for process in group:
        hang = classify_process(process, group_size=len(group))
        if hang.kind == "collective":
            in_collective.append(process)
        else:
            outside.append(process)
    return in_collective, outside


def _odd_one_among_collectives(group: Sequence[Examined]) -> Examined | None:
    """Return the process that the others wait for if all processes wait in collectives.

    This is a process that is behind the others or waits in a different collective. Return None if
    there is no such process.
    """
    in_guard = [process for process in group if call_of_guard(process) is not None]
    if 0 < len(in_guard) <= len(group) / 2:
        return in_guard[0]
    if _steps_differ(group):
        return min(group, key=lambda process: process.step)
    counts = Counter(_place(process) for process in group)
    rarest = min(counts.values())
    rare = [process for process in group if counts[_place(process)] == rarest]
    if len(rare) == len(group):
        # All lines are equally rare, for example with two ranks. Blame a rank that called a
        # collective explicitly, not in the backward pass.
        rare = [process for process in group if not is_in_backward(process)]
    return rare[0] if 0 < len(rare) < len(group) else None


def _odd_one_by_phase(group: Sequence[Examined]) -> Examined | None:
    """Return a process in the rarest phase, or None.

    Return None if all processes are in the same phase, or if the stack of any process is known.
    """
    if any(process.last.main.frames for process in group):
        return None
    counts = Counter(process.phase for process in group)
    if len(counts) == 1:
        return None
    return min(group, key=lambda process: (counts[process.phase], process.step))


def _place(process: Examined) -> tuple[str, int]:
    """Return the file and line of user code that a process is executing; ("", 0) if unknown."""
    frame = user_frame(process.last.main.frames)
    return ("", 0) if frame is None else (frame.file, frame.line)


def _steps_differ(group: Iterable[Examined]) -> bool:
    return len({process.step for process in group}) > 1


# --- Whether it waits for another process ---------------------------------------------------------


def _blame_loader_worker(blame: _Blame, processes: Sequence[Examined]) -> _Blame:
    """Blame a stuck loader worker or a lost batch if the blamed process waits for its loader.

    Return the blame unchanged if the process does not wait for its loader, or if no worker is stuck
    and no batch was lost.
    """
    trainer = blame.process
    if blame.hang.kind == "stopped" or not waits_for_workers(trainer):
        return blame
    worker = _find_stuck_worker(processes, trainer)
    if worker is not None:
        hang = classify_process(worker, group_size=1)
        return replace(blame, process=worker, hang=hang, in_worker=True)
    children = [process for process in processes if process.ppid == trainer.pid]
    if not any(is_idle_worker(child) for child in children):
        return blame
    lost_batch = ProcessHang(
        kind="loader",
        certainty="likely",
        frame=user_frame(trainer.last.main.frames),
        activity="waits for a batch that no worker is making",
    )
    return replace(blame, hang=lost_batch)


def _find_stuck_worker(processes: Sequence[Examined], trainer: Examined) -> Examined | None:
    """Return the busy loader worker to blame, or None if no worker is busy.

    A stopped worker is preferred to a blocked worker, and a blocked worker to one that computes.
    """
    workers = [process for process in processes if _is_worker_of(process, trainer)]
    busy = [worker for worker in workers if _is_busy(worker)]
    if not busy and not any(worker.last.main.frames for worker in workers):
        busy = [worker for worker in workers if worker.last.main.waits not in _IDLE_WAITS]
    return min(busy, key=_order_of_suspicion, default=None)


def _is_worker_of(process: Examined, trainer: Examined) -> bool:
    """Return whether a process is a loader worker that the trainer started."""
    if process.ppid != trainer.pid:
        return False
    return process.role == "loader worker" or is_in_worker_loop(process.last.main.frames)


def _is_busy(worker: Examined) -> bool:
    """Return whether a loader worker is stopped, or its stack shows that it is not idle."""
    if is_stopped(worker):
        return True
    return bool(worker.last.main.frames) and not is_idle_worker(worker)


def _order_of_suspicion(worker: Examined) -> tuple[int, int]:
    """Return a sort key that puts stopped workers first, then blocked, then computing workers."""
    hang = classify_process(worker, group_size=1)
    if hang.kind == "stopped":
        return 0, rank_of(hang.certainty)
    return (2 if hang.moving else 1), rank_of(hang.certainty)


def _excuse_wait_for_busy_child(blame: _Blame, processes: Sequence[Examined]) -> _Blame:
    """Classify the blamed process as slow, not stuck, if it waits for a child that is working.

    Return the blame unchanged if the process does not wait for another process, or if none of its
    descendants is working.
    """
    if blame.hang.kind not in _WAITS_FOR_PROCESSES:
        return blame
    if _work_of_descendants(processes, blame.process) < _WORKING_SHARE:
        return blame
    slow = ProcessHang(
        kind="merely slow",
        certainty="a guess",
        frame=blame.hang.frame,
        activity="waits for a process that is working",
        moving=True,
    )
    return replace(blame, hang=slow)


def _work_of_descendants(processes: Iterable[Examined], ancestor: Examined) -> float:
    """Return the number of CPUs that all descendants of a process use or wait for in total.

    A descendant that reads or writes a lot of data is counted as using one more CPU.
    """
    children: dict[int, list[Examined]] = {}
    for process in processes:
        children.setdefault(process.ppid, []).append(process)
    share = 0.0
    pending = list(children.get(ancestor.pid, ()))
    while pending:
        descendant = pending.pop()
        share += descendant.cpu_share
        if descendant.is_runnable:
            share += descendant.cpu_wait_share
        if descendant.io_rate > _BUSY_BYTES_PER_SECOND:
            share += 1.0
        pending += children.get(descendant.pid, ())
    return share


# --- The diagnosis in words -----------------------------------------------------------------------


def describe_frame(frame: Frame | None) -> str:
    """Return a frame as ``file:line in function`` without control characters; "" for None."""
    if frame is None:
        return ""
    return f"{clean(frame.file)}:{frame.line} in {clean(frame.function)}"


def _explain(blame: _Blame) -> str:
    """Return what is known about the cause as a paragraph.

    The paragraph follows a sentence about the process that exceeded its time limit.
    """
    sentences = []
    if blame.gone_ranks:
        ranks = ", ".join(str(rank) for rank in blame.gone_ranks)
        if len(blame.gone_ranks) == 1:
            sentences.append(f"Rank {ranks} has ended, and the others are waiting for it.")
        else:
            sentences.append(f"Ranks {ranks} have ended, and the others are waiting for them.")
    elif blame.odd_one_out is not None:
        sentences.append(f"Rank {blame.odd_one_out} is the odd one out: the others wait for it.")
        if _steps_differ(blame.group):
            steps = ", ".join(f"{process.rank}: {process.step}" for process in blame.group)
            sentences.append(f"Steps by rank: {steps}.")
    different_calls = _different_calls(blame.group)
    if different_calls:
        sentences.append(different_calls)
    where = "" if blame.hang.frame is None else f" at {shortened(blame.hang.frame)}"
    sentences.append(f"{_subject(blame)} {blame.hang.activity}{where}.")
    return " ".join(sentences)


def _lack_of_progress(process: Examined) -> str:
    """Return a sentence that says for how long, and at which step, a process made no progress."""
    who = f"Process {process.pid}"
    if process.rank is not None:
        who = f"Rank {process.rank} (process {process.pid})"
    digits = 0 if process.seconds >= 10 else 1
    duration = f"{process.seconds:.{digits}f} s"
    if not process.phase and not process.step:
        # The process records neither its phase nor its steps, so only its activity was observed.
        return f"{who} has shown no progress for {duration}."
    sentence = f"{who} has made no progress for {duration}"
    if process.phase:
        sentence += f" in the phase {process.phase!r}"
    return f"{sentence}, at step {process.step}."


def _different_calls(group: Sequence[Examined]) -> str:
    """Return a sentence if one rank waits in a Guard call and another rank in a collective.

    In this situation, neither call will ever return. In any other situation, return "".
    """
    in_guard = next((process for process in group if call_of_guard(process) is not None), None)
    in_collective = next(
        (process for process in group if collective_called(process) is not None), None
    )
    if in_guard is None or in_collective is None:
        return ""
    return (
        f"Rank {in_guard.rank} waits for the others in {call_of_guard(in_guard)}, and rank"
        f" {in_collective.rank} is in {collective_called(in_collective)}: all ranks must make the"
        " same guard calls in the same order (H116)."
    )


def _subject(blame: _Blame) -> str:
    """Return the subject of the diagnosis's last sentence, which is about the blamed process."""
    process = blame.process
    is_noticed = process.pid == blame.noticed.pid
    is_odd_one = (
        blame.odd_one_out is not None and process.rank == blame.odd_one_out and not blame.in_worker
    )
    # "It" refers to the process named last in the previous sentences.
    if not blame.gone_ranks and (is_noticed or is_odd_one):
        return "It"
    return f"{'Loader worker' if blame.in_worker else 'Process'} {process.pid}"
