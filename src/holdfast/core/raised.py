"""An exception as facts: type, message, frames, and what it was raised from.

Text only, bounded, never an error.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

_MOST_MESSAGE = 2_000
_MOST_FRAMES = 40
_MOST_FRAMES_OF_CAUSE = 10
_MOST_CAUSES = 6


def printable(text: str) -> str:
    """Return text that can be printed.

    Half characters, as of a file name that is no UTF-8, are spelt out.
    """
    return text.encode("utf-8", "backslashreplace").decode()


def describe_exception(
    error: BaseException, traceback: TracebackType | None, *, without: str | None = None
) -> dict[str, Any]:
    """Return an exception as JSON values, without the frames of files whose path begins with
    `without`.

    Its type, message and frames, each as [file, line, function] with the innermost last, and the
    chain of its causes, the nearest first.
    """
    chain: list[dict[str, Any]] = []
    seen = {id(error)}
    cause = _cause(error)
    while cause is not None and id(cause) not in seen and len(chain) < _MOST_CAUSES:
        seen.add(id(cause))
        chain.append(_describe(cause, cause.__traceback__, _MOST_FRAMES_OF_CAUSE, without))
        cause = _cause(cause)
    return {**_describe(error, traceback, _MOST_FRAMES, without), "chain": chain}


def _cause(error: BaseException) -> BaseException | None:
    if error.__cause__ is not None or error.__suppress_context__:
        return error.__cause__
    return error.__context__


def _describe(
    error: BaseException, traceback: TracebackType | None, most: int, without: str | None
) -> dict[str, Any]:
    kind = type(error)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    return {
        "type": printable(module + kind.__qualname__),
        "message": printable(_message(error)[:_MOST_MESSAGE]),
        "frames": _frames(traceback, most, without),
    }


def _message(error: BaseException) -> str:
    try:
        notes = getattr(error, "__notes__", None)
        return "\n".join([str(error), *map(str, notes if isinstance(notes, list) else [])])
    except Exception as second:  # noqa: BLE001 - the script's own __str__
        return f"(its text cannot be had: {type(second).__name__})"


def _frames(traceback: TracebackType | None, most: int, without: str | None) -> list[list[Any]]:
    """Return the frames; of very many, a quarter from the outer end and the rest from the inner."""
    found: list[list[Any]] = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if without is None or not code.co_filename.startswith(without):
            found.append(
                [printable(code.co_filename), traceback.tb_lineno, printable(code.co_name)]
            )
            if len(found) > most:
                del found[most // 4]
        traceback = traceback.tb_next
    return found
