"""The processes that a watchdog watches, and how long each has gone without progress.

Each process creates a directory in the run directory when it starts. A long run may have thousands
of helper processes, so only the newest directories of helpers that ended well are kept.

``watchdog`` decides whether a lack of progress is a hang.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from holdfast.core.errors import RunDirectoryError
from holdfast.core.files import make_folder, remove
from holdfast.recorder.black_box import EVENTS_FILE
from holdfast.recorder.progress import ProcessPhase, Standing, read_board
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
from holdfast.supervise.watch.limits import HangLimits, LearnedLimits, phase_name

# Interval at which the directories and process states are read. Boards are read at every update.
_REFRESH_SECONDS = 0.5
# Maximum number of directories to keep for helper processes that ended well.
_MAX_ENDED_FOLDERS = 64
# Files that every process creates, and whose presence therefore does not indicate a failure.
_USUAL_FILES = {PROCESS_FILE, BOARD_FILE, FAULTHANDLER_FILE, EVENTS_FILE}
# Kinds of events that a process records even if it ends well.
_HARMLESS_EVENTS = ("torch_imported", "environments_imported", "exiting")
_FOLDER_NAME = re.compile(r"\d{1,20}-\d{1,20}")
# Placeholder for a board that has not been read yet.
_UNKNOWN = Standing(
    pid=0, phase=ProcessPhase.STARTING, since_seconds=0.0, progress=0, step=0, micro_step=0
)


class WatchedProcess:
    """One observed process. All times are in seconds, on the clock of the progress boards.

    Args:
        folder: The directory of the process in the run directory.
        info: The description of the process in that directory.
        limits: Determines how long each phase may go without progress.
    """

    def __init__(self, folder: Path, info: ProcessInfo, limits: HangLimits) -> None:
        self.folder = folder
        self.info = info
        self.is_alive = True
        # When `refresh` first found the process stopped by a signal; None if it is running.
        self.stopped_since: float | None = None
        # Contents of the board when it last showed progress.
        self.standing = _UNKNOWN
        self._learned_limits = LearnedLimits(limits)
        # When the board was last read.
        self._seen_at = 0.0
        # Time without progress is counted from this time at the earliest, because the process could
        # not run before it.
        self._counted_from = 0.0
        # Seconds without progress after which the process is examined again.
        self._next_examination_age = 0.0
        # Modification time of the process description that was last read.
        self._info_written_ns = 0

    @property
    def pid(self) -> int:
        """Return the PID of the process."""
        return self.info.pid

    @property
    def phase_name(self) -> str:
        """Return the name of the current phase for messages."""
        return phase_name(self.standing.phase)

    # --- reading ---

    def read_progress(self, now: float) -> None:
        """Read the board; if it shows progress, learn from the duration of the previous phase."""
        standing = None
        # A board written by a newer version of holdfast cannot be read, so the process cannot
        # exceed a limit.
        with suppress(RunDirectoryError):
            standing = read_board(self.folder / BOARD_FILE)
        if standing is None:
            return
        if standing.progress != self.standing.progress:
            self._learn_duration(standing, now)
            self.standing = standing
            self._next_examination_age = 0.0
        self._seen_at = now

    def _learn_duration(self, newer: Standing, now: float) -> None:
        """Learn the duration of the phase that was current at the last update."""
        before = self.standing
        if before is _UNKNOWN:
            return
        # If progress has increased by more than 1, several phases have ended since the last update,
        # and it is unknown when the first of them ended. It lasted at least until that update.
        ended_at = self._seen_at
        if newer.progress == before.progress + 1:
            ended_at = newer.since_seconds
        began_at = max(before.since_seconds, self._counted_from)
        self._learned_limits.add_duration(before.phase, max(0.0, ended_at - began_at), now)

    def refresh(self, now: float) -> None:
        """Update the description of the process, and whether it is alive or stopped."""
        process = read_process(self.pid)
        self.is_alive = (
            process is not None and process.ticks == self.info.ticks and process.state not in "ZX"
        )
        if process is None or process.state != "T":
            self.stopped_since = None
        elif self.stopped_since is None:
            self.stopped_since = now
        with suppress(OSError):
            self._refresh_info()

    def _refresh_info(self) -> None:
        """Read the process description again if its file has changed."""
        file = self.folder / PROCESS_FILE
        written_ns = os.stat(file).st_mtime_ns  # noqa: PTH116 - called often, and this is faster
        if written_ns == self._info_written_ns:
            return
        self._info_written_ns = written_ns
        info = read_process_file(file)
        if info is not None and info.folder == self.folder.name:
            self.info = info

    # --- time without progress ---

    def count_from(self, now: float) -> None:
        """Count time without progress only from `now`, because the process could not run before."""
        self._counted_from = now
        self._next_examination_age = 0.0

    def age(self, now: float) -> float:
        """Return the time without progress in seconds, or 0 without a readable board."""
        if self.standing is _UNKNOWN:
            return 0.0
        return now - max(self.standing.since_seconds, self._counted_from)

    def limit(self) -> float:
        """Return how long the current phase may go without progress, in seconds."""
        return self._learned_limits.limit(self.standing.phase)

    def is_moving(self, now: float) -> bool:
        """Return whether the process is known to have made progress within its limit."""
        return self.standing is not _UNKNOWN and self.age(now) <= self.limit()

    def seconds_until_examination(self, now: float) -> float:
        """Return the seconds until the next examination; negative if it is overdue.

        The first examination is due at the limit, later ones at the age set by
        `postpone_examination`.
        """
        return max(self.limit(), self._next_examination_age) - self.age(now)

    def postpone_examination(self, until_age: float) -> None:
        """Examine the process again only after this many seconds without progress."""
        self._next_examination_age = until_age

    # --- relations to other processes ---

    def is_in_same_group(self, other: WatchedProcess) -> bool:
        """Return whether both processes are ranks of one run, and so may wait for each other."""
        if self.info.rank is None or other.info.rank is None:
            return False
        return self.info.world_size != 1

    def is_disposable(self) -> bool:
        """Return whether the directory of this process can be deleted.

        That is the case if the process is a helper that ended well and left no unusual files.
        """
        info = self.info
        is_plain_helper = info.role == "other" and info.rank is None and info.torch is None
        if info.role != "loader worker" and not is_plain_helper:
            return False
        with suppress(OSError, ValueError, RunDirectoryError):
            return self._has_only_usual_files() and self._ended_well()
        return False

    def _ended_well(self) -> bool:
        board = read_board(self.folder / BOARD_FILE)
        # A process that ended in any other phase was killed, or exited without shutting down the
        # interpreter.
        if board is None or board.phase is not ProcessPhase.ENDING:
            return False
        return all(
            event.kind in _HARMLESS_EVENTS and not event.data.get("status")
            for event in read_events(self.folder)
        )

    def _has_only_usual_files(self) -> bool:
        with os.scandir(self.folder) as entries:
            sizes = {entry.name: entry.stat().st_size for entry in entries}
        has_dumps = bool(sizes.get(FAULTHANDLER_FILE))
        return sizes.keys() <= _USUAL_FILES and not has_dumps


def _topmost_ranks(candidates: Sequence[WatchedProcess]) -> list[WatchedProcess]:
    """Return the processes that use torch as a rank, without programs that a rank has started.

    Such a program inherits the rank's environment, but is not a rank itself.
    """
    ranks = [
        process
        for process in candidates
        if process.info.rank is not None and process.info.torch is not None
    ]
    rank_by_pid = {process.pid: process.info.rank for process in ranks}
    return [process for process in ranks if rank_by_pid.get(process.info.ppid) != process.info.rank]


class WatchedProcesses:
    """All observed processes of an attempt.

    The *judged* processes are those whose lack of progress means that training hangs.
    """

    def __init__(self, run_path: Path, attempt: int, limits: HangLimits) -> None:
        self._folder = run_path / PROCESSES_FOLDER
        self._attempt = attempt
        self._limits = limits
        self.alive: list[WatchedProcess] = []
        # The processes in `alive` that are judged.
        self.judged: list[WatchedProcess] = []
        # Names of all directories that were already read, including those of earlier attempts.
        self._known_names: set[str] = set()
        self._disposable_folders: list[Path] = []
        # The parent's PID and the rank number of every rank that has ever been judged; see
        # `gone_ranks`.
        self._seen_ranks: set[tuple[int, int]] = set()
        self._refreshed_at = float("-inf")

    def update(self, now: float) -> None:
        """Read the boards of the judged processes; at intervals, refresh the list of processes."""
        if now - self._refreshed_at >= _REFRESH_SECONDS:
            self._refreshed_at = now
            self._refresh(now)
        for process in self.judged:
            process.read_progress(now)

    def _refresh(self, now: float) -> None:
        """Refresh the list of processes: add new ones, drop ended ones, choose which are judged."""
        self.alive += self._find_new_processes()
        for process in self.alive:
            process.refresh(now)
        for process in self.alive:
            if not process.is_alive and process.is_disposable():
                self._disposable_folders.append(process.folder)
        self.alive = [process for process in self.alive if process.is_alive]
        self._remove_old_folders()
        self.judged = self._choose_judged()
        for process in self.judged:
            if process.info.rank is not None:
                self._seen_ranks.add((process.info.ppid, process.info.rank))

    def _remove_old_folders(self) -> None:
        """Delete all but the newest directories of helper processes that ended well."""
        for folder in self._disposable_folders[:-_MAX_ENDED_FOLDERS]:
            self._disposable_folders.remove(folder)
            with suppress(OSError):
                # `make_folder` refuses a symbolic link that leads out of the run directory.
                make_folder(self._folder.parent, self._folder.name)
                remove(folder)

    def _find_new_processes(self) -> Iterator[WatchedProcess]:
        """Yield the processes of this attempt whose directories have appeared since the last call.

        A process that has not yet written its description is found by a later call.
        """
        names: list[str] = []
        with suppress(OSError):
            names = os.listdir(self._folder)  # noqa: PTH208 - faster
        for name in names:
            if name in self._known_names or not _FOLDER_NAME.fullmatch(name):
                continue
            info = read_process_file(self._folder / name / PROCESS_FILE)
            if info is None:
                # The process has not written its description yet.
                continue
            self._known_names.add(name)
            if info.attempt == self._attempt and info.folder == name:
                yield WatchedProcess(self._folder / name, info, self._limits)

    def _choose_judged(self) -> list[WatchedProcess]:
        """Return the processes whose progress is judged.

        These are the trainers and ranks, because any other process may be waiting for them. As long
        as there are none, only the process that started first is judged.
        """
        candidates = [
            process for process in self.alive if process.info.role in ("trainer", "other")
        ]
        trainers = [process for process in candidates if process.info.role == "trainer"]
        ranks = _topmost_ranks(candidates)
        if trainers or ranks:
            return list(dict.fromkeys([*trainers, *ranks]))
        pids = {process.pid for process in candidates}
        topmost = [process for process in candidates if process.info.ppid not in pids]
        return sorted(topmost, key=lambda process: process.info.started)[:1]

    def gone_ranks(self, process: WatchedProcess) -> list[int]:
        """Return the numbers of the ranks in a process's group that no longer exist."""
        if process.info.rank is None:
            return []
        alive = {other.info.rank for other in self.alive}
        # After an elastic launcher has continued with fewer ranks, the others are not missing.
        world_size = process.info.world_size or math.inf
        return sorted(
            rank
            for parent, rank in self._seen_ranks
            if parent == process.info.ppid and rank not in alive and rank < world_size
        )
