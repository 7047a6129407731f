"""Find the name that holds an object, by following references backwards.

The walk asks the garbage collector what refers to an object, what refers to those objects, and so
on until it reaches a name: a global, a local, a class attribute, or a cache. It must not find
itself, so our own containers that hold objects of the script during the walk are excluded by `id`.
"""

from __future__ import annotations

import gc
import re
import sys
import time
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from holdfast.core.text import sanitise
from holdfast.supervise.leaks.introspection import (
    OWN_FOLDER,
    attributes_of,
    is_a,
    is_users_file,
    locals_of,
    source_file_of,
)

_MAX_LEVELS = 40
# How many objects are followed per level.
_MAX_WIDTH = 24
_MAX_TEXT_LENGTH = 200
_LRU_CACHE = "_lru_cache_wrapper"
# Attributes of tensors that are not slots of the class.
_TENSOR_ATTRIBUTES = frozenset({"_backward_hooks", "_post_accumulate_grad_hooks", "grad"})
# Attribute names of torch's hook dictionaries.
HOOK_TABLE = re.compile(r"_\w*hooks\w*$")

LinkKind: TypeAlias = Literal[
    "global", "local", "cell", "default", "attribute", "entry", "traceback", "cache", "other"
]
# A chain begins with an object, followed by what refers to it, what refers to that, and so on.
Chain: TypeAlias = list[Any]


@dataclass(frozen=True, slots=True)
class Link:
    """One link on the way from a name to an object.

    Args:
        kind: What the link is in Python terms; an "entry" is an entry of a container.
        name: The identifier or the key; empty if there is none.
        owner: The module, function or class that the name belongs to.
        file: The source file of `owner`.
        lines: First and last line of the function, for a local.
    """

    kind: LinkKind
    name: str = ""
    owner: str = ""
    file: str = ""
    lines: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class HolderPath:
    """The shortest path to an object.

    Args:
        root: What holds the object in the end: a "name"; only a "cycle" that nothing outside refers
            to; a "container" that is known to grow; or it is "unknown".
        links: Its links, innermost first.
    """

    root: Literal["name", "cycle", "container", "unknown"]
    links: tuple[Link, ...] = ()


# --- what a chain of references is to a program ---


@dataclass(frozen=True, slots=True)
class _Match:
    """A link, and the number of holders at the start of a chain that it covers."""

    length: int
    link: Link


def links_of(chain: Chain) -> list[Link]:
    """Return the links of a chain of references, innermost first."""
    links = []
    while len(chain) >= 2:
        match = _match(chain)
        links.append(match.link)
        chain = chain[match.length :]
    return links


def _match(chain: Chain) -> _Match:
    """Return the link at the start of a chain, from the first recogniser that knows it."""
    for recognise in _RECOGNISERS:
        match = recognise(chain)
        if match is not None:
            return match
    return _Match(1, _direct_link(chain[1], chain[0]))


def _element(chain: Chain, index: int) -> Any:
    return chain[index] if index < len(chain) else None


def _recognise_closure(chain: Chain) -> _Match | None:
    """Recognise a closure: object, cell, tuple of cells, function."""
    cell = chain[1]
    function = _element(chain, 3)
    if not (is_a(cell, types.CellType) and is_a(function, types.FunctionType)):
        return None
    code = function.__code__
    cells = zip(code.co_freevars, function.__closure__, strict=False)
    return _Match(3, _link_of_code("cell", _name_in(cells, cell), code))


def _recognise_default(chain: Chain) -> _Match | None:
    """Recognise a default argument: object, tuple or dictionary of defaults, function."""
    function = _element(chain, 2)
    if not (is_a(function, types.FunctionType) and is_a(chain[1], tuple, dict)):
        return None
    code = function.__code__
    defaults = function.__defaults__ or ()
    first = code.co_argcount - len(defaults)
    positional = zip(code.co_varnames[first : code.co_argcount], defaults, strict=False)
    keyword_only = (function.__kwdefaults__ or {}).items()
    name = _name_in([*positional, *keyword_only], chain[0])
    return _Match(2, _link_of_code("default", name, code)) if name else None


def _recognise_attribute(chain: Chain) -> _Match | None:
    """Recognise an attribute: object, attribute dictionary, instance or class."""
    attributes = chain[1]
    owner = _element(chain, 2)
    if not is_a(attributes, dict):
        return None
    name = _key_in(attributes, chain[0])
    if is_a(owner, type):
        return _Match(2, _link_of_class(owner, name))
    if attributes_of(owner) is attributes:
        return _Match(2, _link_of_class(type(owner), name))
    return None


def _recognise_cache(chain: Chain) -> _Match | None:
    """Recognise a cache: object, entry of the cache, function returned by `functools.lru_cache`."""
    cache = _element(chain, 2)
    if type(cache).__name__ != _LRU_CACHE:
        return None
    return _Match(2, _direct_link(cache, chain[1]))


