"""What grows from step to step: containers by their length, objects by their number, and named values by their size.

A census compares a look at all objects with the looks before it. It keeps ids and numbers, and no object alive.

Does not: say who holds what grows (``retention_paths``).
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, CoroutineType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

from holdfast.supervise.observe.retention_origin import file_of_class, file_of_module, is_a, is_users
from holdfast.supervise.observe.retention_steps import locals_of, object_dict

_CONTAINERS = (list, dict, set, deque)
_SIZED = (str, bytes, bytearray, list, tuple)
_COUNTED, _IGNORED = object, type  # stand for what is no container
_MOST_VALUES = 20_000
_MOST_DEPTH = 3
_MOST_ENTRIES = 64  # of a container whose entries are taken for named values
_MOST_NODES = 20_000
_MOST_OBJECTS = 2_000_000  # a trace keeps some 250 bytes for each container among them
_AT_ONCE = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A value with its names, the outermost first.

    Args:
        names: Such as ``("trainer", "hidden")``.
        file: Where the outermost is at home.
        function: Its code, None for a global of the module.
    """

    names: tuple[str, ...]
    file: str
    function: CodeType | None = None


@dataclass(slots=True)
class Grown:
    """Something that has grown in every interval so far.

    Args:
        first: Its size at the first look.
        last: At the newest.
    """

    first: int
    last: int


@dataclass(slots=True)
class Census:
    """The sizes of everything at several looks; what did not grow in between is dropped.

    Args:
        tensor: Class of tensors.
        array: Class of arrays, or None if numpy is not there.
        looks: Taken so far.
        containers: By id.
        groups: Objects of one class, tensors also of one shape and type, by their number.
        values: Named values by their size.
        nodes: Named tensors by the nodes of the graph behind them.
        members: Ids of the objects of `groups` at each look.
        old_tensors: Ids of the tensors at the first look.
    """

    tensor: type
    array: type | None = None
    looks: int = 0
    containers: dict[int, Grown] = field(default_factory=dict)
    groups: dict[Hashable, Grown] = field(default_factory=dict)
    values: dict[Value, Grown] = field(default_factory=dict)
    nodes: dict[Value, Grown] = field(default_factory=dict)
    members: dict[Hashable, list[frozenset[int]]] = field(default_factory=dict)
    old_tensors: frozenset[int] = frozenset()
    _roles: dict[type, Any] = field(default_factory=dict)

    def look(self, frames: Sequence[FrameType]) -> None:
        """Take the next look.

        Args:
            frames: Of running functions, for their locals.
        """
        lengths: dict[int, int] = {}
        members: dict[Hashable, list[int]] = {}
        roles = self._roles
        for each in all_objects():
            role: Any = roles.get(type(each))
            if role is None:
                role = roles[type(each)] = self._role(type(each))
            if role is _IGNORED:
                continue
            if role is not _COUNTED:
                if self.looks == 0 or id(each) in self.containers:
                    lengths[id(each)] = role.__len__(each)
                continue
            key = self.group_of(each)
            if self.looks == 0 or key in self.groups:
                members.setdefault(key, []).append(id(each))
        counts = {key: len(ids) for key, ids in members.items()}
        self.containers = self._keep(self.containers, lengths)
        self.groups = self._keep(self.groups, counts)
        self.members = {key: [*self.members.get(key, ()), frozenset(members[key])] for key in self.groups}
        if self.looks == 0:
            of_tensors = [ids for key, ids in members.items() if type(key) is tuple]
            self.old_tensors = frozenset(one for ids in of_tensors for one in ids)
        sizes, nodes = self._measure_values(frames)
        self.values = self._keep(self.values, sizes)
        self.nodes = self._keep(self.nodes, nodes)
        self.looks += 1

    def grows(self) -> bool:
        """Return whether anything has grown at every look."""
        return bool(self.containers or self.groups or self.values or self.nodes)

    def _keep(self, before: dict[Any, Grown], now: dict[Any, int]) -> dict[Any, Grown]:
        """Return what has grown since the look before."""
        if self.looks == 0:
            return {key: Grown(first=size, last=size) for key, size in now.items()}
        kept = {}
        for key, grown in before.items():
            if now.get(key, 0) > grown.last:
                kept[key] = Grown(first=grown.first, last=now[key])
        return kept

    def _role(self, kind: type) -> Any:
        """Return the container that a class is one of, else whether its objects are counted."""
        for base in _CONTAINERS:
            if issubclass(kind, base):
                return base
        counted = issubclass(kind, (self.tensor, BaseException, GeneratorType, CoroutineType))
        return _COUNTED if counted or is_users(file_of_class(kind)) else _IGNORED

    def length_of(self, each: object) -> int:
        """Return the length of a container that looks have seen, -1 of anything else; it is not asked itself."""
        role = self._roles.get(type(each))
        return role.__len__(each) if role in _CONTAINERS else -1

    def is_counted(self, each: object) -> bool:
        """Return whether an object belongs to a group."""
        return self._roles.get(type(each)) is _COUNTED

    def group_of(self, each: object) -> Any:
        """Return what an object is counted with."""
        kind = type(each)
        return (kind, *shape_of(each)) if issubclass(kind, self.tensor) else kind

    # --- named values ---------------------------------------------------------------------------------------------

    def _measure_values(self, frames: Sequence[FrameType]) -> tuple[dict[Value, int], dict[Value, int]]:
        sizes: dict[Value, int] = {}
        nodes: dict[Value, int] = {}
        for value, found in self.named(frames):
            size = self.size_of(found)
            if size is not None:
                sizes[value] = size
            if issubclass(type(found), self.tensor):
                nodes[value] = count_nodes(found)
        return sizes, nodes

    def size_of(self, found: Any) -> int | None:
        """Return the size of a value whose growth counts by itself, None of any other."""
        kind = type(found)
        if issubclass(kind, self.tensor):
            return bytes_of(found)
        if kind in _SIZED:
            return len(found)
        if self.array is not None and issubclass(kind, self.array):
            return int(found.nbytes)
        return None

    def shape_of(self, found: Any) -> tuple[Any, ...]:
        """Return shape and type of a tensor or an array, nothing of anything else."""
        arrays = (self.tensor,) if self.array is None else (self.tensor, self.array)
        return shape_of(found) if issubclass(type(found), arrays) else ()

    def named(self, frames: Sequence[FrameType]) -> Iterator[tuple[Value, Any]]:
        """Yield the values that have names in the script: its variables, and what these hold, three levels deep."""
        left = _MOST_VALUES
        seen: set[int] = set()
        todo: deque[tuple[Value, Any]] = deque(_variables(frames))
        while todo and left:
            left -= 1
            value, found = todo.popleft()
            yield value, found
            if type(found) is FunctionType and is_users(found.__code__.co_filename):
                if id(found) not in seen:
                    todo.extend(_closed_over(found))
                seen.add(id(found))
            if len(value.names) <= _MOST_DEPTH and id(found) not in seen:
                seen.add(id(found))
                todo.extend((_below(value, name), each) for name, each in self._parts(found))

    def _parts(self, found: Any) -> Iterable[tuple[str, Any]]:
        kind = type(found)
        if is_a(found, dict) and dict.__len__(found) <= _MOST_ENTRIES:
            return [(key, each) for key, each in list(dict.items(found)) if type(key) is str]
        if is_a(found, type):
            return [] if not is_users(file_of_class(found)) else list(vars(found).items())
        if issubclass(kind, (self.tensor, ModuleType, CodeType)):
            return []
        inside = is_users(file_of_class(kind)) or any(base.__name__ == "Module" for base in kind.__mro__)
        attributes = object_dict(found) if inside else None
        return [] if attributes is None else list(attributes.items())


