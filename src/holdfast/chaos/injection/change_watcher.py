"""Count the system calls by which a save changes files, or kill the process before one of them."""

from __future__ import annotations

import errno
import os
import platform
import signal
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG

from holdfast.chaos.injection.listener import CallListener, SuspendedCall
from holdfast.chaos.injection.plan import MET_FILE, WATCH_ENDED_FILE, AttemptPlan
from holdfast.chaos.injection.seccomp import ARCHITECTURES, FTRUNCATE, PathCall

# The longest path in Linux, in bytes.
MOST_PATH_BYTES = 4096
# In place of a folder's descriptor, this number stands for the current directory (AT_FDCWD).
CURRENT_FOLDER = -100
_INT_VALUES = 1 << 32


class ChangeWatcher(CallListener):
    """Lists the system calls that change files in the workplace, until the watch has ended.

    Args:
        folder: The trace folder of the attempt; see `CallListener`.
        plan: The plan of the attempt. If the plan's injection has a `change_number`, the process
            that trains is killed before this call, counted from 1.
    """

    def __init__(self, folder: Path, plan: AttemptPlan) -> None:
        # A description of each call, such as "rename a.pt.tmp to a.pt".
        self.changes: list[str] = []
        architecture = ARCHITECTURES.get(platform.machine())
        self._path_calls = {} if architecture is None else architecture.path_calls
        super().__init__(folder, plan)

    def decide(self, call: SuspendedCall) -> int:
        """Note a call that changes a file, and kill the process if it is the planned one."""
        if (self._folder / WATCH_ENDED_FILE).exists():
            return 0
        change = self._describe(call)
        if change is None:
            return 0
        self.changes.append(change)
        if len(self.changes) == self._injection.change_number:
            self._kill(call.process)
            # On a busy machine, the kernel may process this answer before the signal. So the call
            # must not continue, or the kill would come after the change.
            return errno.EINTR
        return 0

    def _kill(self, caller: int) -> None:
        """Kill the process that trains, and the one that makes the call.

        They differ if the script lets another process write, such as ``cp`` or a forked one. If
        only that process died, the script would continue, and its next save would hide the damage.
        """
        trainer = int((self._folder / MET_FILE).read_text())
        for process in (trainer, caller):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def _describe(self, call: SuspendedCall) -> str | None:
        """Return a description of a call, or None if it changes no file in the workplace."""
        path_call = self._path_calls.get(call.number)
        if path_call is not None:
            paths = _paths_of(call, path_call)
            if not any(map(self._is_writable, paths)):
                return None
            return f"{path_call.verb} {' to '.join(map(self._name, paths))}"
        path = call.open_file.readlink()
        if not self._is_writable(path) or not S_ISREG(call.open_file.stat().st_mode):
            return None
        verb = "resize" if call.number in FTRUNCATE else "write to"
        return f"{verb} {self._name(path)}"

    def _name(self, path: Path) -> str:
        """Return the path below the folder of the workplace that it is in."""
        for folder in self._writable_folders:
            with suppress(ValueError):
                return str(path.relative_to(folder))
        return str(path)


def _paths_of(call: SuspendedCall, path_call: PathCall) -> list[Path]:
    """Return the absolute paths that a call is about."""
    process = Path(f"/proc/{call.process}")
    paths = []
    with (process / "mem").open("rb", buffering=0) as memory:
        for position in path_call.path_arguments:
            memory.seek(call.arguments[position])
            path = os.fsdecode(memory.read(MOST_PATH_BYTES).partition(b"\0")[0])
            link = process / "cwd"
            if path_call.has_folder_arguments:
                descriptor = call.arguments[position - 1] % _INT_VALUES
                if descriptor != CURRENT_FOLDER % _INT_VALUES:
                    link = process / "fd" / str(descriptor)
            paths.append(link.readlink() / path)
    return paths
