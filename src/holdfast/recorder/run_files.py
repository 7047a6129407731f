"""The files of a supervised run, and what each observed process says of itself.

``supervised.json`` and ``output.log`` are written by the supervisor, ``processes/<pid>-<ticks>/``
by each process. A process is named by its pid and its start time in clock ticks, since pids come
again.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from holdfast.core.files import make_folder, read_file, swap_in

SUPERVISED_FILE = "supervised.json"
OUTPUT_FILE = "output.log"
VERDICT_FILE = "verdict.json"
SUPERVISOR_FOLDER = "supervisor"
LOST_FILE = "lost.json"
PROCESSES_FOLDER = "processes"
HOSTS_FOLDER = "hosts"
STACKS_FOLDER = "stacks"
PROCESS_FILE = "process.json"
BOARD_FILE = "progress.board"
SAMPLES_FILE = "samples.ring"
FAULTHANDLER_FILE = "stacks.txt"
OPTIMIZERS_FILE = "optimizers.json"
SETTINGS_FILE = "settings.json"
_MOST_HOST_BYTES = 64 << 10
_MOST_PLAYERS = 8
ATTEMPT_LINE = "--- holdfast: attempt {number} ---"
# Not HOLDFAST_*: each of those is taken for a field of a policy, and refused if it is none.
OBSERVE_VARIABLE = "OBSERVED_BY_HOLDFAST"
ATTEMPT_VARIABLE = "ATTEMPT_BY_HOLDFAST"
# A real-time signal, upon which Python processes write their stacks. SIGUSR1 and SIGUSR2 are the
# script's: schedulers send them as a warning, and a guard stops the run upon them. Nothing that
# people use sends this one.
STACKS_SIGNAL = int(signal.SIGRTMIN) + 12

ProcessRole = Literal["trainer", "loader worker", "launcher", "other"]
_recording_listeners: list[Callable[[Path], None]] = []
guarded: dict[int, tuple[str, Callable[[], Any]]] = {}
"""By `id` of each optimizer of an open guard its name, and a weak reference to what has the
``global_step``."""


class ProcessInfo(NamedTuple):
    """What an observed process says of itself."""

    pid: int
    ticks: int  # when it started, in clock ticks since boot (field 22 of /proc/<pid>/stat)
    ppid: int  # its parent's when it started
    argv: list[str]
    attempt: int = 0  # of the supervisor
    role: ProcessRole = "other"  # a trainer steps or calls backward, a loader worker serves one
    rank: int | None = None  # this and the next two: as the launcher says
    local_rank: int | None = None
    world_size: int | None = None
    torch: str | None = None  # version, None before it is imported
    started: float = 0.0  # Unix time
    # Upon which it writes stacks.txt; None if the script handles that signal itself
    stacks_signal: int | None = None

    @property
    def folder(self) -> str:
        """Return the name of its folder in ``processes/``."""
        return f"{self.pid}-{self.ticks}"


def write_process(run: Path, info: ProcessInfo) -> Path:
    """Write what a process says of itself, and return its folder.

    OSError if it cannot be made or written.

    Whole or not at all, but not flushed to the disk: it must survive the process, not the machine,
    and a process of the user must not wait for a disk when it starts.
    """
    folder = make_folder(run, PROCESSES_FOLDER, info.folder)
    swap_in(folder / PROCESS_FILE, json.dumps(info._asdict()).encode())
    return folder


def read_processes(run: Path) -> list[tuple[Path, ProcessInfo]]:
    """Return the folders of observed processes with what they say, oldest first.

    A damaged one is passed over.
    """
    found = []
    for path in sorted((run / PROCESSES_FOLDER).glob(f"*/{PROCESS_FILE}")):
        info = read_process_file(path)
        if info is not None:
            found.append((path.parent, info))
    return sorted(found, key=lambda pair: pair[1].started)


def read_process_file(path: Path) -> ProcessInfo | None:
    """Return what a process says of itself, None if the file is missing or damaged."""
    try:
        values: dict[str, Any] = json.loads(read_file(path))
        info = ProcessInfo(**{name: values[name] for name in ProcessInfo._fields if name in values})
        return info if _is_sound(info) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _is_sound(info: ProcessInfo) -> bool:
    """Return whether each field is of its type.

    The file lies where the observed script can write.
    """
    numbers = (info.pid, info.ticks, info.ppid, info.attempt)
    perhaps = (info.rank, info.local_rank, info.world_size, info.stacks_signal)
    return (
        all(type(number) is int and number >= 0 for number in numbers)
        and all(number is None or type(number) is int for number in perhaps)
        and isinstance(info.argv, list)
        and all(isinstance(word, str) for word in info.argv)
        and info.role in get_args(ProcessRole)
        and (info.torch is None or isinstance(info.torch, str))
        and type(info.started) in (int, float)
        and info.started == info.started  # not NaN, which has no place in an order
    )


class Optimizers(dict[str, int]):
    """Numbers from 1 of the optimizers whose steps a ring holds, by name; from the 255th on one.

    A file has them.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(
            (name, number) for number, name in enumerate(read_optimizers(folder), start=1)
        )
        self._file = folder / OPTIMIZERS_FILE

    def __missing__(self, name: str) -> int:
        self[name] = number = min(len(self) + 1, 255)  # a record has a byte for it
        write_json(self._file, list(self))  # without it, it has no name
        return number


