"""`VariableReader`: restore the variables of the script from a checkpoint.

Objects are restored in place where possible, since other objects may refer to them too.
`kinds` describes the saved values.
"""

from __future__ import annotations

import collections
import copy
import importlib
import operator
from collections.abc import Callable, Iterable, Mapping
from types import FrameType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from holdfast.guard.scheduler_state import load_state
from holdfast.guard.state.trees import copied
from holdfast.guard.unchanged.frames import is_script_class, write_locals
from holdfast.guard.unchanged.refusal import resume_differs
from holdfast.guard.unchanged.variables.kinds import (
    FACTORIES,
    MAPPINGS,
    SCALARS,
    Saved,
    attributes_of_dataset,
    attributes_of_object,
    class_name,
    slots_of,
    storage_address,
    variables_of_closure,
)
from holdfast.guard.unchanged.variables.namespaces import functions_by_namespace, namespaces
from holdfast.guard.unchanged.variables.random_sources import restore_generator, restore_sources
from holdfast.loader.random_state import GENERATOR_TYPES
from holdfast.loader.samplers import samplers_of

# Stands for a variable, an item or an attribute that does not exist.
MISSING = object()
# The kinds of saved values that are restored in place and have a number.
_RESTORED_IN_PLACE = frozenset({"list", "deque", "set", "dict", "object", "tensor", "array"})


