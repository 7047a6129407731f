"""From an object to the name that holds it: a walk against the direction of references, to a variable or a class.

Locals of functions that run are no referrers to the collector: they are looked up in the frames themselves.

Does not: decide what leaks (``retention_census``), find lines (``retention_lines``), keep anything.
"""

from __future__ import annotations

import gc
import inspect
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from holdfast.supervise.observe.retention_origin import file_of_module, is_a, is_ours, is_users
from holdfast.supervise.observe.retention_steps import CACHE, Step, lines_of, locals_of, steps_of

_MOST_LEVELS = 40
_MOST_WIDE = 24
_MOST_TEXT = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The way from a root to an object.

    Args:
        steps: The innermost first.
        root: ``"name"``: it ends at a name; ``"cycle"``: nothing outside refers to it; ``"container"``: it goes
            through one that is known to grow; ``"unknown"``: it was not followed to its end.
    """

    steps: tuple[Step, ...]
    root: str

    def __str__(self) -> str:
        text = ""
        for step in reversed(self.steps):
            if step.kind == "attribute" and step.name == "_modules":
                continue  # of a module of torch: the entry is what a script calls an attribute
            if step.kind == "attribute":
                text = f"{text or step.owner or '?'}.{step.name}"
            elif step.kind == "entry":
                text += f"[{step.name!r}]" if step.name else "[...]"
            elif step.kind in ("global", "local"):
                text += f" {step.name}" if text else step.name
            elif step.kind in ("cell", "default"):
                what = "default" if step.kind == "default" else "closure"
                text += f"{text and ' '}{step.name} ({what} of {step.owner})"
            elif step.kind == "cache":
                text += f"cache of {step.name}"
            elif step.kind == "traceback" and not text.endswith("(traceback)"):
                text += " (traceback)"
        return "".join(letter if letter.isprintable() else "?" for letter in text)[:_MOST_TEXT]


class Names:
    """What the names of running functions and of modules stand for, at one moment.

    Args:
        frames: Of running functions; those of ours are passed over.
    """

    def __init__(self, frames: Iterable[FrameType]) -> None:
        modules = [each for each in list(sys.modules.items()) if is_a(each[1], ModuleType)]
        self.modules = {id(vars(module)): name for name, module in modules}
        if "__main__" in sys.modules:  # a script may be known under two names
            self.modules[id(vars(sys.modules["__main__"]))] = "__main__"
        self.locals: dict[int, tuple[str, CodeType]] = {}
        self.running: set[int] = set()
        for frame in frames:
            self.running.add(id(frame))
            if frame.f_code.co_flags & inspect.CO_NEWLOCALS and not is_ours(frame.f_code.co_filename):
                mine = is_users(frame.f_code.co_filename)
                for name, value in locals_of(frame).items():
                    if name.isidentifier() and (mine or id(value) not in self.locals):
                        self.locals[id(value)] = (name, frame.f_code)


class Walk:
    """Follows objects back to what holds them.

    Args:
        names: Of the moment; nothing may be imported or run in between.
        containers: Ids of containers that grow: a path through one is explained by it.
        own: Ids of containers of ours that hold what is looked for.
        until: When to give up, on the clock of `time.thread_time`.
    """

    def __init__(self, names: Names, containers: frozenset[int], own: frozenset[int], until: float) -> None:
        self._names, self._containers, self._own, self._until = names, containers, own, until

    def path_of(self, target: object) -> Path:
        """Return the shortest path from a name to an object."""
        held_by: dict[int, object] = {}  # what an object refers to, on the way to the target
        kept: list[object] = [target]  # ids are of living objects only
        frontier: list[object] = [target]
        closing: list[tuple[object, object]] = []  # references that lead back to what was met before
        cut = False
        for _ in range(_MOST_LEVELS):
            for each in frontier:
                found = self._at_root(each, target, held_by)
                if found is not None:
                    return found
            own = {id(frontier), id(kept), id(held_by), id(self._names.locals), id(closing), *map(id, closing)}
            own |= self._own
            upper: list[object] = []
            for holder, held in _holders(frontier, own, self._names.running):
                if holder is target or id(holder) in held_by:
                    closing.append((holder, held))
                elif len(upper) < _MOST_WIDE:
                    held_by[id(holder)] = held
                    kept.append(holder)
                    upper.append(holder)
                else:
                    cut = True
            frontier = upper
            if not frontier or time.thread_time() > self._until:
                break
        if closing and not frontier and not cut:
            circles = [_circle(_chain(held, target, held_by), holder) for holder, held in closing]
            return Path(steps=tuple(max(circles, key=_count_names)), root="cycle")
        return Path(steps=tuple(steps_of(_chain(kept[-1], target, held_by))), root="unknown")

    def _at_root(self, each: Any, target: object, held_by: dict[int, object]) -> Path | None:
        """Return the path if an object is where a walk ends."""
        if id(each) in self._containers and each is not target:
            return Path(steps=(), root="container")
        local = self._names.locals.get(id(each))
        if local is not None:
            name, code = local
            last = Step(kind="local", name=name, owner=code.co_name, file=code.co_filename, lines=lines_of(code))
            return Path(steps=(*steps_of(_chain(each, target, held_by)), last), root="name")
        module = self._names.modules.get(id(each))
        if module is not None and each is not target:
            *steps, last = steps_of(_chain(each, target, held_by))
            file = file_of_module(module)
            return Path(steps=(*steps, Step(kind="global", name=last.name, owner=module, file=file)), root="name")
        function = is_a(each, FunctionType) and "<locals>" not in each.__qualname__
        if each is not target and (function or is_a(each, type) or type(each).__name__ == CACHE):
            steps = steps_of(_chain(each, target, held_by))
            return Path(steps=tuple(steps), root="name") if any(step.name for step in steps) else None
        return None


def _circle(chain: list[object], holder: object) -> list[Step]:
    """Return the steps of a circle alone: from an object that refers to the end of a chain to where it is in it."""
    start = next((index for index, each in enumerate(chain) if each is holder), None)
    return [] if start is None else steps_of([*chain[start:], holder])


def _count_names(steps: Iterable[Step]) -> int:
    return sum(bool(step.name) for step in steps)


def _chain(each: Any, target: object, held_by: dict[int, object]) -> list[object]:
    chain = [each]
    while chain[-1] is not target and len(chain) <= 2 * _MOST_LEVELS:
        chain.append(held_by[id(chain[-1])])
    return chain[::-1]


def _holders(frontier: list[object], own: set[int], running: set[int]) -> list[tuple[object, object]]:
    """Return what refers to some objects, each with the one that it refers to."""
    found = []
    by_id = {id(each): each for each in frontier}
    for holder in gc.get_referrers(*frontier):
        if holder is by_id or id(holder) in own or id(holder) in running or is_a(holder, ModuleType):
            continue
        if is_a(holder, FrameType) and is_ours(holder.f_code.co_filename):
            continue
        held = next((id(each) for each in gc.get_referents(holder) if id(each) in by_id), None)
        if held is not None:
            found.append((holder, by_id[held]))
    return found
