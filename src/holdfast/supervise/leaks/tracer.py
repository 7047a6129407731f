"""What holds memory that grows: looked for inside the process, during a few steps, when somebody outside has asked.

Four looks at all objects, one after each step, show what grows every time; if nothing does, four more looks follow,
eight steps apart. What grows until the fifth look is followed back to what holds it, and to the line that makes it
grow. It reads only: no random state, no gradient and no mode of torch is touched, and nothing is kept alive.
"""

from __future__ import annotations

import gc
import itertools
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from holdfast.core.events.event import EventData
from holdfast.core.events.process_events import Leak, LeakTrace
from holdfast.core.text import sanitise
from holdfast.explain.signatures.leaks import signature_of
from holdfast.supervise.leaks.census import Census, Frames, Weight
from holdfast.supervise.leaks.holders import OURS, Holders, Step, file_of, is_a, is_users, text_of
from holdfast.supervise.leaks.lines import HOOKS, Lines

_Ranked = tuple[float, Leak]
_Found = tuple[float, int, str, dict[str, Any], Weight]  # rank, index of the target, kind, first facts, weight
_LOOKS = 4
_STRIDES = (1, 8)
_MOST_EMITTED, _MOST_FOLLOWED = 3, 24
_MOST_WEIGHED = 32  # newest entries of a container
_LEAST_SHARE = 0.05  # of the bytes of the largest leak
_LEAST_BYTES = 256  # a step; a curve that is plotted has less, and is emitted only if it is all that grows
_LEAST_BYTES_OF_CYCLE = 1024
_NODE_BYTES = 512  # a node of a graph with what it keeps of its own; what it saves of tensors comes on top
_GRAPH_BYTES = 65_536  # stands for the activations behind a tensor, which only C++ knows
_MOST_SECONDS, _MOST_SOURCE_SECONDS = 8.0, 24.0  # of processor time, for walks and then for sources


class LeakTracer:
    """Traces what memory is held by, each time that it is asked to; `emit` records an event."""

    def __init__(self, emit: Callable[[EventData], None]) -> None:
        self._emit = emit
        self._answered = self._window = self._until_look = self._steps = 0
        self._census: Census | None = None
        self._seconds = 0.0

    def after_step(self, requested: int) -> None:
        """Go on with a trace, or begin one; each request is answered once. An error in a look ends the trace."""
        if self._census is not None:
            self._steps += 1
            self._until_look -= 1
        elif requested != self._answered:
            self._answered, self._steps, self._seconds, self._window = requested, 0, 0.0, 0
            self._census, self._until_look = Census(), 0
        if self._census is not None and self._until_look <= 0:
            self._look(self._census)

    def _look(self, census: Census) -> None:
        began, stride = time.monotonic(), _STRIDES[self._window]
        self._census, found, collects = None, None, gc.isenabled()
        gc.disable()  # so that no destructor of the script's runs within
        frames = _running_frames()
        try:
            with sys.modules["torch"]._C.DisableTorchFunctionSubclass():  # attributes are read without their code
                if census.looks < _LOOKS:
                    census.look(frames)
                else:
                    found = find_leaks(census, frames, stride * (_LOOKS - 1))
        except MemoryError as error:
            why = str(error) or "no memory left"
            self._emit(LeakTrace(found=0, steps=self._steps, why=why, request=self._answered))
            return
        finally:
            frames.clear()
            if collects:
                gc.enable()
        self._seconds += time.monotonic() - began
        if found is None and (census.looks < _LOOKS or census.grown):
            self._census, self._until_look = census, stride
        elif self._window + 1 < len(_STRIDES) and all(rank < _LEAST_BYTES for rank, _ in found or ()):
            self._window += 1
            self._census, self._until_look = Census(), 1
        else:
            for _, leak in found or ():
                self._emit(leak)
            seconds, request = round(self._seconds, 3), self._answered
            self._emit(LeakTrace(found=len(found or ()), steps=self._steps, seconds=seconds, request=request))


def _running_frames() -> Frames:
    """Return the frames of all threads without those of ours."""
    tops = sys._current_frames().values()
    found = {id(frame): frame for top in tops for frame, _ in traceback.walk_stack(top)}
    return [frame for frame in found.values() if not frame.f_code.co_filename.startswith(OURS)]