def write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Keep what a training is set to, by names such as "optimizer.0.lr".

    What is no plain value is left out.
    """
    plain = (bool, int, float, str)
    found = {
        name: list(v) if isinstance(v, (list, tuple)) else [v]
        for name, v in settings.items()
        if v is not None
    }
    sound = {
        name
        for name, values in found.items()
        if all(isinstance(each, plain) for each in values[:16])
    }
    write_json(folder / SETTINGS_FILE, {name: v for name, v in settings.items() if name in sound})


def write_json(path: Path, value: Any) -> None:
    """Write a value, or nothing on a full disk."""
    with suppress(OSError):
        swap_in(path, json.dumps(value).encode())


def read_optimizers(folder: Path) -> list[str]:
    """Return the names of the optimizers whose steps a folder's ring holds.

    None of many made in turn.
    """
    try:
        found = json.loads(read_file(folder / OPTIMIZERS_FILE))
    except (OSError, ValueError, RecursionError):
        return []
    return list(map(str, found)) if isinstance(found, list) and len(found) <= _MOST_PLAYERS else []


def read_host(path: Path) -> dict[str, Any] | None:
    """Return what the supervisor of one of several hosts says, None if the file is missing or
    damaged.
    """
    try:
        found = json.loads(read_file(path, _MOST_HOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not all(
        isinstance(found.get(key), str) for key in ("state", "beat")
    ):
        return None
    go = found.get("go")
    if go is not None and not (isinstance(go, dict) and all(each.isdecimal() for each in go)):
        return None
    return found


def folder_of_first_host(run: Path) -> Path:
    """Return the folder of the host that failed first, if several hosts were the last to use
    `run`; else `run`.
    """
    files = sorted(
        (run / HOSTS_FOLDER).glob("[0-9]*.json"), key=lambda path: (len(path.name), path.name)
    )
    told = {path: its for path in files if (its := read_host(path)) is not None}
    newest = max(told, key=_changed, default=None)
    if newest is None or _changed(run / SUPERVISED_FILE) > _changed(newest):
        return run
    told = {
        path: its for path, its in told.items() if its.get("count") == told[newest].get("count")
    }
    first = next(
        (path for path, its in told.items() if its.get("cause") and not its.get("follows")), None
    )
    return run / f"host-{(first or next(iter(told))).stem}"


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def process_lives(pid: int, ticks: int) -> bool:
    """Return whether a process of this machine is there and has not ended.

    ``ticks`` as in `ProcessInfo`.
    """
    fields = _stat(pid)
    return len(fields) > 19 and fields[0] not in (b"Z", b"X") and int(fields[19]) == ticks


def process_is_stopped(pid: int) -> bool:
    """Return whether a signal such as SIGSTOP has stopped a process of this machine."""
    return _stat(pid)[:1] == [b"T"]


def _stat(pid: int) -> list[bytes]:
    """Return the fields of ``/proc/<pid>/stat`` from the state on.

    None of a process that is gone.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return []


def on_recording(listener: Callable[[Path], None]) -> None:
    """Call a function with every run directory that a guard opens in this process."""
    _recording_listeners.append(listener)


def announce_recording(path: Path) -> None:
    """Let whoever observes this process know that a guard records into this run directory."""
    for listener in _recording_listeners:
        listener(path)
