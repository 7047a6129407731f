"""Numbers that a script logs under names of its own: checked, recorded in a ring, and read back.

    scalars.ring    step, value, epoch, name (at most 64 bytes of UTF-8)    32,768 records, 3.4 MiB, made at the first

They go to the newest guard that is open in this process, else to the observer of `holdfast run`, else nowhere: so a
value lies in one place whoever sees it.
"""

from __future__ import annotations

import logging
import os
import struct
import weakref
from _thread import RLock, _local
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from holdfast.core.errors import PolicyError
from holdfast.recorder.ring import Record, RingWriter

if TYPE_CHECKING:
    from holdfast.core.events.event import EventData

SCALARS_FILE = "scalars.ring"
LONGEST_NAME = 64  # bytes of UTF-8
_RECORD = struct.Struct(f"<qdiB{LONGEST_NAME}s")  # step, value, epoch or -1, bytes of the name, name
_CAPACITY = 32_768
_FARTHEST = 2**62  # steps beyond are no steps
_MOST_REMEMBERED = 4096
_log = logging.getLogger("holdfast")

Found = list[tuple[bytes, float]]
"""Names and values that may be recorded."""
Logged = tuple[Mapping[Any, Any], Any, int | None]
"""What somebody logs: values by name (nested ones are joined by "/"), their own step or None, epoch or None."""


class Scalar(NamedTuple):
    """One value as it was recorded; `epoch` is None if nobody knew it."""

    name: str
    value: float
    step: int
    epoch: int | None
    unix_seconds: float


class Outlet(Protocol):
    """Who records scalars: a guard, or the observer of this process."""

    def log(self, found: Found, step: int | None = None, epoch: int | None = None) -> None:
        """Record values at a step and an epoch; None: the present ones."""


class Scalars:
    """Write the scalars of this process from any thread, in a file that the first of them makes.

    A process that was forked from this one writes nothing. Where the file cannot be made, `emit` gets one event.
    """

    def __init__(self, folder: Callable[[], Path], emit: Callable[[EventData], None]) -> None:
        self._folder, self._emit = folder, emit
        self._ring: RingWriter | None = None
        self._cannot_record = False
        self._lock = RLock()
        self._process = os.getpid()

    def write(self, found: Found, step: int, epoch: int | None) -> None:
        """Record values; about 1 microsecond each, no system call but the first time."""
        if os.getpid() != self._process:
            return
        with self._lock:
            ring = self._ring or self._open()
            if ring is not None:
                for name, value in found:
                    ring.append(_RECORD.pack(step, value, -1 if epoch is None else epoch, len(name), name))

    def _open(self) -> RingWriter | None:
        if self._cannot_record:
            return None
        from holdfast.core.events import process_events, run_events  # most processes log nothing

        try:
            path = self._folder() / SCALARS_FILE
            self._ring = RingWriter(path, payload_bytes=_RECORD.size, capacity=_CAPACITY)
        except OSError as error:
            self._cannot_record = True
            self._emit(process_events.ScalarsNotRecorded(error=error.strerror or str(error)))
            return None
        if self._ring.moved_aside:
            what = f"{SCALARS_FILE} begins anew: {self._ring.moved_aside}"
            self._emit(run_events.RecordingMovedAside(what=what))
        return self._ring

    def close(self) -> None:
        """Unmap the file; what is written afterwards opens it again."""
        if self._ring is not None:
            self._ring.close()
            self._ring = None


def scalar_of(record: Record) -> Scalar | None:
    """Return what a record of a ring of scalars says, None if it is of another kind of ring or a damaged one."""
    if len(record.payload) != _RECORD.size:
        return None
    step, value, epoch, length, name = _RECORD.unpack(record.payload)
    if not 0 < length <= LONGEST_NAME:
        return None
    text = name[:length].decode("utf-8", "replace")
    return Scalar(text, value, step, None if epoch < 0 else epoch, record.nanoseconds / 1e9)


# --- what is logged ---------------------------------------------------------------------------------------------

_names: dict[tuple[str, str], bytes] = {}  # that were checked


def checked(values: Mapping[str, Any] | None, split: str, more: dict[str, Any]) -> Found:
    """Return what may be recorded of the arguments of `log`; H117 if that is not all."""
    if not isinstance(split, str):
        raise _refused(f"split={split!r}", "it is put before the name", 'pass a text such as split="validation"')
    if values is not None and not isinstance(values, Mapping):
        raise _refused(f"a {type(values).__name__} without a name", "it is shown under a name", _EXAMPLE)
    found = []
    for name, value in (more if values is None else {**values, **more}).items():
        data = _names.get((split, name)) or _name(split, name)
        found.append((data, value if type(value) is float else _number(data, value)))
    return found


_EXAMPLE = 'call log(accuracy=0.93), or log({"val/wer": 0.2})'


