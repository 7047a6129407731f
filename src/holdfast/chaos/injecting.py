"""Do to this process what its trial is about, once, at the moment that was planned."""

from __future__ import annotations

import ctypes
import json
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

from holdfast.chaos import clock
from holdfast.chaos.refusing import ask_before

PLAN_FILE = "plan.json"
COMMAND_FILE = "command.pid"
MET_FILE = "met"


class Injector:
    """The fault of one attempt, as the file `PLAN_FILE` says it.

    ``at`` is the moment: ``backward``, ``before`` or ``after`` a step, ``loader``, ``forward``,
        ``eval``,
    ``save begins`` or ``save ends``; ``count`` how many steps (saves, evaluations) there were by
    then; ``act`` what is done; ``rank`` to whom. ``clock`` is by how many seconds another time it
    is, ``path`` a file that is not read.
    """

    def __init__(self, folder: Path, write: Callable[..., None]) -> None:
        self._folder, self._write = folder, write
        self.plan: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            self.plan = json.loads((folder / PLAN_FILE).read_bytes())
        self._at = self.plan.get("at")
        self._cut = False

    def begin(self) -> None:
        """Carry out what holds from the start of a process on."""
        if "clock" in self.plan:
            clock.shift(self.plan["clock"])
        if "path" in self.plan:
            self._ask_before("read")

    def _ask_before(self, which: str) -> bool:
        try:
            ask_before(which, self._folder)
        except OSError as error:
            self._write(
                "missed",
                why=f"this system refuses a filter of system calls (seccomp): {error.strerror}",
            )
            return False
        return True

    def _is_now(self, at: str, count: int) -> bool:
        if (
            at != self._at
            or count < self.plan["count"]
            or own_rank()[0] != self.plan.get("rank", 0)
        ):
            return False
        self._at = None
        # Once in all processes: a launcher may start others in place of a dead one
        with suppress(FileExistsError):
            with (self._folder / MET_FILE).open("x") as file:
                file.write(str(os.getpid()))
            self._write("fault", act=self.plan["act"])
            return True
        return False

    def meet(self, at: str, count: int) -> None:
        """Carry out the fault, if this is its moment."""
        if at == self._at and self._is_now(at, count):
            _ACTS[self.plan["act"]](self)

    def batch(self, torch: Any, batch: Any, steps: int, at: str) -> Any:
        """Return a batch, with a NaN in it if that is the fault.

        A fault of workers is carried out.
        """
        if (
            at != self._at
            or (self.plan["act"] != "nan" and not self.workers())
            or not self._is_now(at, steps)
        ):
            return batch
        if self.plan["act"] == "nan":
            batch = with_nan(torch, batch, done := [False])
            if not done[0]:
                self._write("missed", why="no number of that batch can be NaN")
            return batch
        os.kill(
            self.workers()[0],
            signal.SIGKILL if self.plan["act"] == "worker killed" else signal.SIGSTOP,
        )
        return batch

    def workers(self) -> list[int]:
        """Return the pids of the children that load."""
        # The training has it imported, if it has workers
        from multiprocessing import active_children

        return sorted(each.pid for each in active_children() if each.pid is not None)

    def save_ends(self) -> None:
        """End this process after a save that was to be cut and was too short for it."""
        if self._cut:
            self._signal(signal.SIGKILL)

    @staticmethod
    def _signal(number: int) -> None:
        os.kill(os.getpid(), number)

    def _terminate(self) -> None:
        """As schedulers do: the command is asked, and whoever it asks."""
        os.kill(int((self._folder / COMMAND_FILE).read_text()), signal.SIGTERM)
        time.sleep(0.05)  # or a handler in this process would see it later than it happened

    def _cut_write(self) -> None:
        """Let the kernel end this process in the middle of a file, as a kill would.

        Past half of what it writes.
        """
        self._cut = True
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        # As `signal.signal`, in a thread that saves too
        ctypes.CDLL(None).signal(signal.SIGXFSZ, None)
        self._limit_files()

    @staticmethod
    def append(file: int, line: bytes) -> None:
        """Write to the trace, which no fault may limit."""
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits[1], limits[1]))
        try:
            os.write(file, line)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def _limit_disk(self) -> None:
        """Let the kernel cut short what would grow too large.

        What comes then is refused with the planned errno.
        """
        if self._ask_before("write") or self.plan["act"] == "disk":  # which is EFBIG then
            self._limit_files()

    def _cut_off(self) -> None:
        """Shut down every TCP connection of this process."""
        count = 0
        for file in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # it is closed again, or a socket that is not connected
                if file.is_socket():
                    with socket.socket(fileno=os.dup(int(file.name))) as each:
                        if each.family != socket.AF_UNIX and each.getpeername():
                            each.shutdown(socket.SHUT_RDWR)
                            count += 1
        if not count:
            self._write("missed", why="no TCP connection was open")

    def _limit_files(self) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(self.plan["bytes"]), hard))

    def _use_up_memory(self) -> None:
        """Ask for more memory than there is.

        The error is the allocator's own, and comes out of `backward`.
        """
        torch: Any = sys.modules["torch"]
        torch.empty(
            1 << 60, dtype=torch.uint8, device="cuda" if torch.cuda.is_initialized() else "cpu"
        )


def own_rank() -> tuple[int, int]:
    """Return the rank of this process, and of how many, (0, 1) without ranks.

    A launcher may set it after a fork.
    """
    group = sys.modules.get("torch.distributed")
    # `mp.spawn` sets no variable
    if group is not None and group.is_available() and group.is_initialized():
        return group.get_rank(), group.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def with_nan(torch: Any, value: Any, done: list[bool]) -> Any:
    """Return a batch like this one, with a NaN at the first place of its first tensor of
    floating-point numbers.
    """
    if (
        not done[0]
        and isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.numel()
    ):
        done[0] = True
        value = value.detach().clone()
        value.view(-1)[0] = float("nan")
    elif isinstance(value, Mapping) and hasattr(value, "copy"):
        other: Any = value.copy()
        for key in value:
            other[key] = with_nan(torch, value[key], done)
        return other
    elif type(value) in (list, tuple):
        return type(value)(with_nan(torch, each, done) for each in value)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(with_nan(torch, each, done) for each in value))
    return value


_ACTS: dict[str, Callable[[Injector], None]] = {
    "SIGKILL": lambda injector: injector._signal(signal.SIGKILL),
    "SIGSTOP": lambda injector: injector._signal(signal.SIGSTOP),
    "SIGTERM": Injector._terminate,
    "memory": Injector._use_up_memory,
    "disk": Injector._limit_disk,
    "EIO": Injector._limit_disk,
    "cut off": Injector._cut_off,
    "cut write": Injector._cut_write,
}
