"""Where an object was made, as `tracemalloc` remembers it."""

from __future__ import annotations

import sys
import tracemalloc

# Before Python 3.12 (which changed the layout) an instance with a dict of its own, such as a tensor,
# starts four words before its address, and `get_object_traceback` looks two words before it.
_WORDS_BEFORE = 4
_WORD_BYTES = 8


def made_at(each: object) -> list[tuple[str, int]]:
    """Return file and line of the calls that made an object, the innermost first; nothing if it is not known."""
    traceback = tracemalloc.get_object_traceback(each)
    if traceback is not None:
        return [(frame.filename, frame.lineno) for frame in reversed(traceback)]
    return _made_at_address(id(each) - _WORDS_BEFORE * _WORD_BYTES) if sys.version_info < (3, 12) else []


def _made_at_address(address: int) -> list[tuple[str, int]]:
    """Ask what `get_object_traceback` asks, for another address."""
    try:
        import ctypes

        ask = ctypes.pythonapi["_PyTraceMalloc_GetTraceback"]
    except (ImportError, AttributeError):
        return []
    ask.restype, ask.argtypes = ctypes.py_object, [ctypes.c_uint, ctypes.c_size_t]
    frames = ask(0, address)
    return [] if frames is None else list(frames)
