"""What a feature cache was made from, as names and texts: the function with all that is bound to it, and the dataset.

Two builds with equal facts give the same features. A difference has a name, so that the error can say what changed:
the source of a function or of one that it calls, a default, a closure, an argument of a partial, an attribute of a
callable object or of its class, a global that the code reads, a module that it imports when it runs, a sample.

Not seen: files that the function opens, versions of installed packages, and what it reaches by a name that is put
together at run time. That is what the user's own ``parameters`` are for. Where more than 50 objects hold one another,
only the kinds and names of those further inside are told.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from holdfast.data.features.errors import not_computed
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
from holdfast.data.random_state import isolated, seed_cpu
from holdfast.data.seeds import derive_seed

_SAMPLES = 8
"""Samples that tell datasets apart. Another set of data differs in nearly all; eight cost no time worth naming."""
_LONGEST_TEXT = 100
_DEEPEST = 50
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def facts_of(dataset: Any, fn: Any, parameters: Mapping[str, Any] | None, seed: int) -> dict[str, str]:
    """Return what decides the features, by name.

    Args:
        dataset: Map-style; eight of its samples are read.
        fn: Computes the features of a sample.
        parameters: What the user says beside it.
        seed: Decides the random numbers that a sample and ``fn`` draw.

    Raises:
        LoaderError: H623, naming a sample that cannot be read.
    """
    teller = _Teller()
    parts: dict[str, list[str]] = {}
    for name, text in teller.parts(fn):
        parts.setdefault(f"function: {name}", []).append(text)  # a class and its base may have the same name
    facts = {name: _short("; ".join(texts)) for name, texts in parts.items()}
    facts |= {f"parameters: {name}": _short(teller.told(value)) for name, value in (parameters or {}).items()}
    facts["dataset: length"] = str(len(dataset))
    for index in _looked_at(len(dataset)):
        facts[f"dataset: sample {index}"] = _short(teller.told(_read(dataset, index, seed)))
    facts["seed"] = str(seed)
    return facts


def differences(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Return each fact that is another one, in words."""
    found = []
    for name in [*there, *(name for name in here if name not in there)]:
        old, new = there.get(name), here.get(name)
        if name.startswith("dataset: sample") and None in (old, new):
            continue  # of a dataset of another length, which is told, other samples are looked at
        if old != new:
            found.append(f"{name} was {old or 'not there'} and is {new or 'gone'}")
    return found


def _read(dataset: Any, index: int, seed: int) -> Any:
    """Return a sample as a build sees it, its random numbers decided by (seed, index)."""
    with isolated():
        seed_cpu(derive_seed(seed, "features", index))
        try:
            return dataset[index]
        except Exception as error:
            raise not_computed(index, f"raised {type(error).__name__}: {error}") from error


def _looked_at(length: int) -> list[int]:
    if length <= _SAMPLES:
        return list(range(length))
    between = {derive_seed("looked at", length, number) % length for number in range(_SAMPLES - 2)}
    return sorted({0, length - 1, *between})


def _joined(parts: Iterable[tuple[str, str]]) -> str:
    return "; ".join(f"{name} {text}" for name, text in parts)


