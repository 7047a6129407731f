"""The observer of one Python process.

Its folder in the run directory, its board, and what becomes of them at a fork.

It costs what its imports cost, and nothing more happens until torch is imported.
"""

from __future__ import annotations

import _thread
import os
import sys
import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.core.files import make_folder, opened_to_write
from holdfast.core.importing import ImportWatch
from holdfast.core.raised import printable
from holdfast.core.secrets import without_secrets
from holdfast.recorder.progress import Phase, ProgressBoard, SampleRing
from holdfast.recorder.run_files import (
    ATTEMPT_VARIABLE,
    BOARD_FILE,
    PROCESSES_FOLDER,
    SAMPLES_FILE,
    ProcessInfo,
    ProcessRole,
    on_recording,
    write_process,
    write_settings,
)
from holdfast.recorder.scalars import Found, Scalars, outlets
from holdfast.supervise.observe import logged
from holdfast.supervise.observe.endings import Endings
from holdfast.supervise.observe.launchers import find_launcher_name, leave_signals_to_ranks
from holdfast.supervise.observe.stacks import Stacks

if TYPE_CHECKING:
    from holdfast.core.events.event import EventData
    from holdfast.recorder.black_box import EventRing
    from holdfast.supervise.observe.steps import Steps

# torch reads the first of each; the others are what Slurm and Open MPI set, where nobody sets
# those.
_RANKS = {
    "rank": ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"),
    "local_rank": ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "world_size": ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"),
}
# Who imports one of these trains by reward, so that the loss need not fall.
_ENVIRONMENTS = (
    "gymnasium",
    "gym",
    "pettingzoo",
    "dm_env",
    "stable_baselines3",
    "torchrl",
    "ray.rllib",
)
_MOST_NOTES = 20
_observer: Observer | None = None


def start(run: str) -> None:
    """Observe this process from now on, if the run directory is there; once.

    OSError if it cannot be written.

    Called by ``injected/sitecustomize.py``.
    """
    global _observer
    folder = Path(run)
    if _observer is None and folder.is_absolute() and folder.is_dir():
        _observer = Observer(folder, _number(ATTEMPT_VARIABLE) or 0)


