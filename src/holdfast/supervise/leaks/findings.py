"""Turn a census into leaks: which objects pile up, what holds them, and which line adds them.

While references are followed, only one of holdfast's own lists, `targets`, may hold objects of the
script; otherwise, the search would report holdfast as a holder. Records in this module therefore
refer to objects by their index in that list.
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
# Maximum number of a container's newest entries whose memory is measured.
_MAX_NEWEST_ENTRIES = 32
# Limit on the CPU time that is spent on following references.
_MAX_SECONDS = 8.0
# A leak smaller than this share of the largest leak is not reported.
_MIN_SHARE = 0.05
# A leak of fewer bytes per step than this, such as a list of losses kept for plotting, is reported
# only if nothing else grows.
_MIN_BYTES = 256
# Estimated size of an autograd node without its saved tensors.
_NODE_BYTES = 512
# Assumed size of the activations in the graph behind a tensor; Python cannot see the real size.
_GRAPH_BYTES = 64 << 10
_MAX_TEXT_LENGTH = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class _GrowingObject:
    """An object or a class that has grown in every scan.

    Args:
        target: Index in `targets` of the growing container or value, or of a recent instance of the
            growing class.
        measure: How the object was measured.
        what: A description of the object.
        count_per_step: Growth per step, in the unit of `measure`.
        bytes_per_step: Growth per step in bytes, of memory that is visible from Python.
        rank: Growth per step in bytes, including an estimate for activations; used for sorting.
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
    """A leak with its `_GrowingObject.rank`."""

    rank: float
    leak: Leak


def find_leaks(census: Census, frames: Frames, steps: int) -> list[Leak]:
    """Return the leaks worth reporting, largest last.

    Args:
        census: The scans so far. This function adds another one.
        frames: Frames of running functions.
        steps: Number of steps from the first scan to the newest.
    """
    search = HolderSearch(frames, time.thread_time() + _MAX_SECONDS)
    user_files = map(source_file_of, ["__main__", *sys.modules])
    lines = SourceLines(filter(is_users_file, dict.fromkeys(user_files)))
    growing_containers = frozenset(key[1] for key in census.grown if key[0] == "length")
    targets: list[Any] = []
    growing_objects = _find_growing_objects(census, frames, steps, targets)
    growing_objects.sort(key=lambda growing: -growing.rank)
    # Leaks, keyed by the line or name that keeps the memory alive. Each line or name is reported
    # only once, with its largest object.
    leaks: dict[str, _RankedLeak] = {}
    for growing in growing_objects[:_MAX_FOLLOWED]:
        stop_at: frozenset[int] = frozenset()
        if growing.measure != "length":
            # An object inside a growing container is reported together with that container.
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
    """Return the leaks worth reporting, largest last; `leaks` is in descending order."""
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
    """Describe a path as text: its names, and the file and function in which it starts."""
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
    """Return the form of a leak, which selects its signature; the most reliable rule wins."""
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


# --- growing objects ---


def _find_growing_objects(
    census: Census, frames: Frames, steps: int, targets: list[Any]
) -> list[_GrowingObject]:
    """Return a record of each object that is still growing, and append the object to `targets`."""
    # For each growing class, the instances that first appeared in the second-to-last scan and still
    # exist.
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
        # A named value that is itself a growing container is reported only once, as a container.
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
    """Return the growing object that a census key identifies, with its growth per step."""
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
    """Return the bytes per unit of growth, which is an object, a graph node or an entry."""
    if measure == "number":
        return retained.bytes
    if measure == "nodes":
        return _NODE_BYTES
    # An entry of a list is a pointer. Strings and arrays are measured in bytes.
    return 8 if is_a(target, list, tuple) else 1


def _graphs_per_step(measure: Measure, count_per_step: float, retained: RetainedMemory) -> float:
    """Estimate how many autograd graphs are kept alive per step."""
    if measure == "nodes":
        return 1.0
    if measure == "size" or not retained.has_graph:
        return 0.0
    return count_per_step


def _newest_entries(container: Any, count: int) -> list[Any]:
    """Return the newest entries of a container, or arbitrary entries of a set."""
    if is_a(container, dict):
        return list(dict.values(container))[-count:]
    for base in (list, set, deque):
        if is_a(container, base):
            return list(base.__iter__(container))[-count:]
    raise AssertionError(f"{type(container).__name__} is not a container")


def _describe(target: Any, census: Census) -> str:
    """Describe an object by its class, shape and dtype, without calling code of the script."""
    text = type(target).__qualname__
    shape = census.shape_of(target)
    if shape:
        text += f" {shape[0]} {shape[1].removeprefix('torch.')}"
    return sanitise(text, most=_MAX_TEXT_LENGTH)
