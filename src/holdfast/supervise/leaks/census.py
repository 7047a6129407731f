"""What grows from step to step: containers by length, objects by number, values by size, graphs by their nodes.

A census compares each look at all objects with the one before. It keeps ids and numbers, and no object alive.
"""

from __future__ import annotations

import gc
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from holdfast.supervise.leaks.holders import file_of, is_a, is_users, locals_of, object_dict

Key = tuple[Any, ...]
Frames = list[types.FrameType]
_CONTAINERS = (list, dict, set, deque)
_SIZED = (str, bytes, bytearray, list, tuple)
_PLAIN = (*_SIZED, int, float, complex, dict, set, frozenset)
_COUNTED, _IGNORED = object, type  # stand for what is no container
_MOST_OBJECTS = 2_000_000  # a trace keeps some 250 bytes for each container among them
_MOST_NAMED = 64  # entries of a dict that may be somebody's attributes
_MOST_NODES, _MOST_WEIGHED = 20_000, 2_000
_AT_ONCE = 50_000


@dataclass(slots=True)
class Weight:
    """What an object keeps."""

    bytes: int = 0
    graph: bool = False  # whether a tensor in it keeps its graph
    traceback: bool = False
    device: str = "cpu"


class Census:
    """The sizes of everything at several looks; what did not grow in between is dropped.

    A key is ``("length", id)`` of a container, ``("number", class, ...)`` of objects of one class (tensors also of
    one shape and type), or ``("size" or "nodes", id of the holder, name)`` of a value that has a name.
    """

    def __init__(self) -> None:
        torch: Any = sys.modules["torch"]
        self._tensor: type = torch.Tensor
        self._arrays: tuple[type, ...] = (self._tensor,)
        if "numpy" in sys.modules:
            self._arrays += (sys.modules["numpy"].ndarray,)
        self.looks = 0
        self.grown: dict[Key, tuple[int, int]] = {}
        """Size at the first look and at the newest, of what has grown at every look."""
        self.members: dict[Key, list[set[int]]] = {}
        """Ids of the objects of each growing class, at each look."""
        self._roles: dict[type, Any] = {}

    def look(self, frames: Frames) -> None:
        """Take the next look; `frames` are those of running functions."""
        sizes: dict[Key, int] = {}
        members: dict[Key, set[int]] = {}
        for key, size, each in self.measured(frames):
            if key[0] == "number":
                members.setdefault(key, set()).add(id(each))
            else:
                sizes[key] = size
        sizes.update((key, len(ids)) for key, ids in members.items())
        if self.looks == 0:
            self.grown = {key: (size, size) for key, size in sizes.items()}
        else:
            before = self.grown.items()
            self.grown = {key: (first, sizes[key]) for key, (first, last) in before if sizes.get(key, 0) > last}
        self.members = {key: [*self.members.get(key, ()), ids] for key, ids in members.items() if key in self.grown}
        self.looks += 1

    def measured(self, frames: Frames) -> Iterator[tuple[Key, int, Any]]:
        """Yield key, size and object: of everything at the first look, then of what has grown so far."""
        for each in _all_objects():
            kind = type(each)
            role: Any = self._roles.get(kind)
            if role is None:
                role = self._roles[kind] = self._role(kind)
            if role is types.CellType:
                yield from self._values(id(each), (("", found) for found in gc.get_referents(each)))
            elif role is _COUNTED:
                if self._wants(key := ("number", kind, *(self.shape_of(each) if is_a(each, self._tensor) else ()))):
                    yield key, 1, each
                if is_users(file_of(kind)) and (attributes := object_dict(each)) is not None:
                    yield from self._container(attributes, dict)
            elif role is not _IGNORED:
                yield from self._container(each, role)
        for frame in frames:
            if is_users(frame.f_code.co_filename):
                yield from self._values(id(frame), locals_of(frame).items())

    def _wants(self, key: Key) -> bool:
        return self.looks == 0 or key in self.grown

    def _role(self, kind: type) -> Any:
        """Return the container that a class is one of, else whether its objects are counted."""
        for base in (types.CellType, *_CONTAINERS):
            if issubclass(kind, base):
                return base
        counted = issubclass(kind, (self._tensor, BaseException, types.GeneratorType))
        return _COUNTED if counted or is_users(file_of(kind)) else _IGNORED

    def _container(self, each: Any, base: Any) -> Iterator[tuple[Key, int, Any]]:
        size = base.__len__(each)
        if self._wants(key := ("length", id(each))):
            yield key, size, each
        if type(each) is dict:
            module = each.get("__name__", each.get("__module__"))  # of a module, or of a class
            if size <= _MOST_NAMED if module is None else is_users(file_of(module)):
                yield from self._values(id(each), list(each.items()))

    def _values(self, holder: int, named: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Key, int, Any]]:
        for name, each in named:
            is_array = issubclass(type(each), self._arrays)
            if type(name) is not str or not (is_array or type(each) in _SIZED):
                continue
            if self._wants(key := ("size", holder, name)):
                yield key, self._memory(each)[1] if is_array else len(each), each
            if is_a(each, self._tensor) and self._wants(key := ("nodes", holder, name)):
                yield key, _count_nodes(each), each

    def shape_of(self, each: Any) -> Key:
        """Return shape and type of a tensor or an array, nothing of anything else."""
        try:
            return (tuple(each.shape), str(each.dtype)) if issubclass(type(each), self._arrays) else ()
        except Exception:  # noqa: BLE001 - a class of the script's
            return ()

    def _memory(self, each: Any) -> tuple[int, int]:
        """Return a number of the memory of a tensor or an array, which views of it share, and its bytes."""
        try:
            storage = each.untyped_storage() if is_a(each, self._tensor) else None
            return (id(each), each.nbytes) if storage is None else (storage.data_ptr(), storage.nbytes())
        except Exception:  # noqa: BLE001 - it has none, or its class is the script's
            return id(each), 0

    def weigh(self, target: Any, counted: set[int]) -> Weight:
        """Return what an object keeps, without memory that was counted before; what is counted now is added."""
        found, most, seen, todo = Weight(), 0, {id(target)}, [target]
        while todo and len(seen) < _MOST_WEIGHED:
            each = todo.pop()
            kind = type(each)
            names = [base.__name__ for base in kind.__mro__]  # torch's modules are the model, which stays anyway
            if issubclass(kind, self._arrays):
                place, size = self._memory(each)
                if issubclass(kind, self._tensor) and size >= most:
                    most, found.device = size, str(each.device.type)
                found.graph = found.graph or _count_nodes(each, 1) > 0
                found.bytes += 0 if place in counted else size
                counted.add(place)
            elif not issubclass(kind, (type, types.ModuleType, types.CodeType)) and "Module" not in names:
                found.bytes += sys.getsizeof(each) if kind in _PLAIN else kind.__basicsize__
                found.traceback = found.traceback or is_a(each, types.TracebackType)
                new = [inner for inner in _inside(each) if id(inner) not in seen]
                seen.update(map(id, new))
                todo += new
        return found


