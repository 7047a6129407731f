"""Translate a chain of references between objects into attributes, entries and variables.

A chain is a list of objects in which each object is referred to by the next one. Several
consecutive references are often a single link in Python terms: an attribute consists of a reference
from an instance to its attribute dictionary, and another from the dictionary to the value.
`links_of` does the translation.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from holdfast.core.text import sanitise
from holdfast.supervise.leaks.introspection import attributes_of, is_a, locals_of, source_file_of

_MAX_TEXT_LENGTH = 200
# Name of the class of functions that `functools.lru_cache` returns.
LRU_CACHE = "_lru_cache_wrapper"
# Attributes of tensors that are implemented in C, so they do not appear as slots of the class.
_TENSOR_ATTRIBUTES = frozenset({"_backward_hooks", "_post_accumulate_grad_hooks", "grad"})
# Matches the attribute names of torch's hook dictionaries.
HOOK_TABLE = re.compile(r"_\w*hooks\w*$")

LinkKind: TypeAlias = Literal[
    "global", "local", "cell", "default", "attribute", "entry", "traceback", "cache", "other"
]
Chain: TypeAlias = list[Any]


@dataclass(frozen=True, slots=True)
class HolderLink:
    """One link of the path from a name to an object.

    Args:
        kind: The kind of link in Python terms. An "entry" is an entry of a container.
        name: The identifier or the key; empty if the link has none.
        owner: The module, function or class that defines the name.
        file: The source file of `owner`.
        lines: The first and the last line of the function, for a local variable.
    """

    kind: LinkKind
    name: str = ""
    owner: str = ""
    file: str = ""
    lines: tuple[int, int] = (0, 0)


def links_of(chain: Chain) -> list[HolderLink]:
    """Translate a chain of references into links, innermost first."""
    links = []
    while len(chain) > 1:
        link, holder_count = _first_link(chain)
        links.append(link)
        chain = chain[holder_count:]
    return links


def _first_link(chain: Chain) -> tuple[HolderLink, int]:
    """Return the innermost link of a chain, and the number of references that it covers."""
    for recognize, holder_count in _RECOGNIZERS.items():
        if len(chain) > holder_count:
            link = recognize(*chain[: holder_count + 1])
            if link is not None:
                return link, holder_count
    return _direct_link(chain[0], chain[1]), 1


def _closure_link(_held: Any, cell: Any, _cells: Any, function: Any) -> HolderLink | None:
    """Recognize a variable of an enclosing function that a closure uses."""
    if not (is_a(cell, types.CellType) and is_a(function, types.FunctionType)):
        return None
    code = function.__code__
    cells = zip(code.co_freevars, function.__closure__, strict=False)
    return link_of_code("cell", _name_in(cells, cell), code)


def _default_link(held: Any, defaults: Any, function: Any) -> HolderLink | None:
    """Recognize a default argument in a function's tuple or dictionary of defaults."""
    if not (is_a(function, types.FunctionType) and is_a(defaults, tuple, dict)):
        return None
    code = function.__code__
    positional = function.__defaults__ or ()
    first = code.co_argcount - len(positional)
    names = code.co_varnames[first : code.co_argcount]
    keyword_only = (function.__kwdefaults__ or {}).items()
    name = _name_in([*zip(names, positional, strict=False), *keyword_only], held)
    return link_of_code("default", name, code) if name else None


def _attribute_link(held: Any, attributes: Any, owner: Any) -> HolderLink | None:
    """Recognize an attribute of an instance or a class."""
    if not is_a(attributes, dict):
        return None
    name = _key_in(attributes, held)
    if is_a(owner, type):
        return _link_of_class(owner, name)
    if attributes_of(owner) is attributes:
        return _link_of_class(type(owner), name)
    return None


def _cache_link(_held: Any, entry: Any, cache: Any) -> HolderLink | None:
    """Recognize an entry in the cache of `functools.lru_cache`."""
    if type(cache).__name__ != LRU_CACHE:
        return None
    return _direct_link(entry, cache)


