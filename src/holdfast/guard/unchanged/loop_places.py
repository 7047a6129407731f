"""Find the statement of the script that iterates a loader, and whether such a loop can be resumed.

Between the statement and the loader there may be wrappers: generators, such as tqdm or a function
that moves batches to a device, and objects such as ``enumerate``. A loop can be resumed in its
middle only if each wrapper can continue there: a generator runs its own code again, and the counter
of an ``enumerate`` can be set.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, GeneratorType
from typing import Any

from holdfast.guard.unchanged.bytecode import (
    is_comprehension,
    is_requested_by_for,
    is_requested_by_yield_from,
    targets_of_enclosing_loops,
)
from holdfast.guard.unchanged.stack import is_script_file

# Libraries whose loops have an integration, by the name of their top-level package.
_INTEGRATIONS = {
    "accelerate": "`holdfast.integrations.accelerate`",
    "lightning": "`holdfast.integrations.lightning`",
    "pytorch_lightning": "`holdfast.integrations.lightning`",
    "speechbrain": "`holdfast.integrations.speechbrain`",
    "transformers": "`holdfast.integrations.transformers`",
}
# The objects of these libraries refer to the iterator, but their generators request its values.
_PROGRESS_BARS = ("tqdm", "rich", "alive_progress")
# The offset of the counter in an ``enumerate`` object: CPython stores it right after the header.
# `_counter_can_be_set` checks this before the counter is used.
_ENUMERATE_COUNTER = object.__basicsize__


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPlace:
    """The statement that requests the batches of a loop.

    It must not hold the frame. A frame refers to the iterator of its loop, which must be freed at
    once when the script leaves the loop.
    """

    file: str
    line: int
    function: str
    # The code of the function, and the offset of the instruction that requests a batch.
    code: CodeType
    offset: int
    # Why the loop cannot be resumed, as a clause without its subject. None if it can.
    problem: str | None
    # What the user can do about the problem.
    fix: str = ""

    @property
    def name(self) -> str:
        """Return the place as text: the name of the file, a colon and the line."""
        return f"{Path(self.file).name}:{self.line}"

    def is_same_as(self, name: str, function: str) -> bool:
        """Return whether a place of another attempt has this `name` and `function`."""
        return (self.name, self.function) == (name, function)


def find_place(frame: FrameType) -> LoopPlace:
    """Return the statement that requests a batch, behind any generators that pass it on.

    Args:
        frame: The frame that has called ``__next__`` of a loader's iterator.
    """
    problem = _problem_of(frame)
    fix = "iterate the loader with a `for` statement."
    while problem is None and is_in_generator(frame) and frame.f_back is not None:
        frame = frame.f_back
        problem = _problem_of(frame)
    library = _library_of(frame)
    if library is not None:
        problem = f"runs in the package {library!r}, not in the script"
        fix = "use a Guard in a loop of your own."
        if library in _INTEGRATIONS:
            fix = f"use the integration {_INTEGRATIONS[library]}, which saves with the framework."
    return LoopPlace(
        file=frame.f_code.co_filename,
        line=frame.f_lineno,
        function=frame.f_code.co_qualname,
        code=frame.f_code,
        offset=frame.f_lasti,
        problem=problem,
        fix=fix,
    )


def _problem_of(frame: FrameType) -> str | None:
    """Return why a frame that requests a batch cannot be resumed, or None if it can.

    Args:
        frame: The frame of the loop, or of a generator between the loader and the loop.
    """
    flags = frame.f_code.co_flags
    if flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        return "is asynchronous"
    if flags & inspect.CO_GENERATOR and is_requested_by_yield_from(frame):
        return None
    if not is_requested_by_for(frame):
        return "takes its batches with next() and not with a `for` statement"
    if is_comprehension(frame.f_code, frame.f_lasti):
        return "is a comprehension, whose values are in no variable"
    return None


def _library_of(frame: FrameType) -> str | None:
    """Return the top-level package of a frame that belongs to a library, or None."""
    if is_script_file(frame.f_code.co_filename):
        return None
    return str(frame.f_globals.get("__name__", "?")).partition(".")[0]


def loop_frame(frame: FrameType, place: LoopPlace) -> FrameType | None:
    """Return the frame in which a loop runs, or None if it is not on the stack.

    Args:
        frame: The innermost frame to be searched.
        place: The place of the loop.
    """
    current: FrameType | None = frame
    while current is not None:
        if current.f_code is place.code:
            return current
        current = current.f_back
    return None


def enclosing_targets(frames: list[FrameType]) -> dict[str, Any]:
    """Return the current values of the targets of all running ``for`` statements.

    Args:
        frames: The frames of the script on the stack.

    Returns:
        Numbers and strings, by the names of the function and the variable, such as
        ``"train.epoch"``.
    """
    values = {}
    for frame in frames:
        variables = frame.f_locals
        for name in sorted(targets_of_enclosing_loops(frame.f_code, frame.f_lasti)):
            value = variables.get(name)
            if isinstance(value, (bool, int, float, str)):
                values[f"{frame.f_code.co_qualname}.{name}"] = value
    return values


# --- wrappers around the iterator of a loader -----------------------------------------------------


class Counter:
    """The counter of an ``enumerate`` object through which a loop requests its batches.

    This refers to the object only by its address, because a real reference would keep the iterator
    of the loop alive after the script has left the loop. The counter may be used only while the
    loop requests a batch, since the object is certain to exist then.
    """

    def __init__(self, enumeration: enumerate[Any]) -> None:
        self._address = id(enumeration) + _ENUMERATE_COUNTER

    @property
    def value(self) -> int:
        """Return the number that the object yields next."""
        return ctypes.c_ssize_t.from_address(self._address).value

    @value.setter
    def value(self, value: int) -> None:
        ctypes.c_ssize_t.from_address(self._address).value = value


def is_in_generator(frame: FrameType) -> bool:
    """Return whether a batch is requested by a generator, which passes it on to a loop."""
    return bool(frame.f_code.co_flags & inspect.CO_GENERATOR)


def find_counters(iterator: object, frame: FrameType) -> list[Counter] | None:
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
    counters: list[Counter] = []
    # The lists of this function also refer to the objects, and must not count as wrappers.
    own_lists = [pending]
    for wrapped in pending:
        referrers = gc.get_referrers(wrapped)
        own_lists.append(referrers)
        for referrer in referrers:
            if isinstance(referrer, FrameType) or _contains(own_lists, referrer):
                continue
            if type(referrer) is enumerate and _counter_can_be_set(referrer):
                counters.append(Counter(referrer))
                # Another wrapper may be around this one.
                pending.append(referrer)
            elif not _is_progress_bar(referrer):
                return None
    return counters


def _contains(values: list[Any], value: object) -> bool:
    """Return whether a list contains an object itself.

    This is a function of its own, because a generator expression in `find_counters` would put the
    referrer into a cell, which would then refer to it too.
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
    """Return whether the counter is where `Counter` expects it in memory."""
    return bool(Counter(enumeration).value == enumeration.__reduce__()[1][1])
