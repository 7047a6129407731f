"""What a feature cache was made from, as names and texts: the function with all that is bound to it, and the dataset.

Two builds with equal facts give the same features. A difference has a name, so that the error can say what changed:
the source of a function or of one that it calls, a default, a closure, an argument of a partial, an attribute of a
callable object, a global that the code reads, a sample.

Not seen: files that the function opens, versions of installed packages, and what it reaches by a name that is put
together at run time. That is what the user's own ``parameters`` are for.
"""

from __future__ import annotations

import ast
import collections
import dis
import functools
import hashlib
import inspect
import sysconfig
import textwrap
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.data.features.errors import not_computed
from holdfast.data.random_state import isolated, seed_cpu
from holdfast.data.seeds import derive_seed

_SAMPLES = 8
"""Samples that tell datasets apart. Another set of data differs in nearly all; eight cost no time worth naming."""
_LONGEST_TEXT = 100
_INSTALLED = tuple(str(Path(sysconfig.get_path(name))) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_Code = types.CodeType


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
    facts = {f"function: {name}": _short(text) for name, text in teller.parts(fn)}
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


def _short(text: str) -> str:
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[: _LONGEST_TEXT // 2]}... (sha256 {_digest(text.encode('utf-8', 'surrogatepass'))})"


def _digest(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


class _Teller:
    """Tells values and functions as texts that are equal for equal ones, in every process."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}
        self._kept: list[Any] = []  # an id must not be used again while it is known

    def told(self, value: Any) -> str:
        """Return the text of any value; of one that cannot be told, its type."""
        if type(value) in _PLAIN:
            return repr(value)
        if id(value) not in self._known:
            self._known[id(value)] = "..."  # one that holds itself
            self._kept.append(value)
            self._known[id(value)] = self._told(value)
        return self._known[id(value)]

    def _told(self, value: Any) -> str:
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
        if isinstance(value, (type, functools.partial, types.FunctionType, types.MethodType)):
            return "; ".join(f"{name} {text}" for name, text in self.parts(value))
        return self._object(value)

    def _array(self, value: Any) -> str:
        if value.dtype.hasobject:
            return self.told(value.tolist())
        return f"{value.dtype.str} {value.shape} sha256 {_digest(value.tobytes())}"

    def _object(self, value: Any) -> str:
        name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
        if isinstance(name, str):  # a module, a function that is not python's
            return f"{type(value).__name__} {name}"
        if _is_of_the_library(type(value)) or not _attributes_of(value):
            text = repr(value)
            return type(value).__qualname__ if " at 0x" in text or text.startswith("<") else text
        return "; ".join(f"{name} {text}" for name, text in self._attributes(value))

    def _attributes(self, value: Any) -> Iterator[tuple[str, str]]:
        yield from self._class(type(value))
        for name, item in _attributes_of(value).items():
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
        elif isinstance(inner := getattr(fn, "__wrapped__", None), types.FunctionType):  # functools.lru_cache
            yield from self.parts(inner)
        elif isinstance(getattr(fn, "__name__", None), str):  # of C code
            yield "name", f"{type(fn).__name__} {fn.__name__}"
        else:
            yield from self._attributes(fn)

    def _class(self, kind: type) -> Iterator[tuple[str, str]]:
        yield "name", kind.__qualname__
        for each in kind.__mro__:
            if _is_own(inspect.getmodule(each)):
                yield f"source of {each.__qualname__}", _source(each)
                for name, value in vars(each).items():
                    if isinstance(value, types.FunctionType):
                        yield from ((f"{name}: {what}", text) for what, text in self._bound(value))

    def _function(self, fn: types.FunctionType) -> Iterator[tuple[str, str]]:
        code = fn.__code__
        yield "name", fn.__qualname__
        if _is_own_file(code.co_filename):
            yield "source", _source(code)
            yield from self._bound(fn)

    def _bound(self, fn: types.FunctionType) -> Iterator[tuple[str, str]]:
        """Yield what a function of the user's was given beside its source."""
        code = fn.__code__
        defaults = fn.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        for name, value in [*zip(names, defaults, strict=True), *(fn.__kwdefaults__ or {}).items()]:
            yield f"default of {name}", self.told(value)
        for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
            if (held := _content(cell)) is not cell:
                yield f"closure {name}", self.told(held)
        for name, value in sorted(_globals_read(code, fn.__globals__).items()):
            yield f"global {name}", self.told(value)


def _tensor(value: torch.Tensor) -> str:
    if value.layout != torch.strided or value.is_quantized or value.is_nested or value.is_meta:
        return repr(value)
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    raw = plain.view(torch.uint8).numpy() if plain.numel() else b""
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} sha256 {_digest(raw)}"


def _is_array(value: Any) -> bool:
    if isinstance(value, (np.ndarray, np.generic)):
        return True
    if isinstance(value, type) or type(value).__module__.startswith("h5py"):  # a file would be read whole
        return False
    return hasattr(value, "__array__") or hasattr(value, "__array_interface__")  # tables of pandas, images of PIL


def _attributes_of(value: Any) -> dict[str, Any]:
    slots = [name for kind in type(value).__mro__ for name in _slots_of(kind)]
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is not bound yet
        return cell


def _globals_read(code: _Code, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the globals that a function's code reads, and what it reads of modules of the user's own."""
    found: dict[str, Any] = {}
    module: tuple[str, types.ModuleType] | None = None
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME") and each.argval in known:
            value = known[each.argval]
            if isinstance(value, types.ModuleType):
                module = each.argval, value
                continue
            found[each.argval] = value
        elif module is not None and each.opname in ("LOAD_ATTR", "LOAD_METHOD") and _is_own(module[1]):
            found[f"{module[0]}.{each.argval}"] = getattr(module[1], each.argval, None)
        module = None
    for constant in code.co_consts:
        if isinstance(constant, _Code):
            found |= _globals_read(constant, known)
    return found


def _is_own(module: types.ModuleType | None) -> bool:
    file = getattr(module, "__file__", None)
    return _is_own_file(file) if file else getattr(module, "__name__", "") == "__main__"


def _is_own_file(name: str) -> bool:
    """Say whether a file is the user's: neither python's own nor of an installed package, nor frozen."""
    return not name.startswith((*_INSTALLED, "<frozen"))


def _is_of_the_library(kind: type) -> bool:
    file = getattr(inspect.getmodule(kind), "__file__", None)
    if file is None:
        return kind.__module__ != "__main__"
    return str(file).startswith(_INSTALLED[0]) and "-packages" not in file


def _source(code: Any) -> str:
    """Return the digest of the source of a class or a code object, whatever its comments, docstrings and layout."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
        if isinstance(code, _Code) and code.co_name == "<lambda>":
            (lambda_alone,) = (node for node in ast.walk(tree) if isinstance(node, ast.Lambda))
            return _digest(ast.unparse(lambda_alone).encode())
    except (OSError, TypeError, SyntaxError, ValueError):  # no source, or a lambda beside others on its line
        return _digest(repr(_compiled(code)).encode())
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return _digest(ast.unparse(tree).encode("utf-8", "surrogatepass"))


def _compiled(code: Any) -> Any:
    if isinstance(code, type):
        functions = (value for value in vars(code).values() if isinstance(value, types.FunctionType))
        return [_compiled(value.__code__) for value in functions]
    if not isinstance(code, _Code):
        return repr(code)
    return code.co_code.hex(), code.co_names, [_compiled(constant) for constant in code.co_consts]