class TooManyError(Exception):
    """There are more objects than can be looked at without hurting a process that is short of memory."""


def all_objects() -> Iterator[Any]:
    """Yield every object that the collector knows, and dicts that it does not track: they hold only plain values.

    Raises:
        TooManyError: if there are more than two million.
    """
    known = gc.get_objects()
    if len(known) > _MOST_OBJECTS:
        raise TooManyError(f"{len(known)} objects; a trace looks at {_MOST_OBJECTS} at most")
    yield from known
    for start in range(0, len(known), _AT_ONCE):
        part = gc.get_referents(*known[start : start + _AT_ONCE])
        yield from [each for each in part if type(each) is dict and not gc.is_tracked(each)]


def _variables(frames: Sequence[FrameType]) -> Iterator[tuple[Value, Any]]:
    for frame in frames:
        code = frame.f_code
        if code.co_flags & inspect.CO_NEWLOCALS and is_users(code.co_filename):
            for name, found in locals_of(frame).items():
                yield Value(names=(name,), file=code.co_filename, function=code), found
    files = {}
    for name in ["__main__", *sys.modules]:
        file = file_of_module(name)
        if file not in files and is_users(file):
            files[file] = vars(sys.modules[name])
    for file, variables in files.items():
        for name, found in list(variables.items()):
            yield Value(names=(name,), file=file), found


def _closed_over(function: FunctionType) -> Iterator[tuple[Value, Any]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        for found in gc.get_referents(cell):  # nothing, where the cell is empty
            yield Value(names=(name,), file=code.co_filename, function=code), found


def _below(value: Value, name: str) -> Value:
    return Value(names=(*value.names, name), file=value.file, function=value.function)


# --- tensors -------------------------------------------------------------------------------------------------------


def shape_of(tensor: Any) -> tuple[Any, ...]:
    """Return shape and type of a tensor, nothing if it does not tell."""
    try:
        return tuple(tensor.shape), str(tensor.dtype)
    except Exception:  # noqa: BLE001 - a class of the script's
        return ()


def bytes_of(tensor: Any) -> int:
    """Return how many bytes the storage of a tensor has."""
    try:
        return int(tensor.untyped_storage().nbytes())
    except Exception:  # noqa: BLE001 - it has none, or its class is the script's
        return 0


def count_nodes(tensor: Any) -> int:
    """Return how many nodes the graph behind a tensor has, up to some number."""
    try:
        first = tensor.grad_fn
    except Exception:  # noqa: BLE001 - its class is the script's
        return 0
    seen: set[Any] = set()
    todo = [first] if first is not None else []
    while todo and len(seen) < _MOST_NODES:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += [each for each, _ in node.next_functions if each is not None and each not in seen]
    return len(seen)