def _all_objects() -> Iterator[Any]:
    """Yield every object that the collector knows, and dicts that it does not track: they hold only plain values."""
    known = gc.get_objects()
    if len(known) > _MOST_OBJECTS:
        raise MemoryError(f"{len(known)} objects; a trace looks at {_MOST_OBJECTS} at most")
    yield from known
    for start in range(0, len(known), _AT_ONCE):
        part = gc.get_referents(*known[start : start + _AT_ONCE])
        yield from [each for each in part if type(each) is dict and not gc.is_tracked(each)]


def _inside(each: Any) -> Iterable[Any]:
    if is_a(each, types.FunctionType):
        return [*gc.get_referents(*(each.__closure__ or ())), *(each.__defaults__ or ())]
    return list(locals_of(each).values()) if is_a(each, types.FrameType) else gc.get_referents(each)


def _count_nodes(tensor: Any, most: int = _MOST_NODES) -> int:
    """Return how many nodes the graph behind a tensor has, up to some number."""
    try:
        todo = [] if tensor.grad_fn is None else [tensor.grad_fn]
    except Exception:  # noqa: BLE001 - an array, or its class is the script's
        return 0
    seen: set[Any] = set()
    while todo and len(seen) < most:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += [each for each, _ in node.next_functions if each is not None and each not in seen]
    return len(seen)