def find_leaks(census: Census, frames: Frames, steps: int) -> list[_Ranked]:
    """Return what has leaked, the largest last: its bytes for each step, roughly, and its event."""
    until = time.thread_time() + _MOST_SECONDS
    holders = Holders(frames, until)
    users = dict.fromkeys(file_of(name) for name in ("__main__", *list(sys.modules)))
    lines = Lines(filter(is_users, users), until + _MOST_SOURCE_SECONDS)
    growing = frozenset(key[1] for key in census.grown if key[0] == "length")
    targets: list[Any] = []
    found = sorted(_growing(census, frames, steps, targets), key=lambda each: -each[0])
    best: dict[str, _Ranked] = {}
    for rank, index, kind, facts, weight in found[:_MOST_FOLLOWED]:
        root, path = holders.path_of(targets[index], {id(targets)}, frozenset() if kind == "length" else growing)
        form = _form(kind, root, path, weight)
        small = form == "cycle" and rank < _LEAST_BYTES_OF_CYCLE
        if root in ("container", "unknown") or small or any(step.file.startswith(OURS) for step in path):
            continue
        last, line = path[-1], lines.keeping(path)
        held = f"{'a cycle: ' if root == 'cycle' else ''}{text_of(path)}{'[...]' if kind == 'length' else ''}"
        if root == "name" and last.file:
            held += f" in {Path(last.file).name}" + (f", {last.owner}()" if last.kind == "local" else "")
        signature = signature_of(form, on_host=weight.device == "cpu")
        leak = Leak(form=form, device=weight.device, held_by=held, retained_at=line, signature=signature, **facts)
        best.setdefault("cycle" if form == "cycle" else line or held, (rank, leak))  # once, by its heaviest object
    targets.clear()
    most = max((rank for rank, _ in best.values()), default=0.0)
    leaks = [each for each in best.values() if each[0] >= max(_LEAST_SHARE * most, min(_LEAST_BYTES, most))]
    return leaks[:_MOST_EMITTED][::-1]


def _growing(census: Census, frames: Frames, steps: int, targets: list[Any]) -> list[_Found]:
    """Add objects that have gone on growing, of a growing class one that was made lately, and describe them."""
    wanted = {key: looks[-1] & looks[-2] - looks[-3] for key, looks in census.members.items()}
    found, seen = [], set()
    for key, size, target in list(census.measured(frames)):
        kind, (first, last) = key[0], census.grown[key]
        is_kept = id(target) in wanted[key] if kind == "number" else size > last
        if not is_kept or key in seen or (kind != "length" and ("length", id(target)) in census.grown):
            continue
        seen.add(key)
        count, what = (last - first) / steps, _describe(target, census)
        weight = census.weigh(target, set())
        if kind == "length":
            entries, counted = _newest_of(target, min(last - first, _MOST_WEIGHED)), set[int]()
            weights = [census.weigh(each, counted) for each in entries]
            weight, what = max(weights, key=lambda each: each.bytes), f"{type(target).__name__} of "
            what += _describe(entries[0], census)
            unit = sum(each.bytes for each in weights) / len(weights)
        else:
            unit = {"number": weight.bytes, "nodes": _NODE_BYTES, "size": 8 if is_a(target, list, tuple) else 1}[kind]
            what = f"graph behind {what}" if kind == "nodes" else what
        graphs = {"nodes": 1.0, "size": 0.0}.get(kind, count if weight.graph else 0.0)
        facts = {"what": what, "count_per_step": round(count, 3), "bytes_per_step": round(count * unit)}
        found.append((count * unit + _GRAPH_BYTES * graphs, len(targets), kind, facts, weight))
        targets.append(target)
    return found


def _newest_of(container: Any, count: int) -> list[Any]:
    """Return the entries that were added last; of a set, some."""
    if is_a(container, dict):
        return list(itertools.islice(reversed(dict.values(container)), count))
    base: Any = next(base for base in (list, set, deque) if is_a(container, base))
    return list(itertools.islice(base.__iter__(container) if base is set else base.__reversed__(container), count))


def _describe(each: Any, census: Census) -> str:
    """Return class, shape and type of an object in words; of a class of the script's nothing is asked."""
    text, shape = type(each).__qualname__, census.shape_of(each)
    if shape:
        text += f" {shape[0]} {shape[1].removeprefix('torch.')}"
    elif type(each) in (tuple, list) and 0 < len(each) <= 8:
        text += f" ({', '.join(type(inner).__qualname__ for inner in each)})"
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
