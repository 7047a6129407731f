"""What holds memory that grows.

Looked for inside the process, during a few steps, when somebody outside has asked.

Four looks at all objects, one after each step, show what grows every time. What still grows at the
fifth is followed
back to what holds it, and to the line that makes it grow. It reads only: no random state or
    gradient is touched.
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.events.event import EventData
from holdfast.core.events.process_events import Leak, LeakTrace
from holdfast.core.text import sanitise
from holdfast.explain.signatures.leaks import signature_of
from holdfast.supervise.leaks.holders import (
    HOOKS,
    OURS,
    Holders,
    Lines,
    Step,
    file_of,
    is_a,
    is_users,
    locals_of,
    object_dict,
    text_of,
)

Key = tuple[Any, ...]
Frames = list[types.FrameType]
_CONTAINERS = (list, dict, set, deque)
_SIZED = (str, bytes, bytearray, list, tuple)
_PLAIN = (*_SIZED, int, float, complex, dict, set, frozenset)
_NOT_WEIGHED = (type, types.ModuleType, types.CodeType, types.FunctionType)
_COUNTED, _IGNORED = object, type  # stand for what is no container
_MOST_OBJECTS = 2_000_000  # a trace keeps some 250 bytes for each container among them
_MOST_NAMED = 64  # entries of a dict that may be somebody's attributes
_MOST_NODES, _MOST_WEIGHED = 20_000, 2_000
_LOOKS = 4
_MOST_EMITTED, _MOST_FOLLOWED, _MOST_NEWEST = 3, 24, 32  # the last: entries of a container
_LEAST_SHARE = 0.05  # of the bytes of the largest leak
# A step; a curve that is plotted has less, and is emitted only if it is all that grows
_LEAST_BYTES = 256
# A node of a graph with what it keeps of its own; what it saves of tensors comes on top
_NODE_BYTES = 512
_GRAPH_BYTES = 65_536  # stands for the activations behind a tensor, which only C++ knows
_MOST_SECONDS = 8.0  # of processor time, for walks


@dataclass(slots=True)
class Weight:
    """What an object keeps."""

    bytes: int = 0
    graph: bool = False  # whether a tensor in it keeps its graph
    traceback: bool = False
    device: str = "cpu"


class Census:
    """The sizes of everything at several looks; what did not grow in between is dropped.

    A key is ``("length", id)`` of a container, ``("number", class, ...)`` of objects of one class
    (tensors also of one shape and type), or ``("size" or "nodes", id of the holder, name)`` of a
    value that has a name.
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
            self.grown = {
                key: (first, sizes[key])
                for key, (first, last) in before
                if sizes.get(key, 0) > last
            }
        self.members = {
            key: [*self.members.get(key, ()), ids]
            for key, ids in members.items()
            if key in self.grown
        }
        self.looks += 1

    def measured(self, frames: Frames) -> Iterator[tuple[Key, int, Any]]:
        """Yield key, size and object.

        Of everything at the first look, then of what has grown so far.
        """
        for each in _all_objects():
            kind = type(each)
            role: Any = self._roles.get(kind)
            if role is None:
                role = self._roles[kind] = self._role(kind)
            if role is types.CellType:
                yield from self._values(id(each), (("", found) for found in gc.get_referents(each)))
            elif role is _COUNTED:
                if self._wants(
                    key := (
                        "number",
                        kind,
                        *(self.shape_of(each) if is_a(each, self._tensor) else ()),
                    )
                ):
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

    def _values(
        self, holder: int, named: Iterable[tuple[Any, Any]]
    ) -> Iterator[tuple[Key, int, Any]]:
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
            return (
                (tuple(each.shape), str(each.dtype)) if issubclass(type(each), self._arrays) else ()
            )
        except Exception:  # noqa: BLE001 - a class of the script's
            return ()

    def _memory(self, each: Any) -> tuple[int, int]:
        """Return a number of the memory of a tensor or an array, which views of it share, and
        its bytes.
        """
        try:
            storage = each.untyped_storage() if is_a(each, self._tensor) else None
            return (
                (id(each), each.nbytes)
                if storage is None
                else (storage.data_ptr(), storage.nbytes())
            )
        except Exception:  # noqa: BLE001 - it has none, or its class is the script's
            return id(each), 0

    def weigh(self, target: Any, counted: set[int]) -> Weight:
        """Return what an object keeps, without memory that was counted before.

        What is counted now is added.
        """
        found, most, seen, todo = Weight(), 0, {id(target)}, [target]
        while todo and len(seen) < _MOST_WEIGHED:
            each = todo.pop()
            kind = type(each)
            # Torch's modules are the model, which stays anyway
            names = [base.__name__ for base in kind.__mro__]
            if issubclass(kind, self._arrays):
                place, size = self._memory(each)
                if issubclass(kind, self._tensor) and size >= most:
                    most, found.device = size, str(each.device.type)
                found.graph = found.graph or _count_nodes(each, 1) > 0
                found.bytes += 0 if place in counted else size
                counted.add(place)
            elif not issubclass(kind, _NOT_WEIGHED) and "Module" not in names:
                found.bytes += sys.getsizeof(each) if kind in _PLAIN else kind.__basicsize__
                found.traceback = found.traceback or is_a(each, types.TracebackType)
                inside = (
                    locals_of(each).values()
                    if is_a(each, types.FrameType)
                    else gc.get_referents(each)
                )
                new = [inner for inner in inside if id(inner) not in seen]
                seen.update(map(id, new))
                todo += new
        return found


