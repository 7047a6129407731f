"""Find the statement of the script that iterates a loader, and whether its loop can be resumed."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from holdfast.guard.unchanged.frames import is_script_file
from holdfast.guard.unchanged.loops.bytecode import (
    is_comprehension,
    is_requested_by_for,
    is_requested_by_yield_from,
    targets_of_enclosing_loops,
)

# Libraries whose loops have an integration, by the name of their top-level package.
_INTEGRATIONS = {
    "accelerate": "`holdfast.integrations.accelerate`",
    "lightning": "`holdfast.integrations.lightning`",
    "pytorch_lightning": "`holdfast.integrations.lightning`",
    "speechbrain": "`holdfast.integrations.speechbrain`",
    "transformers": "`holdfast.integrations.transformers`",
}


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
        fix = "use a Guard in your own loop."
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


def values_of_enclosing_targets(frames: list[FrameType]) -> dict[str, Any]:
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


def is_in_generator(frame: FrameType) -> bool:
    """Return whether a batch is requested by a generator, which passes it on to a loop."""
    return bool(frame.f_code.co_flags & inspect.CO_GENERATOR)
