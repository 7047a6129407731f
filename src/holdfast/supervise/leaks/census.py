"""`Census`: measure all objects of a process repeatedly, and find those that grow every time.

A container is measured by its length. Tensors and instances of the script's classes are counted by
class. Named values are measured by their size and by the size of the autograd graph behind them.
No measurement calls code of the script.
"""

from __future__ import annotations

import gc
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

from holdfast.supervise.leaks.introspection import (
    attributes_of,
    is_a,
    is_users_file,
    locals_of,
    source_file_of,
)

# Identifies a measured quantity. The first entry of the tuple is a `Measure`:
#     ("length", id of a container)
#     ("number", class), for tensors also their shape and dtype
#     ("size", id of the holder, name) of a named value
#     ("nodes", id of the holder, name) of the graph behind a named tensor
# Keys are plain tuples, because every scan creates one for each object.
Key: TypeAlias = tuple[Any, ...]
Measure: TypeAlias = Literal["length", "number", "size", "nodes"]
Frames: TypeAlias = list[types.FrameType]
# A key, a size, and the object that was measured.
Measurement: TypeAlias = tuple[Key, int, Any]

_CONTAINERS = (list, dict, set, deque)
# Types of named values whose size is measured.
_SIZED = (str, bytes, bytearray, list, tuple)
# Classes whose instances can be passed to `sys.getsizeof` without calling code of the script.
_BUILT_IN = (*_SIZED, int, float, complex, dict, set, frozenset)
# References from objects of these types are not followed, because the program keeps the objects
# that they refer to alive anyway.
_NOT_WEIGHED = (type, types.ModuleType, types.CodeType, types.FunctionType)
# A trace gives up above this many objects, because it needs about 250 bytes per container.
_MAX_OBJECTS = 2_000_000
# A dictionary with more entries than this is assumed not to contain the attributes of an object.
_MAX_NAMED_ENTRIES = 64
_MAX_NODES = 20_000
_MAX_WEIGHED_OBJECTS = 2_000


@dataclass(slots=True)
class RetainedMemory:
    """The memory that an object keeps alive.

    Args:
        bytes: Size of the memory in bytes.
        has_graph: Whether it includes a tensor that keeps an autograd graph alive.
        has_traceback: Whether it includes a traceback.
        largest_tensor_bytes: Size of the largest tensor in bytes.
        device: Device type of that tensor.
    """

    bytes: int = 0
    has_graph: bool = False
    has_traceback: bool = False
    largest_tensor_bytes: int = 0
    device: str = "cpu"


