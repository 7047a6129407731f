"""How objects refer to each other, in words of a program: a local, an attribute, an entry, a default, a closure.

Reads attributes only where that calls no code of the script. Does not: search (``retention_paths`` does).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import (
    CellType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    GetSetDescriptorType,
    MemberDescriptorType,
    TracebackType,
)
from typing import Any

from holdfast.supervise.observe.retention_origin import file_of_class, is_a

_MOST_ENTRIES = 200_000  # of a dict that is searched for the key of a value
_OF_TENSORS = frozenset({"_backward_hooks", "_post_accumulate_grad_hooks", "grad"})
CACHE = "_lru_cache_wrapper"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One name or index on the way from a root to an object.

    Args:
        kind: ``"global"``, ``"local"``, ``"cell"``, ``"default"``, ``"attribute"`` (of an object or class),
            ``"entry"`` (of a container), ``"traceback"`` (of an exception), ``"cache"`` (of a function) or
            ``"other"``.
        name: The identifier or key, or an empty text.
        owner: Name of the module, function or class that it belongs to.
        file: Of the owner's source, or an empty text.
        lines: Of the owner in it, or (0, 0).
    """

    kind: str
    name: str = ""
    owner: str = ""
    file: str = ""
    lines: tuple[int, int] = (0, 0)


def lines_of(code: CodeType) -> tuple[int, int]:
    """Return the first and last line of a function."""
    return code.co_firstlineno, max((line for _, _, line in code.co_lines() if line is not None), default=0)


def locals_of(frame: FrameType) -> dict[str, Any]:
    """Return a copy of the locals of a frame, and leave no snapshot in it that would keep them alive."""
    snapshot = frame.f_locals
    found = dict(snapshot)
    # Before Python 3.13 it is kept in the frame. If the script has called locals(), it holds it too, and keeps it.
    if frame.f_code.co_flags & inspect.CO_NEWLOCALS and type(snapshot) is dict and sys.getrefcount(snapshot) <= 3:
        snapshot.clear()
    return found


def object_dict(holder: Any) -> dict[str, Any] | None:
    """Return the attributes of an object without calling code of its class."""
    for base in type(holder).__mro__:
        descriptor: Any = vars(base).get("__dict__")
        if type(descriptor).__name__ == "getset_descriptor":
            try:
                found = descriptor.__get__(holder, type(holder))
            except (AttributeError, TypeError):
                return None
            return found if type(found) is dict else None
    return None


def steps_of(chain: Sequence[Any]) -> list[Step]:
    """Return the steps of a chain of references.

    Args:
        chain: The object first, then what refers to it, and so on.
    """
    steps, index = [], 0
    while index + 1 < len(chain):
        used, step = next(_readings(chain[index:]))
        steps.append(step)
        index += used
    return steps


def _readings(chain: Sequence[Any]) -> Iterator[tuple[int, Step]]:
    """Yield how the beginning of a chain can be read, the most telling first: links used, and the step."""
    held, holder = chain[0], chain[1]
    above: Any = chain[2] if len(chain) > 2 else None
    if is_a(holder, CellType) and len(chain) > 3 and is_a(chain[3], FunctionType):
        yield 3, _of_code("cell", _free_name(chain[3], holder), chain[3].__code__)
    if is_a(above, FunctionType) and is_a(holder, tuple, dict):
        name = _default_name(above, held)
        if name:
            yield 2, _of_code("default", name, above.__code__)
    if is_a(holder, dict) and above is not None:
        if is_a(above, dict) and len(chain) > 3 and type(chain[3]).__name__ == "_local":
            yield 3, Step(kind="attribute", name=_key(holder, held), owner="threading.local")
        if is_a(above, type) and _key(holder, held):
            yield 2, _of_class(above, _key(holder, held))
        attributes = object_dict(above)
        if attributes is not None and attributes is holder:
            yield 2, _of_class(type(above), _key(attributes, held))
        if type(above).__name__ == CACHE:
            yield 2, _of_cache(above)
    yield 1, _single(holder, held)


def _single(holder: Any, held: Any) -> Step:
    kind = type(holder)
    if kind.__name__ == CACHE:
        return _of_cache(holder)
    if is_a(holder, dict):
        return Step(kind="entry", name=_key(holder, held), owner=kind.__name__)
    if is_a(holder, list, tuple, set, frozenset) or kind.__name__ == "deque":
        return Step(kind="entry", owner=kind.__name__)
    if is_a(holder, type):
        return _of_class(holder, next((name for name, value in list(vars(holder).items()) if value is held), ""))
    if is_a(holder, FrameType):
        return _local(holder, held)
    if is_a(holder, GeneratorType, CoroutineType):
        frame = holder.gi_frame if is_a(holder, GeneratorType) else holder.cr_frame
        return Step(kind="other", owner=kind.__name__) if frame is None else _local(frame, held)
    if is_a(holder, TracebackType, BaseException):
        return Step(kind="traceback", owner=kind.__name__)
    return _attribute(holder, held)


def _attribute(holder: Any, held: Any) -> Step:
    kind = type(holder)
    for base in kind.__mro__:
        for name, member in list(vars(base).items()):
            if is_a(member, MemberDescriptorType) or (name in _OF_TENSORS and is_a(member, GetSetDescriptorType)):
                try:
                    if member.__get__(holder, kind) is held:
                        return _of_class(kind, name)
                except (AttributeError, TypeError):
                    continue
    found = object_dict(holder)
    name = _key(found, held) if found is not None else ""
    return _of_class(kind, name) if name else Step(kind="other", owner=kind.__name__, file=file_of_class(kind))


def _of_class(kind: type, name: str) -> Step:
    return Step(kind="attribute", name=name, owner=kind.__name__, file=file_of_class(kind))


def _of_code(kind: str, name: str, code: CodeType) -> Step:
    return Step(kind=kind, name=name, owner=code.co_name, file=code.co_filename, lines=lines_of(code))


def _of_cache(holder: Any) -> Step:
    code = getattr(getattr(holder, "__wrapped__", None), "__code__", None)
    if isinstance(code, CodeType):
        return _of_code("cache", code.co_name, code)
    return Step(kind="cache")


def _free_name(function: FunctionType, cell: CellType) -> str:
    names = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    return next((name for name, each in names if each is cell), "")


def _default_name(function: FunctionType, held: Any) -> str:
    code, defaults = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    by_name = (*zip(names, defaults, strict=False), *(function.__kwdefaults__ or {}).items())
    return next((name for name, value in by_name if value is held), "")


def _local(frame: FrameType, held: Any) -> Step:
    name = next((name for name, value in locals_of(frame).items() if value is held), "")
    return _of_code("local", name, frame.f_code)


def _key(holder: Mapping[Any, Any], held: Any) -> str:
    if len(holder) > _MOST_ENTRIES:
        return ""
    key = next((key for key, value in list(holder.items()) if value is held), None)
    return key if type(key) is str else ""
