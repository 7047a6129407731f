"""Determine which objects in the script's variables are saved, and in which form.

A number, string, bool or None is saved as it is. Anything else is saved as a dict of plain values
with these entries. `id` is a number by which other saved values refer to the same object.

``list``, ``tuple``, ``set`` and ``frozenset``
    `id`, `items`
``deque``
    `id`, `items`, `maxlen`
``dict``
    `id`, `type`: the name of a mapping type, such as ``"Counter"``, `entries`: pairs of a key and a
    value, `factory`: the class that a defaultdict calls for a new entry, or None
``namedtuple``: an instance of a `NamedTuple` of the script
    `id`, `class`, `items`
``object``: an instance of a class of the script
    `id`, `class`, `attributes`, `entries` and `items`: None unless the class is derived from dict
    or list
``enum``: a member of an enumeration of the script
    `class`, `name`
``class``: a class of the script, with the attributes that are data
    `id`, `class`, `attributes`
``function``: a function of the script with variables of its own
    `id`, `attributes`, `closure`, `defaults`
``tensor``
    `id`, `tensor`, `device`, `requires_grad`, `is_part_of_model`
``array``: a NumPy array
    `id`, `array`
``placeholder``: a large tensor or array after a finished loop, such as the last batch
    `shape`, `dtype`, `device`: None for an array
``plain``: a complex number, bytes, a NumPy number, a path, a dtype
    `value`
``module``: a torch module
    `id`: None if the guard saves the module, `class`, `attributes_of_parts`, `state`: None if the
    guard saves all its tensors
``optimizer``
    `id`, `class`, `attributes`: those that its ``state_dict`` lacks
``stateful``: any other object with a ``state_dict``
    `class`, `state`
``generator``: a random generator
    `state`
``dataset``: the attributes of a dataset of the script that training may change
    `id`, `attributes`
``loader``: the random generators, samplers and dataset of a loader
    `sources`, `samplers`, `dataset`
``same``: an object that occurred before
    `id`
``unchanged``: large data that has not changed since training began
``omitted``: anything else; a resumed script keeps the object that it has created itself
    `class`
"""

from __future__ import annotations

import argparse
import collections
import inspect
import types
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from functools import cache
from pathlib import PurePath
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset

from holdfast.checkpoint.codec import Encoder
from holdfast.core.errors import CheckpointError
from holdfast.guard.unchanged.frames import is_script_class, is_script_file
from holdfast.loader.random_state import GENERATOR_TYPES

# The saved form of a variable: a scalar, or a dict with the entry "kind".
Saved = Any
# The saved variables of the script, by namespace and name; see ``namespaces``.
SavedVariables = dict[str, dict[str, Saved]]

SCALARS = (bool, int, float, str, type(None))
# Values without parts that a checkpoint can store.
PLAIN_VALUES = (complex, bytes, np.generic, PurePath, torch.dtype, torch.device, torch.Size)
CONTAINERS = (list, tuple, set, frozenset, collections.deque)
MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
# NumPy's one-letter dtype kinds of the scalars that a checkpoint can store: booleans and numbers.
_NUMBER_KINDS = "biufc"
_PLAIN_CLASSES = (argparse.Namespace, types.SimpleNamespace)
# The kinds of instances of some classes and of classes derived from them.
_KINDS_OF_OBJECTS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (nn.Module, "module"),
    (DataLoader, "loader"),
    (GENERATOR_TYPES, "generator"),
    (Dataset, "dataset"),
    (torch.optim.Optimizer, "optimizer"),
)
# The attributes of every module, which torch manages.
_ATTRIBUTES_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
# The attributes of every optimizer, which torch manages.
_ATTRIBUTES_OF_OPTIMIZERS = frozenset(vars(torch.optim.SGD([torch.zeros(1)])))
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
        return "tensor" if _is_storable_tensor(value) else "omitted"
    if has_type(value, np.ndarray):
        return "array" if _is_storable_array(value) else "omitted"
    if has_type(value, np.generic) and value.dtype.kind not in _NUMBER_KINDS:
        return "omitted"
    if has_type(value, PLAIN_VALUES):
        return "plain"
    if is_container(value):
        return _kind_of_container(value)
    return _kind_of_object(value)


