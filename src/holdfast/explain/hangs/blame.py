"""Find the process and the line of code that are to blame for a hang.

This module answers three questions in turn: Which rank are the other ranks waiting for? Is that
rank waiting for a loader worker? And how does the blamed process hang (see ``classification``)?

All functions are pure: their results depend only on the samples in `ExaminedProcess`.
``supervise`` inspects the processes and decides when one of them has made no progress for too long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from holdfast.core.text import capitalized, listed
from holdfast.explain.certainty import Certainty, rank_of
from holdfast.explain.evidence import Frame
from holdfast.explain.hangs.classification import (
    HangKind,
    ProcessHang,
    classify_process,
    is_stopped,
)
from holdfast.explain.hangs.frames import (
    find_collective_call,
    find_guard_call,
    frame_to_show,
    is_idle_worker,
    is_in_backward,
    is_in_worker_loop,
    short_place,
    uses_holdfast_loader,
    waits_for_workers,
)
from holdfast.explain.hangs.process_samples import ExaminedProcess, clean_name

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
# How many ranks a sentence lists.
_MAX_NAMES = 8
# The values of `ThreadSample.waits` for an idle loader worker.
_IDLE_WAITS = ("futex", "poll", "pipe read", "socket", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class HangDiagnosis:
    """The explanation of a hang: the process to blame, and where and how it hangs."""

    # How the blamed process hangs.
    kind: HangKind
    # How certain the diagnosis is.
    certainty: Certainty
    # The process to blame.
    process: ExaminedProcess
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
    may_recover: bool
    # The diagnosis in words.
    sentence: str
    # The part of `sentence` that explains the lack of progress, without stating it.
    explanation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _OddOneOut:
    """The process to examine, and how it differs from the others."""

    process: ExaminedProcess
    # The rank that the others wait for, or None if there is no such rank.
    rank: int | None = None
    # What is known about the ranks, as sentences; empty if they do not differ.
    words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blame:
    """The blamed process, and the processes with which it was compared."""

    # The process that exceeded its time limit without progress.
    noticed: ExaminedProcess
    # The processes that train together and still exist.
    group: tuple[ExaminedProcess, ...]
    # The process that was chosen from the group, and how it differs from the others.
    odd: _OddOneOut
    # The process to blame.
    process: ExaminedProcess
    # How the blamed process hangs.
    hang: ProcessHang
    # Whether the blamed process is a loader worker.
    in_worker: bool = False


def diagnose_hang(
    processes: Sequence[ExaminedProcess], suspect: int, *, gone_ranks: Sequence[int] = ()
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
    odd = _find_odd_one_out(group, noticed, gone_ranks)
    trainer = odd.process
    blame = _Blame(
        noticed=noticed,
        group=group,
        odd=odd,
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
        odd_one_out=odd.rank,
        moving=blame.hang.moving,
        starved=blame.hang.starved,
        may_recover=waits_for_loader and uses_holdfast_loader(trainer),
        sentence=f"{_lack_of_progress(noticed)} {explanation}",
        explanation=explanation,
    )


# --- Which rank is the odd one out ----------------------------------------------------------------


def _find_odd_one_out(
    group: Sequence[ExaminedProcess], noticed: ExaminedProcess, gone_ranks: Sequence[int]
) -> _OddOneOut:
    """Return the process to examine, and how it differs from the others.

    If a rank has ended and the process that exceeded its time limit waits in a collective, it waits
    for that rank. Nothing is said about a process whose stack is unknown, except its step.
    """
    gone = f"{_ranks_with_verb(gone_ranks)} ended." if gone_ranks else ""
    hang = classify_process(noticed, group_size=len(group) + len(gone_ranks))
    if gone_ranks and hang.kind == "collective":
        return _OddOneOut(
            process=noticed,
            rank=gone_ranks[0],
            words=f"{gone} The collective cannot complete without all ranks.",
        )
    odd = _find_difference(group) if len(group) > 1 else None
    if odd is None:
        return _OddOneOut(process=noticed, words=gone)
    words = [gone, odd.words]
    if _steps_differ(group):
        words.append(_steps_in_words(group))
    return replace(odd, words=" ".join(filter(None, words)))


def _find_difference(group: Sequence[ExaminedProcess]) -> _OddOneOut | None:
    """Return the process that differs from the others, or None if they do not differ."""
    in_collective, outside, unknown = _split_by_collective(group)
    if in_collective and outside:
        # The ranks in a collective wait for the ranks outside it. Among the latter, blame the rank
        # with the fewest steps and then the rank that has made no progress for the longest time.
        odd = min(outside, key=lambda process: (process.step, -process.seconds))
        who = _names_with_verb(outside)
        others = _names_with_verb(in_collective)
        words = f"{who} in no collective, while {others} waiting in one."
        return _OddOneOut(process=odd, rank=odd.rank, words=_with_unknown(words, unknown))
    if in_collective and unknown:
        words = _with_unknown("", unknown)
        behind = _find_rank_behind(group)
        return replace(behind, words=f"{behind.words} {words}") if behind else None
    if in_collective:
        return _odd_one_among_collectives(group)
    return _odd_one_by_phase(group)


def _split_by_collective(
    group: Sequence[ExaminedProcess],
) -> tuple[list[ExaminedProcess], list[ExaminedProcess], list[ExaminedProcess]]:
    """Split a group into processes in a collective, other processes, and those without a stack.

    A process that is stopped is not in a collective, whatever its stack.
    """
    in_collective = []
    outside = []
    unknown = []
    for process in group:
        if classify_process(process, group_size=len(group)).kind == "collective":
            in_collective.append(process)
        elif process.newest.main_thread.frames or is_stopped(process):
            outside.append(process)
        else:
            unknown.append(process)
    return in_collective, outside, unknown


def _find_rank_behind(group: Sequence[ExaminedProcess]) -> _OddOneOut | None:
    """Return the process with the fewest steps, or None if all have completed as many."""
    if not _steps_differ(group):
        return None
    odd = min(group, key=lambda process: process.step)
    return _OddOneOut(
        process=odd, rank=odd.rank, words=f"{_names_with_verb([odd])} behind the others."
    )


def _odd_one_among_collectives(group: Sequence[ExaminedProcess]) -> _OddOneOut | None:
    """Return the process that the others wait for if all processes wait in collectives.

    This is a process that is behind the others or waits in a different collective. Return None if
    there is no such process.
    """
    in_guard = [process for process in group if find_guard_call(process) is not None]
    if 0 < len(in_guard) <= len(group) / 2:
        return _OddOneOut(process=in_guard[0], rank=in_guard[0].rank)
    behind = _find_rank_behind(group)
    if behind is not None:
        return behind
    rare = _processes_at_rarest_line(group)
    if len(rare) == len(group):
        # All lines are equally rare, for example with two ranks. Blame a rank that called a
        # collective explicitly, not in the backward pass.
        rare = [process for process in group if not is_in_backward(process)]
    if not 0 < len(rare) < len(group):
        return None
    words = f"{_names_with_verb(rare)} waiting in a collective at another line than the others."
    return _OddOneOut(process=rare[0], rank=rare[0].rank, words=words)


def _processes_at_rarest_line(group: Sequence[ExaminedProcess]) -> list[ExaminedProcess]:
    """Return the processes at a line of user code at which as few processes are as at any other."""
    counts = Counter(_user_line(process) for process in group)
    rarest = min(counts.values())
    return [process for process in group if counts[_user_line(process)] == rarest]


def _odd_one_by_phase(group: Sequence[ExaminedProcess]) -> _OddOneOut | None:
    """Return a process in the rarest phase, or None.

    Return None if all processes are in the same phase, or if the stack of any process is known.
    """
    if any(process.newest.main_thread.frames for process in group):
        return None
    counts = Counter(process.phase for process in group)
    if len(counts) == 1:
        return None
    odd = min(group, key=lambda process: (counts[process.phase], process.step))
    words = f"{_names_with_verb([odd])} in another phase than the others."
    return _OddOneOut(process=odd, rank=odd.rank, words=words)


# --- Ranks in words ---


def _name(process: ExaminedProcess) -> str:
    """Return a name such as ``"rank 1 (process 4711)"``, or ``"process 4711"`` without a rank."""
    if process.rank is None:
        return f"process {process.pid}"
    return f"rank {process.rank} (process {process.pid})"


def _names_with_verb(processes: Sequence[ExaminedProcess]) -> str:
    """Return processes with a verb, such as ``"rank 1 is"`` or ``"ranks 0 and 2 are"``."""
    numbers = sorted(process.rank for process in processes if process.rank is not None)
    noun = "rank"
    if len(numbers) < len(processes):
        numbers = sorted(process.pid for process in processes)
        noun = "process"
    if len(numbers) == 1:
        return f"{noun} {numbers[0]} is"
    plural = "processes" if noun == "process" else "ranks"
    return f"{plural} {listed(numbers, most=_MAX_NAMES)} are"


def _ranks_with_verb(ranks: Sequence[int]) -> str:
    """Return ranks with a verb, such as ``"Rank 1 has"`` or ``"Ranks 1, 2 have"``."""
    if len(ranks) == 1:
        return f"Rank {ranks[0]} has"
    return f"Ranks {listed(ranks, most=_MAX_NAMES)} have"


def _steps_in_words(group: Sequence[ExaminedProcess]) -> str:
    """Return a sentence with the step of each process."""
    numbers = [process.pid if process.rank is None else process.rank for process in group]
    steps = [f"{number}: {process.step}" for number, process in zip(numbers, group, strict=True)]
    key = "process" if any(process.rank is None for process in group) else "rank"
    return f"Steps by {key}: {listed(steps, most=_MAX_NAMES)}."


def _with_unknown(words: str, unknown: Sequence[ExaminedProcess]) -> str:
    """Add a sentence about the processes whose stacks are unknown."""
    if not unknown:
        return words
    sentence = f"The stacks of {listed([_name(process) for process in unknown])} are not known."
    return f"{words} {sentence}".strip()


def _user_line(process: ExaminedProcess) -> tuple[str, int]:
    """Return the file and line of user code that a process is executing; ("", 0) if unknown."""
    frame = frame_to_show(process.newest.main_thread.frames)
    return ("", 0) if frame is None else (frame.file, frame.line)


def _steps_differ(group: Iterable[ExaminedProcess]) -> bool:
    return len({process.step for process in group}) > 1


# --- Whether it waits for another process ---------------------------------------------------------


def _blame_loader_worker(blame: _Blame, processes: Sequence[ExaminedProcess]) -> _Blame:
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
        frame=frame_to_show(trainer.newest.main_thread.frames),
        activity="waits for a batch that no worker is preparing",
    )
    return replace(blame, hang=lost_batch)


def _find_stuck_worker(
    processes: Sequence[ExaminedProcess], trainer: ExaminedProcess
) -> ExaminedProcess | None:
    """Return the busy loader worker to blame, or None if no worker is busy.

    A stopped worker is preferred to a blocked worker, and a blocked worker to one that computes.
    """
    workers = [process for process in processes if _is_worker_of(process, trainer)]
    busy = [worker for worker in workers if _is_busy(worker)]
    if not busy and not any(worker.newest.main_thread.frames for worker in workers):
        busy = [worker for worker in workers if worker.newest.main_thread.waits not in _IDLE_WAITS]
    return min(busy, key=_order_of_suspicion, default=None)


def _is_worker_of(process: ExaminedProcess, trainer: ExaminedProcess) -> bool:
    """Return whether a process is a loader worker that the trainer started."""
    if process.ppid != trainer.pid:
        return False
    return process.role == "loader worker" or is_in_worker_loop(process.newest.main_thread.frames)


def _is_busy(worker: ExaminedProcess) -> bool:
    """Return whether a loader worker is stopped, or its stack shows that it is not idle."""
    if is_stopped(worker):
        return True
    return bool(worker.newest.main_thread.frames) and not is_idle_worker(worker)


def _order_of_suspicion(worker: ExaminedProcess) -> tuple[int, int]:
    """Return a sort key that puts stopped workers first, then blocked, then computing workers."""
    hang = classify_process(worker, group_size=1)
    if hang.kind == "stopped":
        return 0, rank_of(hang.certainty)
    return (2 if hang.moving else 1), rank_of(hang.certainty)


def _excuse_wait_for_busy_child(blame: _Blame, processes: Sequence[ExaminedProcess]) -> _Blame:
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


def _work_of_descendants(processes: Iterable[ExaminedProcess], ancestor: ExaminedProcess) -> float:
    """Return the number of CPUs that all descendants of a process use or wait for in total.

    A descendant that reads or writes a lot of data is counted as using one more CPU.
    """
    children: dict[int, list[ExaminedProcess]] = {}
    for process in processes:
        children.setdefault(process.ppid, []).append(process)
    share = 0.0
    pending = list(children.get(ancestor.pid, ()))
    while pending:
        descendant = pending.pop()
        share += descendant.cpu_share
        main = descendant.newest.main_thread
        if main.waits == "running":
            share += descendant.cpu_wait_share_of(main.tid)
        if descendant.io_rate > _BUSY_BYTES_PER_SECOND:
            share += 1.0
        pending += children.get(descendant.pid, ())
    return share


# --- The diagnosis in words -----------------------------------------------------------------------


def describe_frame(frame: Frame | None) -> str:
    """Return a frame as ``file:line in function`` without control characters; "" for None."""
    if frame is None:
        return ""
    return f"{clean_name(frame.file)}:{frame.line} in {clean_name(frame.function)}"


def _explain(blame: _Blame) -> str:
    """Return what is known about the cause as a paragraph.

    The paragraph follows a sentence about the process that exceeded its time limit.
    """
    sentences = []
    if blame.odd.words:
        sentences.append(capitalized(blame.odd.words))
    different_calls = _different_calls(blame.group)
    if different_calls:
        sentences.append(different_calls)
    where = "" if blame.hang.frame is None else f" at {short_place(blame.hang.frame)}"
    # "It" is the process named in the sentence before this paragraph.
    subject = (
        "It"
        if blame.process is blame.noticed and not sentences
        else _subject_of_last_sentence(blame)
    )
    sentences.append(f"{subject} {blame.hang.activity}{where}.")
    return " ".join(sentences)


def _lack_of_progress(process: ExaminedProcess) -> str:
    """Return a sentence that says for how long, and at which step, a process made no progress."""
    who = capitalized(_name(process))
    digits = 0 if process.seconds >= 10 else 1
    duration = f"{process.seconds:.{digits}f} s"
    if not process.phase and not process.step:
        # The process records neither its phase nor its steps, so only its activity was observed.
        return f"{who} has shown no progress for {duration}."
    sentence = f"{who} has made no progress for {duration}"
    if process.phase:
        sentence += f" in the phase {process.phase!r}"
    return f"{sentence}, at step {process.step}."


def _different_calls(group: Sequence[ExaminedProcess]) -> str:
    """Return a sentence if one rank waits in a Guard call and another rank in a collective.

    In this situation, neither call will ever return. In any other situation, return "".
    """
    in_guard = next((process for process in group if find_guard_call(process) is not None), None)
    in_collective = next(
        (process for process in group if find_collective_call(process) is not None), None
    )
    if in_guard is None or in_collective is None:
        return ""
    guard_call = find_guard_call(in_guard)
    collective = find_collective_call(in_collective)
    return (
        f"{capitalized(_name(in_guard))} waits for the others in {guard_call}, and"
        f" {_name(in_collective)} is in {collective}: all ranks must make the same guard calls in"
        " the same order (H116)."
    )


def _subject_of_last_sentence(blame: _Blame) -> str:
    """Return the subject of the diagnosis's last sentence, which is about the blamed process."""
    if not blame.in_worker:
        return capitalized(_name(blame.process))
    owner = "" if blame.odd.process.rank is None else f" of rank {blame.odd.process.rank}"
    return f"Loader worker {blame.process.pid}{owner}"
