"""How much memory an object keeps by itself, roughly: its tensors, arrays and plain values, a few levels deep."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any

from holdfast.supervise.observe.retention_census import Census, bytes_of
from holdfast.supervise.observe.retention_origin import is_a
from holdfast.supervise.observe.retention_steps import locals_of

_MOST_OBJECTS = 2_000
_PLAIN = (str, bytes, bytearray, int, float, complex, list, tuple, dict, set, frozenset)
_PASSED_OVER = (type, ModuleType, CodeType)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """What an object keeps.

    Args:
        bytes: Of storages, arrays and plain values.
        heaviest: The tensor or array with most bytes, else the object itself.
        graph: Whether a tensor in it keeps the graph that it was computed by.
        device: Type of the device of the heaviest, such as ``"cuda"``.
        exception: Whether it is or holds an exception with its traceback.
    """

    bytes: int
    heaviest: Any
    graph: bool
    device: str
    exception: bool


def weigh(target: Any, census: Census, storages: set[int] | None = None) -> Weight:
    """Return what an object keeps alive that was not there at the first look.

    Args:
        target: The object.
        census: Knows what was there.
        storages: Those that were counted; more are added.
    """
    storages = set() if storages is None else storages
    total, most, heaviest, graph, exception = 0, 0, target, False, False
    seen = {id(target)}
    todo = [target]
    while todo and len(seen) < _MOST_OBJECTS:
        each = todo.pop()
        kind, size = type(each), 0
        if issubclass(kind, census.tensor):
            if id(each) in census.old_tensors and each is not target:
                continue
            size = 0 if _storage(each) in storages else bytes_of(each)
            storages.add(_storage(each))
            graph = graph or _has_graph(each)
        elif census.array is not None and issubclass(kind, census.array):
            size = int(each.nbytes)
        elif issubclass(kind, _PASSED_OVER) or any(base.__name__ == "Module" for base in kind.__mro__):
            continue  # of the model, whose parameters stay anyway
        else:
            total += sys.getsizeof(each) if kind in _PLAIN else kind.__basicsize__
            exception = exception or is_a(each, TracebackType)
            for inner in _inside(each):
                if id(inner) not in seen:
                    seen.add(id(inner))
                    todo.append(inner)
        total += size
        if size > most:
            most, heaviest = size, each
    device = str(heaviest.device.type) if is_a(heaviest, census.tensor) else "cpu"
    return Weight(bytes=total, heaviest=heaviest, graph=graph, device=device, exception=exception)


def _inside(each: Any) -> list[Any]:
    if is_a(each, FrameType):
        return list(locals_of(each).values())
    if is_a(each, FunctionType):
        cells = [cell for cell in each.__closure__ or () if gc.get_referents(cell)]
        return [*[inner for cell in cells for inner in gc.get_referents(cell)], *(each.__defaults__ or ())]
    return gc.get_referents(each) if not is_a(each, *_PLAIN) or is_a(each, *_HOLD) else []


_HOLD = (list, tuple, dict, set, frozenset)


def _storage(tensor: Any) -> int:
    try:
        return int(tensor.untyped_storage().data_ptr())
    except Exception:  # noqa: BLE001 - it has none, or its class is the script's
        return 0


def _has_graph(tensor: Any) -> bool:
    try:
        return tensor.grad_fn is not None
    except Exception:  # noqa: BLE001 - its class is the script's
        return False
