"""Turn a census into leaks: which objects pile up, what holds them, and which line adds them.

While references are followed, only one list of ours, `targets`, may hold objects of the script;
otherwise the search would report us as a holder. The records here refer to objects by their index
in that list.
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
from holdfast.supervise.leaks.census import Census, Frames, Key, Measure, RetainedMemory
from holdfast.supervise.leaks.holder_links import HOOK_TABLE, text_of
from holdfast.supervise.leaks.introspection import (
    OWN_FOLDER,
    is_a,
    is_users_file,
    source_file_of,
)
from holdfast.supervise.leaks.references import HolderPath, HolderSearch
from holdfast.supervise.leaks.source_lines import SourceLines

_MAX_LEAKS = 3
_MAX_FOLLOWED = 24
# How many of the newest entries of a container are weighed.
_MAX_NEWEST_ENTRIES = 32
# Limit on the CPU time for following references.
_MAX_SECONDS = 8.0
# Leaks smaller than this share of the largest one are not reported.
_MIN_SHARE = 0.05
# In bytes per step. Smaller leaks, such as a list of losses kept for plotting, are reported only if
# nothing else grows.
_MIN_BYTES = 256
# Estimated memory of an autograd node itself, without the tensors that it saves.
_NODE_BYTES = 512
# Assumed for the activations behind a tensor, whose sizes only C++ knows.
_GRAPH_BYTES = 64 << 10
_MAX_TEXT_LENGTH = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class _GrowingObject:
    """Something that has grown between all scans.

    Args:
        target: Index of an object in the list of targets: the container or value that grows, or,
            for a growing class, one of its recent instances.
        measure: How it was measured.
        what: Description of the object.
        count_per_step: Growth per step, in units of `measure`.
        bytes_per_step: Growth per step in bytes, as far as Python can tell.
        rank: Growth per step in bytes, including an estimate of the activations behind tensors.
        retained: The memory that one of the added objects keeps alive.
    """

    target: int
    measure: Measure
    what: str
    count_per_step: float
    bytes_per_step: float
    rank: float
    retained: RetainedMemory


@dataclass(frozen=True, slots=True)
class _RankedLeak:
    """A leak and its approximate bytes per step."""

    rank: float
    leak: Leak


def find_leaks(census: Census, frames: Frames, steps: int) -> list[Leak]:
    """Return the leaks, largest last.

    Args:
        census: The scans so far; this function makes one more.
        frames: Frames of running functions.
        steps: Number of steps between the first scan and the newest.
    """
    search = HolderSearch(frames, time.thread_time() + _MAX_SECONDS)
    user_files = map(source_file_of, ["__main__", *sys.modules])
    lines = SourceLines(filter(is_users_file, dict.fromkeys(user_files)))
    growing_containers = frozenset(key[1] for key in census.grown if key[0] == "length")
    targets: list[Any] = []
    growing_objects = _find_growing_objects(census, frames, steps, targets)
    growing_objects.sort(key=lambda growing: -growing.rank)
    # Keyed by the place that keeps it: a leak is reported once, by its heaviest object.
    leaks: dict[str, _RankedLeak] = {}
    for growing in growing_objects[:_MAX_FOLLOWED]:
        stop_at: frozenset[int] = frozenset()
        if growing.measure != "length":
            # What is inside a growing container is reported with that container.
            stop_at = growing_containers
        path = search.find_path(targets[growing.target], {id(targets)}, stop_at)
        is_our_own = any(link.file.startswith(OWN_FOLDER) for link in path.links)
        if path.root in ("container", "unknown") or is_our_own:
            continue
        leak = _make_leak(growing, path, lines.find_keeping_line(path.links))
        place = leak.retained_at or leak.held_by
        if leak.form == "cycle":
            place = "cycle"
        leaks.setdefault(place, _RankedLeak(growing.rank, leak))
    targets.clear()
    return _choose_largest(list(leaks.values()))


def _choose_largest(leaks: Sequence[_RankedLeak]) -> list[Leak]:
    """Return the leaks that are worth reporting, largest last; `leaks` is in descending order."""
    largest = max((ranked.rank for ranked in leaks), default=0.0)
    threshold = max(_MIN_SHARE * largest, min(_MIN_BYTES, largest))
    chosen = [ranked.leak for ranked in leaks if ranked.rank >= threshold]
    return chosen[:_MAX_LEAKS][::-1]


def _make_leak(growing: _GrowingObject, path: HolderPath, line: str) -> Leak:
    form = _form_of(growing, path)
    device = growing.retained.device
    return Leak(
        form=form,
        what=growing.what,
        count_per_step=round(growing.count_per_step, 3),
        bytes_per_step=round(growing.bytes_per_step),
        device=device,
        held_by=_describe_holder(growing, path),
        retained_at=line,
        signature=signature_of(form, on_host=device == "cpu"),
    )


def _describe_holder(growing: _GrowingObject, path: HolderPath) -> str:
    """Return a path as text: its names, and the file and function where it begins."""
    text = text_of(path.links)
    if growing.measure == "length":
        text += "[...]"
    if path.root == "cycle":
        return f"a cycle: {text}"
    outermost = path.links[-1]
    if outermost.file:
        text += f" in {Path(outermost.file).name}"
        if outermost.kind == "local":
            text += f", {outermost.owner}()"
    return text


def _form_of(growing: _GrowingObject, path: HolderPath) -> str:
    """Return the form of a leak, which selects its signature. The most certain sign comes first."""
    kinds = {link.kind for link in path.links}
    is_container = growing.measure == "length"
    rules = (
        ("autograd chain", growing.measure == "nodes"),
        ("value", growing.measure == "size"),
        ("cache", "cache" in kinds),
        ("hooks", is_container and HOOK_TABLE.match(path.links[0].name) is not None),
        ("exception", growing.retained.has_traceback or "traceback" in kinds),
        ("cycle", path.root == "cycle"),
        ("linked", growing.measure == "number"),
        ("graph", growing.retained.has_graph),
    )
    for form, applies in rules:
        if applies:
            return form
    return "container"


# --- what grows ---


def _find_growing_objects(
    census: Census, frames: Frames, steps: int, targets: list[Any]
) -> list[_GrowingObject]:
    """Return what has kept growing since the last scan, and append its objects to `targets`."""
    # Of a growing class, the objects that are new at the second-to-last scan and still exist.
    recent_instances = {
        key: scans[-1] & (scans[-2] - scans[-3]) for key, scans in census.members.items()
    }
    growing_objects: list[_GrowingObject] = []
    reported: set[Key] = set()
    for key, size, target in list(census.measure(frames)):
        measure = cast("Measure", key[0])
        if measure == "number":
            is_growing = id(target) in recent_instances[key]
        else:
            is_growing = size > census.grown[key][1]
        # If a named value is itself a growing container, it is reported as the container.
        is_known_container = measure != "length" and ("length", id(target)) in census.grown
        if not is_growing or key in reported or is_known_container:
            continue
        reported.add(key)
        growing_objects.append(_measure_growth(census, key, target, steps, index=len(targets)))
        targets.append(target)
    return growing_objects


def _measure_growth(
    census: Census, key: Key, target: Any, steps: int, *, index: int
) -> _GrowingObject:
    """Return what grows under one key, with its estimated size per step."""
    measure = cast("Measure", key[0])
    first, last = census.grown[key]
    count_per_step = (last - first) / steps
    what = _describe(target, census)
    if measure == "length":
        entries = _newest_entries(target, min(last - first, _MAX_NEWEST_ENTRIES))
        counted: set[int] = set()
        retained_by_entries = [census.weigh(entry, counted) for entry in entries]
        retained = max(retained_by_entries, key=lambda retained: retained.bytes)
        unit_bytes = sum(retained.bytes for retained in retained_by_entries) / len(entries)
        what = f"{type(target).__name__} of {_describe(entries[0], census)}"
    else:
        retained = census.weigh(target, set())
        unit_bytes = _unit_bytes(measure, target, retained)
    if measure == "nodes":
        what = f"graph behind {what}"
    bytes_per_step = count_per_step * unit_bytes
    graphs_per_step = _graphs_per_step(measure, count_per_step, retained)
    return _GrowingObject(
        target=index,
        measure=measure,
        what=what,
        count_per_step=count_per_step,
        bytes_per_step=bytes_per_step,
        rank=bytes_per_step + _GRAPH_BYTES * graphs_per_step,
        retained=retained,
    )


def _unit_bytes(measure: Measure, target: Any, retained: RetainedMemory) -> float:
    """Return the bytes per unit of growth: one object, one graph node or one entry of a value."""
    if measure == "number":
        return retained.bytes
    if measure == "nodes":
        return _NODE_BYTES
    # An entry of a list is a pointer; strings and arrays are counted in bytes.
    return 8 if is_a(target, list, tuple) else 1


def _graphs_per_step(measure: Measure, count_per_step: float, retained: RetainedMemory) -> float:
    """Return roughly how many autograd graphs are kept per step."""
    if measure == "nodes":
        return 1.0
    if measure == "size" or not retained.has_graph:
        return 0.0
    return count_per_step


def _newest_entries(container: Any, count: int) -> list[Any]:
    """Return the entries that were added last; for a set, arbitrary ones."""
    if is_a(container, dict):
        return list(dict.values(container))[-count:]
    for base in (list, set, deque):
        if is_a(container, base):
            return list(base.__iter__(container))[-count:]
    raise AssertionError(f"{type(container).__name__} is not a container")


def _describe(target: Any, census: Census) -> str:
    """Describe an object by class, shape and dtype, without calling code of the script's class."""
    text = type(target).__qualname__
    shape = census.shape_of(target)
    if shape:
        text += f" {shape[0]} {shape[1].removeprefix('torch.')}"
    return sanitise(text, most=_MAX_TEXT_LENGTH)
