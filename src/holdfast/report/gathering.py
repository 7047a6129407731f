"""From a run directory to one snapshot of everything that was recorded.

What the page is drawn from.

Tolerant and bounded: a damaged, missing or unreadable file leaves a sentence in
    `RunSnapshot.problems` and no gap
elsewhere; curves are thinned one process after the other, and events, stacks and output are cut.
"""

from __future__ import annotations

import contextlib
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from holdfast.checkpoint.manifest import read_manifest
from holdfast.checkpoint.store import Store
from holdfast.core.errors import CheckpointError, HoldfastError
from holdfast.core.files import opened
from holdfast.core.text import sanitise
from holdfast.recorder.black_box import STEPS_FILE
from holdfast.recorder.history import NAMES, read_history
from holdfast.recorder.progress import Phase, Standing, read_board
from holdfast.recorder.reader import not_recorded_any_more
from holdfast.recorder.ring import read_ring
from holdfast.recorder.run_files import (
    BOARD_FILE,
    FAULTHANDLER_FILE,
    OUTPUT_FILE,
    PROCESSES_FOLDER,
    SAMPLES_FILE,
    SETTINGS_FILE,
    STACKS_FOLDER,
    SUPERVISED_FILE,
    read_optimizers,
)
from holdfast.recorder.scalars import SCALARS_FILE, Scalar, scalars_of
from holdfast.recorder.start import START_FILE
from holdfast.report import series
from holdfast.report.images import read_images
from holdfast.report.run_follower import RunFollower
from holdfast.report.run_snapshot import (
    CheckpointSeen,
    Lane,
    ProcessSnapshot,
    RunSnapshot,
    phase_seen,
)
from holdfast.report.sources import CHECKPOINTS_FOLDER, EventSeen, Source, find_sources, read_json
from holdfast.report.verdicts import verdict_of

# What a browser draws and a person reads. 48 curves of 2000 points in each of seven panels are some
# 10 MB of JSON.
_MOST_LANES = 48
_MOST_POINTS_IN_ALL = 48 * series.MOST_POINTS // 2
_FEWEST_POINTS = 200
_MOST_EVENTS_OF_A_KIND = 100
_MOST_KINDS = 100
_MOST_STACKS = 60
_MOST_STACK_BYTES = 64 << 10
_OUTPUT_BYTES = 32 << 10
_LONGEST_STEP = 1e7  # seconds, a third of a year: a longer one is damage
_T = TypeVar("_T")