class Observer:
    """Observes this process, and those that are forked from it.

    OSError if its folder cannot be made or written.
    """

    def __init__(self, run: Path, attempt: int) -> None:
        self._run, self._attempt = run, attempt
        self._torch: str | None = None
        self._role: ProcessRole = "launcher" if find_launcher_name(sys.orig_argv) else "other"
        self._steps: Steps | None = None
        self.watch = ImportWatch(self.failed)
        if self._role == "launcher":
            leave_signals_to_ranks()
        self._stacks = Stacks(self._describe)
        self._forget()
        self.board = self._open()
        self._stacks.watch()
        self._endings = Endings(self.emit, self._leaves, self.watch)
        os.register_at_fork(after_in_child=self._after_fork)
        on_recording(self._on_guard)
        logged.install(self.watch, self.failed)
        self.watch.when_imported("torch", self._on_torch)
        for package in _ENVIRONMENTS:
            self.watch.when_imported(package, self._on_environments)

    def _forget(self) -> None:
        """Be as if nothing was opened yet."""
        vars(self).pop("board", None)
        self._has_left = False
        self._folder: Path | None = None
        self._info: ProcessInfo | None = None
        self._events: EventRing | None = None
        self._samples: SampleRing | None = None
        self._scalars = Scalars(self._own_folder, self.emit)
        outlets[self] = None
        self._lock = _thread.RLock()
        self._notes = 0

    @cached_property
    def board(self) -> ProgressBoard:
        """The board of this process, which is made with its folder if a fork has left it
        without: most never do.
        """
        try:
            return self._open()
        except OSError as error:  # in a forked process: it goes on unseen
            self.failed(error)
            return ProgressBoard(None)

    def _open(self) -> ProgressBoard:
        with open("/proc/self/stat", "rb") as file:  # noqa: PTH123 - of the system
            # Field 22; the name before may hold anything
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        self._info = ProcessInfo(
            pid=os.getpid(),
            ticks=ticks,
            ppid=os.getppid(),
            attempt=self._attempt,
            started=time.time(),
            argv=without_secrets([printable(word) for word in sys.orig_argv]),
        )
        folder = make_folder(self._run, PROCESSES_FOLDER, self._info.folder)
        board = ProgressBoard(folder / BOARD_FILE)
        self._stacks.open(folder)
        self._folder = folder
        self._describe()
        return board

    def _describe(self) -> None:
        """Write what is known of this process now."""
        if self._info is not None:
            ranks: dict[str, Any] = {
                name: _number(*names) for name, names in _RANKS.items()
            } | _initialized_ranks()
            ranks |= {
                "role": self._role,
                "torch": self._torch,
                "stacks_signal": self._stacks.signal,
            }
            write_process(self._run, self._info._replace(**ranks))

    def samples(self) -> SampleRing:
        """Return the ring of samples, made when it is first asked for.

        OSError if it cannot be made.
        """
        if self._samples is None:
            self._samples = SampleRing(self._own_folder() / SAMPLES_FILE)
        return self._samples

    def describe(self, settings: dict[str, Any]) -> None:
        """Keep what the training is set to; OSError as `samples`."""
        write_settings(self._own_folder(), settings)

    def _own_folder(self) -> Path:
        if self.board is None or self._folder is None:
            raise FileNotFoundError("this process has no folder")
        return self._folder

    # --- what happens: never an error, since nothing of ours may stop the script
    # ------------------------------------

    def emit(self, data: EventData) -> None:
        """Record an event; from any thread."""
        try:
            # Here, as the classes elsewhere: most processes without torch have no events, and these
            # take 20 ms.
            from holdfast.core.events.event import Event
            from holdfast.recorder.black_box import EventRing

            with self._lock:
                if self._events is None:
                    self._events = EventRing(self._own_folder())
                step = self.board.step
                self._events.event(
                    Event(
                        kind=data.kind,
                        global_step=step,
                        unix_seconds=time.time(),
                        data=data.facts(),
                    )
                )
        except Exception as error:  # noqa: BLE001 - as above
            self.failed(error)

    def log(self, found: Found, step: int | None = None) -> None:
        """Record what the script logs; None: at the present step."""
        self._scalars.write(found, self.board.step if step is None else step, None)

    def becomes(self, role: ProcessRole) -> None:
        """Show what this process has turned out to be."""
        try:
            if self.board is not None and role != self._role:
                self._role = role
                self._describe()
        except Exception as error:  # noqa: BLE001 - as above
            self.failed(error)

    def failed(self, error: BaseException) -> None:
        """Note that something of ours went wrong, where the supervisor finds it."""
        self._notes += 1
        if self._notes > _MOST_NOTES:
            return
        with suppress(Exception):  # the run directory may be what fails
            import traceback

            # No link that leads out of the run directory
            folder = make_folder(self._run, PROCESSES_FOLDER)
            with opened_to_write(folder / f"failed-{os.getpid()}.txt", "ab") as file:
                file.write("".join(traceback.format_exception(error)).encode("utf-8", "replace"))

    def _leaves(self, how: str, status: int | None, said: str) -> None:
        try:
            if "board" not in vars(self):
                return  # forked, and nothing was ever shown
            if self._steps is not None:
                self._steps.finish()
            self.board.enter(Phase.ENDING)
            if not self._has_left and (self._events is not None or status):
                from holdfast.core.events import process_events

                self.emit(process_events.Exiting(how=how, status=status, said=said or None))
            self._has_left = True
        except Exception as error:  # noqa: BLE001 - as above
            self.failed(error)

    def _on_guard(self, path: Path) -> None:
        from holdfast.core.events import process_events

        self.emit(process_events.GuardOpened(path=str(path)))

    def _on_environments(self, package: Any) -> None:
        from holdfast.core.events import process_events

        self.emit(process_events.EnvironmentsImported(package=package.__name__))

    def _on_torch(self, torch: Any) -> None:
        from holdfast.core.events import process_events
        from holdfast.supervise.observe.hooks import install

        self._torch = str(torch.__version__)
        self._describe()
        self.emit(process_events.TorchImported(version=self._torch))
        self._steps = install(torch, self)

    def _after_fork(self) -> None:
        try:
            self._forget()
            self._role = "other"
            # A guard tries something there
            if getattr(sys.modules.get("holdfast.core.forked"), "is_copying", False):
                # So that nothing is written
                self.board, self._notes = ProgressBoard(None), _MOST_NOTES
            self._endings.after_fork()
            if self._steps is not None:
                self._steps.begin()
        except Exception as error:  # noqa: BLE001 - as above
            self.failed(error)


def _number(*names: str) -> int | None:
    """Return the number that the first of these environment variables holds that holds one."""
    texts = (os.environ.get(name, "") for name in names)
    return next((int(text) for text in texts if text.isdecimal() and len(text) < 10), None)


def _initialized_ranks() -> dict[str, int]:
    """Return what ``torch.distributed`` says, where it is in use: some scripts set no variables."""
    distributed: Any = sys.modules.get("torch.distributed")
    with suppress(AttributeError, RuntimeError, ValueError):  # half imported, or on its way out
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return {"rank": distributed.get_rank(), "world_size": distributed.get_world_size()}
    return {}
