"""The files of a supervised run, and what each observed process reports about itself.

``supervised.json`` and ``output.log`` are written by the supervisor, and
``processes/<pid>-<ticks>/`` by each process. A process is named by its PID and its start time in
clock ticks, since PIDs are reused.
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
# A script with more names than this evidently keeps creating optimizers, and their names mean
# nothing.
_MOST_NAMED_OPTIMIZERS = 8
# A record of a step has one byte for the number of the optimizer.
_LARGEST_OPTIMIZER_NUMBER = 255
# The most values that a setting may have.
_MOST_SETTING_VALUES = 16
ATTEMPT_LINE = "--- holdfast: attempt {number} ---"
# Not HOLDFAST_*: such a variable would be taken for a field of a policy, and refused.
OBSERVE_VARIABLE = "OBSERVED_BY_HOLDFAST"
ATTEMPT_VARIABLE = "ATTEMPT_BY_HOLDFAST"
# A real-time signal on which Python processes write their stacks. SIGUSR1 and SIGUSR2 belong to the
# script: schedulers send them as a warning, and a guard stops the run on them. No common tool sends
# this one.
STACKS_SIGNAL = int(signal.SIGRTMIN) + 12

ProcessRole = Literal["trainer", "loader worker", "launcher", "other"]
_recording_listeners: list[Callable[[Path], None]] = []
# The optimizers of open guards by `id`: the name, and a weak reference to the object that has the
# ``global_step``.
guarded: dict[int, tuple[str, Callable[[], Any]]] = {}


class ProcessInfo(NamedTuple):
    """What an observed process reports about itself."""

    pid: int
    # Its start time, in clock ticks since boot (field 22 of /proc/<pid>/stat).
    ticks: int
    # The PID of its parent when it started.
    ppid: int
    argv: list[str]
    # The attempt of the supervisor.
    attempt: int = 0
    # A trainer steps or calls backward; a loader worker serves a trainer.
    role: ProcessRole = "other"
    # As reported by the launcher.
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    # The version, or None before torch is imported.
    torch: str | None = None
    # Unix time.
    started: float = 0.0
    # The signal on which it writes its stacks, or None if the script handles that signal itself.
    stacks_signal: int | None = None

    @property
    def folder(self) -> str:
        """The name of its folder in ``processes/``."""
        return f"{self.pid}-{self.ticks}"


def write_process(run: Path, info: ProcessInfo) -> Path:
    """Write what a process reports about itself, and return its folder.

    The file is written atomically but not flushed to the disk: it must survive the process, not the
    machine, and a starting user process must not wait for a disk.

    Raises:
        OSError: It cannot be written.
    """
    folder = make_folder(run, PROCESSES_FOLDER, info.folder)
    swap_in(folder / PROCESS_FILE, json.dumps(info._asdict()).encode())
    return folder


def read_processes(run: Path) -> list[tuple[Path, ProcessInfo]]:
    """Return the folders of observed processes and what they report, oldest first.

    Damaged files are skipped.
    """
    processes = []
    for path in sorted((run / PROCESSES_FOLDER).glob(f"*/{PROCESS_FILE}")):
        info = read_process_file(path)
        if info is not None:
            processes.append((path.parent, info))
    return sorted(processes, key=lambda process: process[1].started)


def read_process_file(path: Path) -> ProcessInfo | None:
    """Return what a process reports about itself, or None if the file is missing or damaged."""
    try:
        values: dict[str, Any] = json.loads(read_file(path))
        fields = {name: values[name] for name in ProcessInfo._fields if name in values}
        info = ProcessInfo(**fields)
        return info if _is_sound(info) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _is_sound(info: ProcessInfo) -> bool:
    """Return whether every field has its type: the observed script can write to the file."""
    counts = (info.pid, info.ticks, info.ppid, info.attempt)
    optional_numbers = (info.rank, info.local_rank, info.world_size, info.stacks_signal)
    return (
        all(type(number) is int and number >= 0 for number in counts)
        and all(number is None or type(number) is int for number in optional_numbers)
        and isinstance(info.argv, list)
        and all(isinstance(word, str) for word in info.argv)
        and info.role in get_args(ProcessRole)
        and (info.torch is None or isinstance(info.torch, str))
        and type(info.started) in (int, float)
        # A NaN, which differs from itself, has no place in an order. Not `math.isnan`, which raises
        # for integers beyond floats.
        and info.started == info.started
    )


class Optimizers(dict[str, int]):
    """The numbers, from 1, of the optimizers whose steps a ring holds, by name.

    A name that is new gets the next number and is written to a file beside the ring. All names from
    the 255th on share a number.
    """

    def __init__(self, folder: Path) -> None:
        names = read_optimizers(folder)
        super().__init__((name, number) for number, name in enumerate(names, start=1))
        self._file = folder / OPTIMIZERS_FILE

    def __missing__(self, name: str) -> int:
        number = min(len(self) + 1, _LARGEST_OPTIMIZER_NUMBER)
        self[name] = number
        write_json(self._file, list(self))
        return number


def read_optimizers(folder: Path) -> list[str]:
    """Return the names of the optimizers whose steps a folder's ring holds.

    Empty if there are more names than `_MOST_NAMED_OPTIMIZERS`: such a script keeps creating
    optimizers, whose names mean nothing.
    """
    try:
        names = json.loads(read_file(folder / OPTIMIZERS_FILE))
    except (OSError, ValueError, RecursionError):
        return []
    if not isinstance(names, list) or len(names) > _MOST_NAMED_OPTIMIZERS:
        return []
    return [str(name) for name in names]


def write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings of a training run, by names such as ``"optimizer.0.lr"``.

    Anything but plain values and lists of them is left out.
    """
    plain = {name: value for name, value in settings.items() if _is_plain(value)}
    write_json(folder / SETTINGS_FILE, plain)


