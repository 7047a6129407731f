"""Numbers that a script logs under names of its own.

Checked, recorded in a ring that the first makes, and read.

They go to the newest open guard of this process, else to its observer: a value lies in one place,
whoever sees it.
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
LONGEST_NAME = 64  # bytes of UTF-8
# Step, value, epoch or -1, bytes of the name, name
_RECORD = struct.Struct(f"<qdiB{LONGEST_NAME}s")
_within = _local()
Found = list[tuple[bytes, float]]  # names and values that may be recorded
outlets: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
"""Who records in this process, the newest last, by ``log(found, step)``; a step of None is the
present one."""
os.register_at_fork(after_in_child=outlets.clear)


class Scalar(NamedTuple):
    """One value as it was recorded; `epoch` is None if nobody knew it."""

    name: str
    value: float
    step: int
    epoch: int | None
    unix_seconds: float


class Scalars:
    """Write the scalars of this process, from any thread.

    A process that is forked from it writes nothing.
    """

    def __init__(self, folder: Callable[[], Path], emit: Callable[[Any], None]) -> None:
        self._folder, self._emit = folder, emit
        self._ring: RingWriter | None = None
        self._cannot_record = False
        self._lock = RLock()
        self._process = os.getpid()

    def write(self, found: Found, step: int, epoch: int | None) -> None:
        """Record values, about 1 microsecond each.

        If the first finds no room there is an event, and none later.
        """
        if os.getpid() != self._process or self._cannot_record:
            return
        with self._lock:
            try:
                if self._ring is None:
                    path = self._folder() / SCALARS_FILE
                    self._ring = RingWriter(path, payload_bytes=_RECORD.size, capacity=32_768)
                for name, value in found:
                    self._ring.append(
                        _RECORD.pack(step, value, -1 if epoch is None else epoch, len(name), name)
                    )
            except OSError as error:
                # Most processes log nothing
                from holdfast.core.events.process_events import ScalarsNotRecorded

                self._cannot_record = True
                self._emit(ScalarsNotRecorded(error=error.strerror or str(error)))

    def close(self) -> None:
        """Unmap the file; the next value opens it again."""
        if self._ring is not None:
            self._ring.close()
            self._ring = None


def scalars_of(records: list[Record]) -> list[Scalar]:
    """Return what the records of a ring of scalars say, without those of another kind of ring
    and damaged ones.
    """
    found = []
    for record in records:
        if len(record.payload) == _RECORD.size:
            step, value, epoch, length, name = _RECORD.unpack(record.payload)
            text = name[:length].decode("utf-8", "replace")
            found.append(
                Scalar(text, value, step, None if epoch < 0 else epoch, record.nanoseconds / 1e9)
            )
    return found


def checked(values: Mapping[str, Any] | None, split: str, more: Mapping[str, Any]) -> Found:
    """Return what may be recorded of the arguments of `log`; H117 if that is not all."""
    given = (
        more
        if values is None
        else {**values, **more}
        if isinstance(values, Mapping)
        else {None: values}
    )
    found = []
    for name, value in given.items():
        whole = f"{split}/{name}" if split else name
        data = (
            whole.encode("utf-8", "backslashreplace")
            if isinstance(name, str) and isinstance(split, str)
            else b""
        )
        number = value if type(value) is float else number_of(value)
        if not name or number is None or not 0 < len(data) <= LONGEST_NAME:
            kind = (
                f"{type(value).__name__} of shape {tuple(value.shape)}"
                if hasattr(value, "shape")
                else ""
            )
            raise PolicyError(
                f"log() of {whole!r:.100} = {kind or repr(value):.80}",
                limit=(
                    "the value must be one real number, or a tensor of one element, and this is"
                    " none"
                    if number is None
                    else (
                        f"a name has 1 to {LONGEST_NAME} bytes of UTF-8, split included, and this"
                        f" has {len(data)}"
                    )
                ),
                fix=(
                    'call log(accuracy=0.93) or log({"wer": 0.2}, split="validation");'
                    " Guard.add_image keeps images."
                ),
                rule="H117",
            )
        found.append((data, number))
    return found


def number_of(value: Any) -> float | None:
    """Return a real number, or that in a tensor or array of one element; None of anything else."""
    try:
        if hasattr(value, "shape") and not isinstance(value, Real):
            value = value.item() if all(side == 1 for side in value.shape) else None
        return float(value) if isinstance(value, Real) else None
    except (TypeError, ValueError, OverflowError):
        return None


def log(values: Mapping[str, Any] | None = None, /, *, split: str = "", **more: Any) -> None:
    """Record numbers of your own from anywhere in a script.

    Arguments and errors are those of `Guard.log`.

    They go to the newest guard that is open in this process; else, under `holdfast run`, to the
    record of the process, at its present step; else they are checked, and nothing is recorded.
    """
    found = checked(values, split, more)
    for outlet in list(outlets)[-1:]:
        outlet.log(found)


def recorded_too(
    original: Callable[..., Any], read: Callable[..., Any], failed: Any = None
) -> Callable[..., Any]:
    """Return a function that does what `original` does, and records once what `read` returns of
    the arguments.
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
            for outlet in list(outlets)[-1:]:
                values, step = read(*args, **kwargs)
                own = None if step is None else number_of(step)
                outlet.log(
                    list(_numbers(values)),
                    None if own is None or not abs(own) < 2**62 else int(own),
                )
        except Exception as error:  # noqa: BLE001 - the script logs where it wants to, and that has worked
            (failed or logging.getLogger("holdfast").warning)(error)
        return result

    return logging_too


def _numbers(values: Mapping[Any, Any], before: str = "") -> Iterator[tuple[bytes, float]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{before}{key}/")
        elif (name := f"{before}{key}") and (number := number_of(value)) is not None:
            data = name.encode("utf-8", "backslashreplace")[:LONGEST_NAME]
            yield data.decode("utf-8", "ignore").encode(), number
