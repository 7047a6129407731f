"""Which loss functions are the same one: what was found out about one must not be held against another.

A lambda in a loop is a new object each time and the same function; two partials of one function with another
``reduction`` are two. Distinguished are code, texts and flags that are bound to it (arguments of a partial, closures,
attributes of an object), and objects that are alive at the same time. Numbers are not: a step or a weight that
changes would make each step a new function.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
import zlib
from collections.abc import Callable, Iterable
from typing import Any

from holdfast.guard.splitting.two_pass import TwoPass

_DEPTH = 3
_VARIANTS = 16
"""Kinds of one function that are distinguished; with more, texts or objects change all the time and mean nothing."""


def description_of(loss_fn: Any) -> str:
    """Return a text that is the same for the same loss function, after every restart of a run."""
    return _described(loss_fn, _DEPTH)


def _described(value: Any, depth: int) -> str:
    if isinstance(value, TwoPass):
        return f"{_described(value.outputs, depth)} {_described(value.loss, depth)}"
    if isinstance(value, functools.partial):
        bound = [*value.args, *(value.keywords[name] for name in sorted(value.keywords))]
        return _with(_described(value.func, depth), bound, depth)
    if isinstance(value, types.MethodType):
        return _with(_described(value.__func__, depth), [value.__self__], depth)
    code = getattr(value, "__code__", None)
    if code is not None:
        mark = zlib.crc32(code.co_code + repr(code.co_names).encode())  # of two lambdas in one line
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        bound = [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return _with(f"{code.co_qualname}:{code.co_firstlineno}:{mark:x}", bound, depth)
    return _with(type(value).__qualname__, vars(value).values() if hasattr(value, "__dict__") else (), depth)


def _with(name: str, bound: Iterable[Any], depth: int) -> str:
    if depth == 0:
        return name
    texts = [text for value in bound if (text := _plain(value, depth - 1))]
    return f"{name}({', '.join(texts)})" if texts else name


def _plain(value: Any, depth: int) -> str:
    if value is None or isinstance(value, (bool, str)):
        return repr(value)[:80]
    # Of a module only a criterion says something: the models are the guard's own.
    is_function = isinstance(value, (functools.partial, types.FunctionType, types.MethodType))
    if is_function or (callable(value) and not isinstance(value, type) and not getattr(value, "_parameters", None)):
        return _described(value, depth) if depth else ""
    return ""


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - it raises when empty
    except ValueError:
        return False
    return True


class Identities:
    """Keys of the loss functions of one run: equal for the same one, as long as it exists."""

    def __init__(self) -> None:
        self._kinds: dict[str, set[Any]] = {}
        self._numbers: dict[int, tuple[Callable[[], Any], int]] = {}
        self._last: tuple[Callable[[], Any], Any] = (lambda: None, None)

    def key(self, loss_fn: Any) -> Any:
        """Return a hashable key; of a function with too many kinds that of its code."""
        if self._last[0]() is loss_fn:  # asked several times in a step
            return self._last[1]
        key = self._key(loss_fn)
        with contextlib.suppress(TypeError):
            self._last = weakref.ref(loss_fn), key
        return key

    def _key(self, loss_fn: Any) -> Any:
        code = _described(loss_fn, 0)
        kinds = self._kinds.setdefault(code, set())
        if len(kinds) > _VARIANTS:
            return code
        found = description_of(loss_fn), tuple(self._number(each) for each in _owners(loss_fn))
        kinds.add(found)
        return found if len(kinds) <= _VARIANTS else code

    def _number(self, owner: Any) -> int:
        known = self._numbers.get(id(owner))
        if known is not None and known[0]() is owner:
            return known[1]
        try:
            reference = weakref.ref(owner)
        except TypeError:
            return 0
        self._numbers[id(owner)] = reference, len(self._numbers) + 1
        return self._numbers[id(owner)][1]


def _owners(loss_fn: Any) -> list[Any]:
    """Return the objects that a loss function belongs to: what a method is bound to, or a callable object itself."""
    if isinstance(loss_fn, TwoPass):
        return [*_owners(loss_fn.outputs), *_owners(loss_fn.loss)]
    if isinstance(loss_fn, functools.partial):
        return _owners(loss_fn.func)
    if isinstance(loss_fn, types.MethodType):
        return [loss_fn.__self__]
    return [] if hasattr(loss_fn, "__code__") else [loss_fn]
