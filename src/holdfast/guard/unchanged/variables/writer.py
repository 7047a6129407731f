"""`VariableWriter`: turn the variables of the script into values that a checkpoint can store.

The variables are the local variables of the script's functions on the stack, and the global
variables of its modules. `kinds` describes the saved values.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from types import FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from holdfast.guard.scheduler_state import state_of
from holdfast.guard.state.trees import copied
from holdfast.guard.unchanged.frames import is_script_class
from holdfast.guard.unchanged.variables.kinds import (
    FACTORIES,
    SCALARS,
    SMALL_BYTES,
    Saved,
    SavedVariables,
    attributes_of_class,
    attributes_of_dataset,
    attributes_of_module,
    attributes_of_object,
    attributes_of_optimizer,
    can_be_stored,
    class_name,
    has_type,
    has_variables,
    kind_of,
    storage_address,
    variables_of_closure,
)
from holdfast.guard.unchanged.variables.large_data import LargeData
from holdfast.guard.unchanged.variables.namespaces import namespace_of, namespaces
from holdfast.guard.unchanged.variables.random_sources import state_of_generator, states_of_sources
from holdfast.loader.samplers import samplers_of

# Global variables that Python itself assigns.
_OWN_NAMES_OF_MODULES = frozenset(
    {"__builtins__", "__cached__", "__doc__", "__file__", "__loader__", "__name__", "__package__",
     "__spec__", "__annotations__", "__warningregistry__"}
)  # fmt: skip
# The size up to which an intermediate result, such as the output of the model, is saved. The next
# step computes it again, so a large one is not worth saving.
_MOST_BYTES_OF_RESULT = 1 << 20


class VariableWriter:
    """Turns the variables of the script into values that a checkpoint can store.

    Args:
        guarded_ids: The `id` of each optimizer, module, parameter and buffer that the guard saves.
        large_data: Recognizes data that need not be saved.
        only_small: Whether to save only the shapes of large tensors and arrays.
    """

    def __init__(
        self,
        guarded_ids: frozenset[int],
        large_data: LargeData,
        *,
        only_small: bool = False,
    ) -> None:
        self._guarded_ids = guarded_ids
        self._large_data = large_data
        self._only_small = only_small
        # The number of each object that has been written, by its `id`. If it occurs again, this
        # number is written instead.
        self._numbers: dict[int, int] = {}
        # Keeps these objects alive, so that their ids are not reused.
        self._objects: list[Any] = []
        self._writers: dict[str, Callable[[Any, int], Saved]] = {
            "list": self._sequence,
            "tuple": self._sequence,
            "set": self._sequence,
            "frozenset": self._sequence,
            "deque": self._deque,
            "dict": self._dict,
            "namedtuple": self._namedtuple,
            "object": self._object,
            "class": self._class,
            "function": self._function,
            "tensor": self._tensor,
            "array": self._array,
            "module": self._module,
            "optimizer": self._optimizer,
            "stateful": self._stateful,
            "generator": self._generator,
            "dataset": self._dataset,
            "loader": self._loader,
        }

    def write(
        self, frames: list[FrameType], about_to_be_assigned: frozenset[str] = frozenset()
    ) -> SavedVariables:
        """Return the variables of the script by namespace and name.

        Args:
            frames: The frames of the script on the stack, from the innermost one outward.
            about_to_be_assigned: Local variables of the innermost frame that are left out, because
                the script assigns them next.
        """
        innermost = None
        if about_to_be_assigned and frames:
            innermost = namespace_of(frames[0], frames)
        saved = {}
        for name, variables in namespaces(frames).items():
            omitted = about_to_be_assigned if name == innermost else frozenset()
            saved[name] = self._namespace(variables, omitted)
        return saved

    def _namespace(self, variables: Mapping[str, Any], omitted: frozenset[str]) -> dict[str, Saved]:
        # Other threads may add variables meanwhile, so this iterates over a copy.
        return {
            name: self.saved(value)
            for name, value in list(variables.items())
            if name not in _OWN_NAMES_OF_MODULES and name not in omitted and _is_saved(value)
        }

    def saved(self, value: Any) -> Saved:
        """Return the saved form of a value."""
        if type(value) in SCALARS:
            return value
        kind = kind_of(value)
        if kind == "plain":
            return {"kind": "plain", "value": value}
        if kind == "enum":
            # A member exists only once, so it needs no number by which other variables refer to it.
            return {"kind": "enum", "class": class_name(type(value)), "name": value.name}
        if kind == "omitted":
            return _omitted(value)
        if id(value) in self._guarded_ids and kind != "optimizer":
            return self._guarded(value, kind)
        if id(value) in self._numbers:
            return {"kind": "same", "id": self._numbers[id(value)]}
        number = len(self._objects)
        self._numbers[id(value)] = number
        self._objects.append(value)
        return self._writers[kind](value, number)

    def _guarded(self, value: Any, kind: str) -> Saved:
        """Return the saved form of an object that the guard saves."""
        if kind == "module":
            return self._module(value, None)
        return _omitted(value)

    # --- containers

    def _items(self, values: Any) -> list[Saved]:
        if {type(item) for item in values} <= set(SCALARS):
            # This is fast for a long list of numbers, such as a history of losses.
            return list(values)
        return [self.saved(item) for item in values]

    def _sequence(self, value: Any, number: int) -> Saved:
        return {"kind": type(value).__name__, "id": number, "items": self._items(value)}

    def _deque(self, value: collections.deque[Any], number: int) -> Saved:
        return {"kind": "deque", "id": number, "items": self._items(value), "maxlen": value.maxlen}

    def _dict(self, value: dict[Any, Any], number: int) -> Saved:
        if not all(map(_is_key, value)):
            return _omitted(value)
        return {
            "kind": "dict",
            "id": number,
            "type": type(value).__name__,
            "entries": self._entries(value),
            "factory": _name_of_factory(value),
        }

    def _entries(self, value: Mapping[Any, Any]) -> list[Saved]:
        return [[_saved_key(key), self.saved(item)] for key, item in value.items()]

    def _namedtuple(self, value: Any, number: int) -> Saved:
        items = [self.saved(item) for item in value]
        return {
            "kind": "namedtuple",
            "id": number,
            "class": class_name(type(value)),
            "items": items,
        }

    # --- objects, classes and functions of the script

    def _object(self, value: Any, number: int) -> Saved:
        # The class may be derived from `dict` or `list`.
        entries = None
        items = None
        if has_type(value, dict) and all(map(_is_key, value)):
            entries = self._entries(value)
        elif has_type(value, list):
            items = self._items(value)
        return {
            "kind": "object",
            "id": number,
            "class": class_name(type(value)),
            "attributes": self._attributes(attributes_of_object(value)),
            "entries": entries,
            "items": items,
        }

    def _class(self, value: type, number: int) -> Saved:
        attributes = self._attributes(attributes_of_class(value))
        return {
            "kind": "class",
            "id": number,
            "class": class_name(value),
            "attributes": attributes,
        }

    def _function(self, value: FunctionType, number: int) -> Saved:
        closure = {name: cell.cell_contents for name, cell in variables_of_closure(value).items()}
        return {
            "kind": "function",
            "id": number,
            "attributes": self._attributes(vars(value)),
            "closure": self._attributes(closure),
            "defaults": [self.saved(item) for item in value.__defaults__ or ()],
        }

    def _attributes(self, attributes: Mapping[str, Any]) -> dict[str, Saved]:
        return {
            name: self.saved(value)
            for name, value in list(attributes.items())
            if type(name) is str and _is_saved(value)
        }

    # --- tensors, arrays and modules

    def _tensor(self, value: torch.Tensor, number: int) -> Saved:
        if self._large_data.is_unchanged(value):
            return {"kind": "unchanged"}
        if self._only_small and value.nbytes > SMALL_BYTES:
            return _placeholder(value, device=str(value.device))
        if value.nbytes > _limit_of(value):
            return _omitted(value)
        return {
            "kind": "tensor",
            "id": number,
            "tensor": value.detach().clone(),
            "device": str(value.device),
            # Only a leaf can be restored with its flag. The graph of any other tensor is lost.
            "requires_grad": value.requires_grad and value.is_leaf,
            "is_part_of_model": storage_address(value) in self._guarded_ids,
        }

    def _array(self, value: np.ndarray[Any, Any], number: int) -> Saved:
        if self._large_data.is_unchanged(value):
            return {"kind": "unchanged"}
        if self._only_small and value.nbytes > SMALL_BYTES:
            return _placeholder(value, device=None)
        return {"kind": "array", "id": number, "array": value.copy()}

    def _module(self, value: nn.Module, number: int | None) -> Saved:
        attributes_of_parts = {
            name: self._attributes(attributes_of_module(module))
            for name, module in value.named_modules()
        }
        state = None
        if not _saves_all(self._guarded_ids, value) and not self._only_small:
            state = copied(dict(value.state_dict()))
            if not can_be_stored(state):
                state = None
        return {
            "kind": "module",
            "id": number,
            "class": class_name(type(value)),
            "attributes_of_parts": attributes_of_parts,
            "state": state,
        }

    def _optimizer(self, value: torch.optim.Optimizer, number: int) -> Saved:
        # The guard saves the rest.
        return {
            "kind": "optimizer",
            "id": number,
            "class": class_name(type(value)),
            "attributes": self._attributes(attributes_of_optimizer(value)),
        }

    def _stateful(self, value: Any, _number: int) -> Saved:
        state = state_of(value) if isinstance(value, LRScheduler) else value.state_dict()
        if not can_be_stored(state):
            return _omitted(value)
        return {"kind": "stateful", "class": class_name(type(value)), "state": copied(state)}

    # --- data

    def _generator(self, value: Any, _number: int) -> Saved:
        return {"kind": "generator", "state": state_of_generator(value)}

    def _dataset(self, value: Any, number: int) -> Saved:
        attributes = {
            name: self._saved_data(attribute)
            for name, attribute in attributes_of_dataset(value).items()
        }
        return {"kind": "dataset", "id": number, "attributes": attributes}

    def _loader(self, value: Any, _number: int) -> Saved:
        return {
            "kind": "loader",
            "sources": states_of_sources(value),
            "samplers": self.saved_samplers(value),
            "dataset": self._saved_data(value.dataset),
        }

    def _saved_data(self, value: Any) -> Saved:
        """Return the saved form of a dataset, or of an attribute of one."""
        if self._large_data.is_unchanged_container(value):
            return {"kind": "unchanged"}
        return self.saved(value)

    def saved_samplers(self, loader: Any) -> list[Saved]:
        """Return the saved forms of a loader's samplers, for those that the script defines."""
        return [self.saved(sampler) for sampler in samplers_of(loader)]


