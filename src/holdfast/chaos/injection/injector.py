"""Inject the planned fault into a process of the command, once, at the planned moment."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.chaos.injection import clock
from holdfast.chaos.injection.plan import (
    COMMAND_FILE,
    MET_FILE,
    WATCH_ENDED_FILE,
    Action,
    Moment,
    read_plan,
)
from holdfast.chaos.injection.seccomp import Calls, ask_before

# After sending SIGTERM to the command, this process waits for this long. If the command passes the
# signal on to this process, the signal handler therefore still runs within the planned step.
SIGTERM_PAUSE_SECONDS = 0.05
# More bytes than any allocator can provide.
IMPOSSIBLE_BYTES = 1 << 60


class Injector:
    """Injects the planned fault into this process.

    Args:
        folder: The trace folder of the attempt, which contains the plan.
        write: Adds a line to the trace of this process. It takes the kind of the record, and the
            record's fields as keyword arguments.
    """

    def __init__(self, folder: Path, write: Callable[..., None]) -> None:
        self._folder = folder
        self._write = write
        self.plan = read_plan(folder)
        self._injection = self.plan.injection
        # The planned moment; None once the fault has been injected.
        self._moment = self._injection.moment
        # Whether a file size limit was set, at which the kernel kills this process during a write.
        self._will_cut_write = False
        # Whether the campaign watches the changes that the planned save makes to files, and whether
        # that save has returned.
        self._is_watching = False
        self._has_watched_save = False

    def begin(self) -> None:
        """Inject the faults that affect the process from its start."""
        if self._injection.clock_shift_seconds:
            clock.shift(self._injection.clock_shift_seconds)
        if self._injection.unreadable_file is not None:
            self._intercept_calls(Calls.READ)

    def meet(self, moment: Moment, count: int) -> None:
        """Inject the fault if it is planned for this moment.

        Args:
            moment: The kind of moment that the process has reached.
            count: The number of steps that this process has taken. For a save or an evaluation, the
                number of this save or evaluation, counted from 1.
        """
        if self._is_watching:
            self._end_watching(moment)
        if self._is_due(moment, count):
            assert self._injection.action is not None
            _ACTIONS[self._injection.action](self)

    def disturb_batch(self, torch: Any, batch: Any, count: int, moment: Moment) -> Any:
        """Inject the fault into a batch or a loader worker, if it is planned for this moment.

        Args:
            torch: The torch module that the script uses.
            batch: A batch from the loader, or the inputs of a model.
            count: The number of steps that this process has taken.
            moment: `Moment.LOADER` for a batch, or `Moment.FORWARD` for inputs.

        Returns:
            The batch to use. If the fault is a NaN, this is a changed copy.
        """
        if moment != self._moment:
            return batch
        if self._injection.action == Action.PUT_NAN:
            if not self._is_due(moment, count):
                return batch
            batch_with_nan = put_nan(torch, batch)
            if batch_with_nan is None:
                self._write(
                    "missed", why="the batch has no floating-point number that could become NaN"
                )
                return batch
            return batch_with_nan
        if self.loader_workers() and self._is_due(moment, count):
            self._signal_worker()
        return batch

    def loader_workers(self) -> list[int]:
        """Return the PIDs of this process's loader workers."""
        # If the script has loader workers, this module has already been imported.
        from multiprocessing import active_children

        return sorted(child.pid for child in active_children() if child.pid is not None)

    def save_ends(self) -> None:
        """Kill this process after a save whose file was too small for a kill during the write."""
        if self._will_cut_write:
            self._kill()

    def _is_due(self, moment: Moment, count: int) -> bool:
        """Return whether to inject the fault now. If so, record the injection in the trace."""
        if moment != self._moment or count < self._injection.count:
            return False
        rank, _ = read_rank()
        if rank != self._injection.rank:
            return False
        self._moment = None
        try:
            # Only the process that creates this file injects the fault. A process that a launcher
            # starts as a replacement therefore does not inject it again.
            with (self._folder / MET_FILE).open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            return False
        self._write("fault", act=self._injection.action)
        return True

    # --- actions --------------------------------------------------------------------------------

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def _terminate_command(self) -> None:
        """Send SIGTERM to the command, as a scheduler does.

        Only the command itself receives the signal, and decides which of its processes to notify.
        """
        command = int((self._folder / COMMAND_FILE).read_text())
        os.kill(command, signal.SIGTERM)
        time.sleep(SIGTERM_PAUSE_SECONDS)

    def _signal_worker(self) -> None:
        worker = self.loader_workers()[0]
        if self._injection.action == Action.KILL_WORKER:
            os.kill(worker, signal.SIGKILL)
        else:
            os.kill(worker, signal.SIGSTOP)

    def _use_up_memory(self) -> None:
        """Try to allocate more memory than the machine has.

        The error comes from torch's own allocator, and it is raised during `backward`.
        """
        torch: Any = sys.modules["torch"]
        device = "cuda" if torch.cuda.is_initialized() else "cpu"
        torch.empty(IMPOSSIBLE_BYTES, dtype=torch.uint8, device=device)

    def _cut_write(self) -> None:
        """Make the kernel kill this process when it has written half of a file.

        The kernel sends SIGXFSZ to a process that exceeds its limit on file sizes.
        """
        self._will_cut_write = True
        # SIGXFSZ would also dump core, which takes time and disk space.
        _, hard_limit = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard_limit))
        # By default, SIGXFSZ kills a process, but Python ignores this signal. Restore the default
        # action through C, because `signal.signal` works only in the main thread, and a save may
        # run in another thread.
        default_action = None
        ctypes.CDLL(None).signal(signal.SIGXFSZ, default_action)
        self._limit_file_size()

    def _refuse_writes(self) -> None:
        """Make writes beyond half the size of a checkpoint fail with the planned error.

        The kernel cuts the first such write short at the file size limit, and a seccomp filter
        makes the next write fail. Without filter support, a full disk is reported to the script as
        EFBIG, and a single failing write cannot be injected.
        """
        has_filter = self._intercept_calls(Calls.WRITE)
        if has_filter or self._injection.action == Action.FILL_DISK:
            self._limit_file_size()

    def _limit_file_size(self) -> None:
        assert self._injection.size_bytes is not None
        _, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self._injection.size_bytes, hard_limit))

    def _intercept_calls(self, calls: Calls) -> bool:
        """Let the campaign decide about some system calls of this process (see `seccomp`).

        Returns:
            Whether the system supports this. If not, the reason is written to the trace.
        """
        try:
            ask_before(calls, self._folder)
        except OSError as error:
            why = f"this system does not allow seccomp filters: {error.strerror}"
            self._write("missed", why=why)
            return False
        return True

    def _watch_changes(self) -> None:
        """Let the campaign see the system calls that change files, until a step after the save."""
        self._is_watching = self._intercept_calls(Calls.CHANGE)

    def _end_watching(self, moment: Moment) -> None:
        """End the watch with the first step after the save.

        Until then, the script may still rename the file, or remove older ones.
        """
        if moment == Moment.SAVE_ENDS:
            self._has_watched_save = True
        elif moment == Moment.AFTER_STEP and self._has_watched_save:
            self._is_watching = False
            (self._folder / WATCH_ENDED_FILE).touch()

    def _cut_connections(self) -> None:
        """Shut down every TCP connection of this process."""
        was_shut_down = [shut_down(file) for file in Path("/proc/self/fd").iterdir()]
        if not any(was_shut_down):
            self._write("missed", why="no TCP connection was open")