def _is_plain(value: Any) -> bool:
    items = value[:_MOST_SETTING_VALUES] if isinstance(value, (list, tuple)) else [value]
    return all(isinstance(item, (bool, int, float, str)) for item in items)


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, unless the disk is full."""
    with suppress(OSError):
        swap_in(path, json.dumps(value).encode())


def read_host(path: Path) -> dict[str, Any] | None:
    """Return what the supervisor of one host reports, or None if the file is missing or damaged."""
    try:
        host = json.loads(read_file(path, _MOST_HOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(host, dict):
        return None
    if not (isinstance(host.get("state"), str) and isinstance(host.get("beat"), str)):
        return None
    go = host.get("go")
    if go is not None and not (isinstance(go, dict) and all(key.isdecimal() for key in go)):
        return None
    return host


def folder_of_first_host(run: Path) -> Path:
    """Return the folder to read a run from.

    This is `run` itself or, if the run last used several hosts, the folder of the host that failed
    first.
    """
    hosts = _hosts_of(run)
    if not hosts:
        return run
    newest = max(hosts, key=_modified_at)
    if _modified_at(run / SUPERVISED_FILE) > _modified_at(newest):
        # The last attempt ran on this host alone.
        return run
    # Files of other hosts may be left over from an attempt with another number of hosts.
    count = hosts[newest].get("count")
    current = {path: host for path, host in hosts.items() if host.get("count") == count}
    # These have a failure of their own, rather than one that follows another's.
    failed_first = [
        path for path, host in current.items() if host.get("cause") and not host.get("follows")
    ]
    folder_number = (failed_first or list(current))[0].stem
    return run / f"host-{folder_number}"


def _hosts_of(run: Path) -> dict[Path, dict[str, Any]]:
    """Return what each host of a run reports, by its file, in the order of the hosts' numbers."""
    hosts = {}
    files = (run / HOSTS_FOLDER).glob("[0-9]*.json")
    for path in sorted(files, key=lambda path: (len(path.name), path.name)):
        host = read_host(path)
        if host is not None:
            hosts[path] = host
    return hosts


def _modified_at(path: Path) -> float:
    """Return when a file was last modified, in Unix seconds; 0 if it does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def process_lives(pid: int, ticks: int) -> bool:
    """Return whether a process of this machine exists and has not exited.

    Args:
        pid: Its PID.
        ticks: Its start time, as in `ProcessInfo`.
    """
    fields = _stat(pid)
    if len(fields) < 20 or fields[0] in (b"Z", b"X"):
        return False
    return int(fields[19]) == ticks


def process_is_stopped(pid: int) -> bool:
    """Return whether a signal such as SIGSTOP has stopped a process of this machine."""
    return _stat(pid)[:1] == [b"T"]


def _stat(pid: int) -> list[bytes]:
    """Return the fields of ``/proc/<pid>/stat`` starting with the state, or none if it is gone."""
    try:
        content = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return []
    # The program's name, in parentheses, may contain anything.
    return content.rpartition(b")")[2].split()


def on_recording(listener: Callable[[Path], None]) -> None:
    """Call a function with every run directory that a guard opens in this process."""
    _recording_listeners.append(listener)


def announce_recording(path: Path) -> None:
    """Tell the observer of this process that a guard records into this run directory."""
    for listener in _recording_listeners:
        listener(path)
