"""Determine which objects in the script's variables are saved, and in which form.

A saved variable is a tree of plain values that a checkpoint can store. Numbers, strings and None
are saved as they are. Anything else is a list that begins with its kind:

``["list", id, items]``                 likewise ``"tuple"``, ``"set"`` and ``"frozenset"``
``["deque", id, items, maxlen]``
``["dict", id, entries, type, factory]``
                                        pairs of a key and a value; `type` is the name of a mapping
                                        type, such as ``"Counter"``, and `factory` is the class that
                                        a defaultdict calls, or None
``["namedtuple", id, class, items]``    an instance of a `NamedTuple` of the script
``["object", id, class, attributes, items]``
                                        an instance of a class of the script; `items` is None unless
                                        the class is derived from dict or list
``["enum", class, name]``               a member of an enumeration of the script
``["class", id, class, attributes]``    a class of the script, with the attributes that are data
``["tensor", id, tensor, requires_grad, device]``
``["array", id, array]``                a NumPy array
``["number", value]``                   a complex number, bytes, a NumPy number, a path, a dtype
``["generator", state]``                a random generator
``["module", id, class, attributes, state]``
                                        a torch module; `state` is None if the guard saves it
``["function", id, attributes, closure, defaults]``
                                        a function of the script with variables of its own
``["stateful", class, state]``          any other object with a ``state_dict``
``["dataset", id, numbers]``            the numbers among the attributes of a dataset of the script
``["loader", states, samplers]``        the random generators and samplers of a loader
``["same", id]``                        an object that occurred before
``["unchanged"]``                       large data that has not changed since training began
``["omitted", class]``                  anything else; a resumed script keeps the object that it has
                                        created itself
"""

from __future__ import annotations

import argparse
import collections
import inspect
import types
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from pathlib import PurePath
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from holdfast.checkpoint.codec import Encoder
from holdfast.core.errors import CheckpointError
from holdfast.guard.unchanged.stack import is_script_class, is_script_file
from holdfast.loader.random_state import GENERATOR_TYPES

# A saved variable.
Tree = Any

SCALARS = (bool, int, float, str, type(None))
# Values without parts that a checkpoint can store.
PLAIN_VALUES = (complex, bytes, np.generic, PurePath, torch.dtype, torch.device, torch.Size)
CONTAINERS = (list, tuple, set, frozenset, collections.deque)
MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
# NumPy's one-letter dtype kinds of the arrays that a checkpoint can store: booleans and numbers.
_NUMBER_KINDS = "biufc"
_PLAIN_CLASSES = (argparse.Namespace, types.SimpleNamespace)
# The kinds of instances of some classes and of classes derived from them. Optimizers are omitted
# because the guard saves them.
_KINDS_OF_OBJECTS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (nn.Module, "module"),
    (DataLoader, "loader"),
    (GENERATOR_TYPES, "generator"),
    (Dataset, "dataset"),
    (torch.optim.Optimizer, "omitted"),
)
# The attributes of every module, which torch manages.
_ATTRIBUTES_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
# A container with more entries than this is considered to be data. The script creates it again in
# each attempt, so it is not saved.
MOST_ENTRIES = 1_000_000
# Tensors and arrays up to this size are always saved. Larger ones are saved only if they have
# changed since training began.
SMALL_BYTES = 1 << 16


def has_type(value: Any, types: type | tuple[type, ...]) -> bool:
    """Return whether a value is an instance of a type, without running code of the value.

    `isinstance` reads the attribute ``__class__``. Some objects compute it, and for example warn
    that they are deprecated.
    """
    return issubclass(type(value), types)


def kind_of(value: Any) -> str:
    """Return the kind under which a value is saved; see the module's docstring."""
    if has_type(value, torch.Tensor):
        return "tensor"
    if has_type(value, (np.ndarray, np.generic)) and value.dtype.kind not in _NUMBER_KINDS:
        return "omitted"
    if has_type(value, np.ndarray):
        return "array"
    if has_type(value, PLAIN_VALUES):
        return "number"
    if is_container(value):
        return type(value).__name__ if len(value) <= MOST_ENTRIES else "omitted"
    return _kind_of_object(value)