_ACTIONS: dict[Action, Callable[[Injector], None]] = {
    Action.SIGKILL: Injector._kill,
    Action.SIGSTOP: Injector._stop,
    Action.SIGTERM: Injector._terminate_command,
    Action.USE_UP_MEMORY: Injector._use_up_memory,
    Action.FILL_DISK: Injector._refuse_writes,
    Action.FAIL_WRITE: Injector._refuse_writes,
    Action.CUT_CONNECTIONS: Injector._cut_connections,
    Action.CUT_WRITE: Injector._cut_write,
    Action.WATCH_CHANGES: Injector._watch_changes,
}


def shut_down(file: Path) -> bool:
    """Shut down a file descriptor's network connection, if it has one.

    Args:
        file: The path of the descriptor in ``/proc/self/fd``.

    Returns:
        Whether the descriptor was a connected network socket.
    """
    # Ignore errors: the descriptor may already be closed, and `getpeername` fails for a socket that
    # is not connected.
    with suppress(OSError):
        if not file.is_socket():
            return False
        with socket.socket(fileno=os.dup(int(file.name))) as connection:
            if connection.family != socket.AF_UNIX and connection.getpeername():
                connection.shutdown(socket.SHUT_RDWR)
                return True
    return False


def read_rank() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks; (0, 1) if the run has no ranks.

    The result is not cached, because a launcher may set the environment variables after a fork.
    """
    distributed = sys.modules.get("torch.distributed")
    # `torch.multiprocessing.spawn` sets no environment variables, so query the process group first.
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def put_nan(torch: Any, batch: Any) -> Any:
    """Return a copy of a batch in which the first floating-point number is replaced by NaN.

    Return None if the batch contains no floating-point number.

    Args:
        torch: The torch module that the script uses.
        batch: A tensor, or nested mappings, lists, tuples and named tuples of tensors.
    """
    if isinstance(batch, torch.Tensor):
        if not batch.is_floating_point() or not batch.numel():
            return None
        copy = batch.detach().clone()
        copy.view(-1)[0] = float("nan")
        return copy
    if isinstance(batch, Mapping) and hasattr(batch, "copy"):
        items = list(batch.items())
    elif type(batch) in (list, tuple) or _is_named_tuple(batch):
        items = list(enumerate(batch))
    else:
        return None
    for key, value in items:
        value_with_nan = put_nan(torch, value)
        if value_with_nan is not None:
            return _with_item(batch, key, value_with_nan)
    return None


def _with_item(batch: Any, key: Any, value: Any) -> Any:
    """Return a copy of a mapping or sequence with the item at `key` replaced by `value`."""
    if not isinstance(batch, (list, tuple)):
        # Copying preserves the mapping's class, which may be Hugging Face's BatchEncoding.
        copy = batch.copy()
        copy[key] = value
        return copy
    values = list(batch)
    values[key] = value
    if _is_named_tuple(batch):
        return type(batch)(*values)
    return type(batch)(values)


def _is_named_tuple(batch: Any) -> bool:
    return isinstance(batch, tuple) and hasattr(batch, "_fields")
