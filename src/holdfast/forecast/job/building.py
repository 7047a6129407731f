"""Run the user's factory.

Import it, call it, read what it returns, and say with the user's own line why that fails.

A factory returns a dict:

    {"model": …, "optimizer": …, "loss_fn": f, "batch": …}    f(batch) or f(model, batch) returns
    the loss {"model": …, "optimizer": …, "step": f, "batch": …}       f(batch), f(model, batch) or
    f(guard, batch) is a step {"model": …, "optimizer": …, "step": f}
    f(batch_size)

Models and optimizers may be dicts. Other keys, such as ``scheduler``, are passed over. A factory
with a parameter ``micro_batch_size`` is called with it.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.core.errors import HoldfastError, PolicyError
from holdfast.core.user_modules import import_user_module
from holdfast.forecast.trace.attribution import line_of

_NEEDS_CUDA = re.compile(
    r"cuda|nvidia|cudnn|libc10_hip|flash[_-]attn|triton|apex|xformers|bitsandbytes", re.IGNORECASE
)
_SIZE_NAMES = ("micro_batch_size", "batch_size")

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What a factory returned, checked.

    Models and optimizers by name, a loss function or a step, a sample batch.

    `is_step`: it certainly makes the whole step; else that shows when it is called. `split`: the
        batch's dimension.
    """

    models: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]
    function: Function
    is_step: bool
    batch: Any
    has_batch: bool
    batch_size: int | None = None
    split: int = 0


def load_factory(name: str) -> Function:
    """Return the function that ``module:function`` or ``file.py:function`` names (H411, or H410
    if it needs CUDA).
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise _unusable(
            name,
            "(there is no function after a colon)",
            "write package.module:build or file.py:build.",
        )
    sys.argv = [place]  # a script that reads its arguments gets none of ours
    try:
        found = getattr(import_user_module(place), attribute)
    except HoldfastError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's module does when it is imported
        raise _failed(name, "while it was imported", error) from error
    if not callable(found):
        raise _unusable(
            name,
            f"(it is a {type(found).__name__})",
            "name a function that returns what is to be traced.",
        )
    return found  # type: ignore[no-any-return]


def call_factory(name: str, factory: Function, *, size: int) -> Built:
    """Call a factory, with `size` if it has a parameter for it, and read what it returns.

    H410 or H411 if it raises, H412 if it returns something else.
    """
    given = {key: size for key in _SIZE_NAMES if key in inspect.signature(factory).parameters}
    try:
        returned = factory(**given)
    except HoldfastError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's function does
        raise _failed(name, "when it was called", error) from error
    built = _read(name, factory, returned)
    return dataclasses.replace(built, batch_size=size) if given else built


def _read(name: str, factory: Function, returned: Any) -> Built:
    if not isinstance(returned, Mapping):
        raise _wrong(name, factory, f"a {type(returned).__name__}")
    missing = [key for key in ("model", "optimizer") if key not in returned]
    is_step, has_batch, batch = "step" in returned, "batch" in returned, returned.get("batch")
    if not has_batch and not is_step:
        missing.append("batch")
    if missing:
        raise _wrong(
            name,
            factory,
            f"a dict with {', '.join(map(repr, returned))}, without {' and '.join(missing)}",
        )
    function = returned["step"] if is_step else returned.get("loss_fn")
    if not callable(function):
        raise _wrong(
            name, factory, f"a {type(function).__name__} as {'step' if is_step else 'loss_fn'}"
        )
    size, split = returned.get("batch_size"), returned.get("split", 0)
    return Built(
        models=_named(name, factory, returned["model"], "model", nn.Module),
        optimizers=_named(name, factory, returned["optimizer"], "optimizer", Optimizer),
        function=function,
        is_step=is_step,
        batch=batch,
        has_batch=has_batch,
        batch_size=size if isinstance(size, int) else None,
        split=split if isinstance(split, int) else 0,
    )


def _named(name: str, factory: Function, given: Any, what: str, kind: type) -> dict[str, Any]:
    found = dict(given) if isinstance(given, Mapping) else {what: given}
    for value in found.values():
        if not isinstance(value, kind):
            several = f"; several go into a dict by name: {{'a': {what}_a, 'b': {what}_b}}"
            is_list = isinstance(value, (list, tuple))
            raise _wrong(
                name, factory, f"a {type(value).__name__} as {what}" + (several if is_list else "")
            )
    if not found:
        raise _wrong(name, factory, f"no {what}")
    modules = (
        module
        for value in found.values()
        if isinstance(value, nn.Module)
        for module in value.modules()
    )
    if any(isinstance(module, torch.jit.ScriptModule) for module in modules):
        raise _wrong(
            name,
            factory,
            f"a {what} made by torch.jit, of which a trace sees nothing: return it uncompiled",
        )
    return found


def positional_parameters(function: Function) -> list[str]:
    """Return the names of the parameters that a function must be given."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return []
    return [
        name
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.default is parameter.empty
    ]


def place_of(function: Any) -> str:
    """Return where a function is defined, ``" (model.py:12)"``, or an empty string."""
    code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
    return "" if code is None else f" ({Path(code.co_filename).name}:{code.co_firstlineno})"


def first_line(error: BaseException) -> str:
    """Return the class of an error and the first line of what it says."""
    text = str(error).strip()
    return (
        f"{type(error).__name__}: {text.splitlines()[0].rstrip('.')}"
        if text
        else type(error).__name__
    )


def _failed(name: str, when: str, error: BaseException) -> PolicyError:
    line = line_of(error)
    why = f"{when}: {first_line(error)}" + (f", at {line}" if line else "")
    if not _NEEDS_CUDA.search(str(error)):
        fix = (
            "correct what the message names; in the module and the function tensors have shapes and"
            " no values."
        )
        return _unusable(name, why, fix)
    return PolicyError(
        f"factory {name!r} needs CUDA {why}",
        limit=(
            "a forecast has no GPU, and what stands for one answers torch.cuda and device='cuda'"
            " only"
        ),
        fix=(
            "import what needs a real GPU inside the function that uses it, or leave it out of"
            " build(): a plain torch module in its place needs about the same memory."
        ),
        rule="H410",
    )


def _unusable(name: str, why: str, fix: str) -> PolicyError:
    return PolicyError(
        f"factory {name!r} cannot be used {why}",
        limit=(
            "it names a function of a module, or of a file that ends with .py, which returns what"
            " is to be traced"
        ),
        fix=fix,
        rule="H411",
    )


def _wrong(name: str, factory: Function, what: str) -> PolicyError:
    return PolicyError(
        f"factory {name!r}{place_of(factory)} returned {what}",
        limit=(
            "a forecast needs a model, an optimizer, and a loss function with a sample batch or a"
            " step"
        ),
        fix='return {"model": model, "optimizer": optimizer, "loss_fn": loss_fn, "batch": batch}.',
        rule="H412",
    )
