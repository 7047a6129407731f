"""Which objects in the script's variables are saved, and in which form.

A saved variable is a tree of plain values that a checkpoint can store. Numbers, strings and None
stand for themselves. Anything else is a list that begins with its kind:

``["list", id, items]``, and alike for tuple, set, frozenset, deque and dict
``["object", id, class, attributes]``   an instance of a class of the script
``["enum", class, name]``              a member of an enumeration of the script
``["class", id, class, attributes]``    a class of the script, for its own attributes
``["tensor", id, tensor, requires_grad, device]``
``["array", id, array]``                a NumPy array
``["number", value]``                   a complex number, bytes, a NumPy number, a path, a dtype
``["generator", state]``                a random generator
``["module", attributes, state]``       a torch module; `state` is None if the guard saves it
``["stateful", class, state]``          any other object with a ``state_dict``
``["loader", states]``                  the random generators and samplers of a loader
``["same", id]``                        an object that occurred before
``["unchanged"]``                       data that is large and has not changed since training began
``["omitted", class]``                  anything else; it stays as the script has created it
"""

from __future__ import annotations

import argparse
import collections
import random
import types
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from holdfast.checkpoint.codec import Encoder
from holdfast.core.errors import CheckpointError
from holdfast.guard.unchanged.stack import is_script_class

# A saved variable.
Tree = Any

SCALARS = (bool, int, float, str, type(None))
# Values that a checkpoint can store as they are.
PLAIN_VALUES = (complex, bytes, np.generic, PurePath, torch.dtype, torch.device, torch.Size)
CONTAINERS = (list, tuple, set, frozenset, collections.deque)
MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
_PLAIN_CLASSES = (argparse.Namespace, types.SimpleNamespace)
# The attributes of every module, which torch manages.
_ATTRIBUTES_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
# A container with more entries than this is considered to be data, which the script does not
# change.
MOST_ENTRIES = 1_000_000
# Tensors and arrays up to this size are always saved. Larger ones are saved only if they have
# changed since training began.
SMALL_BYTES = 1 << 16


def kind_of(value: Any) -> str:
    """Return the kind under which a value is saved; see the module's docstring."""
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, np.ndarray):
        return "array" if not value.dtype.hasobject else "omitted"
    if isinstance(value, PLAIN_VALUES):
        return "number"
    if type(value) in CONTAINERS or type(value) in MAPPINGS:
        return type(value).__name__ if len(value) <= MOST_ENTRIES else "omitted"
    return _kind_of_object(value)


def _kind_of_object(value: Any) -> str:
    if isinstance(value, nn.Module):
        return "module"
    if isinstance(value, DataLoader):
        return "loader"
    if isinstance(value, (torch.Generator, np.random.Generator, random.Random)):
        return "generator"
    if isinstance(value, type):
        return "class" if is_script_class(value) else "omitted"
    if isinstance(value, Enum):
        return "enum" if is_script_class(type(value)) else "omitted"
    # The contents of a dataset are data, and the order of a sampler belongs to its loader.
    if isinstance(value, (Dataset, Sampler, torch.optim.Optimizer)):
        return "omitted"
    if type(value) in _PLAIN_CLASSES or (
        is_script_class(type(value)) and hasattr(value, "__dict__")
    ):
        return "object"
    if callable(getattr(value, "state_dict", None)) and hasattr(value, "load_state_dict"):
        return "stateful"
    return "omitted"


def class_name(cls: type) -> str:
    """Return the name under which a class is saved."""
    return f"{cls.__module__}:{cls.__qualname__}"


def attributes_of_module(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that its ``state_dict`` lacks.

    These are the attributes that its own class has added, the flag ``training`` of torch, and
    buffers that are registered with ``persistent=False``.
    """
    is_own_class = is_script_class(type(module))
    attributes: dict[str, Any] = {"training": module.training}
    if is_own_class:
        own_names = vars(module).keys() - _ATTRIBUTES_OF_MODULES
        attributes |= {name: vars(module)[name] for name in sorted(own_names)}
    for name in module._non_persistent_buffers_set:
        attributes[name] = module._buffers.get(name)
    return attributes


def attributes_of_class(cls: type) -> dict[str, Any]:
    """Return the attributes of a class that may be data, without its methods."""
    return {
        name: value
        for name, value in vars(cls).items()
        if not name.startswith("__") and (isinstance(value, SCALARS) or _is_container(value))
    }


def _is_container(value: Any) -> bool:
    return type(value) in CONTAINERS or type(value) in MAPPINGS


def can_be_stored(state: Any) -> bool:
    """Return whether a checkpoint can store the state of an object."""
    try:
        Encoder("script").encode(state)
    except (CheckpointError, RecursionError):
        return False
    return True