_RECOGNISERS: tuple[Callable[[Chain], _Match | None], ...] = (
    _recognise_closure,
    _recognise_default,
    _recognise_attribute,
    _recognise_cache,
)


def _direct_link(holder: Any, held: Any) -> Link:
    """Return the link for a single reference, in Python terms."""
    kind = type(holder)
    if kind.__name__ == _LRU_CACHE:
        return _link_of_cache(holder)
    if is_a(holder, dict):
        return Link("entry", _key_in(holder, held), kind.__name__)
    if is_a(holder, list, tuple, set, frozenset) or kind.__name__ == "deque":
        return Link("entry", owner=kind.__name__)
    if is_a(holder, types.TracebackType, BaseException):
        return Link("traceback", owner=kind.__name__)
    frame = holder.gi_frame if is_a(holder, types.GeneratorType) else holder
    if is_a(frame, types.FrameType):
        return _link_of_code("local", _key_in(locals_of(frame), held), frame.f_code)
    if is_a(holder, type):
        return _link_of_class(holder, _name_in(list(vars(holder).items()), held))
    name = _slot_of(holder, held) or _key_in(attributes_of(holder) or {}, held)
    if name:
        return _link_of_class(kind, name)
    return Link("other", owner=kind.__name__, file=source_file_of(kind))


def _link_of_cache(cache: Any) -> Link:
    code = getattr(getattr(cache, "__wrapped__", None), "__code__", None)
    if not isinstance(code, types.CodeType):
        return Link("cache")
    return _link_of_code("cache", code.co_name, code)


def _slot_of(holder: Any, held: Any) -> str:
    """Return the name of the slot that holds an object; empty if there is none."""
    kind = type(holder)
    for base in kind.__mro__:
        for name, member in vars(base).items():
            if name not in _TENSOR_ATTRIBUTES and not is_a(member, types.MemberDescriptorType):
                continue
            try:
                if member.__get__(holder, kind) is held:
                    return name
            except (AttributeError, TypeError):
                # The slot is empty, or belongs to another class.
                continue
    return ""


def _link_of_class(kind: type, name: str) -> Link:
    return Link("attribute", name, kind.__name__, source_file_of(kind))


def _link_of_code(kind: LinkKind, name: str, code: types.CodeType) -> Link:
    last_line = max((line for _, _, line in code.co_lines() if line is not None), default=0)
    return Link(kind, name, code.co_name, code.co_filename, (code.co_firstlineno, last_line))


def _key_in(entries: dict[Any, Any], held: Any) -> str:
    """Return the key of an object in a dictionary if it is a string; otherwise an empty string."""
    return _name_in(list(dict.items(entries)), held)


def _name_in(named: Iterable[tuple[Any, Any]], held: Any) -> str:
    """Return the name of an object from pairs of name and object; an empty string without one."""
    for name, candidate in named:
        if candidate is held and type(name) is str:
            return name
    return ""


# --- a path as text ---


def text_of(links: Sequence[Link]) -> str:
    """Return a path as a program would write it, such as ``holder.losses[...]``."""
    text = ""
    for link in reversed(links):
        text = _APPENDERS[link.kind](text, link)
    return sanitise(text, most=_MAX_TEXT_LENGTH)


def _append_name(text: str, link: Link) -> str:
    separator = " " if text else ""
    return f"{text}{separator}{link.name}"


def _append_cell(text: str, link: Link) -> str:
    return f"{_append_name(text, link)} (closure of {link.owner})"


def _append_default(text: str, link: Link) -> str:
    return f"{_append_name(text, link)} (default of {link.owner})"


def _append_attribute(text: str, link: Link) -> str:
    # For a script, the entries of `_modules` are attributes.
    if link.name == "_modules":
        return text
    return f"{text or link.owner or '?'}.{link.name}"


def _append_entry(text: str, link: Link) -> str:
    return f"{text}[{link.name!r}]" if link.name else f"{text}[...]"


def _append_cache(text: str, link: Link) -> str:
    return f"{text}cache of {link.name}"


def _append_traceback(text: str, _link: Link) -> str:
    # An exception and its tracebacks are several links but written as one word.
    return text if text.endswith("(traceback)") else f"{text} (traceback)"


def _append_nothing(text: str, _link: Link) -> str:
    return text


# How a link is appended to the text of the links around it, by its kind.
_APPENDERS: dict[LinkKind, Callable[[str, Link], str]] = {
    "global": _append_name,
    "local": _append_name,
    "cell": _append_cell,
    "default": _append_default,
    "attribute": _append_attribute,
    "entry": _append_entry,
    "traceback": _append_traceback,
    "cache": _append_cache,
    "other": _append_nothing,
}


# --- the walk ---


