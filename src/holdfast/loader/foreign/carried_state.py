"""Find the state that another library's loader carries from epoch to epoch, so that it is saved.

This state mostly consists of random generators. A dataset usually stores its generator in an
attribute or in a transform, but some datasets use a generator in a global variable of their module.
Two searches of limited depth find these generators:

1. `_reachable` starts from the parts of the loader and follows attributes and containers.
2. `_generators_in_globals` takes the functions found by the first search, such as the methods of
   the dataset's class, and looks up the global variables that their code uses.

If both searches miss a generator, a resume does not restore it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler

from holdfast.loader.order.sampler_state import fingerprint
from holdfast.loader.random_state import GENERATOR_TYPES
from holdfast.loader.samplers import has_no_state, is_stateful, samplers_of, torch_loader_of

# Limits of the searches. Objects that are nested more deeply, or that are in longer containers, are
# assumed to be data.
_MAX_LEVELS = 6
_MAX_CONTAINER_LENGTH = 64
_MAX_OBJECTS = 2000

# Libraries that are not searched, because a user's dataset does not draw from generators in their
# global variables.
_LIBRARIES = (
    "builtins",
    "collections",
    "functools",
    "numpy",
    "random",
    "torch",
    "torchvision",
    "typing",
)


def sources_of_state(loader: object) -> list[Any]:
    """Return the stateful objects that a loader uses: generators, and samplers with a state_dict.

    If two loaders were created in the same way, their objects are returned in the same order.
    """
    holders = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    sources = _generators_among([value for holder in holders for value in _attributes(holder)])
    torch_loader = torch_loader_of(loader)
    if torch_loader is not None:
        samplers = samplers_of(torch_loader)
        parts = [*samplers, torch_loader.dataset, torch_loader.collate_fn]
        sources += _generators_among(_reachable([torch_loader.generator, *parts]))
        sources += [sampler for sampler in samplers if is_stateful(sampler)]
        sources += _generators_in_globals(_reachable(parts))
    # Remove duplicates.
    return list({id(source): source for source in sources}.values())


def digest_order(loader: object) -> bytes | None:
    """Return a digest of the values that the script passed to determine the order of an epoch.

    These values are a list of batches, or the arguments of torch's own samplers, such as weights.
    Returns None if the loader has neither, or if one of its samplers has a ``set_epoch`` or carries
    state.
    """
    # Batches are compared by identity, not by content.
    if isinstance(loader, (list, tuple)):
        return repr([id(entry) for entry in loader]).encode()
    torch_loader = torch_loader_of(loader)
    if torch_loader is None:
        return None
    # A BatchSampler's order is determined by the sampler inside it.
    samplers = [
        sampler for sampler in samplers_of(torch_loader) if type(sampler) is not BatchSampler
    ]
    if not samplers:
        return None
    if any(hasattr(sampler, "set_epoch") or not has_no_state(sampler) for sampler in samplers):
        return None
    arguments = fingerprint(samplers, torch_loader.dataset)
    return arguments.digest if arguments.is_complete else None


def _generators_in_globals(values: Iterable[Any]) -> list[Any]:
    """Return the random generators that functions use through global variables.

    The search covers the functions among the values, the methods of the values, and all functions
    that are called through a global name from any of these.
    """
    waiting = [function for value in values for function in _functions_of(value)]
    searched: set[int] = set()
    generators: list[Any] = []
    while waiting and len(searched) < _MAX_OBJECTS:
        function = waiting.pop()
        if id(function) in searched or _is_of_library(function.__module__):
            continue
        searched.add(id(function))
        for name in sorted(_names_in(function.__code__)):
            value = function.__globals__.get(name)
            if isinstance(value, GENERATOR_TYPES):
                generators.append(value)
            elif isinstance(value, FunctionType):
                waiting.append(value)
    return generators


def _generators_among(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if isinstance(value, GENERATOR_TYPES)]


# --- attributes and containers --------------------------------------------------------------------


def _reachable(values: Iterable[Any]) -> list[Any]:
    """Return the values and all objects reachable from them, up to a limited depth.

    The nearest objects come first.
    """
    reached: dict[int, Any] = {}
    level = list(values)
    for _ in range(_MAX_LEVELS):
        next_level: list[Any] = []
        new_values = [value for value in level if id(value) not in reached]
        for value in new_values[: _MAX_OBJECTS - len(reached)]:
            # The same object can occur twice in a level.
            if id(value) not in reached:
                reached[id(value)] = value
                next_level += _parts_of(value)
        level = next_level
    return list(reached.values())


def _parts_of(value: Any) -> Iterable[Any]:
    """Return the objects that an object refers to.

    Long containers and arrays are assumed to contain data, so their contents are not returned.
    """
    if isinstance(value, Mapping):
        return list(value.values()) if len(value) <= _MAX_CONTAINER_LENGTH else ()
    if isinstance(value, (list, tuple)):
        return value if len(value) <= _MAX_CONTAINER_LENGTH else ()
    if isinstance(value, MethodType):
        return (value.__self__,)
    if isinstance(value, FunctionType):
        return _closure_of(value)
    return _attributes(value)


def _attributes(value: Any) -> list[Any]:
    """Return the values of an object's attributes, or [] for an array, a class or a module."""
    if isinstance(value, (torch.Tensor, np.ndarray, type, ModuleType)):
        return []
    return list(getattr(value, "__dict__", {}).values())


def _closure_of(function: FunctionType) -> list[Any]:
    """Return the values that a function captures from enclosing functions."""
    values = []
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:
            # The captured variable has not been assigned yet.
            continue
    return values


# --- functions and their global variables ---------------------------------------------------------


def _functions_of(value: Any) -> list[FunctionType]:
    """Return the value itself if it is a function, or the methods from the user's own classes."""
    if isinstance(value, FunctionType):
        return [value]
    functions = []
    for cls in type(value).__mro__:
        if not _is_of_library(cls.__module__):
            functions += [
                attribute for attribute in vars(cls).values() if isinstance(attribute, FunctionType)
            ]
    return functions


def _is_of_library(module: str | None) -> bool:
    return str(module).split(".")[0] in _LIBRARIES


def _names_in(code: CodeType) -> set[str]:
    """Return the global names used in a function's code, including nested functions."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names