def _all_objects() -> Iterator[Any]:
    """Yield every object that the collector knows, and dicts that it does not track.

    They hold only plain values.
    """
    known = gc.get_objects()
    if len(known) > _MOST_OBJECTS:
        raise MemoryError(f"{len(known)} objects; a trace looks at {_MOST_OBJECTS} at most")
    yield from known
    for each in known:
        yield from [
            inner
            for inner in gc.get_referents(each)
            if type(inner) is dict and not gc.is_tracked(inner)
        ]


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
            todo += [
                each for each, _ in node.next_functions if each is not None and each not in seen
            ]
    return len(seen)


class LeakTracer:
    """Traces what memory is held by, each time that it is asked to; `emit` records an event."""

    def __init__(self, emit: Callable[[EventData], None]) -> None:
        self._emit = emit
        self._answered = self._steps = 0
        self._census: Census | None = None
        self._seconds = 0.0

    def after_step(self, requested: int) -> None:
        """Go on with a trace, or begin one; each request is answered once.

        An error in a look ends the trace.
        """
        if self._census is not None:
            self._steps += 1
        elif requested != self._answered:
            self._answered, self._steps, self._seconds = requested, 0, 0.0
            self._census = Census()
        if self._census is not None:
            self._look(self._census)

    def _look(self, census: Census) -> None:
        began, why = time.monotonic(), ""
        self._census, found, collects = None, None, gc.isenabled()
        gc.disable()  # so that no destructor of the script's runs within
        frames = _running_frames()
        try:
            # Attributes are read without their code
            with sys.modules["torch"]._C.DisableTorchFunctionSubclass():
                if census.looks < _LOOKS:
                    census.look(frames)
                else:
                    found = find_leaks(census, frames, _LOOKS - 1)
        except MemoryError as error:
            why = str(error) or "no memory left"
        finally:
            frames.clear()
            if collects:
                gc.enable()
        self._seconds += time.monotonic() - began
        if not why and found is None and (census.looks < _LOOKS or census.grown):
            self._census = census
        else:
            for _, leak in found or ():
                self._emit(leak)
            spent, request = round(self._seconds, 3), self._answered
            self._emit(
                LeakTrace(
                    found=len(found or ()),
                    steps=self._steps,
                    seconds=spent,
                    request=request,
                    why=why,
                )
            )


def _running_frames() -> Frames:
    """Return the frames of all threads without those of ours."""
    tops = sys._current_frames().values()
    found = {id(frame): frame for top in tops for frame, _ in traceback.walk_stack(top)}
    return [frame for frame in found.values() if not frame.f_code.co_filename.startswith(OURS)]