def _short(text: str) -> str:
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[: _LONGEST_TEXT // 2]}... (sha256 {digest(text.encode('utf-8', 'surrogatepass'))})"


class _Teller:
    """Tells values and functions as texts that are equal for equal ones, in every process.

    A text within another one is shortened to its digest. Beyond 50 objects that hold one another only kind and name
    are told.
    """

    def __init__(self) -> None:
        self._known: dict[int, str] = {}
        self._kept: list[Any] = []  # an id must not be used again while it is known
        self._depth = 0

    def told(self, value: Any) -> str:
        """Return the text of any value; of one that cannot be told, its type."""
        if type(value) in _PLAIN:
            return repr(value)
        if id(value) not in self._known:
            if self._depth == _DEEPEST:
                return _kind_and_name(value)
            self._known[id(value)] = "..."  # one that holds itself
            self._kept.append(value)
            self._depth += 1
            self._known[id(value)] = _short(self._told(value))
            self._depth -= 1
        return self._known[id(value)]

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
            items = (f"{self.told(key)}: {self.told(item)}" for key, item in value.items())
            return f"{type(value).__name__}({', '.join(items)})"
        if isinstance(value, (set, frozenset)):
            return f"{type(value).__name__}({', '.join(sorted(map(self.told, value)))})"
        if isinstance(value, (list, tuple, collections.deque)):
            return f"{type(value).__name__}({', '.join(map(self.told, value))})"
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
            return _joined([("class", self.told(type(value))), *self._attributes(value)])
        if is_of_the_library(type(value)) or not _attributes_of(value):
            text = repr(value)
            return type(value).__qualname__ if " at 0x" in text or text.startswith("<") else text
        return _joined([("name", type(value).__qualname__), *self._attributes(value)])

    def _attributes(self, value: Any) -> Iterator[tuple[str, str]]:
        for name, item in _attributes_of(value).items():
            member = getattr(type(value), name, None)
            if name != "__doc__" and not isinstance(member, functools.cached_property):  # there once it was asked for
                yield f"attribute {name}", self.told(item)

    def parts(self, fn: Any) -> Iterator[tuple[str, str]]:
        """Yield what a callable consists of, by name."""
        if isinstance(fn, functools.partial):
            for name, value in [*enumerate(fn.args), *fn.keywords.items()]:
                yield f"argument {name}", self.told(value)
            yield from self.parts(fn.func)
        elif isinstance(fn, types.MethodType):
            yield from self.parts(fn.__func__)
            yield "self", self.told(fn.__self__)
        elif isinstance(fn, types.FunctionType):
            yield from self._function(fn)
        elif isinstance(fn, type):
            yield from self._class(fn)
        elif not is_own(type(fn)) and callable(inner := wrapped(fn)):  # functools.lru_cache
            yield from self.parts(inner)
        elif not is_own(type(fn)) and isinstance(getattr(fn, "__name__", None), str):  # of C code
            yield "name", _kind_and_name(fn)
            if not isinstance(owner := getattr(fn, "__self__", None), (types.ModuleType, types.NoneType)):
                yield "self", self.told(owner)
            for name, held in _attributes_of(fn).items():
                if _leads_to_own(held):  # of numpy.vectorize
                    yield f"attribute {name}", self.told(held)
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
                    yield f"class attribute {name}", self.told(value)
                for fn in functions_in(value):
                    parts = self._bound(fn) if _is_written_in(each, fn) else self.parts(fn)
                    yield from ((f"{name}: {what}", text) for what, text in parts)

    def _function(self, fn: types.FunctionType) -> Iterator[tuple[str, str]]:
        code, inner = fn.__code__, wrapped(fn)
        if is_own_function(fn):
            yield "name", fn.__qualname__
            yield "source", source(code)
            yield from self._bound(fn)
            if inner is not None:
                yield "wrapped", self.told(inner)
            return
        if callable(inner):  # what an installed decorator made of it
            yield from self.parts(inner)
        else:
            yield "name", fn.__qualname__
        for name, held in _closure(fn):
            if _leads_to_own(held):
                yield f"closure {name}", self.told(held)

    def _bound(self, fn: types.FunctionType) -> Iterator[tuple[str, str]]:
        """Yield what a function of the user's was given beside its source."""
        code = fn.__code__
        defaults = fn.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        for name, value in [*zip(names, defaults, strict=True), *(fn.__kwdefaults__ or {}).items()]:
            yield f"default of {name}", self.told(value)
        for name, held in _closure(fn):
            yield f"closure {name}", self.told(held)
        for name, held in vars(fn).items():
            if _is_plain(held) and not name.startswith("__"):
                yield f"attribute {name}", self.told(held)
        for name, value in sorted(globals_read(code, fn.__globals__).items()):
            yield f"global {name}", self.told(value)
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