class _Walk:
    """The chains from a target to the objects that refer to it, explored level by level."""

    def __init__(self, target: object) -> None:
        # The chain from the target to each visited object, by the object's `id`.
        self.chains: dict[int, Chain] = {id(target): [target]}
        # Chains that lead back to an object that was already visited.
        self.closed: list[Chain] = []
        # The objects of the newest level.
        self.frontier: list[Any] = [target]
        # Whether objects were skipped because a level had too many.
        self.was_cut = False

    def extend(self, referrers: Iterable[tuple[Any, Any]]) -> None:
        """Go one level further.

        Args:
            referrers: Objects that refer to the frontier, each with the frontier object it refers
                to.
        """
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
        """Return the `id` of every container here that refers to objects of the script."""
        containers = (self.frontier, self.chains, self.closed, *self.chains.values(), *self.closed)
        return {id(container) for container in containers}


class HolderSearch:
    """Follow objects back to what holds them, at a single point in time.

    The script must not run or import anything meanwhile.

    Args:
        frames: Frames of running functions. Before Python 3.12 the collector does not report them
            as referrers.
        until: When to give up, on the clock of `time.thread_time`.
    """

    def __init__(self, frames: Sequence[types.FrameType], until: float) -> None:
        self._until = until
        self._running_frames = {id(frame) for frame in frames}
        # Module names, by the `id` of the module's globals. A script may be loaded under two names;
        # the last one wins.
        self._modules: dict[int, str] = {}
        for name in [*sys.modules, "__main__"]:
            module = sys.modules[name]
            if is_a(module, types.ModuleType):
                self._modules[id(vars(module))] = name
        # Name and function of each local, by the `id` of its value. Names in the script's own files
        # win.
        self._locals: dict[int, tuple[str, types.CodeType]] = {}
        for frame in sorted(frames, key=lambda frame: not is_users_file(frame.f_code.co_filename)):
            for name, local in locals_of(frame).items():
                if name.isidentifier():
                    self._locals.setdefault(id(local), (name, frame.f_code))

    def find_path(self, target: object, own: set[int], growing: frozenset[int]) -> HolderPath:
        """Return the shortest path from a name to an object, or what else holds the object.

        Args:
            target: The object.
            own: `id` of each of our containers that holds the object.
            growing: `id` of each container that is known to grow.
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
        # A cycle is the only holder only if all references were followed to their end.
        if walk.frontier or walk.was_cut or not walk.closed:
            return HolderPath("unknown")
        return HolderPath("cycle", _best_cycle(walk.closed))

    def _find_end(self, walk: _Walk, target: object, growing: frozenset[int]) -> HolderPath | None:
        """Return the path if the walk has reached a name or a growing container, or None."""
        for member in walk.frontier:
            if member is not target and id(member) in growing:
                return HolderPath("container")
            links = self._links_from_root(walk.chains[id(member)])
            if links:
                return HolderPath("name", tuple(links))
        return None

    def _links_from_root(self, chain: Chain) -> list[Link]:
        """Return the links of a chain if it ends at a name; otherwise none.

        A name is a local, or a named entry of a module, function, class or cache.
        """
        last = chain[-1]
        local = self._locals.get(id(last))
        if local is not None:
            name, code = local
            return [*links_of(chain), _link_of_code("local", name, code)]
        module = self._modules.get(id(last))
        if len(chain) < 2 or not (module is not None or _is_root(last)):
            return []
        links = links_of(chain)
        if module is not None:
            links[-1] = Link("global", links[-1].name, module, source_file_of(module))
        return links if any(link.name for link in links) else []

    def _find_referrers(self, below: list[Any], excluded: set[int]) -> list[tuple[Any, Any]]:
        """Return the objects that refer to `below`, each with the object it refers to.

        Args:
            below: The objects whose referrers are wanted.
            excluded: `id` of each of our containers that holds one.
        """
        referrers = []
        by_id = {id(member): member for member in below}
        for holder in gc.get_referrers(*below):
            if holder is by_id or id(holder) in excluded or id(holder) in self._running_frames:
                continue
            if _is_own_frame(holder) or is_a(holder, types.ModuleType):
                continue
            for held in gc.get_referents(holder):
                if id(held) in by_id:
                    referrers.append((holder, held))
                    break
        return referrers


def _is_root(candidate: Any) -> bool:
    """Return whether the walk stops at an object: a class, a cache, or a module-level function."""
    if is_a(candidate, types.FunctionType):
        return "<locals>" not in candidate.__qualname__
    return is_a(candidate, type) or type(candidate).__name__ == _LRU_CACHE


def _is_own_frame(holder: Any) -> bool:
    return is_a(holder, types.FrameType) and holder.f_code.co_filename.startswith(OWN_FOLDER)


def _best_cycle(closed: Sequence[Chain]) -> tuple[Link, ...]:
    """Return the links of the cycle with the most names."""
    cycles = []
    for chain in closed:
        start = next(index for index, member in enumerate(chain) if member is chain[-1])
        cycles.append(tuple(links_of(chain[start:])))
    return max(cycles, key=lambda links: sum(bool(link.name) for link in links))
