"""Check, record and read the scalars that a script logs.

A scalar is recorded only once: by the Guard that was opened last in this process or, if no Guard is
open, by the observer that `holdfast run` installs in the process.
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
# The maximum length of a scalar's name, in bytes of UTF-8.
LONGEST_NAME = 64
_CAPACITY = 32_768
# The layout of a record: step, value, epoch (-1 if unknown), length of the name in bytes, name.
_RECORD = struct.Struct(f"<qdiB{LONGEST_NAME}s")
_NO_EPOCH = -1
# If a step passed to another library's logger is at least this large, the current step is recorded
# instead. Such loggers accept any number as a step.
_MOST_STEPS = 2**62

# Encoded names and values that have passed the checks of `log`.
CheckedScalars = list[tuple[bytes, float]]

# The outlets, which are the Guards and observers that record scalars in this process, in the order
# in which they were added. Each outlet has a method ``log(scalars, step)``, where a step of None
# means the current step. A forked process has no outlets.
outlets: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
os.register_at_fork(after_in_child=outlets.clear)

_thread_state = _local()


class Scalar(NamedTuple):
    """One value that a script logged, with its name, step and time."""

    name: str
    value: float
    step: int
    # The epoch in which the value was logged, or None if unknown.
    epoch: int | None
    unix_seconds: float


class Scalars:
    """Writes the scalars of this process to a ring file.

    Any thread may write scalars. In a forked child of the process, nothing is written.

    Args:
        folder: A function that returns the folder for the ring file. It is called when the first
            scalar is written.
        emit: A function that records an event, which is called if the ring file cannot be created.
    """

    def __init__(self, folder: Callable[[], Path], emit: Callable[[Any], None]) -> None:
        self._folder = folder
        self._emit = emit
        self._ring: RingWriter | None = None
        self._cannot_record = False
        self._lock = RLock()
        self._process = os.getpid()

    def write(self, scalars: CheckedScalars, step: int, epoch: int | None) -> None:
        """Record scalars. Recording one scalar takes about 1 microsecond.

        If the ring file cannot be created, one event reports the error and no scalars are recorded
        from then on.

        Args:
            scalars: The names and values, as returned by `check_scalars`.
            step: The step at which the scalars were logged.
            epoch: The current epoch, or None if it is unknown.
        """
        if os.getpid() != self._process or self._cannot_record:
            return
        with self._lock:
            try:
                self._append(scalars, step, _NO_EPOCH if epoch is None else epoch)
            except OSError as error:
                # Imported here because most processes never need this module.
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
        """Unmap the ring file. If another scalar is written, the file is opened again."""
        if self._ring is not None:
            self._ring.close()
            self._ring = None


def scalars_of(records: list[Record]) -> list[Scalar]:
    """Return the scalars in records of a scalar ring, skipping records of other kinds of rings."""
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
    """Check the arguments of `log`, and return the names and values to record.

    Args:
        values: A mapping from names to values, or None.
        split: A prefix for all names, such as ``"validation"``; empty for no prefix.
        more: The keyword arguments of `log`, which are further values keyed by name.

    Raises:
        PolicyError: H117 if a name or a value cannot be recorded.
    """
    scalars: dict[Any, Any] = dict(more)
    if isinstance(values, Mapping):
        scalars = {**values, **more}
    elif values is not None:
        # This value has no name, so the check below rejects it.
        scalars = {None: values}
    return [_checked_entry(name, value, split) for name, value in scalars.items()]


def _checked_entry(name: Any, value: Any, split: str) -> tuple[bytes, float]:
    """Check one scalar, and return its encoded name and its value.

    Raises:
        PolicyError: H117 if the name or the value cannot be recorded.
    """
    full_name = f"{split}/{name}" if split else name
    encoded = b""
    if isinstance(name, str) and isinstance(split, str):
        encoded = full_name.encode("utf-8", "backslashreplace")
    number = value if type(value) is float else number_of(value)
    if number is None:
        limit = "the value must be a single real number or a tensor of one element"
    elif not name or not 0 < len(encoded) <= LONGEST_NAME:
        limit = (
            f"a name must have 1 to {LONGEST_NAME} bytes of UTF-8, including the split; this name"
            f" has {len(encoded)}"
        )
    else:
        return encoded, number
    raise PolicyError(
        f"log() of {full_name!r:.100} = {_describe(value):.80}",
        limit=limit,
        fix=(
            'call log(accuracy=0.93) or log({"wer": 0.2}, split="validation");'
            " use Guard.add_image for images."
        ),
        rule="H117",
    )


def _describe(value: Any) -> str:
    """Return a value as text for an error message; for a tensor or an array, its shape."""
    if hasattr(value, "shape"):
        return f"{type(value).__name__} of shape {tuple(value.shape)}"
    return repr(value)


def number_of(value: Any) -> float | None:
    """Return a real number, or the single element of a tensor or array, as a float.

    Return None for any other value.
    """
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

    If a Guard is open in this process, the Guard that was opened last records the scalars. If no
    Guard is open but the script runs under `holdfast run`, the observer of the process records them
    with the current step. Otherwise, the arguments are checked but nothing is recorded.

    For the arguments and errors, see `Guard.log`.
    """
    scalars = check_scalars(values, split, more)
    outlet = _newest_outlet()
    if outlet is not None:
        outlet.log(scalars)


def _newest_outlet() -> Any:
    """Return the outlet that was added last, or None if there is no outlet."""
    return next(reversed(list(outlets)), None)


def with_recording(
    original: Callable[..., Any], read: Callable[..., Any], failed: Any = None
) -> Callable[..., Any]:
    """Wrap another library's logging function so that its values are also recorded.

    Args:
        original: The logging function to wrap. If it calls another wrapped function, the values
            passed to the latter are not recorded a second time.
        read: A function that takes the arguments of `original` and returns the values, keyed by
            name, and the step. A step of None means the current step.
        failed: A function to call with any error that occurs during the recording. If None, a
            warning is logged instead. The error is never raised, because the script's own logging
            has succeeded.

    Returns:
        The wrapped function, which takes the arguments of `original` and returns its result.
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
            # Read the values only if they will be recorded, because reading them may fail or wait
            # for a device.
            if outlet is not None:
                values, step = read(*args, **kwargs)
                outlet.log(list(_numbers_in(values)), _step_number(step))
        except Exception as error:  # noqa: BLE001
            report = failed or logging.getLogger("holdfast").warning
            report(error)
        return result

    return log_and_record


def _step_number(step: Any) -> int | None:
    """Return the step that was passed to another library's logger as an integer.

    Return None, which means the current step, if `step` is not a number or is too large.
    """
    number = number_of(step)
    if number is None or not abs(number) < _MOST_STEPS:
        return None
    return int(number)


def _numbers_in(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[bytes, float]]:
    """Yield the name and value of each number in nested mappings.

    A name consists of the keys on the path to the number, joined by slashes.
    """
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers_in(value, f"{prefix}{key}/")
            continue
        name = f"{prefix}{key}"
        number = number_of(value) if name else None
        if number is not None:
            yield _cut(name), number


def _cut(name: str) -> bytes:
    """Return a name as at most `LONGEST_NAME` bytes of UTF-8, without splitting a character."""
    encoded = name.encode("utf-8", "backslashreplace")[:LONGEST_NAME]
    return encoded.decode("utf-8", "ignore").encode()
