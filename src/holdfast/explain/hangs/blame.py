"""Which process and line are to blame when training stands still.

Pure, from stacks and facts of all processes.

Three questions in turn: which of several ranks is the odd one out; whether it waits for a loader's
    worker; and how
the process that is left stands still. Does not: look at processes (``supervise``), or decide what
    is too long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from holdfast.explain.evidence import Frame
from holdfast.explain.hangs.evidence import Examined, clean
from holdfast.explain.hangs.standing_still import (
    HangKind,
    How,
    call_of_guard,
    collective_called,
    has_own_loader,
    how_it_stands,
    is_idle_worker,
    is_in_backward,
    short,
    user_frame,
    waits_for_workers,
)

Remedy = Literal["wait", "continue", "restart", "end"]
"""``wait``: it may still finish. ``continue``: send SIGCONT to the blamed process.

``restart``: SIGTERM, so that a
guard saves if the loop still answers, then kill and start again. ``end``: the training is over and
    only its end
hangs, so kill it and do not start again.
"""

KINDS: tuple[HangKind, ...] = get_args(HangKind)
SIGNATURES_OF: dict[HangKind, str] = {kind: f"H{1401 + index}" for index, kind in enumerate(KINDS)}
_BYTES_A_SECOND = 65_536
_WORKING_SHARE = 0.2
"""A process that waits wakes up a few times a second and uses below 1 %; a fifth of a processor is
work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What a hang is."""

    kind: HangKind  # how the blamed process stands still
    confidence: float  # between 0 and 1
    process: Examined  # the one to blame
    frame: Frame | None  # its innermost frame of user code, else the innermost of all, or None
    odd_one_out: int | None  # rank that the others wait for, or None
    moving: bool  # whether the blamed process uses a processor or moves bytes
    heals: bool  # whether what waits is a loader of holdfast, which replaces its workers itself
    sentence: str  # all this in words


def diagnose_hang(
    processes: Sequence[Examined], suspect: int, *, gone_ranks: Sequence[int] = ()
) -> Diagnosis:
    """Say what stands still, where, and who is to blame.

    The pid `suspect` was over its limit, `gone_ranks` ended.
    """
    first = next(process for process in processes if process.pid == suspect)
    group = [process for process in processes if process.judged]
    blamed, odd_one_out = _odd_one_out(group, first, gone_ranks)
    how = how_it_stands(blamed, group=len(group) + len(gone_ranks))
    trainer, in_worker = blamed, False
    if how.kind != "stopped" and waits_for_workers(blamed):
        worker = _stuck_worker(processes, blamed)
        if worker is not None:
            blamed, how, in_worker = worker, how_it_stands(worker, group=1), True
        elif any(is_idle_worker(each) for each in processes if each.ppid == blamed.pid):
            frame = user_frame(blamed.last.main.frames)
            how = How("loader", 0.7, frame, "waits for a batch, and no worker makes one,")
    how = _with_children(how, processes, blamed)
    return Diagnosis(
        kind=how.kind,
        confidence=how.confidence,
        process=blamed,
        frame=how.frame,
        odd_one_out=odd_one_out,
        moving=how.moving,
        heals=(in_worker or how.kind == "loader") and has_own_loader(trainer),
        sentence=_sentence(group, first, blamed, how, odd_one_out, gone_ranks, in_worker=in_worker),
    )


def _odd_one_out(
    group: Sequence[Examined], first: Examined, gone: Sequence[int]
) -> tuple[Examined, int | None]:
    """Return the process whose standing still explains that of the others, and its rank if it is
    the odd one.
    """
    if gone:
        return first, gone[0]
    if len(group) < 2:
        return first, None
    hows = {process.pid: how_it_stands(process, group=len(group)) for process in group}
    in_collective = [process for process in group if hows[process.pid].kind == "collective"]
    outside = [process for process in group if hows[process.pid].kind != "collective"]
    if in_collective and outside:
        # Who waits for nobody, and has come least far, is what the others wait for.
        odd = min(outside, key=lambda process: (process.step, -process.seconds))
        return odd, odd.rank
    if in_collective:
        return _other_collective(group, first)
    known = any(process.last.main.frames for process in group)
    phases = Counter(process.phase for process in group)
    if not known and len(phases) > 1:
        rarest = min(group, key=lambda process: (phases[process.phase], process.step))
        return rarest, rarest.rank
    return first, None


def _other_collective(group: Sequence[Examined], first: Examined) -> tuple[Examined, int | None]:
    """All wait in a collective: find the one that is behind, or in another one than most."""
    in_guard = [process for process in group if call_of_guard(process) is not None]
    if 0 < len(in_guard) <= len(group) / 2:
        return in_guard[0], in_guard[0].rank
    if _steps_differ(group):
        behind = min(group, key=lambda process: process.step)
        return behind, behind.rank
    places = Counter(map(_place, group))
    rare = [process for process in group if places[_place(process)] == min(places.values())]
    # Two ranks in two places: one that calls a collective itself, beside backward's
    if len(rare) == len(group):
        rare = [process for process in group if not is_in_backward(process)]
    return (rare[0], rare[0].rank) if 0 < len(rare) < len(group) else (first, None)


def _place(process: Examined) -> tuple[str, int]:
    frame = user_frame(process.last.main.frames)
    return ("", 0) if frame is None else (frame.file, frame.line)


def _stuck_worker(processes: Sequence[Examined], trainer: Examined) -> Examined | None:
    """Return the loader worker that is at something, a blocked one before one that computes."""
    workers = [
        each
        for each in processes
        if each.ppid == trainer.pid
        and (
            each.role == "loader worker"
            or any("_worker_loop" in frame.function for frame in each.last.main.frames)
        )
    ]
    busy = [
        each
        for each in workers
        if each.last.state in "Tt" or (each.last.main.frames and not is_idle_worker(each))
    ]
    if not busy and not any(each.last.main.frames for each in workers):
        busy = [
            each
            for each in workers
            if each.last.main.waits not in ("futex", "poll", "pipe read", "socket", "")
        ]
    return min(busy, key=_how_surely_stuck, default=None)


def _how_surely_stuck(worker: Examined) -> tuple[int, float]:
    how = how_it_stands(worker, group=1)
    return (0 if how.kind == "stopped" else 2 if how.moving else 1, -how.confidence)


def _with_children(how: How, processes: Sequence[Examined], blamed: Examined) -> How:
    """Who waits for a process that works is slow, not stuck."""
    if how.kind not in ("process", "queue", "pipe", "socket"):
        return how
    families: dict[int, list[Examined]] = {}
    for each in processes:
        families.setdefault(each.ppid, []).append(each)
    todo, share = list(families.get(blamed.pid, ())), 0.0
    while todo:
        child = todo.pop()
        share += child.cpu_share + (1.0 if child.io_rate > _BYTES_A_SECOND else 0.0)
        todo += families.get(child.pid, ())
    if share < _WORKING_SHARE:
        return how
    return How("merely slow", 0.6, how.frame, "waits for a process that works", moving=True)


def _different_calls(group: Sequence[Examined]) -> str:
    """Return a sentence if one rank waits in a call of the guard and another in a collective.

    Neither will end.
    """
    in_guard = next((process for process in group if call_of_guard(process) is not None), None)
    in_collective = next(
        (process for process in group if collective_called(process) is not None), None
    )
    if in_guard is None or in_collective is None:
        return ""
    where = f"rank {in_collective.rank} is in {collective_called(in_collective)}"
    text = f" Rank {in_guard.rank} waits for the others in {call_of_guard(in_guard)}, and {where}:"
    return f"{text} all ranks make the same calls of the guard in the same order (H116)."


def describe_frame(frame: Frame | None) -> str:
    """Return ``file:line in function``, without control characters."""
    return "" if frame is None else f"{clean(frame.file)}:{frame.line} in {clean(frame.function)}"


def _steps_differ(group: Sequence[Examined]) -> bool:
    return len({process.step for process in group}) > 1


def _sentence(
    group: Sequence[Examined],
    first: Examined,
    blamed: Examined,
    how: How,
    odd: int | None,
    gone: Sequence[int],
    *,
    in_worker: bool,
) -> str:
    who = (
        f"Process {first.pid}" if first.rank is None else f"Rank {first.rank} (process {first.pid})"
    )
    text = f"{who} has made no progress for {first.seconds:.{0 if first.seconds >= 10 else 1}f} s"
    text += f" in the phase {first.phase!r}" if first.phase else ""
    # Who has no board does not say its steps
    text += f", at step {first.step}." if first.phase else "."
    if gone:
        text += f" Rank {', '.join(map(str, gone))} has ended, and the others wait for it."
    elif odd is not None:
        text += f" Rank {odd} is the odd one out: the others wait for it."
        if _steps_differ(group):
            text += (
                f" Steps of the ranks: {', '.join(f'{each.rank}: {each.step}' for each in group)}."
            )
    text += _different_calls(group)
    role = "Loader worker" if in_worker else "Process"
    is_last_named = blamed.pid == first.pid or (
        odd is not None and blamed.rank == odd and not in_worker
    )
    subject = f"{role} {blamed.pid}" if gone or not is_last_named else "It"
    where = "" if how.frame is None else f" at {short(how.frame)}"
    return f"{text} {subject} {how.doing}{where}."
