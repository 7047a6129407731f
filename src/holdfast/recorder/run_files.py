"""The files of a supervised run, including those that each observed process writes.

The supervisor writes ``supervised.json`` and ``output.log``. Each process writes to its own folder,
``processes/<pid>-<ticks>/``. The folder's name contains the process's start time in clock ticks,
because the operating system reuses PIDs.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from holdfast.core.files import make_folder, read_file, swap_in

if TYPE_CHECKING:
    from holdfast.core.events.data import EventData
    from holdfast.core.events.event import Event

SUPERVISED_FILE = "supervised.json"
OUTPUT_FILE = "output.log"
VERDICT_FILE = "verdict.json"
SUPERVISOR_FOLDER = "supervisor"
LOST_FILE = "lost.json"
PROCESSES_FOLDER = "processes"
HOSTS_FOLDER = "hosts"
# The run directory of the guard that saves an unchanged script.
GUARD_FOLDER = "guard"
STACKS_FOLDER = "stacks"
# The dumps of torch's flight recorder.
FLIGHT_FOLDER = "flight"
# What has been logged to an experiment tracker such as W&B, and under which ID.
TRACKER_FOLDER = "tracker"
PROCESS_FILE = "process.json"
BOARD_FILE = "progress.board"
SAMPLES_FILE = "samples.ring"
FAULTHANDLER_FILE = "stacks.txt"
OPTIMIZERS_FILE = "optimizers.json"
SETTINGS_FILE = "settings.json"
_MOST_HOST_BYTES = 64 << 10
# If a script has more optimizers than this, it probably keeps creating new optimizers, whose names
# are meaningless.
_MOST_NAMED_OPTIMIZERS = 8
# Step records store the optimizer's number in one byte.
_LARGEST_OPTIMIZER_NUMBER = 255
# Only this many items of a list are checked for being plain values, so that checking a long list is
# cheap.
_CHECKED_ITEMS = 16
ATTEMPT_LINE = "--- holdfast: attempt {number} ---"
# The names must not start with HOLDFAST_, because such a variable would be interpreted as a policy
# field and rejected.
OBSERVE_VARIABLE = "OBSERVED_BY_HOLDFAST"
ATTEMPT_VARIABLE = "ATTEMPT_BY_HOLDFAST"
# Set if `holdfast run` saves and resumes an unchanged script.
RESUME_VARIABLE = "RESUMED_BY_HOLDFAST"
# The receiver to which the supervisor sends messages. A guard sends its own messages there, too. If
# the variable is empty, as in a trial of `holdfast chaos`, a guard sends no messages.
NOTIFY_VARIABLE = "NOTIFY_BY_HOLDFAST"
# The ID of the W&B run that `holdfast run` continues in all attempts. WANDB_RUN_ID has the same
# value, but only until the script imports W&B; see ``supervise.observe.wandb_run``.
WANDB_VARIABLE = "WANDB_RUN_BY_HOLDFAST"
# When an observed Python process receives this real-time signal, it writes its stacks. SIGUSR1 and
# SIGUSR2 cannot be used, because schedulers send them to warn a job, and a Guard stops the run when
# it receives one of them. No common tool sends this real-time signal.
STACKS_SIGNAL = int(signal.SIGRTMIN) + 12

ProcessRole = Literal["trainer", "loader worker", "launcher", "other"]
_recording_listeners: list[Callable[[Path], None]] = []
_event_listeners: list[Callable[[EventData], None]] = []
# The optimizers of open Guards, keyed by the `id` of the optimizer. A value consists of the
# optimizer's name and a weak reference to the object that counts its steps in ``global_step``.
guarded: dict[int, tuple[str, Callable[[], Any]]] = {}


class ProcessInfo(NamedTuple):
    """The identity of an observed process, as reported by the process itself."""

    pid: int
    # The start time of the process, in clock ticks since boot (field 22 of /proc/<pid>/stat).
    ticks: int
    # The PID of the parent when the process started.
    ppid: int
    argv: list[str]
    # The number of the attempt in which the process was started.
    attempt: int = 0
    # What the process does. A trainer calls backward or steps an optimizer. A loader worker
    # prepares batches for a trainer.
    role: ProcessRole = "other"
    # The three numbers that a launcher such as torchrun assigned to the process.
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    # The version of torch, or None if the process has not imported torch yet.
    torch: str | None = None
    # The Unix time at which the process started.
    started: float = 0.0
    # The signal on which the process writes its stacks, or None if the script handles that signal.
    stacks_signal: int | None = None

    @property
    def folder(self) -> str:
        """The name of the process's folder in ``processes/``."""
        return f"{self.pid}-{self.ticks}"


