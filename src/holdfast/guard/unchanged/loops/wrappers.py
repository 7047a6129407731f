"""Find the wrappers between a loop and its loader, and continue in the middle of them.

There may be generators, such as tqdm or a function that moves batches to a device, and objects such
as ``enumerate``. A loop can be resumed in its middle only if each wrapper can continue there: a
generator runs its own code again, and the counter of an ``enumerate`` object can be set.
"""

from __future__ import annotations

import ctypes
import gc
from types import FrameType, GeneratorType
from typing import Any

from holdfast.guard.unchanged.loops.places import is_in_generator

# The objects of these libraries refer to the iterator, but their generators request its values.
_PROGRESS_BARS = ("tqdm", "rich", "alive_progress")
# The offset of the counter in an ``enumerate`` object: CPython stores it right after the header.
# `_counter_can_be_set` checks this before the counter is used.
_OFFSET_OF_COUNTER = object.__basicsize__


class EnumerateCounter:
    """The counter of an ``enumerate`` object through which a loop requests its batches.

    This refers to the object only by its address, because a real reference would keep the iterator
    of the loop alive after the script has left the loop. The counter may be used only while the
    loop requests a batch, since the object is certain to exist then.
    """

    def __init__(self, enumeration: enumerate[Any]) -> None:
        self._address = id(enumeration) + _OFFSET_OF_COUNTER

    @property
    def value(self) -> int:
        """Return the number that the object yields next."""
        return ctypes.c_ssize_t.from_address(self._address).value

    @value.setter
    def value(self, value: int) -> None:
        ctypes.c_ssize_t.from_address(self._address).value = value


def find_enumerate_counters(iterator: object, frame: FrameType) -> list[EnumerateCounter] | None:
    """Return the counters of the ``enumerate`` objects through which a loop requests its batches.

    The wrappers are found by asking the garbage collector what refers to the iterator, and to each
    generator and ``enumerate`` object around it.

    Args:
        iterator: The iterator that the script has received from its loader.
        frame: The frame that has called its ``__next__``.

    Returns:
        The counters, or None if the loop uses a wrapper that cannot continue in the middle, such as
        ``zip`` or ``itertools.islice``.
    """
    pending: list[Any] = [iterator]
    current: FrameType | None = frame
    while current is not None and is_in_generator(current):
        generator = _generator_of(current)
        if generator is None:
            return None
        pending.append(generator)
        current = current.f_back
    counters: list[EnumerateCounter] = []
    # The lists of this function also refer to the objects, and must not count as wrappers.
    own_lists = [pending]
    for wrapped in pending:
        referrers = gc.get_referrers(wrapped)
        own_lists.append(referrers)
        for referrer in referrers:
            if isinstance(referrer, FrameType) or _contains(own_lists, referrer):
                continue
            if type(referrer) is enumerate and _counter_can_be_set(referrer):
                counters.append(EnumerateCounter(referrer))
                # Another wrapper may be around this one.
                pending.append(referrer)
            elif not _is_progress_bar(referrer):
                return None
    return counters


def _contains(values: list[Any], value: object) -> bool:
    """Return whether a list contains an object itself.

    This is a function of its own, because a generator expression in `find_enumerate_counters` would
    put the referrer into a cell, which would then refer to it too.
    """
    return any(value is candidate for candidate in values)


def _generator_of(frame: FrameType) -> object | None:
    """Return the generator that runs in a frame. The frame itself does not refer to it."""
    for candidate in gc.get_objects():
        if type(candidate) is GeneratorType and candidate.gi_frame is frame:
            return candidate
    return None


def _is_progress_bar(value: object) -> bool:
    """Return whether an object is a progress bar, or the dict that holds its attributes."""
    if type(value) is dict:
        # If an object has many attributes, as tqdm's bars do, Python keeps them in a dict. Then the
        # bar refers to this dict, and the dict refers to what the bar iterates.
        return any(
            _is_progress_bar(owner) and getattr(owner, "__dict__", None) is value
            for owner in gc.get_referrers(value)
            if type(owner) is not dict
        )
    return type(value).__module__.partition(".")[0] in _PROGRESS_BARS


def _counter_can_be_set(enumeration: enumerate[Any]) -> bool:
    """Return whether the counter is where `EnumerateCounter` expects it in memory."""
    return bool(EnumerateCounter(enumeration).value == enumeration.__reduce__()[1][1])
