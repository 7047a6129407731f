"""Describe an exception as JSON values: its type, message, frames and causes.

Messages have a maximum length, and all strings can be encoded as UTF-8. The functions in this
module never raise, even if the exception's own methods do.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

# The recorder stores descriptions in a ring buffer, in which a record can hold a few kilobytes.
# These limits keep a description small enough.
_MAX_MESSAGE_CHARACTERS = 2_000
_MAX_FRAMES = 40
_MAX_FRAMES_OF_CAUSE = 10
_MAX_CAUSES = 6


def printable(text: str) -> str:
    """Escape lone surrogates in text, such as those from a file name that is not valid UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def exception_text(type_name: str, message: str) -> str:
    """Format an exception as Python does: ``Type: message``, or only the type without a message."""
    if not message:
        return type_name
    return f"{type_name}: {message}"


def describe_exception(
    error: BaseException, traceback: TracebackType | None, *, without: str | None = None
) -> dict[str, Any]:
    """Describe an exception as a dict of JSON values.

    Args:
        error: The exception.
        traceback: The exception's traceback, or None.
        without: A prefix of file paths. Frames in these files are omitted. None omits no frames.

    Returns:
        A dict with the keys ``type``, ``message``, ``frames`` (a list of [file, line, function],
            innermost frame last) and ``chain`` (the exception's causes, nearest cause first).
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
    """Return the exception that Python's traceback shows as the cause of `error`, or None."""
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
    """Return the qualified name of a class as Python prints it in a traceback."""
    if error_class.__module__ in ("builtins", "__main__"):
        return error_class.__qualname__
    return f"{error_class.__module__}.{error_class.__qualname__}"


def _message(error: BaseException) -> str:
    """Return an exception's message, followed by its notes on separate lines."""
    try:
        lines = [str(error)]
        notes = getattr(error, "__notes__", None)
        if isinstance(notes, list):
            lines += map(str, notes)
        return "\n".join(lines)
    except Exception as second:  # noqa: BLE001 - the exception's own __str__ may raise any error
        return f"(its message cannot be read: {type(second).__name__})"


def _frames(
    traceback: TracebackType | None, max_frames: int, without: str | None
) -> list[list[Any]]:
    """Return a traceback's frames as [file, line, function], outermost first.

    If there are more than `max_frames` frames, the ones in the middle are left out: a quarter of
    the returned frames are the outermost ones, and the rest are the innermost ones.
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
