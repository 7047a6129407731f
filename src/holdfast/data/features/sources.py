"""The user's own code: which files are theirs, digests of functions, classes and modules, and what these reach.

The source counts, whatever its comments, docstrings and layout. Where the file was edited after it was loaded, what
was loaded counts: that is what will run.

Does not know how values are told (``keys``).
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import hashlib
import importlib.util
import inspect
import linecache
import sys
import sysconfig
import textwrap
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

_INSTALLED = tuple(str(Path(sysconfig.get_path(name))) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_FOLDERS_OF_PACKAGES = {"site-packages", "dist-packages"}
_DOCUMENTED = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_Code = types.CodeType


def is_own(thing: Any) -> bool:
    """Say whether a module or a class is the user's."""
    module = inspect.getmodule(thing)
    if file := getattr(module, "__file__", None):
        return is_own_file(file)
    return getattr(module, "__name__", "") == "__main__" or any(map(is_own_file, getattr(module, "__path__", ())))


def is_own_file(name: str) -> bool:
    """Say whether a file is the user's: neither python's own nor of an installed package, nor frozen."""
    return not name.startswith((*_INSTALLED, "<frozen")) and _FOLDERS_OF_PACKAGES.isdisjoint(Path(name).parts)


def is_own_function(fn: Any) -> bool:
    """Say whether a value is a function of the user's, in python."""
    return isinstance(fn, types.FunctionType) and is_own_file(fn.__code__.co_filename)


def is_of_the_library(kind: type) -> bool:
    """Say whether a class is of python's own library."""
    file = getattr(inspect.getmodule(kind), "__file__", None)
    if file is None:
        return kind.__module__ != "__main__"
    return str(file).startswith(_INSTALLED[0]) and "-packages" not in file


def wrapped(value: Any) -> Any:
    """Return what a decorator says that it has wrapped, or None; an object that has every attribute says nothing."""
    own = getattr(value, "__dict__", None)
    return own.get("__wrapped__") if isinstance(own, dict) else None


def functions_in(member: Any) -> list[Any]:
    """Return the functions in what a class or a module holds by a name: a method, property, decorated function."""
    if isinstance(member, (staticmethod, classmethod)):
        return functions_in(member.__func__)
    if isinstance(member, property):
        return [each for each in (member.fget, member.fset, member.fdel) if each is not None]
    if isinstance(member, functools.cached_property):
        return [member.func]
    return [member] if isinstance(member, types.FunctionType) or callable(wrapped(member)) else []


def globals_read(code: _Code, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the globals that a function's code reads, and what it reads of modules of the user's own, by name."""
    found: dict[str, Any] = {}
    for each in _nested(code):
        name, value = "", None
        for operation, argument in _instructions(each):
            if operation in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(value, types.ModuleType) and is_own(value):
                name, value = f"{name}.{argument}", getattr(value, argument, None)
                continue
            found[name] = value
            is_read = operation in ("LOAD_GLOBAL", "LOAD_NAME") and argument in known
            name, value = (argument, known[argument]) if is_read else ("", None)
    del found[""]
    return {name: value for name, value in found.items() if not isinstance(value, types.ModuleType) or is_own(value)}


def modules_imported(code: _Code, package: str) -> dict[str, str]:
    """Return the modules of the user's own that code imports when it runs, and what these import, with their digests.

    They are found and not imported, and the answer is the same whether they were imported or not.
    """
    found: dict[str, str] = {}
    _add_imported(found, code, package)
    return found


def _add_imported(found: dict[str, str], code: _Code, package: str) -> None:
    for name in _names_imported(code, package):
        spec = None if name in found else _own_spec(name)
        if spec is None or not spec.has_location:
            continue
        found[name] = module_source(name, str(spec.origin))
        with contextlib.suppress(OSError, SyntaxError, ValueError):  # no python
            inside = _compile(Path(str(spec.origin)).read_bytes(), name)
            is_package = spec.submodule_search_locations is not None
            _add_imported(found, inside, name if is_package else name.rpartition(".")[0])


def _names_imported(code: _Code, package: str) -> Iterator[str]:
    for each in _nested(code):
        recent: list[Any] = [0, None]
        for operation, argument in _instructions(each):
            if operation == "IMPORT_NAME":
                level, names = recent[-2:]
                with contextlib.suppress(ImportError):  # beyond the top: it will fail when it runs
                    base = importlib.util.resolve_name("." * level + argument, package)
                    inner = [f"{base}.{name}" for name in names or ()]
                    modules = [name for name in inner if _own_spec(name)]
                    yield from modules
                    if not inner or len(modules) < len(inner):
                        yield base
            recent.append(argument)


def _own_spec(name: str) -> ModuleSpec | None:
    """Return where a module of the user's own lies; python's own search would import the packages that it lies in."""
    top, *inner = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module that was made by hand
        return None
    for part in inner:
        if spec is None or not _lies_with_the_user(spec):
            return None
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations or ()))
    return spec if spec is not None and _lies_with_the_user(spec) else None


def _lies_with_the_user(spec: ModuleSpec) -> bool:
    places = [str(spec.origin)] if spec.has_location else spec.submodule_search_locations or ()
    return any(map(is_own_file, places))


def module_source(name: str, file: str) -> str:
    """Return the digest of a module: of its file's source, or of the functions that were loaded from an older one."""
    loaded = sys.modules.get(name)
    codes = [code for code in _codes_in(loaded) if code.co_filename == file] if loaded else []
    if None in map(_on_disk, codes):
        return _digest_of_compiled(codes)
    data = Path(file).read_bytes()
    try:
        return _digest_of_tree(ast.parse(data))
    except (SyntaxError, ValueError, RecursionError):  # not python, or not python that can be read
        return digest(data)


def source(code: type | _Code) -> str:
    """Return the digest of the source of a class or a code object.

    Of what was compiled, if the source is not known, as of a lambda beside others on its line, or is another one, as
    the file was edited after it was loaded.
    """
    codes = [code] if isinstance(code, _Code) else list(_codes_in(code))
    there = [_on_disk(each) for each in codes]
    if None in there:
        return _digest_of_compiled(codes)
    found: Any = there[0] if isinstance(code, _Code) else code
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(found)))
        if isinstance(code, _Code) and code.co_name == "<lambda>":
            (lambda_alone,) = (node for node in ast.walk(tree) if isinstance(node, ast.Lambda))
            return digest(ast.unparse(lambda_alone).encode())
        return _digest_of_tree(tree)
    except (OSError, TypeError, SyntaxError, ValueError, RecursionError):
        return _digest_of_compiled(codes)


