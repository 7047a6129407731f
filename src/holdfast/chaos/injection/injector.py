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
from holdfast.chaos.injection.plan import COMMAND_FILE, MET_FILE, Action, Moment, read_plan
from holdfast.chaos.injection.seccomp import Calls, ask_before

# The process that sends SIGTERM to the command waits this long afterwards. If the command passes
# the signal on to this process, the handler then still runs within the planned step.
SIGTERM_PAUSE_SECONDS = 0.05
# More bytes than any allocator can provide.
IMPOSSIBLE_BYTES = 1 << 60


class Injector:
    """Injects the planned fault into this process.

    Args:
        folder: The trace folder of the attempt, which contains the plan.
        write: Adds a line to the trace of this process. Takes the kind of the record, and its
            fields as keyword arguments.
    """

    def __init__(self, folder: Path, write: Callable[..., None]) -> None:
        self._folder = folder
        self._write = write
        self.plan = read_plan(folder)
        self._injection = self.plan.injection
        # None once the fault has been injected.
        self._moment = self._injection.moment
        # Whether a limit was set that makes the kernel kill this process in the middle of a write.
        self._will_cut_write = False

    def begin(self) -> None:
        """Inject faults that apply from the start of the process."""
        if self._injection.clock_shift_seconds:
            clock.shift(self._injection.clock_shift_seconds)
        if self._injection.unreadable_file is not None:
            self._intercept_calls(Calls.READ)

    def meet(self, moment: Moment, count: int) -> None:
        """Inject the fault if it is planned for this moment.

        Args:
            moment: The moment that the process has reached.
            count: Number of steps that this process has made, or number of this save or evaluation.
        """
        if self._is_due(moment, count):
            assert self._injection.action is not None
            _ACTIONS[self._injection.action](self)

    def disturb_batch(self, torch: Any, batch: Any, count: int, moment: Moment) -> Any:
        """Inject a fault into a batch or a loader worker, if it is planned for this moment.

        Args:
            torch: The torch module of the script.
            batch: A batch from the loader, or the inputs of a model.
            count: Number of steps that this process has made.
            moment: `Moment.LOADER` or `Moment.FORWARD`.

        Returns:
            The batch to use, which is a changed copy if the fault is a NaN.
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
        """Return the PIDs of the worker processes of loaders in this process."""
        # If the script has loader workers, this module has already been imported.
        from multiprocessing import active_children

        return sorted(child.pid for child in active_children() if child.pid is not None)

    def save_ends(self) -> None:
        """Kill this process after a save if the file was too small for a kill during the write."""
        if self._will_cut_write:
            self._kill()

    def _is_due(self, moment: Moment, count: int) -> bool:
        """Return whether to inject the fault now; if so, record that it was injected."""
        if moment != self._moment or count < self._injection.count:
            return False
        rank, _ = read_rank()
        if rank != self._injection.rank:
            return False
        self._moment = None
        try:
            # Only one process injects the fault, even if a launcher replaces one that has died.
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
        """Ask the command to exit, as a scheduler does.

        Only the command itself receives the signal. The command decides which of its processes to
        notify.
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
        """Allocate more memory than the machine has.

        torch's own allocator raises the error, and it does so during `backward`.
        """
        torch: Any = sys.modules["torch"]
        device = "cuda" if torch.cuda.is_initialized() else "cpu"
        torch.empty(IMPOSSIBLE_BYTES, dtype=torch.uint8, device=device)

    def _cut_write(self) -> None:
        """Make the kernel kill this process when it has written half of a file.

        The kernel sends SIGXFSZ to a process that exceeds its limit on file sizes.
        """
        self._will_cut_write = True
        _, hard_limit = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard_limit))
        # By default, SIGXFSZ kills the process, but Python ignores the signal. Restore the default
        # through C, because `signal.signal` works only in the main thread, and a save may run in
        # another thread.
        default_action = None
        ctypes.CDLL(None).signal(signal.SIGXFSZ, default_action)
        self._limit_file_size()

    def _refuse_writes(self) -> None:
        """Make writes beyond half of a checkpoint fail with the planned error.

        The kernel cuts the first write short at the limit on file sizes, and a seccomp filter
        refuses the next write. If the system supports no filter, a full disk is reported as EFBIG,
        and a single failing write cannot be injected.
        """
        has_filter = self._intercept_calls(Calls.WRITE)
        if has_filter or self._injection.action == Action.FILL_DISK:
            self._limit_file_size()

    def _limit_file_size(self) -> None:
        assert self._injection.size_bytes is not None
        _, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self._injection.size_bytes, hard_limit))

    def _intercept_calls(self, calls: Calls) -> bool:
        """Let the campaign decide whether each write or read of this process fails (see `seccomp`).

        Returns:
            Whether this system supports it. If not, the reason is written to the trace.
        """
        try:
            ask_before(calls, self._folder)
        except OSError as error:
            why = f"this system does not allow seccomp filters: {error.strerror}"
            self._write("missed", why=why)
            return False
        return True

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
}


def shut_down(file: Path) -> bool:
    """Shut down a file descriptor's network connection, if it has one.

    Args:
        file: The descriptor as a path in ``/proc/self/fd``.

    Returns:
        Whether the descriptor was a connected network socket.
    """
    # The descriptor may have been closed, and `getpeername` fails for a socket without a peer.
    with suppress(OSError):
        if not file.is_socket():
            return False
        with socket.socket(fileno=os.dup(int(file.name))) as connection:
            if connection.family != socket.AF_UNIX and connection.getpeername():
                connection.shutdown(socket.SHUT_RDWR)
                return True
    return False


def read_rank() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks; (0, 1) in a run without ranks.

    The result is not cached, because a launcher may set the environment after a fork.
    """
    distributed = sys.modules.get("torch.distributed")
    # `torch.multiprocessing.spawn` sets no variables, so ask the process group first.
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def put_nan(torch: Any, batch: Any) -> Any:
    """Return a copy of a batch whose first floating-point number is NaN.

    Return None if the batch has no floating-point number.

    Args:
        torch: The torch module.
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
    """Return a copy of a mapping or sequence in which one item is replaced."""
    if not isinstance(batch, (list, tuple)):
        # Copying preserves the class, such as Hugging Face's BatchEncoding.
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
