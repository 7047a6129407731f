"""Find the name that keeps an object alive, by following references backward.

The search asks the garbage collector which objects refer to a given object, then which objects
refer to those, and so on until it reaches a name: a global, a local, a class attribute or a cache.
The search must not find itself, so its own containers that hold objects of the script are excluded
by `id`.
"""

from __future__ import annotations

import gc
import sys
import time
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.supervise.leaks.holder_links import (
    LRU_CACHE,
    Chain,
    HolderLink,
    link_of_code,
    links_of,
)
from holdfast.supervise.leaks.introspection import (
    OWN_FOLDER,
    is_a,
    is_users_file,
    locals_of,
    source_file_of,
)

_MAX_LEVELS = 40
# Maximum number of objects to follow at each level of the search.
_MAX_WIDTH = 24


@dataclass(frozen=True, slots=True)
class HolderPath:
    """The shortest path from a name to an object, or the reason why there is none.

    Args:
        root: The start of the path. "name": a name holds the object. "container": a container that
            is known to grow holds it. "cycle": only a reference cycle holds it. "unknown": the
            search was cut short.
        links: The links of the path, innermost first.
    """

    root: Literal["name", "cycle", "container", "unknown"]
    links: tuple[HolderLink, ...] = ()


class _Walk:
    """State of a breadth-first search from a target through the objects that refer to it."""

    def __init__(self, target: object) -> None:
        # The chain of objects from the target to each visited object, keyed by the object's `id`.
        self.chains: dict[int, Chain] = {id(target): [target]}
        # Chains that end at an object that was already visited.
        self.closed: list[Chain] = []
        # The objects that were found at the newest level of the search.
        self.frontier: list[Any] = [target]
        # Whether a level had too many objects, so that some were skipped.
        self.was_cut = False

    def extend(self, referrers: Iterable[tuple[Any, Any]]) -> None:
        """Advance by one level, to the objects that refer to the current frontier."""
        self.frontier = []
        for holder, held in referrers:
            chain = [*self.chains[id(held)], holder]
            if id(holder) in self.chains:
                self.closed.append(chain)
            elif len(self.frontier) < _MAX_WIDTH:
                self.chains[id(holder)] = chain
                self.frontier.append(holder)
            else:
                self.was_cut = True

    def container_ids(self) -> set[int]:
        """Return the `id` of every container in this walk that refers to objects of the script."""
        containers = (self.frontier, self.chains, self.closed, *self.chains.values(), *self.closed)
        return {id(container) for container in containers}


class HolderSearch:
    """Finds the names that hold given objects, at a single point in time.

    The script must not run or import anything during the search.

    Args:
        frames: Frames of running functions. Before Python 3.12, the garbage collector does not
            report them as referrers.
        until: Time at which to give up, on the clock of `time.thread_time`.
    """

    def __init__(self, frames: Sequence[types.FrameType], until: float) -> None:
        self._until = until
        self._running_frames = {id(frame) for frame in frames}
        # Module names, keyed by the `id` of the module's globals. If a script is loaded under two
        # names, the last one wins.
        self._modules: dict[int, str] = {}
        for name in [*sys.modules, "__main__"]:
            module = sys.modules[name]
            if is_a(module, types.ModuleType):
                self._modules[id(vars(module))] = name
        # The name and the function of each local variable, keyed by the `id` of its value. Names in
        # the script's files take precedence.
        self._locals: dict[int, tuple[str, types.CodeType]] = {}
        for frame in sorted(frames, key=lambda frame: not is_users_file(frame.f_code.co_filename)):
            for name, local in locals_of(frame).items():
                if name.isidentifier():
                    self._locals.setdefault(id(local), (name, frame.f_code))

    def find_path(self, target: object, own: set[int], growing: frozenset[int]) -> HolderPath:
        """Return the shortest path from a name to an object.

        Args:
            target: The object to which the path leads.
            own: `id` of every container in holdfast that holds the object.
            growing: `id` of every container that is known to grow.
        """
        walk = _Walk(target)
        for _ in range(_MAX_LEVELS):
            end = self._find_end(walk, target, growing)
            if end is not None:
                return end
            excluded = own | walk.container_ids() | {id(self._locals)}
            walk.extend(self._find_referrers(walk.frontier, excluded))
            if not walk.frontier or time.thread_time() > self._until:
                break
        # Only a complete search can prove that nothing but a cycle holds the object.
        if walk.frontier or walk.was_cut or not walk.closed:
            return HolderPath("unknown")
        return HolderPath("cycle", _best_cycle(walk.closed))

    def _find_end(self, walk: _Walk, target: object, growing: frozenset[int]) -> HolderPath | None:
        """Return the path if the frontier contains a name or a growing container, else None."""
        for member in walk.frontier:
            if member is not target and id(member) in growing:
                return HolderPath("container")
            links = self._links_from_root(walk.chains[id(member)])
            if links:
                return HolderPath("name", tuple(links))
        return None

    def _links_from_root(self, chain: Chain) -> list[HolderLink]:
        """Return the links of a chain if the chain ends at a name, otherwise an empty list.

        A name is a local variable, or a named entry of a module, function, class or cache.
        """
        last = chain[-1]
        local = self._locals.get(id(last))
        if local is not None:
            name, code = local
            return [*links_of(chain), link_of_code("local", name, code)]
        module = self._modules.get(id(last))
        if len(chain) < 2 or not (module is not None or _is_root(last)):
            return []
        links = links_of(chain)
        if module is not None:
            links[-1] = HolderLink("global", links[-1].name, module, source_file_of(module))
        return links if any(link.name for link in links) else []

    def _find_referrers(self, below: list[Any], excluded: set[int]) -> list[tuple[Any, Any]]:
        """Return pairs of an object and the member of `below` that it refers to.

        `excluded` contains the `id` of each container to ignore because the search itself uses it.
        """
        referrers = []
        by_id = {id(member): member for member in below}
        for holder in gc.get_referrers(*below):
            if holder is by_id or id(holder) in excluded or id(holder) in self._running_frames:
                continue
            if is_a(holder, types.ModuleType):
                continue
            if is_a(holder, types.FrameType) and holder.f_code.co_filename.startswith(OWN_FOLDER):
                continue
            for held in gc.get_referents(holder):
                if id(held) in by_id:
                    referrers.append((holder, held))
                    break
        return referrers


def _is_root(candidate: Any) -> bool:
    """Return whether a chain may end at an object: a class, a cache or a module-level function."""
    if is_a(candidate, types.FunctionType):
        return "<locals>" not in candidate.__qualname__
    return is_a(candidate, type) or type(candidate).__name__ == LRU_CACHE


def _best_cycle(closed: Sequence[Chain]) -> tuple[HolderLink, ...]:
    """Return the links of the cycle that contains the most names."""
    cycles = []
    for chain in closed:
        start = next(index for index, member in enumerate(chain) if member is chain[-1])
        cycles.append(tuple(links_of(chain[start:])))
    return max(cycles, key=lambda links: sum(bool(link.name) for link in links))