def is_container(value: Any) -> bool:
    """Return whether a value is a container whose entries are saved."""
    return type(value) in CONTAINERS or type(value) in MAPPINGS


def _kind_of_object(value: Any) -> str:
    if has_type(value, FunctionType):
        return "function" if has_variables(value) else "omitted"
    for classes, kind in _KINDS_OF_OBJECTS:
        if has_type(value, classes):
            return kind
    if has_type(value, (type, Enum)):
        cls = value if has_type(value, type) else type(value)
        if not is_script_class(cls):
            return "omitted"
        return "class" if cls is value else "enum"
    if has_type(value, tuple) and hasattr(type(value), "_fields"):
        return "namedtuple" if is_script_class(type(value)) else "omitted"
    if type(value) in _PLAIN_CLASSES or is_script_class(type(value)):
        return "object"
    # The class is asked, because reading attributes of the object may run its code.
    has_state_dict = callable(getattr(type(value), "state_dict", None))
    if has_state_dict and hasattr(type(value), "load_state_dict"):
        return "stateful"
    return "omitted"


def attributes_of_object(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, in its dict and in its slots."""
    attributes = {
        name: getattr(value, name) for name in slots_of(type(value)) if hasattr(value, name)
    }
    # If all attributes are in slots, the object has no dict.
    with suppress(TypeError):
        attributes |= vars(value)
    return attributes


def numbers_of_dataset(dataset: Dataset[Any]) -> dict[str, Any]:
    """Return the attributes that may change while samples are made. All others are data."""
    if not is_script_class(type(dataset)):
        return {}
    attributes = attributes_of_object(dataset)
    return {name: value for name, value in attributes.items() if type(value) in (bool, int, float)}


def slots_of(cls: type) -> Iterator[str]:
    """Yield the names of the slots of a class of the script."""
    for base in cls.__mro__:
        for name, member in vars(base).items():
            if inspect.ismemberdescriptor(member) and is_script_class(base):
                yield name


def has_variables(function: FunctionType) -> bool:
    """Return whether a function of the script has attributes, a closure or mutable defaults."""
    if not is_script_file(inspect.unwrap(function).__code__.co_filename):
        return False
    defaults = function.__defaults__ or ()
    return bool(
        vars(function) or variables_of_closure(function) or any(map(is_container, defaults))
    )


def variables_of_closure(function: FunctionType) -> dict[str, types.CellType]:
    """Return the variables of enclosing functions that a function of the script uses, by name."""
    if not is_script_file(function.__code__.co_filename):
        return {}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell for name, cell in cells if _has_contents(cell)}


def _has_contents(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        # The variable has no value yet.
        return False
    return True


def class_name(cls: type) -> str:
    """Return the name under which a class is saved."""
    return f"{cls.__module__}:{cls.__qualname__}"


def attributes_of_module(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that its ``state_dict`` lacks.

    These are the attributes that a class of the script adds, torch's flag ``training``, and buffers
    that are registered with ``persistent=False``.
    """
    attributes: dict[str, Any] = {"training": module.training}
    if is_script_class(type(module)):
        added_names = vars(module).keys() - _ATTRIBUTES_OF_MODULES
        attributes |= {name: vars(module)[name] for name in sorted(added_names)}
    for name in module._non_persistent_buffers_set:
        attributes[name] = module._buffers.get(name)
    return attributes


def attributes_of_class(cls: type) -> dict[str, Any]:
    """Return the attributes of a class that may be data: numbers, strings and containers."""
    return {
        name: value
        for name, value in vars(cls).items()
        if not name.startswith("__") and (type(value) in SCALARS or _is_data_of_class(value))
    }


def _is_data_of_class(value: Any) -> bool:
    kinds = ("tensor", "array", "number", "object", "namedtuple")
    return is_container(value) or kind_of(value) in kinds


def can_be_stored(state: Any) -> bool:
    """Return whether a checkpoint can store the state of an object."""
    try:
        Encoder("script").encode(state)
    except (CheckpointError, RecursionError):
        return False
    return True