class _Reading:
    """Read parts of a run; what fails is noted and read as empty."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.validated: dict[str, list[Scalar]] = {}  # by the label of the guard
        self.settings: dict[str, Any] = {}

    def listed(self, read: Callable[[Path], Iterable[_T]], path: Path) -> list[_T]:
        try:
            return list(read(path))
        except (HoldfastError, OSError, ValueError, TypeError, struct.error) as error:
            what = error.what if isinstance(error, HoldfastError) else str(error)
            self.problems.append(sanitise(what, most=300))
            return []

    def note_lost(self, source: Source) -> None:
        words = "".join(self.listed(not_recorded_any_more, source.directory))
        self.problems += [f"of {source.label} {words}"] if words else []


def gather(run: Path) -> RunSnapshot:
    """Return all that is known of a run directory, of `holdfast run` or a guard, unfinished or
    damaged.
    """
    reading = _Reading()
    sources = reading.listed(find_sources, run)
    supervised = read_json(run / SUPERVISED_FILE)
    follower = RunFollower(run, steps=False)
    events = [
        EventSeen(source=news.source.label, event=each)
        for news in follower.new()
        for each in news.events
    ]
    events.sort(key=lambda seen: seen.event.unix_seconds)
    guards = [source for source in follower.sources if source.kind == "guard"]
    reading.problems += follower.problems.values()
    for seen in events:
        value, name = (seen.event.data.get(each) for each in ("loss", "name"))
        if seen.event.kind == "validated" and isinstance(value, float):
            scalar = Scalar(
                f"validation {name}", value, seen.event.global_step, None, seen.event.unix_seconds
            )
            reading.validated.setdefault(seen.source, []).append(scalar)
    start = supervised
    for source in (*sources, *guards):
        reading.settings |= read_json(source.directory / SETTINGS_FILE)
        start = start or read_json(source.directory / START_FILE)
    lanes: list[Lane] = []
    processes = _processes(sources, events, reading, lanes)
    lanes += _guard_lanes(guards, lanes, reading)
    resumed = Counter(seen.source for seen in events if seen.event.kind == "resumed")
    of_guards = {source.directory.parent.parent for source in guards}
    stores = {run, *of_guards}
    kept, left_out = _bounded(events)
    if len(lanes) > _MOST_LANES:
        reading.problems.append(
            f"curves of the newest {_MOST_LANES} of {len(lanes)} training processes are drawn"
        )
    return RunSnapshot(
        path=run,
        supervised=supervised,
        start=start,
        settings=reading.settings,
        attempt=max(
            [source.attempt for source in sources] if supervised else resumed.values(), default=0
        ),
        verdict=verdict_of(run, reading.problems),
        lanes=tuple(lanes[-_MOST_LANES:]),
        processes=tuple(processes),
        events=tuple(kept),
        left_out_events=left_out,
        checkpoints=tuple(
            each for store in sorted(stores) for each in reading.listed(_checkpoints, store)
        ),
        guards=tuple(sorted(of_guards)),
        images=tuple(read_images(sorted(stores), reading.problems)),
        stacks=tuple(_stacks(run, processes)),
        output="".join(reading.listed(lambda path: [_tail(path)], run / OUTPUT_FILE)),
        problems=tuple(dict.fromkeys(reading.problems)),
    )


def _processes(
    sources: list[Source], events: list[EventSeen], reading: _Reading, lanes: list[Lane]
) -> list[ProcessSnapshot]:
    """Return the observed processes; what they trained is added to `lanes`."""
    observed = [source for source in sources if source.info is not None]
    last = {each.source: each.event.unix_seconds for each in events}
    most = max(
        _FEWEST_POINTS, min(series.MOST_POINTS, _MOST_POINTS_IN_ALL // max(len(observed), 1))
    )
    found = []
    for source in observed:
        assert source.info is not None
        its = _lanes(source, source.directory / SAMPLES_FILE, reading, most)
        lane = its[0] if its else None
        lanes += its
        (standing,) = reading.listed(_board, source.directory) or [None]
        times = [
            time
            for time in (last.get(source.label), lane.ended if lane else None)
            if time is not None
        ]
        found.append(
            ProcessSnapshot(
                label=source.label,
                role=source.info.role,
                info=source.info,
                lane=lane,
                phase=phase_seen(standing, source.info.role),
                ended=max(times, default=None),
                spent=standing.spent if standing else (),
            )
        )
    ends = {
        f"{each.event.kind} {each.event.data.get('attempt')}": each.event.unix_seconds
        for each in events
    }
    trainers = [
        (seen.info.attempt, seen.phase) for seen in found if seen.info and seen.role == "trainer"
    ]
    # Nobody records when one ends: with its attempt, where all left in order
    for number, seen in enumerate(found):
        attempt = seen.info and seen.info.attempt
        if seen.role == "trainer" and {phase for each, phase in trainers if each == attempt} == {
            Phase.ENDING
        }:
            found[number] = replace(seen, ended=ends.get(f"attempt_ended {attempt}", seen.ended))
    return found


def _lanes(
    source: Source, path: Path, reading: _Reading, most: int = series.MOST_POINTS
) -> list[Lane]:
    """Return what a process recorded of steps, and in lanes that follow what is of one of
    several optimizers.
    """
    ring = next(iter(reading.listed(lambda path: [series.rows_of_ring(path)], path)), None)
    if ring is None or not len(ring):
        never = np.array([]), np.array([])
        logged = _logged(source, never, most, reading)
        return (
            [Lane(label=source.label, columns=logged, moments=never, rank=source.rank)]
            if logged
            else []
        )
    reading.note_lost(source)
    old = read_history(path).rows
    old = old[old["time"] < ring["time"][0]]
    rows, names = series.thinned(old, ring, most), read_optimizers(source.directory)
    whole = np.concatenate([old, ring])
    moments = whole["time"] / 1e9, whole["step"].astype(np.float64)
    counts, means = (
        whole[name][:, NAMES.index("seconds")].astype(np.float64) for name in ("finite", "mean")
    )
    took = np.clip(means, 0.0, _LONGEST_STEP) * counts if source.kind == "guard" else counts
    found = {"": series.columns(rows) | _logged(source, moments, most, reading)}
    for number, name in enumerate(names if len(names) > 1 else [], start=1):
        its = series.columns(rows[rows["optimizer"] == number])
        found[name] = {column: its[column] for column in series.OF_AN_OPTIMIZER if column in its}
        for column in series.OF_AN_OPTIMIZER:
            found[""].pop(column, None)
    begins = (old if len(old) else ring)[0]
    seconds = float(begins["mean"][NAMES.index("seconds")])
    begun = int(begins["time"]) / 1e9 - (seconds if 0 <= seconds < _LONGEST_STEP else 0.0)
    last, ended = int(ring["step"][-1]), int(ring["time"][-1]) / 1e9
    main = Lane(
        label=source.label,
        last_step=last,
        begun=begun,
        ended=ended,
        columns=found.pop(""),
        moments=moments,
        rank=source.rank,
        made=(counts, took),
        of_guard=source.kind == "guard",
    )
    return [
        main,
        *(
            replace(main, label=f"{source.label}, {name}", optimizer=name, begun=None, columns=its)
            for name, its in found.items()
        ),
    ]


def _logged(
    source: Source, moments: series.Moments, most: int, reading: _Reading
) -> dict[str, series.Series]:
    """Return the curves of what a process or a guard logged of its own."""
    scalars = scalars_of(records := reading.listed(read_ring, source.directory / SCALARS_FILE))
    own = len(scalars)
    scalars += reading.validated.get(source.label, [])
    if own and (lost := records[0].sequence - 1):
        gone = f"the logged values before step {scalars[0].step:,} are not recorded any more"
        reading.problems.append(
            f"of {source.label} {gone}: {lost:,} older records were overwritten"
        )
    found, names = (
        series.columns_of_scalars(scalars, moments, most),
        len({scalar.name for scalar in scalars}),
    )
    if names > len(found):
        reading.problems.append(
            f"of {source.label} the first {len(found)} of {names} logged names are drawn"
        )
    return found


def _guard_lanes(guards: list[Source], observed: list[Lane], reading: _Reading) -> list[Lane]:
    """Return what guards recorded of steps, as far as their processes were not observed to
    record the same.
    """
    known = {
        name for lane in observed for name in lane.columns if not name.startswith(series.LOGGED)
    }
    lanes = [
        lane for source in guards for lane in _lanes(source, source.directory / STEPS_FILE, reading)
    ]
    lanes = [
        replace(lane, columns={k: v for k, v in lane.columns.items() if k not in known})
        for lane in lanes
    ]
    return [lane for lane in lanes if lane.columns]


def _bounded(events: list[EventSeen]) -> tuple[list[EventSeen], dict[str, int]]:
    """Keep the first and last of each kind, so that a frequent kind does not hide a rare one."""
    by_kind: dict[str, list[int]] = {}
    for index, seen in enumerate(events):
        by_kind.setdefault(seen.event.kind, []).append(index)
    kept: set[int] = set()
    left_out: dict[str, int] = {}
    half = _MOST_EVENTS_OF_A_KIND // 2
    for number, (kind, indices) in enumerate(
        sorted(by_kind.items(), key=lambda pair: len(pair[1]))
    ):
        chosen = indices if len(indices) <= 2 * half else indices[:half] + indices[-half:]
        chosen = chosen if number < _MOST_KINDS else []
        kept.update(chosen)
        if len(chosen) < len(indices):
            left_out[kind] = len(indices) - len(chosen)
    return [events[index] for index in sorted(kept)], left_out


def _board(directory: Path) -> list[Standing | None]:
    return [read_board(directory / BOARD_FILE)]


def _checkpoints(run: Path) -> Iterator[CheckpointSeen]:
    store = Store(run / CHECKPOINTS_FOLDER)
    try:
        entries, damaged = store.entries(), store.damaged()
    except CheckpointError as error:
        yield CheckpointSeen(
            name=CHECKPOINTS_FOLDER, global_step=0, status=sanitise(error.what, most=200)
        )
        return
    for entry in entries:
        status, size, saved = "complete", None, None
        try:
            manifest = read_manifest(entry.path)
            size, saved = manifest.size_bytes(), manifest.unix_seconds
        except (HoldfastError, OSError, ValueError, KeyError, TypeError) as error:
            status = sanitise(error.what if isinstance(error, HoldfastError) else error, most=200)
        yield CheckpointSeen(
            name=entry.path.name,
            global_step=entry.global_step,
            status=status,
            size_bytes=size,
            saved=saved,
        )
    for entry in damaged:
        yield CheckpointSeen(
            name=entry.path.name, global_step=entry.global_step, status="damaged, moved aside"
        )


def _stacks(run: Path, processes: list[ProcessSnapshot]) -> Iterator[tuple[str, str]]:
    paths = sorted((run / STACKS_FOLDER).glob("*.txt"))[-_MOST_STACKS:]
    folders = [
        seen.info.folder
        for seen in processes
        if seen.info is not None and "/" not in seen.info.folder
    ]
    paths += [run / PROCESSES_FOLDER / folder / FAULTHANDLER_FILE for folder in folders][
        -_MOST_STACKS:
    ]
    for path in paths:
        with contextlib.suppress(OSError):
            if text := _tail(path, _MOST_STACK_BYTES).strip():
                yield sanitise(path.relative_to(run)), text


def _tail(path: Path, most: int = _OUTPUT_BYTES) -> str:
    """Return the end of a file, sanitised; a missing file is empty."""
    try:
        with opened(path) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - most))
            data = file.read(most)
    except FileNotFoundError:
        return ""
    text = data.decode("utf-8", "replace")
    if size > most:
        text = text.partition("\n")[2] or text
    return sanitise(_without_redrawn_lines(text), most=most, lines=True)


def _without_redrawn_lines(text: str) -> str:
    """Keep what a terminal would show of a progress bar.

    What follows the last carriage return of a line.
    """
    return "\n".join(
        line.rstrip("\r").rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n")
    )
