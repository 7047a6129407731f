"""Check, record and read the scalars that a script logs.

A scalar is recorded in one place only: by the newest open guard of this process or, without a
guard, by its observer.
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
from typing import Any, NamedTuple

from holdfast.core.errors import PolicyError
from holdfast.recorder.ring import Record, RingWriter

SCALARS_FILE = "scalars.ring"
# Bytes of UTF-8.
LONGEST_NAME = 64
_CAPACITY = 32_768
# Step, value, epoch or -1, length of the name in bytes, name.
_RECORD = struct.Struct(f"<qdiB{LONGEST_NAME}s")
_NO_EPOCH = -1
# Steps beyond this, passed to loggers of other libraries, are not counts.
_MOST_STEPS = 2**62

# Checked names and values.
CheckedScalars = list[tuple[bytes, float]]

# The outlets that record in this process, newest last: each has ``log(scalars, step)``, where a
# step of None is the current one. A forked process starts without any.
outlets: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
os.register_at_fork(after_in_child=outlets.clear)

_thread_state = _local()


class Scalar(NamedTuple):
    """One recorded value."""

    name: str
    value: float
    step: int
    # None if unknown.
    epoch: int | None
    unix_seconds: float


class Scalars:
    """Writes the scalars of this process, from any thread. A forked process writes nothing.

    Args:
        folder: Returns the folder for the ring. The ring is created with the first value.
        emit: Records an event.
    """

    def __init__(self, folder: Callable[[], Path], emit: Callable[[Any], None]) -> None:
        self._folder = folder
        self._emit = emit
        self._ring: RingWriter | None = None
        self._cannot_record = False
        self._lock = RLock()
        self._process = os.getpid()

    def write(self, scalars: CheckedScalars, step: int, epoch: int | None) -> None:
        """Record values, in about 1 microsecond each.

        If there is no space for the ring, one event says so and nothing is recorded.
        """
        if os.getpid() != self._process or self._cannot_record:
            return
        with self._lock:
            try:
                self._append(scalars, step, _NO_EPOCH if epoch is None else epoch)
            except OSError as error:
                # Imported here because most processes never need it.
                from holdfast.core.events.process_events import ScalarsNotRecorded

                self._cannot_record = True
                self._emit(ScalarsNotRecorded(error=error.strerror or str(error)))

    def _append(self, scalars: CheckedScalars, step: int, epoch: int) -> None:
        if self._ring is None:
            path = self._folder() / SCALARS_FILE
            self._ring = RingWriter(path, payload_bytes=_RECORD.size, capacity=_CAPACITY)
        for name, value in scalars:
            self._ring.append(_RECORD.pack(step, value, epoch, len(name), name))

    def close(self) -> None:
        """Unmap the file; the next value opens it again."""
        if self._ring is not None:
            self._ring.close()
            self._ring = None


def scalars_of(records: list[Record]) -> list[Scalar]:
    """Decode the records of a ring of scalars. Records of other rings are left out."""
    scalars = []
    for record in records:
        if len(record.payload) != _RECORD.size:
            continue
        step, value, epoch, length, name = _RECORD.unpack(record.payload)
        scalar = Scalar(
            name=name[:length].decode("utf-8", "replace"),
            value=value,
            step=step,
            epoch=None if epoch < 0 else epoch,
            unix_seconds=record.nanoseconds / 1e9,
        )
        scalars.append(scalar)
    return scalars


def check_scalars(values: Any, split: str, more: Mapping[str, Any]) -> CheckedScalars:
    """Return the names and values in the arguments of `log`.

    Raises:
        PolicyError: H117 for a name or a value that cannot be recorded.
    """
    scalars: dict[Any, Any] = dict(more)
    if isinstance(values, Mapping):
        scalars = {**values, **more}
    elif values is not None:
        # A bare value without a name, which is refused below.
        scalars = {None: values}
    return [_checked_entry(name, value, split) for name, value in scalars.items()]


def _checked_entry(name: Any, value: Any, split: str) -> tuple[bytes, float]:
    """Return the encoded name and the number of one scalar, or raise H117."""
    full_name = f"{split}/{name}" if split else name
    encoded = b""
    if isinstance(name, str) and isinstance(split, str):
        encoded = full_name.encode("utf-8", "backslashreplace")
    number = value if type(value) is float else number_of(value)
    if number is None:
        limit = "the value must be a single real number or a tensor of one element"
    elif not name or not 0 < len(encoded) <= LONGEST_NAME:
        limit = (
            f"a name has 1 to {LONGEST_NAME} bytes of UTF-8, including the split, and this has"
            f" {len(encoded)}"
        )
    else:
        return encoded, number
    raise PolicyError(
        f"log() of {full_name!r:.100} = {_describe(value):.80}",
        limit=limit,
        fix=(
            'call log(accuracy=0.93) or log({"wer": 0.2}, split="validation");'
            " Guard.add_image keeps images."
        ),
        rule="H117",
    )


def _describe(value: Any) -> str:
    if hasattr(value, "shape"):
        return f"{type(value).__name__} of shape {tuple(value.shape)}"
    return repr(value)


def number_of(value: Any) -> float | None:
    """Return a real number, or the one in a tensor or array of one element; None otherwise."""
    try:
        if hasattr(value, "shape") and not isinstance(value, Real):
            if any(side != 1 for side in value.shape):
                return None
            value = value.item()
        return float(value) if isinstance(value, Real) else None
    except (TypeError, ValueError, OverflowError):
        return None


def log(values: Mapping[str, Any] | None = None, /, *, split: str = "", **more: Any) -> None:
    """Record scalars from anywhere in a script.

    They go to the newest guard that is open in this process. Without one, under `holdfast run`,
    they go to the record of the process, at its current step. Otherwise they are checked, and
    nothing is recorded. Arguments and errors are those of `Guard.log`.
    """
    scalars = check_scalars(values, split, more)
    outlet = _newest_outlet()
    if outlet is not None:
        outlet.log(scalars)


def _newest_outlet() -> Any:
    """Return the newest outlet, or None if there is none."""
    return next(reversed(list(outlets)), None)


def with_recording(
    original: Callable[..., Any], read: Callable[..., Any], failed: Any = None
) -> Callable[..., Any]:
    """Return a function that calls `original` and also records the values it is called with.

    Args:
        original: A logging function of another library. Calls inside it are not recorded again.
        read: Returns the values by name and the step (None for the current one), from the same
            arguments.
        failed: Called with an error that occurred while recording, or None to log a warning. The
            error is never raised because the script's own logging has worked.
    """

    @wraps(original)
    def log_and_record(*args: Any, **kwargs: Any) -> Any:
        if getattr(_thread_state, "is_logging", False):
            return original(*args, **kwargs)
        _thread_state.is_logging = True
        try:
            result = original(*args, **kwargs)
        finally:
            _thread_state.is_logging = False
        try:
            outlet = _newest_outlet()
            # Without an outlet nothing is read: reading may wait for a device, and may fail.
            if outlet is not None:
                values, step = read(*args, **kwargs)
                outlet.log(list(_numbers_in(values)), _step_number(step))
        except Exception as error:  # noqa: BLE001
            report = failed or logging.getLogger("holdfast").warning
            report(error)
        return result

    return log_and_record


def _step_number(step: Any) -> int | None:
    """Return a step as another library's logger got it, or None for the current one."""
    number = number_of(step)
    if number is None or not abs(number) < _MOST_STEPS:
        return None
    return int(number)


def _numbers_in(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[bytes, float]]:
    """Yield the numbers in a tree of mappings, with their keys joined by slashes as names."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers_in(value, f"{prefix}{key}/")
            continue
        name = f"{prefix}{key}"
        number = number_of(value) if name else None
        if number is not None:
            yield _cut(name), number


def _cut(name: str) -> bytes:
    """Return a name of at most `LONGEST_NAME` bytes, without half a character at its end."""
    encoded = name.encode("utf-8", "backslashreplace")[:LONGEST_NAME]
    return encoded.decode("utf-8", "ignore").encode()