def _name(split: str, name: Any) -> bytes:
    if not isinstance(name, str) or not name:
        raise _refused(f"the name {name!r}", "a value is shown under its name, a text", _EXAMPLE)
    whole = f"{split}/{name}" if split else name
    data = whole.encode("utf-8", "backslashreplace")
    if len(data) > LONGEST_NAME:
        raise _refused(
            f"the name {whole[:100]!r} of {len(data)} bytes",
            f"{LONGEST_NAME} bytes of UTF-8 are kept with each value, split included",
            "choose a shorter one",
        )
    if len(_names) >= _MOST_REMEMBERED:
        _names.clear()
    _names[split, name] = data
    return data


def _number(name: bytes, value: Any) -> float:
    number = number_of(value)
    if number is None:
        shape = getattr(value, "shape", None)
        what = f"{value!r:.60}" if shape is None else f"a {type(value).__name__} of shape {tuple(shape)}"
        raise _refused(
            f"{name.decode()} = {what}",
            "a scalar is one real number: int, float, or a tensor or array of one element",
            "log a number of it, such as its mean; Guard.add_image keeps images",
        )
    return number


def _refused(what: str, limit: str, fix: str) -> PolicyError:
    return PolicyError(f"log() of {what}", limit=limit, fix=f"{fix}.", rule="H117")


def number_of(value: Any) -> float | None:
    """Return a real number, or that in a tensor or array of one element; None of anything else."""
    try:
        shape = getattr(value, "shape", None)
        if shape is not None and not isinstance(value, Real):
            if any(side != 1 for side in shape):
                return None
            value = value.item()
        return float(value) if isinstance(value, Real) else None
    except (TypeError, ValueError, OverflowError):
        return None


# --- where it goes ----------------------------------------------------------------------------------------------

_guards: list[weakref.ref[Outlet]] = []  # that are open in this process, the newest last
_observers: list[Outlet] = []
os.register_at_fork(after_in_child=_guards.clear)


def guard_opened(guard: Outlet) -> None:
    """Let `log` go to this guard, until it is closed or collected."""
    guard_closed(guard)
    _guards.append(weakref.ref(guard))


def guard_closed(guard: Outlet) -> None:
    """Let `log` go to whoever is still open."""
    _guards[:] = [each for each in _guards if each() not in (None, guard)]


def observed_by(observer: Outlet) -> None:
    """Let `log` go to the observer of this process wherever no guard is open."""
    _observers[:] = [observer]


def _outlet() -> Outlet | None:
    guards = (guard for each in reversed(_guards) if (guard := each()) is not None)
    return next(guards, _observers[0] if _observers else None)


def log(values: Mapping[str, Any] | None = None, /, *, split: str = "", **more: Any) -> None:
    """Record numbers of your own, in a script under `holdfast run` or beside an open guard.

    They go to the newest guard that is open in this process, as by `Guard.log`; without one to the record of the
    process under `holdfast run`, at its present step; with neither they are checked, and nothing is recorded.

    Args:
        values: By name: numbers, or tensors of one element. One on a device is read, which waits for it.
        split: Such as ``"validation"``; what is shown is ``split/name``, of at most 64 bytes of UTF-8.
        **more: Further values by name, such as ``accuracy=0.93``. NaN and Inf are values.

    Raises:
        PolicyError: H117, for a value that is no number, or a name that is empty or too long.

    Example:
        >>> import holdfast
        >>> holdfast.log({"wer": 0.2}, split="validation", epoch_seconds=31.5)
    """
    found, outlet = checked(values, split, more), _outlet()
    if outlet is not None:
        outlet.log(found)


_within = _local()


def recorded_too(
    original: Callable[..., Any], read: Callable[..., Logged], failed: Callable[[BaseException], None] | None = None
) -> Callable[..., Any]:
    """Return a function that does what another one does, which logs somewhere else, and records the numbers too.

    What it calls to do so logs the same once more, which is not recorded. Whatever goes wrong with us is given to
    `failed`, or to the log.

    Args:
        original: The function.
        read: Takes its arguments and returns what it logs.
        failed: Called with an error of ours.
    """

    @wraps(original)
    def logging_too(*args: Any, **kwargs: Any) -> Any:
        if getattr(_within, "one", False):
            return original(*args, **kwargs)
        _within.one = True
        try:
            result = original(*args, **kwargs)
        finally:
            _within.one = False
        try:
            outlet = _outlet()
            if outlet is not None:
                values, step, epoch = read(*args, **kwargs)
                outlet.log(list(_numbers(values)), _whole(step), epoch)
        except Exception as error:  # noqa: BLE001 - the script logs where it wants to, and that has worked
            (failed or _say)(error)
        return result

    return logging_too


def _say(error: BaseException) -> None:
    _log.warning("what was logged is not recorded: %s: %s", type(error).__name__, error)


def _numbers(values: Mapping[Any, Any], before: str = "") -> Iterator[tuple[bytes, float]]:
    for key, value in values.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{name}/")
        elif name and (number := number_of(value)) is not None:
            data = name.encode("utf-8", "backslashreplace")[:LONGEST_NAME]
            yield data.decode("utf-8", "ignore").encode(), number


def _whole(step: Any) -> int | None:
    number = None if step is None else number_of(step)
    return int(number) if number is not None and abs(number) < _FARTHEST else None
