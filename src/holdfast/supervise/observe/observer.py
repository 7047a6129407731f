"""The observer of one Python process: its folder in the run directory, its board, and what becomes of them at a fork.

Does not: begin (``starting`` does), hook into torch (``hooks`` does), decide what a step is (``steps`` does).
"""

from __future__ import annotations

import _thread
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from holdfast.core.raised import printable
from holdfast.recorder.progress import Phase, ProgressBoard, SampleRing
from holdfast.recorder.run_files import (
    BOARD_FILE,
    PROCESSES_FOLDER,
    SAMPLES_FILE,
    ProcessInfo,
    ProcessRole,
    on_recording,
    write_process,
)
from holdfast.supervise.launchers import find_launcher_name
from holdfast.supervise.observe.endings import Endings
from holdfast.supervise.observe.importing import ImportWatch
from holdfast.supervise.observe.stacks import Stacks

if TYPE_CHECKING:
    from holdfast.recorder.event_ring import EventRing

# torch reads the first of each; the others are what Slurm and Open MPI set, where nobody sets those.
_RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
_LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
_WORLD_SIZE = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
_MOST_NOTES = 20


class Counting(Protocol):
    """Who counts the steps of a process."""

    def begin(self) -> None:
        """Begin anew in a forked process."""

    def finish(self) -> None:
        """Write what is still to be written."""