# Functions that recognize a link made of several references, with the number of references. Each
# function is called with an object and that many further objects of the chain. The first function
# that returns a link wins.
_RECOGNIZERS: dict[Callable[..., HolderLink | None], int] = {
    _closure_link: 3,
    _default_link: 2,
    _attribute_link: 2,
    _cache_link: 2,
}


def _direct_link(held: Any, holder: Any) -> HolderLink:
    """Return the link for a single reference, from `holder` to `held`."""
    kind = type(holder)
    if kind.__name__ == LRU_CACHE:
        code = getattr(getattr(holder, "__wrapped__", None), "__code__", None)
        if isinstance(code, types.CodeType):
            return link_of_code("cache", code.co_name, code)
        return HolderLink("cache")
    if is_a(holder, dict):
        return HolderLink("entry", _key_in(holder, held), kind.__name__)
    if is_a(holder, list, tuple, set, frozenset) or kind.__name__ == "deque":
        return HolderLink("entry", owner=kind.__name__)
    if is_a(holder, types.TracebackType, BaseException):
        return HolderLink("traceback", owner=kind.__name__)
    frame = holder.gi_frame if is_a(holder, types.GeneratorType) else holder
    if is_a(frame, types.FrameType):
        return link_of_code("local", _key_in(locals_of(frame), held), frame.f_code)
    if is_a(holder, type):
        return _link_of_class(holder, _name_in(list(vars(holder).items()), held))
    name = _slot_of(holder, held) or _key_in(attributes_of(holder) or {}, held)
    if name:
        return _link_of_class(kind, name)
    return HolderLink("other", owner=kind.__name__, file=source_file_of(kind))


def _slot_of(holder: Any, held: Any) -> str:
    """Return the name of the slot in which `holder` holds an object; empty if there is none."""
    kind = type(holder)
    for base in kind.__mro__:
        for name, member in vars(base).items():
            if name not in _TENSOR_ATTRIBUTES and not is_a(member, types.MemberDescriptorType):
                continue
            try:
                if member.__get__(holder, kind) is held:
                    return name
            except (AttributeError, TypeError):
                # The slot is empty or belongs to another class.
                continue
    return ""


def _link_of_class(kind: type, name: str) -> HolderLink:
    return HolderLink("attribute", name, kind.__name__, source_file_of(kind))


def link_of_code(kind: LinkKind, name: str, code: types.CodeType) -> HolderLink:
    """Return a link whose name is defined in a function, given the function's code."""
    last_line = max((line for _, _, line in code.co_lines() if line is not None), default=0)
    return HolderLink(kind, name, code.co_name, code.co_filename, (code.co_firstlineno, last_line))


def _key_in(entries: dict[Any, Any], held: Any) -> str:
    """Return the key of an object in a dictionary; empty if the key is not a string."""
    return _name_in(list(dict.items(entries)), held)


def _name_in(named: Iterable[tuple[Any, Any]], held: Any) -> str:
    """Return the name of an object, given pairs of name and object; empty if there is none."""
    for name, candidate in named:
        if candidate is held and type(name) is str:
            return name
    return ""


# --- as text ---


def text_of(links: Sequence[HolderLink]) -> str:
    """Return a path as a Python expression, such as ``holder.losses[...]``."""
    text = ""
    for link in reversed(links):
        text = _append(text, link)
    return sanitise(text, most=_MAX_TEXT_LENGTH)


def _append(text: str, link: HolderLink) -> str:
    """Return the text of a path after appending one link."""
    # In scripts, submodules in `_modules` look like attributes of the parent module.
    if link.kind == "other" or (link.kind == "attribute" and link.name == "_modules"):
        return text
    if link.kind == "attribute":
        return f"{text or link.owner or '?'}.{link.name}"
    if link.kind == "entry":
        return f"{text}[{link.name!r}]" if link.name else f"{text}[...]"
    if link.kind == "cache":
        return f"{text}cache of {link.name}"
    if link.kind == "traceback":
        # An exception and its tracebacks are several links, but appear as a single word.
        return text.removesuffix(" (traceback)") + " (traceback)"
    text = f"{text} {link.name}".lstrip()
    if link.kind == "cell":
        return f"{text} (closure of {link.owner})"
    if link.kind == "default":
        return f"{text} (default of {link.owner})"
    return text
