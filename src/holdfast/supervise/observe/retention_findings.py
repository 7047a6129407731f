"""From what grows to what is told: how much for each step, made where, held by what, and by which line.

Does not: look (``retention_census``), walk (``retention_paths``), read sources (``retention_lines``).
"""

from __future__ import annotations

import itertools
import re
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from holdfast.explain.signatures.leaks import signature_of
from holdfast.supervise.observe.retention_births import made_at
from holdfast.supervise.observe.retention_census import Census, Grown, Value, all_objects, count_nodes
from holdfast.supervise.observe.retention_lines import Line, Name, Sources
from holdfast.supervise.observe.retention_origin import is_a, is_ours, is_users, user_files
from holdfast.supervise.observe.retention_paths import Names, Path, Walk
from holdfast.supervise.observe.retention_steps import Step, lines_of
from holdfast.supervise.observe.retention_weight import Weight, weigh

_MOST_TOLD = 3
_MOST_CONTAINERS = 24
_MOST_GROUPS = 12
_MOST_WEIGHED = 32  # newest entries of a container
_LEAST_SHARE = 0.05  # of the bytes of the largest leak
_LEAST_BYTES = 256  # a step; a curve that is plotted has less, and is told only if it is all that grows
_LEAST_BYTES_OF_CYCLE = 1024
_NODE_BYTES = 512  # a node of a graph with what it keeps of its own; what it saves of tensors comes on top
_GRAPH_BYTES = 65_536  # stands for the activations behind a tensor, which only C++ knows
_MOST_SECONDS = 8.0  # of processor time, for walks
_MOST_SOURCE_SECONDS = 24.0  # more, for sources: without a line all else is of little use
_HOOKS = re.compile(r"_\w*hooks\w*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """Something that grows, and what holds it.

    Args:
        kind: Such as ``"container"``.
        what: What is kept, in words.
        count: How many more for each step.
        bytes: How many more for each step, roughly.
        rank: The same with a guess for what cannot be seen.
        device: Type of the device.
        held_by: In words.
        made: Where what is kept was made, or None.
        line: That keeps it, or None.
    """

    kind: str
    what: str
    count: float
    bytes: float
    rank: float
    device: str
    held_by: str
    made: Line | None
    line: Line | None

    @property
    def matters(self) -> bool:
        """Return whether it is more than the numbers that a script keeps for a plot."""
        return self.rank >= _LEAST_BYTES

    def facts(self) -> dict[str, Any]:
        """Return the facts of the event ``"leak"``."""
        return {
            "form": self.kind, "what": self.what, "count_per_step": round(self.count, 3),
            "bytes_per_step": round(self.bytes), "device": self.device, "held_by": self.held_by,
            "allocated_at": "" if self.made is None else str(self.made),
            "retained_at": "" if self.line is None else str(self.line),
            "signature": signature_of(self.kind, on_host=self.device == "cpu"),
        }  # fmt: skip


def find_leaks(census: Census, frames: Sequence[FrameType], steps: int) -> list[Leak]:
    """Return what has leaked, the largest last.

    Args:
        census: After its looks.
        frames: Of running functions.
        steps: Between the first look and the last.
    """
    search = _Search(census, frames, steps)
    leaks = [*search.containers(), *search.values()]
    leaks += search.objects(explained=bool(leaks))
    most = max((leak.rank for leak in leaks), default=0.0)
    least = _LEAST_SHARE * most
    best: dict[object, Leak] = {}
    for leak in sorted(leaks, key=lambda leak: leak.rank):
        if leak.rank >= least and (leak.matters or leak.rank == most):
            place = leak.held_by if leak.line is None else (leak.line.file, leak.line.line)
            best["cycle" if leak.kind == "cycle" else place] = leak  # a circle is told once, by its heaviest object
    return sorted(best.values(), key=lambda leak: leak.rank)[-_MOST_TOLD:]


class _Search:
    """Looks for the holders of what grows, at one moment."""

    def __init__(self, census: Census, frames: Sequence[FrameType], steps: int) -> None:
        self._census, self._frames, self._steps = census, frames, steps
        self._until = time.thread_time() + _MOST_SECONDS
        self._sources = Sources(self._until + _MOST_SOURCE_SECONDS)
        self._files = tuple(user_files())
        self._names = Names(frames)

    # --- containers -----------------------------------------------------------------------------------------------

    def containers(self) -> Iterable[Leak]:
        """Return the containers that grow."""
        growing = self._census.containers
        every = all_objects() if growing else ()
        # Only what has gone on growing: one that is emptied now and then is no leak, and an id may be another's now.
        kept = [
            each for each in every if id(each) in growing and self._census.length_of(each) > growing[id(each)].last
        ]
        kept = list({id(each): each for each in kept}.values())
        weighed = sorted(
            ((self._weigh_newest(each, growing[id(each)]), each) for each in kept),
            key=lambda pair: -_rank(*pair[0][:2]),
        )[:_MOST_CONTAINERS]
        walk = Walk(self._names, frozenset(), frozenset({id(kept), id(weighed), *map(id, weighed)}), self._until)
        found = []
        for (weight, size, newest), each in weighed:
            path = walk.path_of(each)
            if any(is_ours(step.file) for step in path.steps) or path.root == "unknown":
                continue
            made, ran = self._made(weight.heaviest, newest)
            grown = growing[id(each)]
            count = (grown.last - grown.first) / self._steps
            kind = _kind_of_container(path, weight)
            found.append(
                Leak(
                    kind=kind, what=f"{type(each).__name__} of {describe(newest, self._census)}", count=count,
                    bytes=size / self._steps, rank=_rank(weight, size) / self._steps, device=weight.device,
                    held_by=_held_by(path, entry=True), made=made,
                    line=self._line(path, ran, hooks=kind == "hooks"),
                )
            )  # fmt: skip
        kept.clear()
        weighed.clear()
        return found

    def _weigh_newest(self, container: Any, grown: Grown) -> tuple[Weight, float, Any]:
        """Return the weight of a newest entry, the bytes of all new entries, and that entry."""
        count = grown.last - grown.first
        entries = newest_of(container, min((count + 1) // 2, _MOST_WEIGHED))  # made while it was remembered where
        storages: set[int] = set()  # that entries share are counted once
        weights = [weigh(each, self._census, storages) for each in entries]
        heaviest = max(range(len(weights)), key=lambda index: weights[index].bytes)
        size = sum(each.bytes for each in weights) / len(weights) * count
        return weights[heaviest], size, entries[heaviest]

    # --- named values ---------------------------------------------------------------------------------------------

    def values(self) -> Iterable[Leak]:
        """Return named values that grow, and tensors behind which a graph grows."""
        census, found = self._census, []
        for value, each in census.named(self._frames):
            for kind, grown in (("autograd chain", census.nodes.get(value)), ("value", census.values.get(value))):
                if grown is None or id(each) in census.containers or is_ours(value.file):
                    continue
                now = count_nodes(each) if kind == "autograd chain" else census.size_of(each)
                if now is None or now <= grown.last:
                    continue
                a_step = (grown.last - grown.first) / self._steps
                weight = weigh(each, census)
                chain = kind == "autograd chain"
                size = a_step * (_NODE_BYTES if chain else _bytes_of_unit(each))
                found.append(
                    Leak(
                        kind=kind, what=f"{'graph behind ' if chain else ''}{describe(each, census)}", count=a_step,
                        bytes=size, rank=size + (_GRAPH_BYTES if chain else 0), device=weight.device,
                        held_by=_named(value), made=self._made(each, each)[0], line=self._line_of_value(value),
                    )
                )  # fmt: skip
        return found

    def _line_of_value(self, value: Value) -> Line | None:
        within = (0, 0) if value.function is None else lines_of(value.function)
        names = []
        for index, name in reversed(list(enumerate(value.names))):
            scope = "attribute" if index else "variable" if value.function is None else "local"
            names.append(
                Name(name=name, files=(value.file, *self._files), scope=scope, within=within if not index else (0, 0))
            )
        return self._first_line(names)

    # --- objects --------------------------------------------------------------------------------------------------

    def objects(self, *, explained: bool) -> Iterable[Leak]:
        """Return objects of which there are ever more, and that no growing container holds."""
        census, suspects = self._census, self._suspects()
        own = frozenset({id(suspects), *map(id, suspects), *(id(objects) for _, objects in suspects)})
        walk = Walk(self._names, frozenset(census.containers), own, self._until)
        found: list[Leak] = []
        for key, (each, *others) in suspects:
            weight = weigh(each, census)
            path = walk.path_of(each)
            kind = "cycle" if path.root == "cycle" else "linked"
            if any(step.kind == "traceback" for step in path.steps) or weight.exception:
                kind = "exception"
            if path.root == "container" or any(is_ours(step.file) for step in path.steps):
                continue
            if path.root == "unknown" and (explained or type(key) is not tuple):
                continue
            if path.root == "cycle" and weight.bytes < _LEAST_BYTES_OF_CYCLE and type(key) is not tuple:
                continue
            grown = census.groups[key]
            count = (grown.last - grown.first) / self._steps
            made, ran = self._made(each, *others)
            found.append(
                Leak(
                    kind="unknown" if path.root == "unknown" else kind, what=describe(each, census), count=count,
                    bytes=count * weight.bytes, rank=count * _rank(weight, weight.bytes), device=weight.device,
                    held_by=_held_by(path, entry=False), made=made,
                    line=self._line(path, ran),
                )
            )  # fmt: skip
        suspects.clear()
        return found

    def _suspects(self) -> list[tuple[Any, list[Any]]]:
        """Return objects of each growing group: one that two looks have seen, and one that was made since."""
        wanted: dict[int, Any] = {}
        known: set[int] = set()
        for key, looks in self._census.members.items():
            wanted |= dict.fromkeys(looks[-1] & looks[-2] - looks[-3], key)
            known |= looks[-1]
        found: dict[Any, list[Any]] = {}
        new: dict[Any, Any] = {}
        for each in all_objects() if wanted else ():
            if not self._census.is_counted(each):
                continue
            if id(each) in wanted and self._census.group_of(each) == wanted[id(each)]:
                found.setdefault(wanted[id(each)], [each])
            elif id(each) not in known:
                new[self._census.group_of(each)] = each
        for key, objects in found.items():
            objects += [new[key]] if key in new else []
        new.clear()
        weights = {key: weigh(objects[0], self._census) for key, objects in found.items()}
        order = sorted(found, key=lambda key: -_rank(weights[key], weights[key].bytes))
        return [(key, found[key]) for key in order[:_MOST_GROUPS]]

    # --- lines ----------------------------------------------------------------------------------------------------

    def _made(self, *objects: Any) -> tuple[Line | None, frozenset[tuple[str, int]]]:
        """Return the innermost line of the script at which an object was made, and all lines on the way there."""
        ran: list[tuple[str, int]] = []
        for each in objects:
            ran += [frame for frame in made_at(each) if is_users(frame[0])]
        line = self._sources.describe(*ran[0]) if ran else None
        return line, frozenset(ran)

    def _line(self, path: Path, ran: frozenset[tuple[str, int]], *, hooks: bool = False) -> Line | None:
        steps = list(path.steps)
        for step in steps:
            if step.kind == "cache" and step.file:
                return self._sources.describe(step.file, step.lines[0])
        inner = max((index for index, step in enumerate(steps) if step.kind == "traceback"), default=-1)
        steps = steps[inner + 1 :] or steps  # the names in the frames of an exception do not hold it
        for foreign in (False, True):  # a line of the script before one of a library
            names = list(self._candidates(steps, hooks=hooks, foreign=foreign))
            line = self._first_line(names, ran)
            if line is not None:
                return line
        return None

    def _first_line(self, names: Sequence[Name], ran: frozenset[tuple[str, int]] = frozenset()) -> Line | None:
        """Return a line that builds on one of some names, else one that binds one of them."""
        for mere, name in itertools.product((False, True), names):
            line = self._sources.retaining_line(name, ran=ran, mere=mere)
            if line is not None:
                return line
        return None

    def _candidates(self, steps: Sequence[Step], *, hooks: bool, foreign: bool) -> Iterable[Name]:
        if hooks:
            yield Name(name="", files=self._files, scope="hooks")
        late = []
        for step in steps:
            name = step.name
            if not name.isidentifier() or step.kind == "other":
                continue
            files = tuple(file for file in (step.file, *self._files) if file and (is_users(file) or foreign))
            if step.kind == "entry":
                late.append(Name(name=name, files=files, scope="attribute"))
            elif step.kind == "attribute":
                yield Name(name=name, files=files, scope="attribute", within=step.lines)
            elif step.kind in ("local", "default"):
                yield Name(name=name, files=files[:1], scope="local", within=step.lines)
            else:
                yield Name(name=name, files=files, within=step.lines)
        yield from late


def newest_of(container: Any, count: int) -> list[Any]:
    """Return the entries that were added last; of a set, some."""
    if is_a(container, dict):
        return [value for _, value in zip(range(count), reversed(dict.values(container)), strict=False)]
    if is_a(container, list):
        return list(list.__getitem__(container, slice(-count, None)))
    if is_a(container, deque):
        return list(itertools.islice(reversed(container), count))
    return list(itertools.islice(container, count))


def describe(each: Any, census: Census) -> str:
    """Return class, shape and type of an object in words; of a class of the script's nothing is asked."""
    kind = type(each)
    text = kind.__qualname__
    if (shape := census.shape_of(each)) and len(shape) == 2:
        text += f" {shape[0]} {shape[1].removeprefix('torch.')}"
    elif kind in (tuple, list) and 0 < len(each) <= 8:
        text += f" ({', '.join(type(inner).__qualname__ for inner in each)})"
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:120]


def _rank(weight: Weight, size: float) -> float:
    return size + (_GRAPH_BYTES if weight.graph else 0)


def _bytes_of_unit(each: Any) -> int:
    return 8 if is_a(each, list, tuple) else 1


def _kind_of_container(path: Path, weight: Weight) -> str:
    if any(step.kind == "cache" for step in path.steps):
        return "cache"
    if any(step.kind == "attribute" and _HOOKS.match(step.name) for step in path.steps[:1]):
        return "hooks"
    if path.root == "cycle":
        return "cycle"
    if weight.exception:
        return "exception"
    return "graph" if weight.graph else "container"


def _held_by(path: Path, *, entry: bool) -> str:
    last: Step | None = path.steps[-1] if path.steps else None
    text = str(path) + ("[...]" if entry else "")
    if path.root == "cycle":
        return f"a cycle: {text}"
    where = "" if last is None or not last.file else f" in {last.file.rpartition('/')[2]}"
    return f"{text}{where}" + (f", {last.owner}()" if last is not None and last.kind == "local" else "")


def _named(value: Value) -> str:
    text = f"{'.'.join(value.names)} in {value.file.rpartition('/')[2]}"
    return text + (f", {value.function.co_name}()" if value.function is not None else "")