class _Unopened:
    """Stands for the board of a forked process until it has something to show: most forks never do."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._observer.open(), name)


class Observer:
    """Observes this process, and those that are forked from it.

    Args:
        run: The run directory.
        attempt: Of the supervisor.

    Raises:
        OSError: if the folder of this process cannot be made or written.
    """

    def __init__(self, run: Path, attempt: int) -> None:
        self._run = run
        self._attempt = attempt
        self._torch: str | None = None
        self._role: ProcessRole = "launcher" if find_launcher_name(sys.orig_argv) else "other"
        self.watch = ImportWatch(self.failed)
        self._stacks = Stacks(self._describe)
        self._forget()
        self._open()
        self._stacks.watch()
        self._steps: Counting | None = None
        self._endings = Endings(self)
        self._endings.install(self.watch)
        os.register_at_fork(after_in_child=self._after_fork)
        on_recording(lambda path: self.tell("guard", path=str(path)))

    # --- files ------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        """Be as if nothing was opened yet."""
        self.board = cast("ProgressBoard", _Unopened(self))
        self._is_open = False
        self._has_left = False
        self._folder: Path | None = None
        self._info: ProcessInfo | None = None
        self._events: EventRing | None = None
        self._samples: SampleRing | None = None
        self._lock = _thread.RLock()
        self._notes = 0

    def open(self) -> ProgressBoard:
        """Return the board of this process, which is made with its folder if a fork has left it without."""
        if not self._is_open:
            try:
                self._open()
            except OSError as error:  # in a forked process: it goes on unseen
                self.failed(error)
                self.board = ProgressBoard(None)
                self._is_open = True
        return self.board

    def _open(self) -> None:
        pid = os.getpid()
        self._info = ProcessInfo(
            pid=pid, ticks=_start_ticks(), ppid=os.getppid(), argv=list(map(printable, sys.orig_argv)),
            attempt=self._attempt, started=time.time(),
        )  # fmt: skip
        folder = self._run / PROCESSES_FOLDER / self._info.folder
        folder.mkdir(parents=True, exist_ok=True)
        self.board = ProgressBoard(folder / BOARD_FILE)
        self._is_open = True
        self._stacks.open(folder)
        self._folder = folder
        self._describe()

    def _describe(self) -> None:
        """Write what is known of this process now."""
        if self._info is not None:
            ranks: dict[str, Any] = {
                "rank": find_number(os.environ, _RANK),
                "local_rank": find_number(os.environ, _LOCAL_RANK),
                "world_size": find_number(os.environ, _WORLD_SIZE),
                **_initialized_ranks(),
            }
            write_process(
                self._run,
                replace(self._info, role=self._role, torch=self._torch, stacks_signal=self._stacks.signal, **ranks),
            )

    def samples(self) -> SampleRing:
        """Return the ring of samples, made when it is first asked for.

        Raises:
            OSError: if it cannot be made.
        """
        if self._samples is None:
            self._samples = SampleRing(self._own_folder() / SAMPLES_FILE)
        return self._samples

    def _own_folder(self) -> Path:
        self.open()
        if self._folder is None:
            raise FileNotFoundError("this process has no folder")
        return self._folder

    # --- what happens -----------------------------------------------------------------------------------------

    def tell(self, kind: str, **facts: Any) -> None:
        """Record an event; never an error, from any thread."""
        try:
            # Here, since most processes without torch have no events: the two take 7 ms.
            from holdfast.core.events import Event
            from holdfast.recorder.event_ring import EventRing

            with self._lock:
                if self._events is None:
                    self._events = EventRing(self._own_folder())
                step = self.board.step
                self._events.event(Event(kind=kind, global_step=step, unix_seconds=time.time(), data=facts))
        except Exception as error:  # noqa: BLE001 - nothing of ours may stop the script
            self.failed(error)

    def becomes(self, role: ProcessRole) -> None:
        """Show what this process has turned out to be; never an error."""
        try:
            self.open()
            if role != self._role:
                self._role = role
                self._describe()
        except Exception as error:  # noqa: BLE001 - nothing of ours may stop the script
            self.failed(error)

    def leaves(self, how: str, status: int | None, said: str) -> None:
        """Show that the process leaves; never an error."""
        try:
            if not self._is_open:
                return  # forked, and nothing was ever shown
            if self._steps is not None:
                self._steps.finish()
            self.board.enter(Phase.ENDING)
            if not self._has_left and (self._events is not None or status):
                self.tell("exiting", how=how, status=status, **({"said": said} if said else {}))
            self._has_left = True
        except Exception as error:  # noqa: BLE001 - nothing of ours may stop the script
            self.failed(error)

    def failed(self, error: BaseException) -> None:
        """Note that something of ours went wrong, where the supervisor finds it; never an error."""
        self._notes += 1
        if self._notes > _MOST_NOTES:
            return
        with suppress(Exception):  # the run directory may be what fails
            import traceback

            with (self._run / PROCESSES_FOLDER / f"failed-{os.getpid()}.txt").open("a") as file:
                file.writelines(traceback.format_exception(error))

    def trains_with(self, version: str) -> None:
        """Show which torch was imported.

        Raises:
            OSError: if it cannot be written.
        """
        self._torch = version
        self._describe()
        self.tell("torch_imported", version=version)

    def count_with(self, steps: Counting) -> None:
        """Let the steps of this process be counted."""
        self._steps = steps

    def _after_fork(self) -> None:
        try:
            self._forget()
            self._role = "other"
            self._endings.after_fork()
            if self._steps is not None:
                self._steps.begin()
        except Exception as error:  # noqa: BLE001 - nothing of ours may stop the script
            self.failed(error)


def _start_ticks() -> int:
    with open("/proc/self/stat", "rb") as file:  # noqa: PTH123 - of the system
        return int(file.read().rpartition(b")")[2].split()[19])  # field 22; the name before may hold anything


def find_number(environment: Mapping[str, str], names: Sequence[str]) -> int | None:
    """Return the number that the first of these variables holds that holds one."""
    for name in names:
        text = environment.get(name, "")
        if text.isdecimal() and len(text) < 10:
            return int(text)
    return None


def _initialized_ranks() -> dict[str, int]:
    """Return what ``torch.distributed`` says, where it is in use: some scripts set no variables."""
    distributed: Any = sys.modules.get("torch.distributed")
    try:
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return {"rank": distributed.get_rank(), "world_size": distributed.get_world_size()}
    except (AttributeError, RuntimeError, ValueError):  # half imported, or on its way out
        pass
    return {}