class VariableReader:
    """Restores the variables of the script from what `VariableWriter` has returned.

    Args:
        guarded_ids: The same as for `VariableWriter`.
        models: The models of the guard, whose weights are restored already. A copy that the earlier
            attempt has made of one of them is made again.
    """

    def __init__(
        self, guarded_ids: frozenset[int] = frozenset(), models: Iterable[nn.Module] = ()
    ) -> None:
        self._guarded_ids = guarded_ids
        self._models = list(models)
        # The restored objects by the number that they have in the checkpoint.
        self._objects: dict[int, Any] = {}
        # For each live object that a saved one may be restored into, by `id`: the number of the
        # saved object, and the live object itself, so that its `id` is not reused.
        self._claims: dict[int, tuple[int, Any]] = {}
        self._readers: dict[str, Callable[[Saved, Any], Any]] = {
            "list": self._list,
            "tuple": self._tuple,
            "set": self._set,
            "frozenset": self._frozenset,
            "deque": self._deque,
            "dict": self._dict,
            "namedtuple": self._namedtuple,
            "object": self._object,
            "enum": self._enum,
            "class": self._class,
            "function": self._function,
            "tensor": self._tensor,
            "array": self._array,
            "placeholder": self._placeholder,
            "plain": lambda saved, _: saved["value"],
            "module": self._module,
            "optimizer": self._optimizer,
            "stateful": self._stateful,
            "generator": self._generator,
            "dataset": self._dataset,
            "loader": self._loader,
            "same": lambda saved, live: self._objects.get(saved["id"], live),
            "unchanged": lambda _, live: live,
            "omitted": lambda _, live: live,
        }

    def restore(self, saved: Mapping[str, Mapping[str, Saved]], frames: list[FrameType]) -> None:
        """Restore the variables of the script.

        Variables that are not in the checkpoint keep their values.

        Args:
            saved: The saved variables by namespace.
            frames: The frames of the script on the stack, from the loop outward. Variables of
                functions that are not on the stack as they were at the save are not restored.
        """
        live_namespaces = namespaces(frames)
        functions = functions_by_namespace(frames)
        for namespace, variables in saved.items():
            if namespace not in live_namespaces:
                continue
            values = self._changed_values(variables, live_namespaces[namespace])
            if namespace in functions:
                write_locals(functions[namespace], values)
            else:
                live_namespaces[namespace].update(values)

    def _changed_values(
        self, saved: Mapping[str, Saved], live: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Restore the variables of a namespace, and return those that must be assigned."""
        values = {}
        for name, saved_value in saved.items():
            live_value = live.get(name, MISSING)
            value = self.value_of(saved_value, live_value)
            if value is not MISSING and value is not live_value:
                values[name] = value
        return values

    def value_of(self, saved: Saved, live: Any) -> Any:
        """Return the value of a saved variable.

        Args:
            saved: The saved form of the value.
            live: The current value of the variable, which is changed in place if it is of the same
                kind. `MISSING` if the variable does not exist.
        """
        if not isinstance(saved, dict):
            return saved
        kind = saved["kind"]
        if kind in _RESTORED_IN_PLACE:
            live = self._claim(live, saved["id"])
        return self._readers[kind](saved, live)

    def _claim(self, live: Any, number: int) -> Any:
        """Return a live object, or `MISSING` if another saved object is restored into it already.

        Two variables may refer to one object when the script starts, and to two of them later, such
        as the current and the best weights.

        Args:
            live: The current value of a variable.
            number: The number of the object that the variable referred to at the save.
        """
        if live is MISSING or live is None:
            return live
        claimed_by, _ = self._claims.setdefault(id(live), (number, live))
        return live if claimed_by == number else MISSING

    # --- containers

    def _items(self, saved: list[Saved], live: Iterable[Any]) -> list[Any]:
        """Return the items of a sequence, restored in place where they exist already.

        Args:
            saved: The saved items.
            live: The items that exist. Empty if the variable is of another kind now.
        """
        present = list(live)
        present += [MISSING] * (len(saved) - len(present))
        items = [self.value_of(item, old) for item, old in zip(saved, present, strict=False)]
        return [None if item is MISSING else item for item in items]

    def _list(self, saved: Saved, live: Any) -> Any:
        target = live if type(live) is list else []
        self._objects[saved["id"]] = target
        target[:] = self._items(saved["items"], target)
        return target

    def _deque(self, saved: Saved, live: Any) -> Any:
        maxlen = saved["maxlen"]
        is_same_kind = type(live) is collections.deque and live.maxlen == maxlen
        target = live if is_same_kind else collections.deque(maxlen=maxlen)
        self._objects[saved["id"]] = target
        items = self._items(saved["items"], target)
        target.clear()
        target.extend(items)
        return target

    def _set(self, saved: Saved, live: Any) -> Any:
        target = live if type(live) is set else set()
        self._objects[saved["id"]] = target
        items = self._items(saved["items"], target)
        target.clear()
        target.update(items)
        return target

    def _tuple(self, saved: Saved, live: Any) -> Any:
        present = live if type(live) is tuple else ()
        items = tuple(self._items(saved["items"], present))
        if len(present) == len(items) and all(map(operator.is_, present, items)):
            items = present
        self._objects[saved["id"]] = items
        return items

    def _frozenset(self, saved: Saved, live: Any) -> Any:
        items = frozenset(self._items(saved["items"], live if type(live) is frozenset else ()))
        self._objects[saved["id"]] = items
        return items

    def _dict(self, saved: Saved, live: Any) -> Any:
        is_same_kind = type(live).__name__ == saved["type"]
        target = live if is_same_kind else _new_mapping(saved["type"], saved["factory"])
        self._objects[saved["id"]] = target
        entries = self._entries(saved["entries"], target)
        target.clear()
        target.update(entries)
        return target

    def _entries(self, saved: list[Saved], present: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return the entries of a dict, restored in place where they exist already."""
        factory = getattr(present, "default_factory", None)
        entries = {}
        for saved_key, item in saved:
            key = _key(saved_key)
            entry = present.get(key, MISSING)
            if entry is MISSING and factory is not None and isinstance(item, dict):
                # The script has added the entry by asking for it.
                entry = factory()
            value = self.value_of(item, entry)
            entries[key] = None if value is MISSING else value
        return entries

    def _namedtuple(self, saved: Saved, live: Any) -> Any:
        name = saved["class"]
        is_same_class = class_name(type(live)) == name
        cls: Any = type(live) if is_same_class else _find_class(name)
        if cls is None:
            raise resume_differs(f"no class of the script has the name {name!r}")
        restored = cls._make(self._items(saved["items"], live if is_same_class else ()))
        self._objects[saved["id"]] = restored
        return restored

    # --- objects, classes and functions of the script

    def _object(self, saved: Saved, live: Any) -> Any:
        is_same_class = live is not MISSING and class_name(type(live)) == saved["class"]
        if is_same_class and not _is_frozen(live):
            return self._restore_object(saved, live)
        cls = _find_class(saved["class"])
        if cls is None:
            return live
        target = cls.__new__(cls)  # type: ignore[call-overload] # not `type` itself
        if not is_same_class:
            return self._restore_object(saved, target)
        # The saved form does not include every attribute, for example no plain functions.
        attributes = attributes_of_object(live)
        for name, value in attributes.items():
            _set_attribute(target, name, value)
        self._restore_object(saved, target)
        if not _are_equal(attributes, attributes_of_object(target)):
            return target
        # The script may compare the object by identity with one that is not restored.
        self._objects[saved["id"]] = live
        return live

    def _restore_object(self, saved: Saved, target: Any) -> Any:
        """Restore an object of a class of the script in place, and return it."""
        self._objects[saved["id"]] = target
        self._set_attributes_of_object(target, saved["attributes"])
        # The class may be derived from `dict` or `list`.
        if saved["entries"] is not None:
            entries = self._entries(saved["entries"], dict(target))
            target.clear()
            target.update(entries)
        if saved["items"] is not None:
            target[:] = self._items(saved["items"], list(target))
        return target

    def _set_attributes_of_object(self, target: Any, attributes: Mapping[str, Saved]) -> None:
        present = attributes_of_object(target)
        # At the save, the object did not have these attributes yet, or no longer.
        for name, value in present.items():
            if name not in attributes and isinstance(value, SCALARS):
                _delete_attribute(target, name)
        for name, attribute in attributes.items():
            value = self.value_of(attribute, present.get(name, MISSING))
            if value is not MISSING and value is not present.get(name, MISSING):
                _set_attribute(target, name, value)

    def _set_attributes(self, present: dict[str, Any], attributes: Mapping[str, Saved]) -> None:
        for name, attribute in attributes.items():
            value = self.value_of(attribute, present.get(name, MISSING))
            if value is not MISSING:
                present[name] = value

    def _enum(self, saved: Saved, live: Any) -> Any:
        cls = _find_class(saved["class"])
        return live if cls is None else getattr(cls, saved["name"], live)

    def _class(self, saved: Saved, live: Any) -> Any:
        if isinstance(live, type) and class_name(live) == saved["class"]:
            for name, attribute in saved["attributes"].items():
                present = vars(live).get(name, MISSING)
                value = self.value_of(attribute, present)
                if value is not MISSING and value is not present:
                    setattr(live, name, value)
        return live

    def _function(self, saved: Saved, live: Any) -> Any:
        if not isinstance(live, FunctionType):
            return live
        self._objects[saved["id"]] = live
        self._set_attributes(vars(live), saved["attributes"])
        cells = variables_of_closure(live)
        for name in saved["closure"].keys() & cells.keys():
            cell = cells[name]
            value = self.value_of(saved["closure"][name], cell.cell_contents)
            if value is not cell.cell_contents:
                cell.cell_contents = value
        for default, present in zip(saved["defaults"], live.__defaults__ or (), strict=False):
            # A default value that is a list is restored in place.
            self.value_of(default, present)
        return live

    # --- tensors, arrays and modules

    def _tensor(self, saved: Saved, live: Any) -> Any:
        tensor = saved["tensor"]
        if self._may_overwrite(live, saved):
            with torch.no_grad():
                live.copy_(tensor)
            target = live
        else:
            target = tensor.to(saved["device"], copy=True).requires_grad_(saved["requires_grad"])
        self._objects[saved["id"]] = target
        return target

    def _may_overwrite(self, live: Any, saved: Saved) -> bool:
        """Return whether a saved tensor can be copied into the current value of a variable."""
        if not _can_be_overwritten(live, saved["tensor"]):
            return False
        # A tensor that was not part of a model must not overwrite one that is now.
        return saved["is_part_of_model"] or storage_address(live) not in self._guarded_ids

    def _array(self, saved: Saved, live: Any) -> Any:
        array = saved["array"]
        target = array
        if (
            isinstance(live, np.ndarray)
            and (live.shape, live.dtype) == (array.shape, array.dtype)
            and live.flags.writeable
        ):
            live[...] = array
            target = live
        self._objects[saved["id"]] = target
        return target

    def _placeholder(self, saved: Saved, live: Any) -> Any:
        """Return zeros for a large tensor or array, for the code between two finished loops.

        That code may use the last batch, for example to save a picture. Whatever it writes is
        discarded, and its variables get the values that they had after the next loop.
        """
        if getattr(live, "shape", None) == tuple(saved["shape"]):
            return live
        if saved["device"] is None:
            return np.zeros(saved["shape"], saved["dtype"])
        dtype = getattr(torch, saved["dtype"])
        return torch.zeros(saved["shape"], dtype=dtype, device=saved["device"])

    def _module(self, saved: Saved, live: Any) -> Any:
        state = saved["state"]
        if state is not None:
            live = self._unguarded_module(saved, live)
        if not isinstance(live, nn.Module):
            return live
        if saved["id"] is not None:
            self._objects[saved["id"]] = live
        if state is not None:
            live.load_state_dict(state)
        for name, module in live.named_modules():
            self._set_attributes_of_module(module, saved["attributes_of_parts"].get(name, {}))
        return live

    def _set_attributes_of_module(self, module: nn.Module, saved: Mapping[str, Saved]) -> None:
        """Restore what `attributes_of_module` has returned."""
        attributes = dict(saved)
        for buffer in module._non_persistent_buffers_set & attributes.keys():
            module._buffers[buffer] = self.value_of(
                attributes.pop(buffer), module._buffers.get(buffer)
            )
        self._set_attributes(vars(module), attributes)

    def _optimizer(self, saved: Saved, live: Any) -> Any:
        if isinstance(live, torch.optim.Optimizer) and class_name(type(live)) == saved["class"]:
            self._objects[saved["id"]] = live
            self._set_attributes(vars(live), saved["attributes"])
        return live

    def _unguarded_module(self, saved: Saved, live: Any) -> Any:
        """Return a module for a saved one that the guard does not save.

        Args:
            saved: The saved module.
            live: The current value of the variable. It may be a model of the guard, if the script
                makes a copy of that only later.

        Raises:
            UnchangedScriptError: H739 if there is no such module.
        """
        if isinstance(live, nn.Module) and id(live) not in self._guarded_ids:
            own = self._claim(live, saved["id"])
            if own is not MISSING:
                return own
        original = self._guarded_module_like(saved)
        if original is not None:
            return copy.deepcopy(original)
        if live is MISSING:
            # The script creates the module in the loop.
            return live
        raise resume_differs(
            f"a variable referred to a separate {saved['class'].partition(':')[2]}, and now refers"
            f" to {'a model that is trained' if isinstance(live, nn.Module) else repr(live)}"
        )

    def _guarded_module_like(self, saved: Saved) -> nn.Module | None:
        """Return a module of the guard with the class and the shapes of a saved one, or None."""
        for model in self._models:
            for module in model.modules():
                has_class = class_name(type(module)) == saved["class"]
                if has_class and _has_state_like(module, saved["state"]):
                    return module
        return None

    def _stateful(self, saved: Saved, live: Any) -> Any:
        if live is MISSING or class_name(type(live)) != saved["class"]:
            return live
        state = copied(saved["state"])
        if isinstance(live, LRScheduler):
            load_state(live, state)
        else:
            live.load_state_dict(state)
        return live

    # --- data

    def _generator(self, saved: Saved, live: Any) -> Any:
        if isinstance(live, GENERATOR_TYPES):
            restore_generator(live, saved["state"])
        return live

    def _dataset(self, saved: Saved, live: Any) -> Any:
        if isinstance(live, Dataset):
            self._objects[saved["id"]] = live
            present = attributes_of_dataset(live)
            for name, attribute in saved["attributes"].items():
                value = self.value_of(attribute, present.get(name, MISSING))
                if value is not MISSING and value is not present.get(name, MISSING):
                    _set_attribute(live, name, value)
        return live

    def _loader(self, saved: Saved, live: Any) -> Any:
        if live is not MISSING:
            restore_sources(live, saved["sources"])
            self.restore_samplers(live, saved["samplers"])
            self.value_of(saved["dataset"], live.dataset)
        return live

    def restore_samplers(self, loader: Any, saved: Iterable[Saved]) -> None:
        """Restore what `VariableWriter.saved_samplers` has returned."""
        for sampler, saved_sampler in zip(samplers_of(loader), saved, strict=False):
            self.value_of(saved_sampler, sampler)


def _key(saved: Saved) -> Any:
    """Return a key of a dict. A tuple is saved as a list."""
    return tuple(map(_key, saved)) if isinstance(saved, list) else saved


def _has_state_like(module: nn.Module, state: Mapping[str, Any]) -> bool:
    """Return whether a module's ``state_dict`` has the names and shapes of a saved one."""
    own = module.state_dict()
    if own.keys() != state.keys():
        return False
    return all(
        getattr(value, "shape", None) == getattr(state[name], "shape", None)
        for name, value in own.items()
    )


def _new_mapping(kind: str, factory: str | None) -> Any:
    """Return an empty dict of the kind that was saved."""
    cls = next(cls for cls in MAPPINGS if cls.__name__ == kind)
    if cls is not collections.defaultdict:
        return cls()
    factory_class = None if factory is None else FACTORIES.get(factory) or _find_class(factory)
    return collections.defaultdict(factory_class)


def _set_attribute(target: Any, name: str, value: Any) -> None:
    """Set an attribute without the script's own ``__setattr__`` or property."""
    if name in slots_of(type(target)):
        object.__setattr__(target, name, value)
    else:
        vars(target)[name] = value


def _delete_attribute(target: Any, name: str) -> None:
    if name in slots_of(type(target)):
        object.__delattr__(target, name)
    else:
        del vars(target)[name]


def _can_be_overwritten(live: Any, saved: torch.Tensor) -> bool:
    """Return whether a saved tensor can be copied into the current value of a variable."""
    return (
        isinstance(live, torch.Tensor)
        and live.grad_fn is None
        and not live.is_inference()
        and (live.shape, live.dtype) == (saved.shape, saved.dtype)
    )


def _is_frozen(value: Any) -> bool:
    """Return whether a value is a frozen dataclass, which must be replaced and not changed."""
    parameters = getattr(type(value), "__dataclass_params__", None)
    return parameters is not None and bool(parameters.frozen)


def _are_equal(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether two objects have the same attributes: equal scalars or identical objects."""
    return first.keys() == second.keys() and all(
        value is second[name]
        or (type(value) is type(second[name]) and type(value) in SCALARS and value == second[name])
        for name, value in first.items()
    )


def _find_class(name: str) -> type | None:
    """Return a class of the script by its saved name, or None if it no longer exists."""
    module_name, _, qualified_name = name.partition(":")
    try:
        value: Any = importlib.import_module(module_name)
        for part in qualified_name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError):
        return None
    return value if isinstance(value, type) and is_script_class(value) else None
