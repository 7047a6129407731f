"""The processes that a watchdog watches.

Which are there, which are judged, and for how long each stands still.

Their folders appear in the run directory as they start; of helpers that ended well only the newest
stay, since a long
run has thousands. Does not: decide what a hang is (``watchdog``).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from holdfast.core.errors import RunDirectoryError
from holdfast.core.files import make_folder, remove
from holdfast.recorder.black_box import EVENTS_FILE
from holdfast.recorder.progress import Phase, Standing, read_board
from holdfast.recorder.reader import read_events
from holdfast.recorder.run_files import (
    BOARD_FILE,
    FAULTHANDLER_FILE,
    PROCESS_FILE,
    PROCESSES_FOLDER,
    ProcessInfo,
    read_process_file,
)
from holdfast.supervise.process_tree import read_process
from holdfast.supervise.watch.limits import HangLimits, LearnedLimits, name_of

_REFRESH_SECONDS = 0.5
_MOST_ENDED = 64
_NOTHING_LOGGED = {PROCESS_FILE, BOARD_FILE, FAULTHANDLER_FILE, EVENTS_FILE}
_GOOD_END = "torch_imported", "environments_imported", "exiting"
_TICK_NS = 1_000_000_000  # file times are as coarse as 10 ms, some file systems' 1 s
_NAME = re.compile(r"\d{1,20}-\d{1,20}")
_UNKNOWN = Standing(
    pid=0, phase=Phase.STARTING, since_seconds=0.0, progress=0, step=0, micro_step=0
)


class Watched:
    """One observed process."""

    def __init__(self, folder: Path, info: ProcessInfo, limits: HangLimits) -> None:
        self.folder, self.info = folder, info
        self.alive = True
        self.stopped_since: float | None = None
        """When it was first seen to be stopped by a signal, on the clock of `refresh`."""
        self.standing = _UNKNOWN
        """What its board shows."""
        self._learned = LearnedLimits(limits)
        self._seen = self._counted_from = self._next_age = 0.0
        self._written = 0

    @property
    def phase_name(self) -> str:
        """Return in words what it does."""
        return name_of(self.standing.phase)

    def look(self, now: float) -> None:
        """Read its board, and learn from what has ended since the last look."""
        standing = None
        # Written by a newer holdfast: nothing is known, and nothing is judged
        with suppress(RunDirectoryError):
            standing = read_board(self.folder / BOARD_FILE)
        before = self.standing
        if standing is None or standing.progress == before.progress:
            self._seen = self._seen if standing is None else now
            return
        if before is not _UNKNOWN:
            # What was passed over since is not known; what was seen last took at least until then.
            until = (
                standing.since_seconds if standing.progress == before.progress + 1 else self._seen
            )
            began = max(before.since_seconds, self._counted_from)
            self._learned.ended(before.phase, max(0.0, until - began), now)
        self.standing, self._seen, self._next_age = standing, now, 0.0

    def refresh(self, now: float) -> None:
        """Find out whether it is there and runs, and read again what it says of itself if that
        is new.
        """
        found = read_process(self.info.pid)
        self.alive = (
            found is not None and found.ticks == self.info.ticks and found.state not in "ZX"
        )
        stopped = found is not None and found.state == "T"
        self.stopped_since = (self.stopped_since or now) if stopped else None
        with suppress(OSError):
            written = os.stat(self.folder / PROCESS_FILE).st_mtime_ns  # noqa: PTH116 - often
            if written != self._written:
                info = read_process_file(self.folder / PROCESS_FILE)
                self.info = (
                    info if info is not None and info.folder == self.folder.name else self.info
                )
                self._written = written

    def count_from(self, now: float) -> None:
        """Do not count the time until now: the process could not move."""
        self._counted_from, self._next_age = now, 0.0

    def age(self, now: float) -> float:
        """Return for how long nothing has moved, in seconds.

        0 if it has no board that can be read.
        """
        known = self.standing is not _UNKNOWN
        return now - max(self.standing.since_seconds, self._counted_from) if known else 0.0

    def limit(self) -> float:
        """Return how long its phase may stand still, in seconds."""
        return self._learned.limit(self.standing.phase)

    def moves(self, now: float) -> bool:
        """Return whether it is known to be within its limit."""
        return self.standing is not _UNKNOWN and self.age(now) <= self.limit()

    def left(self, now: float) -> float:
        """Return the seconds until a closer look is due.

        At the limit, and again each time that this has doubled.
        """
        return max(self.limit(), self._next_age) - self.age(now)

    def look_again(self, age: float) -> None:
        """Look closer again only when it has stood still for so long."""
        self._next_age = age

    def is_of_no_use(self) -> bool:
        """Return whether it has ended well and did not train, as far as it said.

        No verdict needs what it left.
        """
        info = self.info
        if info.role != "loader worker" and not (
            info.role == "other" and info.rank is None and info.torch is None
        ):
            return False
        with suppress(OSError, ValueError, RunDirectoryError), os.scandir(self.folder) as found:
            sizes = {each.name: each.stat().st_size for each in found}
            board = read_board(self.folder / BOARD_FILE)
            return (
                board is not None
                and board.phase is Phase.ENDING  # else it was killed, or left past its interpreter
                and sizes.keys() <= _NOTHING_LOGGED
                and not sizes.get(FAULTHANDLER_FILE)
                and all(
                    each.kind in _GOOD_END and not each.data.get("status")
                    for each in read_events(self.folder)
                )
            )
        return False

    def is_of_same_group(self, other: Watched) -> bool:
        """Return whether two processes are ranks of one training, and so wait for each other."""
        return (
            self.info.rank is not None and other.info.rank is not None and self.info.world_size != 1
        )


class WatchedProcesses:
    """All observed processes of one attempt."""

    def __init__(self, run: Path, attempt: int, limits: HangLimits) -> None:
        self._folder, self._attempt, self._limits = run / PROCESSES_FOLDER, attempt, limits
        self.alive: list[Watched] = []
        """All that live."""
        self.judged: list[Watched] = []
        """Those whose progress counts."""
        self._known: set[str] = set()
        self._ended: list[Path] = []
        self._changed = 0
        self._ranks: set[tuple[int, int]] = set()
        self._refreshed = float("-inf")

    def look(self, now: float) -> None:
        """Find new processes and drop those that have ended, now and then.

        Read the boards of those that train.
        """
        if now - self._refreshed >= _REFRESH_SECONDS or now < self._refreshed:
            self._refreshed = now
            self.alive += self._new()
            for process in self.alive:
                process.refresh(now)
            self._ended += [
                each.folder for each in self.alive if not each.alive and each.is_of_no_use()
            ]
            self.alive = [process for process in self.alive if process.alive]
            self._remove_ended()
            self.judged = self._choose()
            self._ranks |= {
                (each.info.ppid, each.info.rank)
                for each in self.judged
                if each.info.rank is not None
            }
        for process in self.judged:
            process.look(now)

    def _remove_ended(self) -> None:
        for folder in self._ended[:-_MOST_ENDED]:
            self._ended.remove(folder)
            with suppress(OSError):
                # No link that leads out of the run directory
                make_folder(self._folder.parent, self._folder.name)
                remove(folder)
                self._known -= set() if folder.exists() else {folder.name}

    def _new(self) -> Iterator[Watched]:
        for name in self._new_names():
            info = read_process_file(self._folder / name / PROCESS_FILE)
            if info is None:
                self._changed = 0  # not written yet: look again
                continue
            self._known.add(name)
            if info.attempt == self._attempt and info.folder == name:
                yield Watched(self._folder / name, info, self._limits)

    def _new_names(self) -> list[str]:
        """Return folders that were not there before."""
        with suppress(OSError):
            changed = self._folder.stat().st_mtime_ns
            if changed == self._changed:
                return []
            # A folder that is made within the same tick of the clock leaves the time as it is: look
            # once more.
            self._changed = changed if time.time_ns() - changed > _TICK_NS else 0
            with os.scandir(self._folder) as found:
                return [
                    each.name
                    for each in found
                    if _NAME.fullmatch(each.name) and each.name not in self._known
                ]
        return []

    def _choose(self) -> list[Watched]:
        """Return those whose progress counts.

        Trainers, each rank, and at first the one that was started first.
        """
        able = [process for process in self.alive if process.info.role in ("trainer", "other")]
        trainers = [process for process in able if process.info.role == "trainer"]
        ranks = [
            process
            for process in able
            if process.info.rank is not None and process.info.torch is not None
        ]
        if trainers or ranks:
            return list(dict.fromkeys([*trainers, *ranks]))  # what else there is may wait for these
        pids = {process.info.pid for process in able}
        tops = [process for process in able if process.info.ppid not in pids]
        return sorted(tops, key=lambda each: each.info.started)[:1]

    def gone_ranks(self, process: Watched) -> list[int]:
        """Return the ranks of a process's group that were there and are not any more."""
        here = {each.info.rank for each in self.alive}
        if process.info.rank is None:
            return []
        return sorted(
            rank for ppid, rank in self._ranks if ppid == process.info.ppid and rank not in here
        )
