"""`description_of`: a text that identifies a loss function.

A lambda in a loop is a new object in each iteration, but always the same function. On the other
hand, two partials of a function with different values of ``reduction`` are different functions.
Functions are therefore identified by their code, and by the strings and flags that are bound to
them. Numbers are ignored, since otherwise a step number or a changing weight would make a new
function in every step.
"""

from __future__ import annotations

import functools
import types
import zlib
from collections.abc import Iterable
from typing import Any

from torch import nn

from holdfast.guard.splitting.two_pass import TwoPass

# The attributes that every module has.
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
# The number of levels of partials, methods and closures to follow.
_DEPTH = 3


def description_of(loss_fn: Any, depth: int = _DEPTH) -> str:
    """Return a text that identifies a loss function, and stays the same after a restart.

    The text consists of the name, line and checksum of the code, followed by the values that are
    bound to the function: arguments of a partial, the object of a method, closure variables,
    defaults, and attributes of a callable object. Among these values, only None, strings, bools and
    callables without weights (such as a criterion) count. Numbers and tensors never do, since they
    may change in every step. Of the global variables that the code uses, strings and bools count.

    Args:
        loss_fn: The loss function.
        depth: How many levels of callables inside callables to follow. With 0, only the code
            counts.
    """
    if isinstance(loss_fn, TwoPass):
        return f"{description_of(loss_fn.outputs, depth)} {description_of(loss_fn.loss, depth)}"
    if isinstance(loss_fn, functools.partial):
        name = description_of(loss_fn.func, depth)
        bound = _arguments_of(loss_fn)
    elif isinstance(loss_fn, types.MethodType):
        name = description_of(loss_fn.__func__, depth)
        bound = [loss_fn.__self__]
    elif getattr(loss_fn, "__code__", None) is not None:
        name = _name_of(loss_fn.__code__)
        bound = [*_closure_of(loss_fn), *_defaults_of(loss_fn), *_global_flags_of(loss_fn)]
    else:
        name = type(loss_fn).__qualname__
        bound = [
            value
            for key, value in getattr(loss_fn, "__dict__", {}).items()
            if key not in MODULE_ATTRIBUTES
        ]
    return _with_bound_values(name, bound, depth)


def _arguments_of(partial: functools.partial[Any]) -> list[Any]:
    """Return the arguments of a partial, with keyword arguments sorted by name."""
    return [*partial.args, *(partial.keywords[name] for name in sorted(partial.keywords))]


def _closure_of(function: Any) -> list[Any]:
    """Return the values of a function's closure variables that have been assigned."""
    values = []
    for cell in function.__closure__ or ():
        try:  # noqa: SIM105 - `suppress` is slower, and this runs in every step
            values.append(cell.cell_contents)
        except ValueError:
            # The variable has not been assigned yet.
            pass
    return values


def _defaults_of(function: Any) -> list[Any]:
    """Return the default values of a function's parameters."""
    return [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _global_flags_of(function: Any) -> list[Any]:
    """Return the strings and bools in global variables that a function uses.

    A function in a script may use flags that are stored there.
    """
    global_variables = getattr(function, "__globals__", {})
    flags = []
    for name in function.__code__.co_names:
        value = global_variables.get(name)
        if type(value) in (bool, str):
            flags.append(value)
    return flags


@functools.lru_cache(maxsize=256)
def _name_of(code: types.CodeType) -> str:
    # The checksum distinguishes two lambdas on the same line.
    checksum = zlib.crc32(code.co_code + repr(code.co_names).encode())
    return f"{code.co_qualname}:{code.co_firstlineno}:{checksum:x}"


def _with_bound_values(name: str, bound: Iterable[Any], depth: int) -> str:
    """Return a name, followed in parentheses by the descriptions of the bound values that count."""
    if depth == 0:
        return name
    descriptions = []
    for value in bound:
        description = _describe_value(value, depth - 1)
        if description:
            descriptions.append(description)
    return f"{name}({', '.join(descriptions)})" if descriptions else name


def _describe_value(value: Any, depth: int) -> str:
    """Return a text that identifies a bound value, or an empty string for a value to ignore."""
    if value is None or isinstance(value, (bool, str)):
        return repr(value)[:80]
    # Modules without weights are criteria, which count. Modules with weights are models.
    if depth == 0 or not callable(value) or isinstance(value, type) or _has_weights(value):
        return ""
    return description_of(value, depth)


def _has_weights(value: Any) -> bool:
    attributes = value.__dict__ if isinstance(value, nn.Module) else {}
    return bool(attributes.get("_parameters")) or any(
        map(_has_weights, attributes.get("_modules", {}).values())
    )
