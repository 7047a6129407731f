"""Read all recordings of a run into a `GatheredRun`, from which its page is rendered.

If a file is damaged, missing or unreadable, a sentence is added to `GatheredRun.problems`, and
everything else is still shown. The amount of data is limited: this module limits events, ``lanes``
limits curves, and ``attachments`` limits texts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.recorder.progress import ProcessPhase, read_board
from holdfast.recorder.run_files import BOARD_FILE, SETTINGS_FILE, SUPERVISED_FILE
from holdfast.recorder.start import START_FILE
from holdfast.report.page.attachments import read_checkpoints, read_output, read_stacks
from holdfast.report.page.gathered_run import GatheredRun
from holdfast.report.page.images import read_images
from holdfast.report.page.lanes import (
    MAX_LANES,
    LaneReader,
    points_per_lane,
    validations,
    without_observed_curves,
)
from holdfast.report.problems import Problems
from holdfast.report.run_follower import RunFollower, events_in_time_order
from holdfast.report.run_snapshot import Lane, ProcessSnapshot, visible_phase
from holdfast.report.sources import RecordedEvent, RunSource, find_sources, read_json
from holdfast.report.verdicts import verdict_of

# Maximum number of shown events of the same kind. If there are more, the first and the last ones
# are shown.
_MAX_EVENTS_OF_A_KIND = 100
_MAX_KINDS = 100


def gather(run: Path) -> GatheredRun:
    """Return all data for the page of a run, which may be active or damaged.

    Args:
        run: A run directory of `holdfast run` or of a guard.
    """
    problems = Problems()
    sources = problems.read(find_sources, run) or []
    events, guards = _read_events(run, problems)
    supervised = read_json(run / SUPERVISED_FILE)

    observed = [source for source in sources if source.info is not None]
    reader = LaneReader(problems, validations(events))
    most_points = points_per_lane(len(observed))
    # For each process, the first lane covers the whole process, and lanes of its optimizers follow.
    lanes_of_process = {
        source.directory: reader.lanes_of(source, most_points) for source in observed
    }
    lanes = [lane for own_lanes in lanes_of_process.values() for lane in own_lanes]
    lanes_of_guards = [lane for guard in guards for lane in reader.lanes_of(guard)]
    lanes += without_observed_curves(lanes_of_guards, lanes)
    newest_events = {recorded.source: recorded.event.unix_seconds for recorded in events}
    processes = [
        _process(source, lanes_of_process[source.directory], newest_events, problems)
        for source in observed
    ]
    if len(lanes) > MAX_LANES:
        problems.add(
            f"only the curves of the newest {MAX_LANES} of {len(lanes)} training processes are"
            " drawn"
        )

    # A guard records in the subdirectory ``recorder/rank0`` of its run directory.
    guard_runs = {guard.directory.parent.parent for guard in guards}
    run_directories = sorted({run, *guard_runs})
    shown_events, left_out_events = _limit_events(events)
    return GatheredRun(
        path=run,
        start=supervised or _first_start([*sources, *guards]),
        settings=_settings([*sources, *guards]),
        attempt=_newest_attempt(sources, events, is_supervised=bool(supervised)),
        verdict=verdict_of(run, problems.sentences),
        lanes=tuple(lanes[-MAX_LANES:]),
        processes=tuple(_ended_with_their_attempts(processes, events)),
        events=tuple(shown_events),
        left_out_events=left_out_events,
        checkpoints=tuple(
            checkpoint
            for directory in run_directories
            for checkpoint in problems.read(read_checkpoints, directory) or []
        ),
        guards=tuple(sorted(guard_runs)),
        images=tuple(read_images(run_directories, problems.sentences)),
        stacks=tuple(read_stacks(run, [source.info for source in observed if source.info])),
        output=problems.read(read_output, run) or "",
        # This argument comes last, because evaluating the others may add sentences.
        problems=tuple(dict.fromkeys(problems.sentences)),
    )


def _read_events(run: Path, problems: Problems) -> tuple[list[RecordedEvent], list[RunSource]]:
    """Return the events of a run in chronological order, and the sources of its guards.

    A guard may have a run directory of its own, which is named in an event of its process.
    """
    follower = RunFollower(run, steps=False)
    events = events_in_time_order(follower.new())
    for sentence in follower.problems.values():
        problems.add(sentence)
    return events, [source for source in follower.sources if source.kind == "guard"]


# --- processes


def _process(
    source: RunSource,
    lanes: Sequence[Lane],
    newest_events: Mapping[str, float],
    problems: Problems,
) -> ProcessSnapshot:
    """Return the snapshot of an observed process.

    Args:
        source: The source with the recordings of the process.
        lanes: Lanes of the process. The first one covers the whole process.
        newest_events: Unix time of the newest event of each source, keyed by label.
        problems: Collects a sentence if the progress board cannot be read.
    """
    assert source.info is not None
    lane = lanes[0] if lanes else None
    standing = problems.read(read_board, source.directory / BOARD_FILE)
    signs = [newest_events.get(source.label), None if lane is None else lane.ended]
    return ProcessSnapshot(
        label=source.label,
        role=source.info.role,
        info=source.info,
        lane=lane,
        phase=visible_phase(standing, source.info.role),
        ended=max((time for time in signs if time is not None), default=None),
        spent=() if standing is None else standing.spent,
    )


def _ended_with_their_attempts(
    processes: Sequence[ProcessSnapshot], events: Sequence[RecordedEvent]
) -> Iterator[ProcessSnapshot]:
    """Yield the processes, with corrected end times of trainers that exited normally.

    Processes do not record their end. The time of the last record is too early, because the
    interpreter takes time to exit. If all trainers of an attempt exited normally, the end of the
    attempt is used as their end time.
    """
    ends = {
        str(recorded.event.data.get("attempt")): recorded.event.unix_seconds
        for recorded in events
        if recorded.event.kind == "attempt_ended"
    }
    phases: dict[str, set[ProcessPhase | None]] = {}
    for process in processes:
        if process.role == "trainer":
            phases.setdefault(_attempt(process), set()).add(process.phase)
    for process in processes:
        attempt = _attempt(process)
        exited_normally = process.role == "trainer" and phases[attempt] == {ProcessPhase.ENDING}
        if exited_normally and attempt in ends:
            yield replace(process, ended=ends[attempt])
        else:
            yield process


def _attempt(process: ProcessSnapshot) -> str:
    return "" if process.info is None else str(process.info.attempt)


# --- the start of the run


def _first_start(sources: Sequence[RunSource]) -> dict[str, Any]:
    """Return the start record of the first source that has written one; empty if none has."""
    for source in sources:
        start = read_json(source.directory / START_FILE)
        if start:
            return start
    return {}


def _settings(sources: Sequence[RunSource]) -> dict[str, Any]:
    """Return the merged settings of all sources; later sources override earlier ones."""
    settings: dict[str, Any] = {}
    for source in sources:
        settings |= read_json(source.directory / SETTINGS_FILE)
    return settings


def _newest_attempt(
    sources: Sequence[RunSource], events: Sequence[RecordedEvent], *, is_supervised: bool
) -> int:
    """Return the number of the newest attempt, counted from 0.

    Without a supervisor, each resume of a guard counts as an attempt.
    """
    if is_supervised:
        return max((source.attempt for source in sources), default=0)
    resumed = Counter(recorded.source for recorded in events if recorded.event.kind == "resumed")
    return max(resumed.values(), default=0)


# --- events


def _limit_events(
    events: Sequence[RecordedEvent],
) -> tuple[list[RecordedEvent], dict[str, int]]:
    """Return the events to show, and the number of omitted events of each kind.

    Of a frequent kind, only the first and the last events are shown, so that they do not crowd out
    rare kinds. If there are too many kinds, only the rarest ones are shown.
    """
    indices_by_kind: dict[str, list[int]] = {}
    for index, recorded in enumerate(events):
        indices_by_kind.setdefault(recorded.event.kind, []).append(index)
    rarest_first = sorted(indices_by_kind, key=lambda kind: len(indices_by_kind[kind]))

    shown: list[int] = []
    left_out: dict[str, int] = {}
    for number, kind in enumerate(rarest_first):
        indices = indices_by_kind[kind]
        shown_of_kind = _first_and_last(indices) if number < _MAX_KINDS else []
        shown += shown_of_kind
        if len(shown_of_kind) < len(indices):
            left_out[kind] = len(indices) - len(shown_of_kind)
    return [events[index] for index in sorted(shown)], left_out


def _first_and_last(indices: list[int]) -> list[int]:
    if len(indices) <= _MAX_EVENTS_OF_A_KIND:
        return indices
    half = _MAX_EVENTS_OF_A_KIND // 2
    return indices[:half] + indices[-half:]