def _digest_of_tree(tree: ast.Module) -> str:
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return digest(ast.unparse(tree).encode("utf-8", "surrogatepass"))


def _on_disk(code: _Code) -> _Code | None:
    """Return this code as the file gives it now: itself if nobody knows, None if the file gives another.

    The file may have been edited above it only, so that its lines are elsewhere.
    """
    linecache.checkcache(code.co_filename)
    codes = _codes_of("".join(linecache.getlines(code.co_filename)), code.co_filename)
    return codes.get((code.co_qualname, _digest_of_compiled([code]))) if codes else code


@functools.lru_cache(maxsize=64)
def _codes_of(text: str, name: str) -> dict[tuple[str, str], _Code]:
    """Return all code that a file's text gives by name and digest; none, if it is no python, as in a notebook."""
    try:
        nested = list(_nested(_compile(text, name)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    return {(code.co_qualname, _digest_of_compiled([code])): code for code in nested[1:]}


def _compile(text: str | bytes, name: str) -> _Code:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a text that was compiled before
        return compile(text, name, "exec", dont_inherit=True)


def _codes_in(holder: Any) -> Iterator[_Code]:
    """Yield the code of the functions in a class, or in a module and its classes, that lie in files of the user's."""
    for value in list(vars(holder).values()):
        for fn in functions_in(value):
            while (inner := wrapped(fn)) is not None and not is_own_function(fn):
                fn = inner
            if is_own_function(fn):
                yield fn.__code__
        if isinstance(holder, types.ModuleType) and isinstance(value, type) and value.__module__ == holder.__name__:
            yield from _codes_in(value)


def _nested(code: _Code) -> Iterator[_Code]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, _Code):
            yield from _nested(constant)


def _instructions(code: _Code) -> Iterator[tuple[str, Any]]:
    return ((each.opname, each.argval) for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG")


def _digest_of_compiled(codes: Iterable[_Code]) -> str:
    return digest(repr([_compiled(code) for code in codes]).encode("utf-8", "surrogatepass"))


def _compiled(value: Any) -> Any:
    """Return what decides what code does, and nothing of its place."""
    if isinstance(value, frozenset):
        return sorted(map(repr, value))
    if not isinstance(value, _Code):
        return repr(value)
    names = value.co_names, value.co_varnames, value.co_exceptiontable
    return value.co_code.hex(), *names, [_compiled(constant) for constant in value.co_consts]


def digest(data: Any) -> str:
    """Return a digest of bytes, or of what lies in memory as they do."""
    return hashlib.sha256(data).hexdigest()[:32]
