"""What workers get from the parent: what a fork shares with them, and whether the rest can be pickled.

Looks through objects within bounds, and opens, changes or sends nothing. What a finding means is told in
`holdfast.loader.tuning.preflight`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import itertools
import socket
import sqlite3
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

_MOST_OBJECTS = 10_000  # looked at: some 10 ms
_MOST_ITEMS = 64  # of one container: the rest of a list of samples is like its beginning
_MOST_PICKLED_BYTES = 64 * 2**20  # tried out; what can be pickled so far is taken for picklable
_DEEPEST = 20  # attributes of attributes on the way to what cannot be pickled
_STANDARD_STREAMS = 3  # descriptors 0, 1 and 2: shared on purpose
_PLAIN = (  # not looked into; a weak proxy comes first, since asking a dead one for its class raises
    *weakref.ProxyTypes, str, bytes, bool, int, float, complex, type(None), type, np.generic, torch.dtype,
    torch.device, ModuleType, BuiltinFunctionType, CodeType,
)  # fmt: skip


def kind_of_handle(each: Any) -> str | None:
    """Return what open handle this is, in words, if it is one that processes must not share."""
    for module, kind, words in (
        ("h5py", "HLObject", "an HDF5 object"),
        ("lmdb", "Environment", "an LMDB environment"),
    ):
        known = getattr(sys.modules.get(module), kind, None)
        if known is not None and isinstance(each, known) and (module != "h5py" or bool(each)):  # false once closed
            return words
    if isinstance(each, sqlite3.Connection):
        return "a SQLite connection"
    return "a socket" if isinstance(each, socket.socket) and each.fileno() >= 0 else None


def is_shared_file(each: Any) -> bool:
    """Say whether this is a file that is open for reading, whose position forked processes share."""
    if not isinstance(each, io.IOBase):
        return False
    try:
        return each.fileno() >= _STANDARD_STREAMS and each.readable() and each.seekable()
    except (OSError, ValueError):  # in memory only, or closed
        return False


def is_held(each: Any) -> bool:
    """Say whether this is a lock that is held; a free one is held for an instant to find out."""
    if not isinstance(each, (type(threading.Lock()), type(threading.RLock()))):
        return False
    if not each.acquire(blocking=False):  # an RLock of this very thread may be taken again, in the worker too
        return True
    each.release()
    return False


def reachable(start: Any, name: str, most_items: int = _MOST_ITEMS) -> Iterator[tuple[str, Any]]:
    """Yield objects that can be reached through attributes and containers, nearest first, each once."""
    waiting, seen = deque([(name, start)]), {id(start)}
    while waiting and len(seen) <= _MOST_OBJECTS:
        path, each = waiting.popleft()
        yield path, each
        for child_path, child in itertools.islice(_children(path, each), most_items):
            if id(child) not in seen and not isinstance(child, _PLAIN):
                seen.add(id(child))
                waiting.append((child_path, child))


def _children(path: str, each: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(each, (torch.Tensor, np.ndarray, io.IOBase, *_PLAIN)):
        return
    if isinstance(each, dict):
        yield from ((f"{path}[{key!r:.40}]", value) for key, value in each.items())
    elif isinstance(each, (list, tuple, set, frozenset, deque)):
        yield from ((f"{path}[{number}]", item) for number, item in enumerate(each))
    elif isinstance(each, FunctionType):
        yield from _used_by(path, each)
    elif isinstance(each, MethodType):
        yield f"{path}.__self__", each.__self__
    elif isinstance(each, functools.partial):
        yield from ((f"{path}.func", each.func), (f"{path}.args", each.args), (f"{path}.keywords", each.keywords))
    else:
        yield from ((f"{path}.{key}", value) for key, value in getattr(each, "__dict__", {}).items())
        for slot in (slot for kind in type(each).__mro__ for slot in getattr(kind, "__slots__", ())):
            if isinstance(slot, str) and hasattr(each, slot):
                yield f"{path}.{slot}", getattr(each, slot)
        for method in ("__getitem__", "__getitems__", "__iter__", "__call__"):
            function = getattr(type(each), method, None)
            if isinstance(function, FunctionType):
                yield from _used_by(f"{path}.{method}", function)


def _used_by(path: str, function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function closes over, and the variables of its module that it names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            yield f"{path}:{name}", cell.cell_contents
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield f"{path}:{name}", function.__globals__[name]


class _FullError(Exception):
    """Enough was pickled."""


class PickleTrial(ForkingPickler):
    """Pickles as the start of a worker does, into nowhere; tensors and arrays are not copied.

    Args:
        thing: What is tried out.
    """

    def __init__(self, thing: Any) -> None:
        super().__init__(self)
        self.copied_bytes = 0
        self.of_main: list[str] = []
        self.error: Exception | None = None
        try:
            self.dump(thing)
        except _FullError:
            pass
        except Exception as error:  # noqa: BLE001 - whatever a user's __getstate__ raises
            self.error = error
        self.clear_memo()

    def write(self, data: Any) -> None:
        """Count."""
        self.copied_bytes += len(data)
        if self.copied_bytes > _MOST_PICKLED_BYTES:
            raise _FullError

    def reducer_override(self, thing: Any) -> Any:
        """Leave out what is large and certainly can be sent."""
        if isinstance(thing, torch.Tensor) and (thing.is_leaf or not thing.requires_grad):
            return int, ()  # its memory will be shared
        if isinstance(thing, np.ndarray) and not thing.dtype.hasobject:
            self.copied_bytes += thing.nbytes
            return int, ()
        if type(thing).__module__.startswith("multiprocessing.") or _is_shared_ctype(thing):
            return int, ()  # these can be sent while a process is started, and only then
        if isinstance(thing, (type, FunctionType)) and thing.__module__ == "__main__":
            self.of_main.append(thing.__qualname__)
        return NotImplemented


def _is_shared_ctype(thing: Any) -> bool:
    kinds = (ctypes._SimpleCData, ctypes.Structure, ctypes.Union, ctypes.Array)
    return isinstance(thing, kinds) and hasattr(thing, "_wrapper")  # of multiprocessing.sharedctypes


def culprit(thing: Any, path: str, error: Exception) -> tuple[str, Exception]:
    """Return the innermost part that cannot be pickled, by its path, and its own error.

    Args:
        thing: What could not be pickled.
        path: How it is called.
        error: Its error.
    """
    for _ in range(_DEEPEST):
        for child_path, child in itertools.islice(_pickled_parts(path, thing), _MOST_OBJECTS):
            trial = PickleTrial(child)
            if trial.error is not None:
                path, thing, error = child_path, child, trial.error
                break
        else:
            break
    return path, error


def _pickled_parts(path: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield what pickle would take of an object: its state, which need not be its attributes."""
    if isinstance(thing, (dict, list, tuple, set, frozenset)):
        yield from _children(path, thing)
        return
    if isinstance(thing, (type, *_PLAIN, FunctionType, MethodType)):
        return
    if isinstance(thing, functools.partial):
        yield from _children(path, thing)
        return
    try:
        reduced = thing.__reduce_ex__(2)
    except Exception:  # noqa: BLE001 - it cannot be taken apart; the whole of it is the culprit
        return
    state, *more = reduced[2:] if isinstance(reduced, tuple) and len(reduced) > 2 else (None,)
    for part in state if isinstance(state, tuple) else (state,):
        if isinstance(part, dict):
            yield from ((f"{path}.{key}", value) for key, value in part.items())
    for part in more:
        if isinstance(part, Iterator):  # the items of a list or a dict
            yield from ((f"{path}[{number}]", item) for number, item in enumerate(part))


def main_can_be_imported() -> bool:
    """Say whether a new process can import this one's main module: not that of a notebook or a prompt."""
    main = sys.modules["__main__"]
    return getattr(main, "__file__", None) is not None or getattr(main, "__spec__", None) is not None