def _is_saved(value: Any) -> bool:
    """Return whether a variable is saved at all, unlike a module or most functions."""
    if has_type(value, FunctionType):
        return has_variables(value)
    return not has_type(value, ModuleType)


def _omitted(value: Any) -> Saved:
    return {"kind": "omitted", "class": class_name(type(value))}


def _placeholder(value: Any, *, device: str | None) -> Saved:
    """Return what is saved of a large tensor or array after a finished loop.

    Args:
        value: The tensor or array.
        device: The device of a tensor. None for an array.
    """
    return {
        "kind": "placeholder",
        "shape": list(value.shape),
        "dtype": str(value.dtype).removeprefix("torch."),
        "device": device,
    }


def _is_key(key: Any) -> bool:
    """Return whether a key of a dict can be saved."""
    if type(key) is tuple:
        return all(map(_is_key, key))
    return type(key) in SCALARS


def _saved_key(key: Any) -> Saved:
    return [_saved_key(item) for item in key] if type(key) is tuple else key


def _name_of_factory(value: Any) -> str | None:
    """Return the name of the class that a `defaultdict` calls for a new entry, or None."""
    factory = getattr(value, "default_factory", None)
    if isinstance(factory, type) and (class_name(factory) in FACTORIES or is_script_class(factory)):
        return class_name(factory)
    return None


def _saves_all(guarded_ids: frozenset[int], module: nn.Module) -> bool:
    """Return whether the guard saves all parameters and buffers of a module."""
    tensors = [*module.parameters(), *module.buffers()]
    return all(id(tensor) in guarded_ids for tensor in tensors)


def _limit_of(value: torch.Tensor) -> float:
    """Return the size in bytes up to which a tensor is saved."""
    return float("inf") if value.grad_fn is None else _MOST_BYTES_OF_RESULT