def find_leaks(census: Census, frames: Frames, steps: int) -> list[tuple[float, Leak]]:
    """Return what has leaked, the largest last: its bytes for each step, roughly, and its event."""
    holders = Holders(frames, time.thread_time() + _MOST_SECONDS)
    lines = Lines(filter(is_users, dict.fromkeys(map(file_of, ["__main__", *sys.modules]))))
    growing = frozenset(key[1] for key in census.grown if key[0] == "length")
    targets: list[Any] = []
    found = sorted(_growing(census, frames, steps, targets), key=lambda each: -each[0])
    best: dict[str, tuple[float, Leak]] = {}
    for rank, index, kind, facts, weight in found[:_MOST_FOLLOWED]:
        root, path = holders.path_of(
            targets[index], {id(targets)}, frozenset() if kind == "length" else growing
        )
        form = _form(kind, root, path, weight)
        if root in ("container", "unknown") or any(step.file.startswith(OURS) for step in path):
            continue
        last, line = path[-1], lines.keeping(path)
        prefix = "a cycle: " if root == "cycle" else ""
        suffix = "[...]" if kind == "length" else ""
        held = f"{prefix}{text_of(path)}{suffix}"
        if root == "name" and last.file:
            held += f" in {Path(last.file).name}" + (
                f", {last.owner}()" if last.kind == "local" else ""
            )
        signature = signature_of(form, on_host=weight.device == "cpu")
        leak = Leak(
            form=form,
            device=weight.device,
            held_by=held,
            retained_at=line,
            signature=signature,
            **facts,
        )
        # Once, by its heaviest object
        best.setdefault("cycle" if form == "cycle" else line or held, (rank, leak))
    targets.clear()
    most = max((rank for rank, _ in best.values()), default=0.0)
    leaks = [
        each
        for each in best.values()
        if each[0] >= max(_LEAST_SHARE * most, min(_LEAST_BYTES, most))
    ]
    return leaks[:_MOST_EMITTED][::-1]


def _growing(
    census: Census, frames: Frames, steps: int, targets: list[Any]
) -> list[tuple[Any, ...]]:
    """Add objects that have gone on growing, of a growing class one that was made lately, and
    describe them.

    Of each: its rank, its index among the targets, kind of key, first facts and weight.
    """
    wanted = {key: looks[-1] & looks[-2] - looks[-3] for key, looks in census.members.items()}
    found, seen = [], set()
    for key, size, target in list(census.measured(frames)):
        kind, (first, last) = key[0], census.grown[key]
        is_kept = id(target) in wanted[key] if kind == "number" else size > last
        if (
            not is_kept
            or key in seen
            or (kind != "length" and ("length", id(target)) in census.grown)
        ):
            continue
        seen.add(key)
        count, what = (last - first) / steps, _describe(target, census)
        weight = census.weigh(target, set())
        if kind == "length":
            entries, counted = _newest_of(target, min(last - first, _MOST_NEWEST)), set[int]()
            weights = [census.weigh(each, counted) for each in entries]
            weight, what = max(weights, key=lambda each: each.bytes), f"{type(target).__name__} of "
            what += _describe(entries[0], census)
            unit = sum(each.bytes for each in weights) / len(weights)
        else:
            unit = {
                "number": weight.bytes,
                "nodes": _NODE_BYTES,
                "size": 8 if is_a(target, list, tuple) else 1,
            }[kind]
            what = f"graph behind {what}" if kind == "nodes" else what
        graphs = {"nodes": 1.0, "size": 0.0}.get(kind, count if weight.graph else 0.0)
        facts = {
            "what": what,
            "count_per_step": round(count, 3),
            "bytes_per_step": round(count * unit),
        }
        found.append((count * unit + _GRAPH_BYTES * graphs, len(targets), kind, facts, weight))
        targets.append(target)
    return found


def _newest_of(container: Any, count: int) -> list[Any]:
    """Return the entries that were added last; of a set, some."""
    if is_a(container, dict):
        return list(dict.values(container))[-count:]
    base: Any = next(base for base in (list, set, deque) if is_a(container, base))
    return list(base.__iter__(container))[-count:]


def _describe(each: Any, census: Census) -> str:
    """Return class, shape and type of an object in words.

    Of a class of the script's nothing is asked.
    """
    text, shape = type(each).__qualname__, census.shape_of(each)
    if shape:
        text += f" {shape[0]} {shape[1].removeprefix('torch.')}"
    return sanitise(text, most=120)


def _form(kind: str, root: str, path: Sequence[Step], weight: Weight) -> str:
    """Return what form of a leak it is, as its signature is chosen by."""
    if kind in ("nodes", "size"):
        return "autograd chain" if kind == "nodes" else "value"
    if any(step.kind == "cache" for step in path):
        return "cache"
    if kind == "length" and path and HOOKS.match(path[0].name):
        return "hooks"
    if weight.traceback or any(step.kind == "traceback" for step in path):
        return "exception"
    if root == "cycle":
        return "cycle"
    return "linked" if kind == "number" else "graph" if weight.graph else "container"
