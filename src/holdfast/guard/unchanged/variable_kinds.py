"""Determine which objects in the script's variables are saved, and in which form.

A saved variable is a tree of plain values that a checkpoint can store. Numbers, strings and None
are saved as they are. Anything else is a list that begins with its kind:

``["list", id, items]``                 likewise ``"tuple"``, ``"set"`` and ``"frozenset"``
``["deque", id, items, maxlen]``
``["dict", id, entries, type]``         pairs of a key and a value; `type` is the name of a mapping
                                        type, such as ``"Counter"``
``["object", id, class, attributes, items]``
                                        an instance of a class of the script; `items` is None unless
                                        the class is derived from dict or list
``["enum", class, name]``               a member of an enumeration of the script
``["class", id, class, attributes]``    a class of the script, with the attributes that are data
``["tensor", id, tensor, requires_grad, device]``
``["array", id, array]``                a NumPy array
``["number", value]``                   a complex number, bytes, a NumPy number, a path, a dtype
``["generator", state]``                a random generator
``["module", attributes, state]``       a torch module; `state` is None if the guard saves it
``["stateful", class, state]``          any other object with a ``state_dict``
``["loader", states, samplers]``        the random generators and samplers of a loader
``["same", id]``                        an object that occurred before
``["unchanged"]``                       large data that has not changed since training began
``["omitted", class]``                  anything else; a resumed script keeps the object that it has
                                        created itself
"""

from __future__ import annotations

import argparse
import collections
import types
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from holdfast.checkpoint.codec import Encoder
from holdfast.core.errors import CheckpointError
from holdfast.guard.unchanged.stack import is_script_class
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
# The kinds of instances of some classes and of classes derived from them. Datasets are omitted
# because their contents are data, and optimizers because the guard saves them.
_KINDS_OF_OBJECTS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (nn.Module, "module"),
    (DataLoader, "loader"),
    (GENERATOR_TYPES, "generator"),
    ((Dataset, torch.optim.Optimizer), "omitted"),
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
    for classes, kind in _KINDS_OF_OBJECTS:
        if has_type(value, classes):
            return kind
    if has_type(value, (type, Enum)):
        cls = value if has_type(value, type) else type(value)
        if not is_script_class(cls):
            return "omitted"
        return "class" if cls is value else "enum"
    if type(value) in _PLAIN_CLASSES or is_script_class(type(value)):
        return "object" if _has_attributes(value) else "omitted"
    # The class is asked, because reading attributes of the object may run its code.
    has_state_dict = callable(getattr(type(value), "state_dict", None))
    if has_state_dict and hasattr(type(value), "load_state_dict"):
        return "stateful"
    return "omitted"


def _has_attributes(value: Any) -> bool:
    """Return whether an object has a dict of attributes, unlike an instance with ``__slots__``."""
    try:
        vars(value)
    except TypeError:
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
        if not name.startswith("__") and (type(value) in SCALARS or is_container(value))
    }


def can_be_stored(state: Any) -> bool:
    """Return whether a checkpoint can store the state of an object."""
    try:
        Encoder("script").encode(state)
    except (CheckpointError, RecursionError):
        return False
    return True
