"""Values and functions told as texts that are equal for equal ones, in every process.

Each value that is met has a path: the labels of what it lies in, down to its own. By paths is told what a function
has changed, and what is to be left out for that.

Does not know what a feature cache is compared by (``keys``) or what a function changes when it runs (``changing``).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import operator
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from holdfast.data.features.sources import (
    digest,
    functions_in,
    globals_read,
    is_of_the_library,
    is_own,
    is_own_function,
    module_source,
    modules_imported,
    source,
    wrapped,
)

SEPARATOR = "\n"
"""Between the labels of a path: no label has it, as texts are told with escapes."""
LEFT_OUT = -1
_LONGEST_TEXT = 100
_DEEPEST = 50
_MOST_PATHS = 100_000
_CONTAINERS = (dict, types.MappingProxyType, set, frozenset, list, tuple, collections.deque)
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def short(text: str) -> str:
    """Return a text, or of a long one its beginning and its digest."""
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[: _LONGEST_TEXT // 2]}... (sha256 {digest(text.encode('utf-8', 'surrogatepass'))})"


def _joined(parts: Iterable[tuple[str, str]]) -> str:
    return "; ".join(f"{name} {text}" for name, text in parts)


class Teller:
    """Tells values and functions as texts that are equal for equal ones, in every process.

    A text within another one is shortened to its digest. Beyond 50 objects that hold one another only kind and name
    are told.

    Args:
        marks: What is left out, by path: ``LEFT_OUT``, or how many entries of a container are not.
    """

    def __init__(self, marks: Mapping[str, int] | None = None) -> None:
        self.texts: dict[str, str] = {}
        """What was told, by path."""
        self.references: set[str] = set()
        """Paths of what had been told before, at another one."""
        self.lengths: dict[str, int] = {}
        """Entries of each container, by path."""
        self._marks = marks or {}
        self._path = ""
        self._known: dict[int, str] = {}
        self._kept: list[Any] = []  # an id must not be used again while it is known
        self._depth = 0

    @property
    def told_all(self) -> bool:
        """Return whether every path is known: of very many only the first are."""
        return max(len(self.texts), len(self.references)) < _MOST_PATHS

    def told(self, value: Any, label: str = "?") -> str:
        """Return the text of any value; of one that cannot be told, its type."""
        outer, self._path = self._path, f"{self._path}{SEPARATOR}{label}"
        try:
            return self._told_here(value)
        finally:
            self._path = outer

    def _told_here(self, value: Any) -> str:
        if type(value) in _PLAIN:
            return self._noted(repr(value))
        if isinstance(value, _CONTAINERS):
            self.lengths[self._path] = len(value)
        if id(value) in self._known:
            if len(self.references) < _MOST_PATHS:
                self.references.add(self._path)
            return self._known[id(value)]
        if self._depth == _DEEPEST:
            return self._noted(_kind_and_name(value))
        self._known[id(value)] = "..."  # one that holds itself
        self._kept.append(value)
        self._depth += 1
        self._known[id(value)] = short(self._told(value))
        self._depth -= 1
        return self._noted(self._known[id(value)])

    @contextlib.contextmanager
    def _within(self, label: str) -> Iterator[None]:
        outer, self._path = self._path, f"{self._path}{SEPARATOR}{label}"
        try:
            yield
        finally:
            self._path = outer

    def _noted(self, text: str) -> str:
        if len(self.texts) < _MOST_PATHS:
            self.texts[self._path] = text
        return text

    def _entries(self, entries: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
        """Yield label and text of what is in a container and not left out."""
        kept = self._marks.get(self._path, LEFT_OUT)
        return self._each(entries if kept == LEFT_OUT else itertools.islice(entries, kept))

    def _each(self, entries: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
        """Yield label and text of each that is not left out."""
        for label, value in entries:
            if not self._marks or self._marks.get(f"{self._path}{SEPARATOR}{label}") != LEFT_OUT:
                yield label, self.told(value, label)

    def _told(self, value: Any) -> str:
        text = self._content(value)
        if text is None:
            return self._object(value)
        return f"{text}; {self._object(value)}" if is_own(type(value)) else text

    def _content(self, value: Any) -> str | None:
        """Return what is in a value that holds others, or None."""
        if isinstance(value, torch.Tensor):
            return _tensor(value)
        if _is_array(value):
            return self._array(np.asarray(value))
        if isinstance(value, (dict, types.MappingProxyType)):
            items = self._entries((self.told(key), item) for key, item in value.items())
            return f"{type(value).__name__}({', '.join(f'{key}: {text}' for key, text in items)})"
        if isinstance(value, (set, frozenset)):
            members = sorted(((self.told(item), item) for item in value), key=operator.itemgetter(0))
            return f"{type(value).__name__}({', '.join(text for _, text in self._entries(members))})"
        if isinstance(value, (list, tuple, collections.deque)):
            items = self._entries((str(number), item) for number, item in enumerate(value))
            return f"{type(value).__name__}({', '.join(text for _, text in items)})"
        return None

    def _array(self, value: Any) -> str:
        if value.dtype.hasobject:
            return self.told(value.tolist())
        return f"{value.dtype.str} {value.shape} sha256 {digest(value.tobytes())}"

    def _object(self, value: Any) -> str:
        if isinstance(value, types.ModuleType):
            file = getattr(value, "__file__", None)
            content = [module_source(value.__name__, file)] if file and is_own(value) else []
            return " ".join([_kind_and_name(value), *content])
        if _is_told_by_parts(value):
            return _joined(self.parts(value))
        if is_own(type(value)):
            return _joined([("class", self.told(type(value), "class")), *self._attributes(value)])
        if is_of_the_library(type(value)) or not _attributes_of(value):
            text = repr(value)
            return type(value).__qualname__ if " at 0x" in text or text.startswith("<") else text
        return _joined([("name", type(value).__qualname__), *self._attributes(value)])

    def _attributes(self, value: Any) -> Iterator[tuple[str, str]]:
        found = {}
        for name, item in _attributes_of(value).items():
            member = getattr(type(value), name, None)
            if name != "__doc__" and not isinstance(member, functools.cached_property):  # there once it was asked for
                found[f"attribute {name}"] = item
        return self._each(found.items())

    def parts(self, fn: Any) -> Iterator[tuple[str, str]]:
        """Yield what a callable consists of, by name."""
        if isinstance(fn, functools.partial):
            arguments = [*enumerate(fn.args), *fn.keywords.items()]
            yield from self._each((f"argument {name}", value) for name, value in arguments)
            yield from self.parts(fn.func)
        elif isinstance(fn, types.MethodType):
            yield from self.parts(fn.__func__)
            yield from self._each([("self", fn.__self__)])
        elif isinstance(fn, types.FunctionType):
            yield from self._function(fn)
        elif isinstance(fn, type):
            yield from self._class(fn)
        elif not is_own(type(fn)) and callable(inner := wrapped(fn)):  # functools.lru_cache
            yield from self.parts(inner)
        elif not is_own(type(fn)) and isinstance(getattr(fn, "__name__", None), str):  # of C code
            yield "name", _kind_and_name(fn)
            if not isinstance(owner := getattr(fn, "__self__", None), (types.ModuleType, types.NoneType)):
                yield from self._each([("self", owner)])
            held = _attributes_of(fn).items()  # of numpy.vectorize
            yield from self._each((f"attribute {name}", value) for name, value in held if _leads_to_own(value))
        elif is_own(type(fn)) or _attributes_of(fn):
            yield from self._class(type(fn))
            yield from self._attributes(fn)
        else:
            yield "name", self.told(fn)

    def _class(self, kind: type) -> Iterator[tuple[str, str]]:
        yield "name", kind.__qualname__
        for each in filter(is_own, kind.__mro__):
            yield f"source of {each.__qualname__}", source(each)
            for name, value in vars(each).items():
                if _is_plain(value) and not name.startswith("__"):
                    yield from self._each([(f"class attribute {name}", value)])
                for fn in functions_in(value):
                    with self._within(f"{each.__qualname__}.{name}"):
                        parts = list(self._bound(fn) if _is_written_in(each, fn) else self.parts(fn))
                    yield from ((f"{name}: {what}", text) for what, text in parts)

    def _function(self, fn: types.FunctionType) -> Iterator[tuple[str, str]]:
        code, inner = fn.__code__, wrapped(fn)
        if is_own_function(fn):
            yield "name", fn.__qualname__
            yield "source", source(code)
            yield from self._bound(fn)
            if inner is not None:
                yield "wrapped", self.told(inner, "wrapped")
            return
        if callable(inner):  # what an installed decorator made of it
            yield from self.parts(inner)
        else:
            yield "name", fn.__qualname__
        yield from self._each((f"closure {name}", held) for name, held in _closure(fn) if _leads_to_own(held))

    def _bound(self, fn: types.FunctionType) -> Iterator[tuple[str, str]]:
        """Yield what a function of the user's was given beside its source."""
        code = fn.__code__
        defaults = fn.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        bound = [*zip(names, defaults, strict=True), *(fn.__kwdefaults__ or {}).items()]
        yield from self._each((f"default of {name}", value) for name, value in bound)
        yield from self._each((f"closure {name}", held) for name, held in _closure(fn))
        plain = ((name, held) for name, held in vars(fn).items() if _is_plain(held) and not name.startswith("__"))
        yield from self._each((f"attribute {name}", held) for name, held in plain)
        read = sorted(globals_read(code, fn.__globals__).items())
        yield from self._each((f"global {name}", value) for name, value in read)
        for name, text in sorted(modules_imported(code, str(fn.__globals__.get("__package__") or "")).items()):
            yield f"module {name}", text