def write_process(run: Path, info: ProcessInfo) -> Path:
    """Write the ``process.json`` of a process, and return the process's folder.

    The file is written atomically but not flushed to disk. It must survive the process but need not
    survive a crash of the machine, and the user's process must not wait for a disk while it starts.

    Raises:
        OSError: If the file cannot be written.
    """
    folder = make_folder(run, PROCESSES_FOLDER, info.folder)
    swap_in(folder / PROCESS_FILE, json.dumps(info._asdict()).encode())
    return folder


def read_processes(run: Path) -> list[tuple[Path, ProcessInfo]]:
    """Return the folder and the `ProcessInfo` of each observed process, oldest first.

    Processes whose ``process.json`` is damaged are skipped.
    """
    processes = []
    for path in sorted((run / PROCESSES_FOLDER).glob(f"*/{PROCESS_FILE}")):
        info = read_process_file(path)
        if info is not None:
            processes.append((path.parent, info))
    return sorted(processes, key=lambda process: process[1].started)


def read_process_file(path: Path) -> ProcessInfo | None:
    """Return the content of a ``process.json`` file, or None if it is missing or damaged."""
    try:
        values: dict[str, Any] = json.loads(read_file(path))
        fields = {name: values[name] for name in ProcessInfo._fields if name in values}
        info = ProcessInfo(**fields)
        return info if _is_sound(info) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _is_sound(info: ProcessInfo) -> bool:
    """Return whether every field of a `ProcessInfo` has the right type.

    This must be checked because the observed script could overwrite the file.
    """
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
        # Reject NaN, because processes are sorted by this time. `math.isnan` would raise an error
        # for an integer that does not fit into a float.
        and info.started == info.started
    )


class Optimizers(dict[str, int]):
    """Maps the names of optimizers to the numbers that identify them in step records.

    Numbering starts at 1. Looking up a new name assigns the next number to it and adds the name to
    ``optimizers.json``. From the 255th name on, all names share one number.

    Args:
        folder: The folder of the ring and of ``optimizers.json``.
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
    """Return the names in a folder's ``optimizers.json``, in the order of their numbers.

    The list is empty if there are more than `_MOST_NAMED_OPTIMIZERS` names. In that case, the
    script probably keeps creating new optimizers, whose names are meaningless.
    """
    try:
        names = json.loads(read_file(folder / OPTIMIZERS_FILE))
    except (OSError, ValueError, RecursionError):
        return []
    if not isinstance(names, list) or len(names) > _MOST_NAMED_OPTIMIZERS:
        return []
    return [str(name) for name in names]


def write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings of a training run to ``settings.json``.

    Args:
        folder: The folder in which to write the file.
        settings: The values, keyed by names such as ``"optimizer.0.lr"``. Only booleans, numbers,
            strings and lists of these are written; other values are omitted.
    """
    plain = {name: value for name, value in settings.items() if _is_plain(value)}
    write_json(folder / SETTINGS_FILE, plain)


def _is_plain(value: Any) -> bool:
    """Return whether a value is a boolean, number or string, or a list of these."""
    items = value[:_CHECKED_ITEMS] if isinstance(value, (list, tuple)) else [value]
    return all(isinstance(item, (bool, int, float, str)) for item in items)


def write_json(path: Path, value: Any) -> None:
    """Write a value to a file as JSON, ignoring the error if the file cannot be written."""
    with suppress(OSError):
        swap_in(path, json.dumps(value).encode())


