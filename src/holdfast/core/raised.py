"""Describe an exception as JSON values: its type, message, frames and causes.

All strings have a maximum length and are printable. No function here raises, even if the methods of
the exception do.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

# The description goes into a ring buffer of the recorder, whose records hold a few kilobytes.
_MAX_MESSAGE_CHARACTERS = 2_000
_MAX_FRAMES = 40
_MAX_FRAMES_OF_CAUSE = 10
_MAX_CAUSES = 6


def printable(text: str) -> str:
    """Return text with lone surrogates escaped, as in a file name that is not valid UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def exception_text(type_name: str, message: str) -> str:
    """Return an exception as Python prints it: ``Type: message``, or the type alone."""
    if not message:
        return type_name
    return f"{type_name}: {message}"


def describe_exception(
    error: BaseException, traceback: TracebackType | None, *, without: str | None = None
) -> dict[str, Any]:
    """Return an exception as JSON values.

    Args:
        error: The exception.
        traceback: Its traceback, or None.
        without: Frames in files whose path starts with this prefix are left out, unless it is None.

    Returns:
        A dict with ``type``, ``message``, ``frames`` (each [file, line, function], the innermost
            last), and ``chain`` (its causes, the nearest first).
    """
    chain: list[dict[str, Any]] = []
    described = {id(error)}
    cause = _cause(error)
    while cause is not None and id(cause) not in described and len(chain) < _MAX_CAUSES:
        described.add(id(cause))
        chain.append(_describe(cause, cause.__traceback__, _MAX_FRAMES_OF_CAUSE, without))
        cause = _cause(cause)
    return {**_describe(error, traceback, _MAX_FRAMES, without), "chain": chain}


def _cause(error: BaseException) -> BaseException | None:
    """Return the exception that a traceback shows as the cause of `error`, or None."""
    if error.__cause__ is not None or error.__suppress_context__:
        return error.__cause__
    return error.__context__


def _describe(
    error: BaseException, traceback: TracebackType | None, max_frames: int, without: str | None
) -> dict[str, Any]:
    return {
        "type": printable(_type_name(type(error))),
        "message": printable(_message(error)[:_MAX_MESSAGE_CHARACTERS]),
        "frames": _frames(traceback, max_frames, without),
    }


def _type_name(error_class: type[BaseException]) -> str:
    """Return the name of a class with its module, as Python prints it in a traceback."""
    if error_class.__module__ in ("builtins", "__main__"):
        return error_class.__qualname__
    return f"{error_class.__module__}.{error_class.__qualname__}"


def _message(error: BaseException) -> str:
    """Return the text of an exception with its notes, one per line."""
    try:
        lines = [str(error)]
        notes = getattr(error, "__notes__", None)
        if isinstance(notes, list):
            lines += map(str, notes)
        return "\n".join(lines)
    except Exception as second:  # noqa: BLE001 - the exception's own __str__ may do anything
        return f"(its message cannot be read: {type(second).__name__})"


def _frames(
    traceback: TracebackType | None, max_frames: int, without: str | None
) -> list[list[Any]]:
    """Return the frames of a traceback, outermost first.

    If there are more than `max_frames`, a quarter of the returned frames are the outermost ones,
    and the rest are the innermost ones.
    """
    frames: list[list[Any]] = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if without is None or not code.co_filename.startswith(without):
            frames.append(
                [printable(code.co_filename), traceback.tb_lineno, printable(code.co_name)]
            )
        if len(frames) > max_frames:
            del frames[max_frames // 4]
        traceback = traceback.tb_next
    return frames
