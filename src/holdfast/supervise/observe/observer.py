"""`ProcessObserver`: record one Python process in a directory of its own, and handle forks.

Until the script imports torch, the observer costs only its own import time. No error of holdfast
may reach the script; errors are written to the run directory (`ProcessObserver.note_error`).
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

from holdfast.core.files import make_folder, open_to_write
from holdfast.core.importing import ImportWatch
from holdfast.core.raised import printable
from holdfast.core.secrets import without_secrets
from holdfast.recorder.progress import ProcessPhase, ProgressBoard, SampleRing
from holdfast.recorder.run_files import (
    ATTEMPT_VARIABLE,
    BOARD_FILE,
    PROCESSES_FOLDER,
    RESUME_VARIABLE,
    SAMPLES_FILE,
    ProcessInfo,
    ProcessRole,
    on_recording,
    write_process,
    write_settings,
)
from holdfast.recorder.scalars import CheckedScalars, Scalars, outlets
from holdfast.supervise.observe import logged_scalars
from holdfast.supervise.observe.launchers import is_launcher, leave_signals_to_ranks
from holdfast.supervise.observe.process_end import ProcessEnd
from holdfast.supervise.observe.stack_writer import StackWriter
from holdfast.supervise.observe.wandb_run import WandbObserver
from holdfast.supervise.process_tree import read_start_ticks

if TYPE_CHECKING:
    from holdfast.core.events.data import EventData
    from holdfast.recorder.black_box import EventRing
    from holdfast.supervise.observe.step_tracker import StepTracker

# Environment variables that may contain each number, in order of precedence. torch reads the first
# one. Slurm and Open MPI set the others, which are used if the first one is not set.
_RANK_VARIABLES = {
    "rank": ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"),
    "local_rank": ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "world_size": ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"),
}
# Reinforcement learning packages. If a script imports one of them, a loss that does not decrease is
# not considered a fault.
_ENVIRONMENT_PACKAGES = (
    "gymnasium",
    "gym",
    "pettingzoo",
    "dm_env",
    "stable_baselines3",
    "torchrl",
    "ray.rllib",
)
# Maximum number of holdfast's own errors that a process writes to the run directory.
_MAX_NOTES = 20
_MAX_DIGITS = 9
_observer: ProcessObserver | None = None


def start(run: str) -> None:
    """Start observing this process if the run directory exists. Further calls do nothing.

    Called by ``injected/sitecustomize.py``.

    Raises:
        OSError: If the run directory cannot be written.
    """
    global _observer
    run_path = Path(run)
    if _observer is None and run_path.is_absolute() and run_path.is_dir():
        _observer = ProcessObserver(run_path, _read_number(ATTEMPT_VARIABLE) or 0)


class ProcessObserver:
    """Observes this process and all processes forked from it.

    Raises:
        OSError: If the directory of this process cannot be created or written.
    """

    def __init__(self, run_path: Path, attempt: int) -> None:
        self._run_path = run_path
        self._attempt = attempt
        self._torch_version: str | None = None
        self._role: ProcessRole = "launcher" if is_launcher(sys.orig_argv) else "other"
        if self._role == "launcher":
            leave_signals_to_ranks()
        self._steps: StepTracker | None = None
        self.watch = ImportWatch(self.note_error)
        self._stacks = StackWriter(self._write_description)
        self._reset()
        self.board = self._open()
        self._stacks.watch()
        self._process_end = ProcessEnd(self.emit, self._on_exit, self.watch)
        os.register_at_fork(after_in_child=self._after_fork)
        on_recording(self._on_guard)
        # This must come first: what W&B has already is not logged again, but it is recorded again.
        WandbObserver(
            self.watch, self._run_path, self._attempt_key(), _find_rank, self.emit, self.note_error
        )
        logged_scalars.install(self.watch, self.note_error)
        self.watch.when_imported("torch", self._on_torch)
        for package in _ENVIRONMENT_PACKAGES:
            self.watch.when_imported(package, self._on_environments)

    def _attempt_key(self) -> str:
        """Return a text that is different at each start of the training processes.

        torchrun restarts its workers within an attempt.
        """
        return f"{self._attempt}-{_read_number('TORCHELASTIC_RESTART_COUNT') or 0}"

    # --- the directory of this process ---

    def _reset(self) -> None:
        """Forget all open files. Called at startup and in a forked process."""
        # `board` is a cached property, so its next use opens a new board.
        vars(self).pop("board", None)
        self._has_exited = False
        self._folder: Path | None = None
        self._info: ProcessInfo | None = None
        self._events: EventRing | None = None
        self._samples: SampleRing | None = None
        self._scalars = Scalars(self._own_folder, self.emit)
        outlets[self] = None
        self._event_lock = _thread.RLock()
        self._note_count = 0

    @cached_property
    def board(self) -> ProgressBoard:
        """The progress board of this process.

        In a forked process, the board is created on first use, because most forks never use it.
        """
        try:
            return self._open()
        except OSError as error:
            # The forked process continues unobserved.
            self.note_error(error)
            return ProgressBoard(None)

    def _open(self) -> ProgressBoard:
        self._info = ProcessInfo(
            pid=os.getpid(),
            ticks=read_start_ticks(),
            ppid=os.getppid(),
            attempt=self._attempt,
            started=time.time(),
            argv=without_secrets([printable(word) for word in sys.orig_argv]),
        )
        folder = make_folder(self._run_path, PROCESSES_FOLDER, self._info.folder)
        board = ProgressBoard(folder / BOARD_FILE)
        self._stacks.open(folder)
        self._folder = folder
        self._write_description()
        return board

    def _write_description(self) -> None:
        """Write what is currently known about this process to its description file."""
        if self._info is None:
            return
        facts: dict[str, Any] = {
            name: _read_number(*variables) for name, variables in _RANK_VARIABLES.items()
        }
        facts |= _ranks_of_torch()
        facts["role"] = self._role
        facts["torch"] = self._torch_version
        facts["stacks_signal"] = self._stacks.signal
        write_process(self._run_path, self._info._replace(**facts))

    def _open_if_forked(self) -> None:
        """Make sure that a forked process has a directory, which is created with its board."""
        _ = self.board

    def _own_folder(self) -> Path:
        self._open_if_forked()
        if self._folder is None:
            raise FileNotFoundError("this process has no directory")
        return self._folder

    def open_samples(self) -> SampleRing:
        """Return the ring buffer for recorded steps, creating it on first use.

        Raises:
            OSError: If the ring buffer cannot be created.
        """
        if self._samples is None:
            self._samples = SampleRing(self._own_folder() / SAMPLES_FILE)
        return self._samples

    def write_settings(self, settings: dict[str, Any]) -> None:
        """Record the settings of the training run.

        Raises:
            OSError: If this process has no directory.
        """
        write_settings(self._own_folder(), settings)

    # --- recording ---

    def emit(self, data: EventData) -> None:
        """Record an event. Thread-safe; never raises."""
        try:
            # This import takes 20 ms, and most processes without torch never need it.
            from holdfast.core.events.event import Event
            from holdfast.recorder.black_box import EventRing

            with self._event_lock:
                if self._events is None:
                    self._events = EventRing(self._own_folder())
                event = Event(
                    kind=data.kind,
                    global_step=self.board.step,
                    unix_seconds=time.time(),
                    data=data.facts(),
                )
                self._events.event(event)
        except Exception as error:  # noqa: BLE001 - holdfast's errors must not stop the script
            self.note_error(error)

    def log(self, values: CheckedScalars, step: int | None = None) -> None:
        """Record values that the script logs; `step` defaults to the current step."""
        if step is None:
            step = self.board.step
        self._scalars.write(values, step, None)

    def set_role(self, role: ProcessRole) -> None:
        """Change the recorded role of this process. Never raises."""
        try:
            self._open_if_forked()
            if role != self._role:
                self._role = role
                self._write_description()
        except Exception as error:  # noqa: BLE001 - holdfast's errors must not stop the script
            self.note_error(error)

    def note_error(self, error: BaseException) -> None:
        """Write an error of holdfast to the run directory, for the supervisor. Never raises."""
        self._note_count += 1
        if self._note_count > _MAX_NOTES:
            return
        # Writing may fail too, because the error may be that the run directory is not writable.
        with suppress(Exception):
            import traceback

            text = "".join(traceback.format_exception(error))
            # `make_folder` refuses a symbolic link that leads out of the run directory.
            folder = make_folder(self._run_path, PROCESSES_FOLDER)
            with open_to_write(folder / f"failed-{os.getpid()}.txt", "ab") as file:
                file.write(text.encode("utf-8", "replace"))

    def _on_exit(self, how: str, status: int | None, exit_text: str) -> None:
        """Record how the process is exiting. May be called several times; see `ProcessEnd`."""
        try:
            # A forked process that has never used its board has nothing to record.
            if "board" not in vars(self):
                return
            if self._steps is not None:
                self._steps.finish()
            self.board.enter(ProcessPhase.ENDING)
            is_worth_an_event = self._events is not None or bool(status)
            if not self._has_exited and is_worth_an_event:
                from holdfast.core.events import process_events

                self.emit(process_events.Exiting(how=how, status=status, said=exit_text or None))
            self._has_exited = True
        except Exception as error:  # noqa: BLE001 - holdfast's errors must not stop the script
            self.note_error(error)

    def _on_guard(self, path: Path) -> None:
        from holdfast.core.events import process_events

        self.emit(process_events.GuardOpened(path=str(path)))

    def _on_environments(self, package: Any) -> None:
        from holdfast.core.events import process_events

        self.emit(process_events.EnvironmentsImported(package=package.__name__))

    def _on_torch(self, torch: Any) -> None:
        from holdfast.core.events import process_events
        from holdfast.supervise.observe.hooks import install

        self._torch_version = str(torch.__version__)
        self._write_description()
        self.emit(process_events.TorchImported(version=self._torch_version))
        self._steps = install(torch, self)
        if RESUME_VARIABLE in os.environ and self._role == "other":
            self._watch_script()

    def _watch_script(self) -> None:
        """Let the guard save and resume the script, because its user asked for that.

        The module is imported by its name, because this package acts outside of the training loop
        and must not depend on the guard.
        """
        import importlib

        module = importlib.import_module("holdfast.guard.unchanged.start")
        module.start(self._run_path, self.emit, self.note_error)

    def _after_fork(self) -> None:
        """Start observing a forked process, with its own board."""
        try:
            self._reset()
            self._role = "other"
            if getattr(sys.modules.get("holdfast.core.forked"), "is_copying", False):
                # A guard has forked this process for an experiment, so record nothing about it.
                self.board = ProgressBoard(None)
                self._note_count = _MAX_NOTES
            self._process_end.after_fork()
            if self._steps is not None:
                self._steps.reset_after_fork()
        except Exception as error:  # noqa: BLE001 - holdfast's errors must not stop the script
            self.note_error(error)


def _read_number(*names: str) -> int | None:
    """Return the first number found in these environment variables, or None if there is none."""
    for name in names:
        text = os.environ.get(name, "")
        if text.isdecimal() and len(text) <= _MAX_DIGITS:
            return int(text)
    return None


def _find_rank() -> int | None:
    """Return the rank of this process, or None if it has none."""
    rank = _ranks_of_torch().get("rank")
    return _read_number(*_RANK_VARIABLES["rank"]) if rank is None else rank


def _ranks_of_torch() -> dict[str, int]:
    """Return the rank and world size from ``torch.distributed``, if it is initialized.

    Some scripts pass these numbers to it without setting environment variables.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None:
        return {}
    # The module may be only partly imported, or already being torn down.
    with suppress(AttributeError, RuntimeError, ValueError):
        if distributed.is_available() and distributed.is_initialized():
            return {"rank": distributed.get_rank(), "world_size": distributed.get_world_size()}
    return {}