class Census:
    """Measures all objects in several scans, and keeps those that have grown in every scan."""

    def __init__(self) -> None:
        torch: Any = sys.modules["torch"]
        self._tensor_type: type = torch.Tensor
        self._array_types: tuple[type, ...] = (self._tensor_type,)
        if "numpy" in sys.modules:
            self._array_types += (sys.modules["numpy"].ndarray,)
        self.scans = 0
        # Size in the first and in the newest scan, for each key that has grown in every scan.
        self.grown: dict[Key, tuple[int, int]] = {}
        # The `id` of every instance of each growing class, one set per scan.
        self.members: dict[Key, list[set[int]]] = {}
        # The function that measures objects of a class; None if they are not measured.
        self._measurers: dict[type, Callable[[Any], Iterator[Measurement]] | None] = {}

    def scan(self, frames: Frames) -> None:
        """Measure all objects again, and drop those that have not grown.

        Raises:
            MemoryError: If there are too many objects.
        """
        sizes: dict[Key, int] = {}
        members: dict[Key, set[int]] = {}
        for key, size, measured in self.measure(frames):
            if key[0] == "number":
                members.setdefault(key, set()).add(id(measured))
            else:
                sizes[key] = size
        for key, ids in members.items():
            sizes[key] = len(ids)
        if self.scans == 0:
            self.grown = {key: (size, size) for key, size in sizes.items()}
        else:
            self.grown = {
                key: (first, sizes[key])
                for key, (first, last) in self.grown.items()
                if sizes.get(key, 0) > last
            }
        self.members = {
            key: [*self.members.get(key, ()), ids]
            for key, ids in members.items()
            if key in self.grown
        }
        self.scans += 1

    # --- measuring ---

    def measure(self, frames: Frames) -> Iterator[Measurement]:
        """Yield the measurements of all objects; after the first scan, only of growing objects."""
        for candidate in _all_objects():
            kind = type(candidate)
            if kind not in self._measurers:
                self._measurers[kind] = self._choose_measurer(kind)
            measure = self._measurers[kind]
            if measure is not None:
                yield from measure(candidate)
        for frame in frames:
            if is_users_file(frame.f_code.co_filename):
                yield from self._measure_values(id(frame), locals_of(frame).items())

    def _is_wanted(self, key: Key) -> bool:
        return self.scans == 0 or key in self.grown

    def _choose_measurer(self, kind: type) -> Callable[[Any], Iterator[Measurement]] | None:
        """Return the function that measures objects of a class; None if they are not measured."""
        if issubclass(kind, types.CellType):
            return self._measure_cell
        for base in _CONTAINERS:
            if issubclass(kind, base):
                return partial(self._measure_container, base=base)
        if issubclass(kind, (self._tensor_type, BaseException, types.GeneratorType)):
            return self._measure_instance
        return self._measure_instance if is_users_file(source_file_of(kind)) else None

    def _measure_cell(self, cell: Any) -> Iterator[Measurement]:
        """Measure the value of a variable that a closure shares with its enclosing function."""
        values = [("", value) for value in gc.get_referents(cell)]
        yield from self._measure_values(id(cell), values)

    def _measure_instance(self, instance: Any) -> Iterator[Measurement]:
        """Count an instance, and measure its attributes if the script defines its class."""
        kind = type(instance)
        shape = self.shape_of(instance) if is_a(instance, self._tensor_type) else ()
        key = ("number", kind, *shape)
        if self._is_wanted(key):
            yield key, 1, instance
        if is_users_file(source_file_of(kind)):
            # The attribute dictionary is measured here, because the garbage collector may not track
            # it yet.
            attributes = attributes_of(instance)
            if attributes is not None:
                yield from self._measure_container(attributes, dict)

    def _measure_container(self, container: Any, base: Any) -> Iterator[Measurement]:
        """Measure a container and its named values; `base` is its built-in class."""
        size = base.__len__(container)
        key = ("length", id(container))
        if self._is_wanted(key):
            yield key, size, container
        if type(container) is dict and _may_be_namespace(container, size):
            yield from self._measure_values(id(container), list(container.items()))

    def _measure_values(
        self, holder: int, named: Iterable[tuple[Any, Any]]
    ) -> Iterator[Measurement]:
        """Measure named values and the autograd graphs behind them.

        Args:
            holder: `id` of the object in which the names are defined.
            named: Pairs of name and value.
        """
        for name, value in named:
            is_array = issubclass(type(value), self._array_types)
            if type(name) is not str or not (is_array or type(value) in _SIZED):
                continue
            size_key = ("size", holder, name)
            if self._is_wanted(size_key):
                size = self._storage_of(value)[1] if is_array else len(value)
                yield size_key, size, value
            nodes_key = ("nodes", holder, name)
            if is_a(value, self._tensor_type) and self._is_wanted(nodes_key):
                yield nodes_key, count_graph_nodes(value, _MAX_NODES), value

    def shape_of(self, candidate: Any) -> tuple[Any, ...]:
        """Return the shape and dtype of a tensor or array, or an empty tuple for other objects."""
        if not issubclass(type(candidate), self._array_types):
            return ()
        try:
            return (tuple(candidate.shape), str(candidate.dtype))
        except Exception:  # noqa: BLE001 - the class may be the script's
            return ()

    def _storage_of(self, array: Any) -> tuple[int, int]:
        """Return the id and the size in bytes of the storage of a tensor or array.

        Views share the storage of their base.
        """
        try:
            if is_a(array, self._tensor_type):
                storage = array.untyped_storage()
                return storage.data_ptr(), storage.nbytes()
            return id(array), array.nbytes
        except Exception:  # noqa: BLE001 - no storage, or a class of the script
            return id(array), 0

    # --- retained memory ---

    def weigh(self, target: Any, counted: set[int]) -> RetainedMemory:
        """Return the memory that an object keeps alive, including its own memory.

        Args:
            target: The object to weigh.
            counted: Ids of objects and storages that are already counted. Newly counted ones are
                added.
        """
        retained = RetainedMemory()
        met = {id(target)}
        remaining = [target]
        while remaining and len(met) < _MAX_WEIGHED_OBJECTS:
            current = remaining.pop()
            kind = type(current)
            if issubclass(kind, self._array_types):
                self._add_array(retained, current, counted)
            elif _is_weighed(kind):
                retained.bytes += (
                    sys.getsizeof(current) if kind in _BUILT_IN else kind.__basicsize__
                )
                if is_a(current, types.TracebackType):
                    retained.has_traceback = True
                for inner in _inside(current):
                    if id(inner) not in met:
                        met.add(id(inner))
                        remaining.append(inner)
        return retained

    def _add_array(self, retained: RetainedMemory, array: Any, counted: set[int]) -> None:
        """Add the memory of a tensor or array to `retained`, unless it is already counted."""
        storage, size = self._storage_of(array)
        if is_a(array, self._tensor_type) and size >= retained.largest_tensor_bytes:
            retained.largest_tensor_bytes = size
            retained.device = str(array.device.type)
        if not retained.has_graph:
            retained.has_graph = count_graph_nodes(array, 1) > 0
        if storage not in counted:
            counted.add(storage)
            retained.bytes += size


