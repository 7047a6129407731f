"""From a census of what grows to leaks: what is kept, who holds it, and which line keeps it.

While references are followed, objects of the script may be held only by one list of ours,
`targets`. The records here refer to them by their index in it. Otherwise the search would find us
as holders.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from holdfast.core.events.process_events import Leak
from holdfast.core.text import sanitise
from holdfast.explain.signatures.leaks import signature_of
from holdfast.supervise.leaks.census import Census, Frames, Key, Measure, Weight
from holdfast.supervise.leaks.introspection import (
    OWN_FOLDER,
    is_a,
    is_users_file,
    source_file_of,
)
from holdfast.supervise.leaks.references import HOOK_TABLE, HolderPath, HolderSearch, text_of
from holdfast.supervise.leaks.source_lines import SourceLines

_MAX_LEAKS = 3
_MAX_FOLLOWED = 24
# The newest entries of a container that are weighed.
_MAX_NEWEST_ENTRIES = 32
# CPU time for following references.
_MAX_SECONDS = 8.0
# A leak that is smaller than this share of the largest one is not reported.
_MIN_SHARE = 0.05
# Bytes per step. A curve that is plotted has less, and is reported only if nothing else grows.
_MIN_BYTES = 256
# A node of a graph with what it keeps of its own; tensors that it saves come on top.
_NODE_BYTES = 512
# Stands for the activations behind a tensor, whose sizes only C++ knows.
_GRAPH_BYTES = 64 << 10
_MAX_TEXT_LENGTH = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class _Growth:
    """Something that has grown at every look.

    Args:
        target: Index of an object in the list of targets: the container or the value that grows, or
            of a growing class an object that was made lately.
        measure: How it was measured.
        what: What it is, in words.
        count_per_step: By how much it grows.
        bytes_per_step: The same in bytes, as far as Python knows them.
        rank: The same with an estimate of the activations behind tensors.
        weight: What one of the objects that are added keeps.
    """

    target: int
    measure: Measure
    what: str
    count_per_step: float
    bytes_per_step: float
    rank: float
    weight: Weight


@dataclass(frozen=True, slots=True)
class _RankedLeak:
    """A leak, with its bytes per step, roughly."""

    rank: float
    leak: Leak


def find_leaks(census: Census, frames: Frames, steps: int) -> list[Leak]:
    """Return what has leaked, the largest last.

    Args:
        census: Looks, of which the last is followed now by another one.
        frames: Frames of running functions.
        steps: Number of steps between the first look and the newest.
    """
    search = HolderSearch(frames, time.thread_time() + _MAX_SECONDS)
    user_files = map(source_file_of, ["__main__", *sys.modules])
    lines = SourceLines(filter(is_users_file, dict.fromkeys(user_files)))
    growing = frozenset(key[1] for key in census.grown if key[0] == "length")
    targets: list[Any] = []
    growths = _find_growths(census, frames, steps, targets)
    growths.sort(key=lambda growth: -growth.rank)
    # By the place that keeps it: a leak is reported once, by its heaviest object.
    leaks: dict[str, _RankedLeak] = {}
    for growth in growths[:_MAX_FOLLOWED]:
        # A container that grows is followed further; what is in one is reported with it.
        stops = frozenset[int]() if growth.measure == "length" else growing
        path = search.find_path(targets[growth.target], {id(targets)}, stops)
        if path.root in ("container", "unknown") or _is_our_own(path):
            continue
        line = lines.find_keeping_line(path.links)
        leak = _make_leak(growth, path, line)
        place = "cycle" if leak.form == "cycle" else line or leak.held_by
        leaks.setdefault(place, _RankedLeak(growth.rank, leak))
    targets.clear()
    return _choose_largest(list(leaks.values()))


def _choose_largest(leaks: Sequence[_RankedLeak]) -> list[Leak]:
    """Return the leaks that are worth a report, from leaks in falling order; the largest last."""
    largest = max((ranked.rank for ranked in leaks), default=0.0)
    least = max(_MIN_SHARE * largest, min(_MIN_BYTES, largest))
    chosen = [ranked.leak for ranked in leaks if ranked.rank >= least]
    return chosen[:_MAX_LEAKS][::-1]


def _is_our_own(path: HolderPath) -> bool:
    return any(link.file.startswith(OWN_FOLDER) for link in path.links)


def _make_leak(growth: _Growth, path: HolderPath, line: str) -> Leak:
    form = _form_of(growth, path)
    device = growth.weight.device
    return Leak(
        form=form,
        what=growth.what,
        count_per_step=round(growth.count_per_step, 3),
        bytes_per_step=round(growth.bytes_per_step),
        device=device,
        held_by=_describe_holder(growth, path),
        retained_at=line,
        signature=signature_of(form, on_host=device == "cpu"),
    )


def _describe_holder(growth: _Growth, path: HolderPath) -> str:
    """Return a path as text: the names, and the file and function where it begins."""
    text = text_of(path.links)
    if growth.measure == "length":
        text += "[...]"
    if path.root == "cycle":
        return f"a cycle: {text}"
    outermost = path.links[-1]
    if outermost.file:
        text += f" in {Path(outermost.file).name}"
        if outermost.kind == "local":
            text += f", {outermost.owner}()"
    return text


def _form_of(growth: _Growth, path: HolderPath) -> str:
    """Return the form of a leak, by which its signature is chosen. The surest sign comes first."""
    kinds = {link.kind for link in path.links}
    is_container = growth.measure == "length"
    rules = (
        ("autograd chain", growth.measure == "nodes"),
        ("value", growth.measure == "size"),
        ("cache", "cache" in kinds),
        ("hooks", is_container and HOOK_TABLE.match(path.links[0].name) is not None),
        ("exception", growth.weight.has_traceback or "traceback" in kinds),
        ("cycle", path.root == "cycle"),
        ("linked", growth.measure == "number"),
        ("graph", growth.weight.has_graph),
    )
    for form, applies in rules:
        if applies:
            return form
    return "container"


# --- what grows ---


def _find_growths(census: Census, frames: Frames, steps: int, targets: list[Any]) -> list[_Growth]:
    """Return what has grown further since the last look, and add the objects to the targets."""
    made_lately = {key: _ids_made_lately(looks) for key, looks in census.members.items()}
    growths: list[_Growth] = []
    done: set[Key] = set()
    for key, size, target in list(census.measure(frames)):
        measure = cast("Measure", key[0])
        if measure == "number":
            is_growing = id(target) in made_lately[key]
        else:
            is_growing = size > census.grown[key][1]
        # A container that has a name is a growing container before it is a growing value.
        is_known_container = measure != "length" and ("length", id(target)) in census.grown
        if not is_growing or key in done or is_known_container:
            continue
        done.add(key)
        growths.append(_describe_growth(census, key, target, steps, index=len(targets)))
        targets.append(target)
    return growths


def _ids_made_lately(looks: Sequence[set[int]]) -> set[int]:
    """Return the objects that came between the third look from the end and the next, and stayed."""
    return looks[-1] & (looks[-2] - looks[-3])


def _describe_growth(census: Census, key: Key, target: Any, steps: int, *, index: int) -> _Growth:
    measure = cast("Measure", key[0])
    first, last = census.grown[key]
    count_per_step = (last - first) / steps
    what = _describe(target, census)
    if measure == "length":
        entries = _newest_entries(target, min(last - first, _MAX_NEWEST_ENTRIES))
        counted: set[int] = set()
        weights = [census.weigh(entry, counted) for entry in entries]
        weight = max(weights, key=lambda weight: weight.bytes)
        unit_bytes = sum(weight.bytes for weight in weights) / len(weights)
        what = f"{type(target).__name__} of {_describe(entries[0], census)}"
    else:
        weight = census.weigh(target, set())
        unit_bytes = _unit_bytes(measure, target, weight)
    if measure == "nodes":
        what = f"graph behind {what}"
    bytes_per_step = count_per_step * unit_bytes
    graphs_per_step = _graphs_per_step(measure, count_per_step, weight)
    return _Growth(
        target=index,
        measure=measure,
        what=what,
        count_per_step=count_per_step,
        bytes_per_step=bytes_per_step,
        rank=bytes_per_step + _GRAPH_BYTES * graphs_per_step,
        weight=weight,
    )


def _unit_bytes(measure: Measure, target: Any, weight: Weight) -> float:
    """Return the bytes of one object, node, or entry of a value."""
    if measure == "number":
        return weight.bytes
    if measure == "nodes":
        return _NODE_BYTES
    # An entry of a list is a pointer; of a text or an array, a byte is counted.
    return 8 if is_a(target, list, tuple) else 1


def _graphs_per_step(measure: Measure, count_per_step: float, weight: Weight) -> float:
    """Return how many autograd graphs are kept with each step, roughly."""
    if measure == "nodes":
        return 1.0
    if measure == "size" or not weight.has_graph:
        return 0.0
    return count_per_step


def _newest_entries(container: Any, count: int) -> list[Any]:
    """Return the entries that were added last; of a set, some."""
    if is_a(container, dict):
        return list(dict.values(container))[-count:]
    for base in (list, set, deque):
        if is_a(container, base):
            return list(base.__iter__(container))[-count:]
    raise AssertionError(f"{type(container).__name__} is no container")


def _describe(target: Any, census: Census) -> str:
    """Return class, shape and type of an object in words; the class of the script is not asked."""
    text = type(target).__qualname__
    shape = census.shape_of(target)
    if shape:
        text += f" {shape[0]} {shape[1].removeprefix('torch.')}"
    return sanitise(text, most=_MAX_TEXT_LENGTH)