def _is_storable_tensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has dense memory of its own, which a checkpoint can store."""
    if is_lazy(tensor):
        # A lazy parameter raises an error when it is asked for its layout or size.
        return False
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        return False
    # A subclass with this method, such as a DTensor, keeps its values in other tensors.
    return not hasattr(type(tensor), "__tensor_flatten__")


def _is_storable_array(array: np.ndarray[Any, Any]) -> bool:
    """Return whether a checkpoint can store an array: not if it is complex or masked."""
    return type(array) in (np.ndarray, np.memmap) and _is_storable_dtype(array.dtype)


@cache
def _is_storable_dtype(dtype: np.dtype[Any]) -> bool:
    return can_be_stored(np.empty(0, dtype))


def _kind_of_container(value: Any) -> str:
    if len(value) > MOST_ENTRIES:
        return "omitted"
    return "dict" if type(value) in MAPPINGS else type(value).__name__


def is_container(value: Any) -> bool:
    """Return whether a value is a container whose entries are saved."""
    return type(value) in CONTAINERS or type(value) in MAPPINGS


def _kind_of_object(value: Any) -> str:
    if has_type(value, FunctionType):
        return "function" if has_variables(value) else "omitted"
    for classes, kind in _KINDS_OF_OBJECTS:
        if has_type(value, classes):
            return kind
    if has_type(value, type):
        return "class" if is_script_class(value) else "omitted"
    if type(value) in _PLAIN_CLASSES:
        return "object"
    if is_script_class(type(value)):
        return _kind_of_instance(value)
    return "stateful" if _has_state_dict(type(value)) else "omitted"


def _kind_of_instance(value: Any) -> str:
    """Return the kind of an instance of a class of the script."""
    if has_type(value, Enum):
        return "enum"
    if has_type(value, tuple) and hasattr(type(value), "_fields"):
        return "namedtuple"
    return "object"


def _has_state_dict(cls: type) -> bool:
    # The class is asked, because reading attributes of an object may run its code.
    return callable(getattr(cls, "state_dict", None)) and hasattr(cls, "load_state_dict")


def attributes_of_object(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, in its dict and in its slots."""
    attributes = {
        name: getattr(value, name) for name in slots_of(type(value)) if hasattr(value, name)
    }
    # If all attributes are in slots, the object has no dict.
    with suppress(TypeError):
        attributes |= vars(value)
    return attributes


def attributes_of_dataset(dataset: Dataset[Any]) -> dict[str, Any]:
    """Return the attributes of a dataset of the script that training may change.

    These are numbers and strings, such as an epoch, and data that the script may replace, such as
    pseudo-labels or a list of the samples that are still used. Other objects, such as transforms
    and open files, are left out.
    """
    if not is_script_class(type(dataset)):
        return {}
    return {
        name: value
        for name, value in attributes_of_object(dataset).items()
        if type(value) in SCALARS
        or is_container(value)
        or has_type(value, (torch.Tensor, np.ndarray))
    }


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


# Classes of Python that a `defaultdict` often calls for a new entry, by name.
FACTORIES = {
    class_name(cls): cls
    for cls in (int, float, bool, str, list, dict, set, tuple, *MAPPINGS, collections.deque)
}


def attributes_of_module(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that its ``state_dict`` lacks.

    These are torch's flag ``training``, the attributes that `_added_attributes` returns, and
    buffers that are registered with ``persistent=False``.
    """
    attributes: dict[str, Any] = {"training": module.training}
    attributes |= _added_attributes(module, _ATTRIBUTES_OF_MODULES)
    for name in module._non_persistent_buffers_set:
        attributes[name] = module._buffers.get(name)
    return attributes


def attributes_of_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer that its ``state_dict`` lacks, such as a counter.

    The optimizer may be a class of the script that has no ``state_dict`` of its own.
    """
    return _added_attributes(optimizer, _ATTRIBUTES_OF_OPTIMIZERS)


def _added_attributes(value: Any, names_of_torch: frozenset[str]) -> dict[str, Any]:
    """Return the attributes of a module or an optimizer that torch does not manage.

    If its class is not of the script, these are only numbers and strings: the library may keep
    tensors in other attributes, for example the weights of an LSTM in a list, but scripts add
    counters such as ``model.global_step``.
    """
    is_of_script = is_script_class(type(value))
    return {
        name: attribute
        for name, attribute in sorted(vars(value).items())
        if name not in names_of_torch
        and (is_of_script or (type(attribute) in SCALARS and not name.startswith("_")))
    }


def attributes_of_class(cls: type) -> dict[str, Any]:
    """Return the attributes of a class that may be data: numbers, strings and containers."""
    return {
        name: value
        for name, value in vars(cls).items()
        if not name.startswith("__") and (type(value) in SCALARS or _is_data_of_class(value))
    }


def _is_data_of_class(value: Any) -> bool:
    kinds = ("tensor", "array", "plain", "object", "namedtuple")
    return is_container(value) or kind_of(value) in kinds


def can_be_stored(state: Any) -> bool:
    """Return whether a checkpoint can store the state of an object."""
    try:
        Encoder("script").encode(state)
    except (CheckpointError, RecursionError):
        return False
    return True


def storage_address(tensor: torch.Tensor) -> int | None:
    """Return where the contents of a tensor are in memory, or None if it has none."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.numel() == 0:
        return None
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return None