def _tensor(value: torch.Tensor) -> str:
    if value.layout != torch.strided or value.is_quantized or value.is_nested or value.is_meta:
        return repr(value)
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    raw = plain.view(torch.uint8).numpy() if plain.numel() else b""
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} sha256 {digest(raw)}"


def _is_array(value: Any) -> bool:
    if isinstance(value, (np.ndarray, np.generic)):
        return True
    if isinstance(value, type) or type(value).__module__.startswith("h5py"):  # a file would be read whole
        return False
    names = "__array__", "__array_interface__"  # tables of pandas, images of PIL
    return any(hasattr(type(value), name) for name in names)


def _attributes_of(value: Any) -> dict[str, Any]:
    if isinstance(value, torch.jit.ScriptModule):  # its own say little, and grow when it is called
        codes = [getattr(each, "code", None) for each in value.modules()]
        return {"code": codes, "training": value.training, **value.state_dict()}
    slots = [name for kind in type(value).__mro__ for name in _slots_of(kind)]
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _closure(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a name that is not bound yet
            yield name, cell.cell_contents


def _leads_to_own(value: Any) -> bool:
    """Say whether what an installed function holds is the user's, or another function that may hold it."""
    if isinstance(value, types.FunctionType):
        return True
    if isinstance(value, (dict, list, tuple)):  # functools.singledispatch
        return any(map(is_own_function, value.values() if isinstance(value, dict) else value))
    inner = getattr(value, "func" if isinstance(value, functools.partial) else "__func__", None)
    if isinstance(inner, types.FunctionType):
        return is_own_function(inner)
    return is_own(value if isinstance(value, type) else type(value))


def _is_told_by_parts(value: Any) -> bool:
    if isinstance(value, (type, functools.partial, types.FunctionType, types.MethodType)):
        return True
    named = isinstance(getattr(value, "__qualname__", None) or getattr(value, "__name__", None), str)
    return not is_own(type(value)) and (named or callable(wrapped(value)))


def _is_written_in(kind: type, fn: Any) -> bool:
    """Say whether the source of a class holds this function: not so what a decorator of elsewhere has made."""
    if not is_own_function(fn):
        return False
    code: types.CodeType = fn.__code__
    return code.co_filename == "<string>" or code.co_qualname.startswith(f"{kind.__qualname__}.")  # of a dataclass


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if type(value) is tuple else type(value) in _PLAIN


def _kind_and_name(value: Any) -> str:
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    return f"{type(value).__name__} {name}" if isinstance(name, str) else type(value).__qualname__
