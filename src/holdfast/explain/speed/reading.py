"""Read what was recorded about the speed of an attempt of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.core.events.event import Event
from holdfast.explain.speed.rules import find_causes
from holdfast.explain.speed.time_use import RankTimes, Resources, SlowRank, StackSamples, TimeUse
from holdfast.explain.speed_finding import SpeedFinding
from holdfast.recorder.progress import LoopTimes, read_board
from holdfast.recorder.reader import read_events
from holdfast.recorder.run_files import BOARD_FILE, SUPERVISOR_FOLDER, ProcessInfo, read_processes


def judge_speed_of_attempt(run: Path, attempt: int) -> tuple[SpeedFinding, ...]:
    """Return why an attempt of a run is slow, which may still be running.

    Recordings that cannot be read are left out.

    Args:
        run: A run directory of `holdfast run`.
        attempt: The number of the attempt, counted from 0.
    """
    boards = []
    events: list[Event] = []
    with suppress(HoldfastError, OSError, ValueError):
        events = read_events(run / SUPERVISOR_FOLDER)
    with suppress(OSError):
        for folder, info in read_processes(run):
            if info.attempt == attempt and info.role == "trainer":
                with suppress(HoldfastError, OSError):
                    standing = read_board(folder / BOARD_FILE)
                    boards.append((info, None if standing is None else standing.loop))
    return find_causes(collect_time_use(boards, events, attempt))


def collect_time_use(
    boards: Iterable[tuple[ProcessInfo, LoopTimes | None]], events: Sequence[Event], attempt: int
) -> TimeUse:
    """Return what was recorded about the speed of an attempt.

    Args:
        boards: The trainers of the attempt with what their boards show.
        events: The events of the supervisor, and those of Guards if they are known.
        attempt: The number of the attempt.
    """
    # If a rank has had several processes, the one with most steps counts.
    loops: dict[int, LoopTimes] = {}
    for info, loop in boards:
        rank = info.rank or 0
        if loop is not None and (rank not in loops or loop.steps > loops[rank].steps):
            loops[rank] = loop
    return TimeUse(
        ranks=tuple(RankTimes(rank=rank, loop=loops[rank]) for rank in sorted(loops)),
        resources=_parse_resources(_newest(events, "resources_used", attempt)),
        stacks=_parse_stack_samples(_newest(events, "stacks_sampled", attempt)),
        slow_rank=_find_slow_rank_of_guard(events),
    )


def _newest(events: Iterable[Event], kind: str, attempt: int) -> Mapping[str, Any]:
    """Return the data of the newest event of a kind in an attempt; empty if there is none."""
    newest: Mapping[str, Any] = {}
    for event in events:
        if event.kind == kind and event.data.get("attempt") == attempt:
            newest = event.data
    return newest


def _parse_resources(data: Mapping[str, Any]) -> Resources | None:
    """Return the recorded use of resources, or None if it is missing or damaged."""
    if not all(_is_number(data.get(name)) for name in ("cpus", "cpus_wanted", "workers")):
        return None
    fields = Resources.__dataclass_fields__
    values = {name: data[name] for name in fields if _is_number(data.get(name))}
    return Resources(**values)


def _parse_stack_samples(data: Mapping[str, Any]) -> StackSamples | None:
    """Return the recorded stack samples, or None if they are missing or damaged."""
    counts = [data.get(name) for name in ("samples", "in_python", "at_place")]
    if not all(isinstance(count, int) and count >= 0 for count in counts) or not counts[0]:
        return None
    samples, in_python, at_place = counts
    return StackSamples(
        samples=samples,  # type: ignore[arg-type] # checked above
        in_python=in_python,  # type: ignore[arg-type]
        place=str(data.get("place") or ""),
        at_place=at_place,  # type: ignore[arg-type]
    )


def _find_slow_rank_of_guard(events: Iterable[Event]) -> SlowRank | None:
    """Return the rank that a Guard found slow in its newest epoch, or None."""
    newest = None
    for event in events:
        if event.kind == "rank_is_slow":
            newest = event.data
    if newest is None or type(newest.get("rank")) is not int:
        return None
    numbers = [newest.get(name) for name in ("seconds_a_step", "of_others", "share")]
    if not all(_is_number(number) for number in numbers):
        return None
    seconds, others_seconds, share = (float(str(number)) for number in numbers)
    return SlowRank(
        rank=newest["rank"],
        where=str(newest.get("where") or ""),
        seconds=seconds,
        others_seconds=others_seconds,
        share=min(max(share, 0.0), 1.0),
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