def _is_weighed(kind: type) -> bool:
    """Return whether the memory of a class's instances counts; a torch module is not a leak."""
    if issubclass(kind, _NOT_WEIGHED):
        return False
    return "Module" not in [base.__name__ for base in kind.__mro__]


def _inside(holder: Any) -> Iterable[Any]:
    """Return the objects that an object refers to."""
    if is_a(holder, types.FrameType):
        return locals_of(holder).values()
    return gc.get_referents(holder)


def _may_be_namespace(entries: dict[Any, Any], size: int) -> bool:
    """Return whether a dictionary may be the namespace of an object, a module or a class."""
    module_name = entries.get("__name__", entries.get("__module__"))
    if module_name is None:
        return size <= _MAX_NAMED_ENTRIES
    return is_users_file(source_file_of(module_name))


def _all_objects() -> Iterator[Any]:
    """Yield every object that the garbage collector tracks, and the dictionaries that it does not.

    The collector does not track a dictionary that holds only plain values.
    """
    objects = gc.get_objects()
    if len(objects) > _MAX_OBJECTS:
        raise MemoryError(f"{len(objects)} objects; a trace examines at most {_MAX_OBJECTS}")
    yield from objects
    for holder in objects:
        for inner in gc.get_referents(holder):
            if type(inner) is dict and not gc.is_tracked(inner):
                yield inner


def count_graph_nodes(tensor: Any, limit: int) -> int:
    """Return the number of nodes in the autograd graph behind a tensor, up to a limit."""
    try:
        remaining = [] if tensor.grad_fn is None else [tensor.grad_fn]
    except Exception:  # noqa: BLE001 - an array, or a class of the script
        return 0
    met: set[Any] = set()
    while remaining and len(met) < limit:
        node = remaining.pop()
        if node in met:
            continue
        met.add(node)
        for next_node, _ in node.next_functions:
            if next_node is not None and next_node not in met:
                remaining.append(next_node)
    return len(met)