def read_host(path: Path) -> dict[str, Any] | None:
    """Return the report that a host's supervisor wrote, or None if it is missing or damaged."""
    try:
        host = json.loads(read_file(path, _MOST_HOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(host, dict):
        return None
    if not (isinstance(host.get("state"), str) and isinstance(host.get("beat"), str)):
        return None
    # The field "go" is optional. Its keys must be numbers.
    go = host.get("go")
    if go is not None and not (isinstance(go, dict) and all(key.isdecimal() for key in go)):
        return None
    return host


def folder_of_first_host(run: Path) -> Path:
    """Return the folder that contains the recording of the host that explains how a run ended.

    If the last attempt used a single host, this is `run` itself. If it used several hosts, this is
    the folder of the host that failed first or, if no host failed, of the first host.
    """
    hosts = _hosts_of(run)
    if not hosts:
        return run
    newest = max(hosts, key=_modified_at)
    if _modified_at(run / SUPERVISED_FILE) > _modified_at(newest):
        # The last attempt ran on this host only.
        return run
    # Ignore reports that remain from an earlier attempt with a different number of hosts.
    count = hosts[newest].get("count")
    current = {path: host for path, host in hosts.items() if host.get("count") == count}
    # The hosts that failed on their own, rather than because another host had failed.
    failed_first = [
        path for path, host in current.items() if host.get("cause") and not host.get("follows")
    ]
    folder_number = (failed_first or list(current))[0].stem
    return run / f"host-{folder_number}"


def _hosts_of(run: Path) -> dict[Path, dict[str, Any]]:
    """Return the report of each host of a run, keyed by its file and sorted by host number."""
    hosts = {}
    files = (run / HOSTS_FOLDER).glob("[0-9]*.json")
    for path in sorted(files, key=lambda path: (len(path.name), path.name)):
        host = read_host(path)
        if host is not None:
            hosts[path] = host
    return hosts


def _modified_at(path: Path) -> float:
    """Return the Unix time at which a file was last modified, or 0 if the file does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def process_lives(pid: int, ticks: int) -> bool:
    """Return whether a process on this machine is still running.

    Args:
        pid: The PID of the process.
        ticks: The process's start time in clock ticks since boot. Another process that reuses the
            PID has a different start time.
    """
    fields = _stat(pid)
    # The first field is the state (Z and X are dead processes), and the 20th is the start time.
    if len(fields) < 20 or fields[0] in (b"Z", b"X"):
        return False
    return int(fields[19]) == ticks


def process_is_stopped(pid: int) -> bool:
    """Return whether a process on this machine was stopped by a signal such as SIGSTOP."""
    return _stat(pid)[:1] == [b"T"]


def _stat(pid: int) -> list[bytes]:
    """Return the fields of ``/proc/<pid>/stat``, starting with the process's state.

    The list is empty if the process no longer exists.
    """
    try:
        content = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return []
    # Split after the last parenthesis, because the program's name, which is in parentheses, may
    # itself contain spaces and parentheses.
    return content.rpartition(b")")[2].split()


def flight_prefix(attempt: int) -> str:
    """Return how the names of an attempt's flight recorder dumps begin; the rank follows."""
    return f"{attempt}-rank_"


def on_recording(listener: Callable[[Path], None]) -> None:
    """Register a function to be called whenever a Guard starts recording in this process.

    Args:
        listener: The function. It is called with the Guard's run directory.
    """
    _recording_listeners.append(listener)


def announce_recording(path: Path) -> None:
    """Call the functions registered with `on_recording`, because a Guard records to a directory.

    Args:
        path: The run directory of the Guard.
    """
    for listener in _recording_listeners:
        listener(path)


def on_guard_event(listener: Callable[[EventData], None]) -> None:
    """Register a function to be called with each event that a Guard in this process records.

    It may be called in any thread, and must neither fail nor take long.
    """
    _event_listeners.append(listener)


def announce_guard_event(data: EventData, _: Event) -> None:
    """Call the functions registered with `on_guard_event`.

    A Guard calls this function with each event that it records.
    """
    for listener in _event_listeners:
        listener(data)
