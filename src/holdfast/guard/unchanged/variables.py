"""Save the variables of the script, and restore their values after a resume.

The variables are the local variables of the script's functions on the stack, and the global
variables of its modules. Objects are restored in place where possible, since other objects may
refer to them too. ``variable_kinds`` determines what is saved.
"""

from __future__ import annotations

import collections
import importlib
import random
import zlib
from collections.abc import Callable, Iterable, Mapping
from types import FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from holdfast.guard.scheduler_state import load_state, state_of
from holdfast.guard.state.trees import copied
from holdfast.guard.unchanged.stack import (
    is_module_level,
    is_script_class,
    modules_of_script,
    write_locals,
)
from holdfast.guard.unchanged.variable_kinds import (
    MAPPINGS,
    SCALARS,
    SMALL_BYTES,
    Tree,
    attributes_of_class,
    attributes_of_module,
    can_be_stored,
    class_name,
    has_type,
    kind_of,
)
from holdfast.loader.foreign.carried_state import sources_of_state
from holdfast.loader.random_state import GENERATOR_TYPES
from holdfast.loader.samplers import is_stateful, samplers_of

# Global variables that Python itself assigns.
_OWN_NAMES_OF_MODULES = frozenset(
    {"__builtins__", "__cached__", "__doc__", "__file__", "__loader__", "__name__", "__package__",
     "__spec__", "__annotations__", "__warningregistry__"}
)  # fmt: skip
# The size up to which an intermediate result, such as the output of the model, is saved. The next
# step computes it again, so a large one is not worth saving.
_MOST_BYTES_OF_RESULT = 1 << 20
_MAPPINGS_BY_NAME: dict[str, Any] = {cls.__name__: cls for cls in MAPPINGS}
# Stands for a variable, an item or an attribute that does not exist.
_MISSING = object()


def namespaces(frames: Iterable[FrameType]) -> dict[str, dict[str, Any]]:
    """Return the variables of the script, by the name of the function or module.

    The name of a function begins with its depth on the stack, because it may be there repeatedly.

    Args:
        frames: The frames of the script on the stack, from the innermost one outward.
    """
    outward = list(frames)
    spaces: dict[str, dict[str, Any]] = {}
    functions = [frame for frame in outward if not is_module_level(frame)]
    for depth, frame in enumerate(reversed(functions)):
        spaces[f"{depth} {frame.f_code.co_qualname}"] = frame.f_locals
    # The module of a script that another one runs with `runpy` may not be in `sys.modules`.
    modules = [frame.f_globals for frame in reversed(outward)]
    modules += [vars(module) for module in modules_of_script()]
    unique = {id(variables): variables for variables in modules}
    for variables in unique.values():
        name = str(variables.get("__name__"))
        while name in spaces:
            name += "'"
        spaces[name] = variables
    return spaces


class LargeData:
    """Recognizes large tensors and arrays that have not changed since training began.

    Most of them are datasets in memory. The script creates them again in each attempt, so they need
    not be saved.
    """

    def __init__(self) -> None:
        # True while training begins. Large data that a `VariableWriter` finds then is recorded.
        self.is_recording = False
        # The version counter of each large tensor, and the checksum of each large array, by `id`.
        # The objects are kept alive so that their ids are not reused.
        self._tensors: dict[int, tuple[torch.Tensor, int]] = {}
        self._arrays: dict[int, tuple[np.ndarray[Any, Any], int]] = {}

    def _record(self, value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.nbytes > SMALL_BYTES:
            if not value.requires_grad and not value.is_inference():
                self._tensors[id(value)] = (value, value._version)
        elif isinstance(value, np.ndarray) and value.nbytes > SMALL_BYTES:
            self._arrays[id(value)] = (value, _checksum(value))

    def is_unchanged(self, value: Any) -> bool:
        """Return whether a value was recorded, and still has the same contents."""
        if self.is_recording:
            self._record(value)
        if id(value) in self._tensors:
            return bool(value._version == self._tensors[id(value)][1])
        if id(value) in self._arrays:
            return _checksum(value) == self._arrays[id(value)][1]
        return False


def _checksum(array: np.ndarray[Any, Any]) -> int:
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data)


class VariableWriter:
    """Turns the variables of the script into a tree for a checkpoint.

    Args:
        guarded_ids: The `id` of each optimizer, module, parameter and buffer that the guard saves.
        large_data: Recognizes data that need not be saved.
        only_small: Whether to leave out all large tensors and arrays.
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

    def write(
        self, frames: list[FrameType], about_to_be_assigned: frozenset[str] = frozenset()
    ) -> dict[str, Tree]:
        """Return the variables of the script by namespace and name.

        Args:
            frames: The frames of the script on the stack, from the innermost one outward.
            about_to_be_assigned: Local variables of the innermost frame that are left out, because
                the script assigns them next.
        """
        spaces = namespaces(frames)
        innermost = frames[0].f_locals if frames else None
        return {
            space: self._namespace(
                variables, about_to_be_assigned if variables is innermost else frozenset()
            )
            for space, variables in spaces.items()
        }

    def _namespace(self, variables: Mapping[str, Any], omitted: frozenset[str]) -> dict[str, Tree]:
        # Other threads may add variables meanwhile, so this iterates over a copy.
        return {
            name: self.tree_of(value)
            for name, value in list(variables.items())
            if name not in _OWN_NAMES_OF_MODULES
            and name not in omitted
            and not has_type(value, (FunctionType, ModuleType))
        }

    def tree_of(self, value: Any) -> Tree:
        """Return the saved form of a value."""
        if type(value) in SCALARS:
            return value
        kind = kind_of(value)
        if kind == "number":
            return ["number", value]
        if kind == "enum":
            # A member exists only once, so it needs no number by which other variables refer to it.
            return ["enum", class_name(type(value)), value.name]
        if kind == "omitted" or id(value) in self._guarded_ids:
            return self._module(value) if kind == "module" else _omitted(value)
        if id(value) in self._numbers:
            return ["same", self._numbers[id(value)]]
        number = len(self._objects)
        self._numbers[id(value)] = number
        self._objects.append(value)
        writer: Callable[[Any, int], Tree] = getattr(self, f"_{kind}", self._container)
        return writer(value, number)

    def _container(self, value: Any, number: int) -> Tree:
        kind = type(value).__name__
        if type(value) in MAPPINGS:
            if not all(_is_key(key) for key in value):
                return _omitted(value)
            entries = [[_key(key), self.tree_of(item)] for key, item in value.items()]
            return ["dict", number, entries, kind]
        if {type(item) for item in value} <= set(SCALARS):
            # This is fast for a long list of numbers, such as a history of losses.
            items = list(value)
        else:
            items = [self.tree_of(item) for item in value]
        if has_type(value, collections.deque):
            return [kind, number, items, value.maxlen]
        return [kind, number, items]

    def _object(self, value: Any, number: int) -> Tree:
        # The class may be derived from `dict` or `list`.
        items = None
        if has_type(value, dict) and all(map(_is_key, value)):
            items = self._container(dict(value), number)
        elif has_type(value, list):
            items = self._container(list(value), number)
        return ["object", number, class_name(type(value)), self._attributes(vars(value)), items]

    def _class(self, value: type, number: int) -> Tree:
        return ["class", number, class_name(value), self._attributes(attributes_of_class(value))]

    def _attributes(self, attributes: Mapping[str, Any]) -> dict[str, Tree]:
        return {
            name: self.tree_of(value)
            for name, value in list(attributes.items())
            if type(name) is str and not has_type(value, (FunctionType, ModuleType))
        }

    def _tensor(self, value: torch.Tensor, number: int) -> Tree:
        if self._large_data.is_unchanged(value):
            return ["unchanged"]
        limit = SMALL_BYTES if self._only_small else _limit_of(value)
        is_plain = value.layout is torch.strided and not value.is_meta
        if not is_plain or value.nbytes > limit:
            return _omitted(value)
        # Only a leaf can be restored with its flag. The graph of any other tensor is lost.
        requires_grad = value.requires_grad and value.is_leaf
        return ["tensor", number, value.detach().clone(), requires_grad, str(value.device)]

    def _array(self, value: np.ndarray[Any, Any], number: int) -> Tree:
        if self._large_data.is_unchanged(value):
            return ["unchanged"]
        if self._only_small and value.nbytes > SMALL_BYTES:
            return _omitted(value)
        return ["array", number, value.copy()]

    def _generator(self, value: Any, _number: int) -> Tree:
        return ["generator", _state_of_generator(value)]

    def _loader(self, value: Any, _number: int) -> Tree:
        return ["loader", states_of_sources(value), self.trees_of_samplers(value)]

    def trees_of_samplers(self, loader: Any) -> list[Tree]:
        """Return the saved forms of a loader's samplers, for those that the script defines."""
        return [self.tree_of(sampler) for sampler in samplers_of(loader)]

    def _stateful(self, value: Any, _number: int) -> Tree:
        state = state_of(value) if isinstance(value, LRScheduler) else value.state_dict()
        if not can_be_stored(state):
            return _omitted(value)
        return ["stateful", class_name(type(value)), copied(state)]

    def _module(self, value: nn.Module, _number: int = 0) -> Tree:
        attributes = {
            name: self._attributes(attributes_of_module(module))
            for name, module in value.named_modules()
        }
        state = None
        if not _saves_all(self._guarded_ids, value) and not self._only_small:
            state = copied(dict(value.state_dict()))
            if not can_be_stored(state):
                state = None
        return ["module", attributes, state]


def _saves_all(guarded_ids: frozenset[int], module: nn.Module) -> bool:
    """Return whether the guard saves all parameters and buffers of a module."""
    tensors = [*module.parameters(), *module.buffers()]
    return all(id(tensor) in guarded_ids for tensor in tensors)


def _limit_of(value: torch.Tensor) -> float:
    """Return the size in bytes up to which a tensor is saved."""
    return float("inf") if value.grad_fn is None else _MOST_BYTES_OF_RESULT


def _omitted(value: Any) -> Tree:
    return ["omitted", class_name(type(value))]


def _is_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(map(_is_key, key))
    return type(key) in SCALARS


def _key(key: Any) -> Tree:
    return ["tuple", 0, [_key(item) for item in key]] if type(key) is tuple else key


def _state_of_generator(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.RandomState):
        return value.get_state()
    return value.bit_generator.state


def states_of_sources(loader: Any) -> list[Any]:
    """Return the states of a loader's random generators and stateful samplers."""
    return [
        copied(source.state_dict()) if is_stateful(source) else _state_of_generator(source)
        for source in sources_of_state(loader)
    ]


def restore_sources(loader: Any, states: Iterable[Any]) -> None:
    """Restore the states that `states_of_sources` has returned."""
    for source, state in zip(sources_of_state(loader), states, strict=False):
        if is_stateful(source):
            source.load_state_dict(copied(state))
        else:
            _restore_generator(source, state)


def _restore_generator(value: Any, state: Any) -> None:
    if isinstance(value, torch.Generator):
        value.set_state(state)
    elif isinstance(value, random.Random):
        value.setstate(state)
    elif isinstance(value, np.random.RandomState):
        value.set_state(state)
    else:
        value.bit_generator.state = state


class VariableReader:
    """Restores the variables of the script from a tree that `VariableWriter` has returned."""

    def __init__(self) -> None:
        # The restored objects by their number.
        self._objects: dict[int, Any] = {}

    def restore(self, saved: Mapping[str, Mapping[str, Tree]], frames: list[FrameType]) -> None:
        """Restore the variables of the script.

        Variables that are not in the checkpoint keep their values.

        Args:
            saved: The saved variables by namespace.
            frames: The frames of the script on the stack, from the loop outward. Variables of
                functions that are not on the stack as they were at the save are not restored.
        """
        spaces = namespaces(frames)
        functions = [frame for frame in frames if not is_module_level(frame)]
        by_space = {
            f"{depth} {frame.f_code.co_qualname}": frame
            for depth, frame in enumerate(reversed(functions))
        }
        for space, trees in saved.items():
            if space not in spaces:
                continue
            values = {}
            for name, tree in trees.items():
                live = spaces[space].get(name, _MISSING)
                value = self.value_of(tree, live)
                if value is not _MISSING and value is not live:
                    values[name] = value
            if space in by_space:
                write_locals(by_space[space], values)
            else:
                spaces[space].update(values)

    def value_of(self, tree: Tree, live: Any) -> Any:
        """Return the value of a saved variable.

        Args:
            tree: The saved form of the value.
            live: The current value of the variable, which is changed in place if it is of the same
                kind. `_MISSING` if the variable does not exist.
        """
        if not isinstance(tree, list):
            return tree
        kind = tree[0]
        if kind in ("omitted", "unchanged"):
            return live
        if kind == "same":
            return self._objects.get(tree[1], live)
        if kind == "number":
            return tree[1]
        reader: Callable[[Tree, Any], Any] = getattr(self, f"_{kind}")
        return reader(tree, live)

    # --- containers

    def _items(self, tree: Tree, live: Any) -> list[Any]:
        """Return the items of a sequence, restored in place where they exist already."""
        present = list(live) if type(live).__name__ == tree[0] else []
        present += [_MISSING] * (len(tree[2]) - len(present))
        items = [self.value_of(item, old) for item, old in zip(tree[2], present, strict=False)]
        return [None if item is _MISSING else item for item in items]

    def _list(self, tree: Tree, live: Any) -> Any:
        target = live if type(live) is list else []
        self._objects[tree[1]] = target
        target[:] = self._items(tree, live)
        return target

    def _deque(self, tree: Tree, live: Any) -> Any:
        target = live
        if type(live) is not collections.deque:
            target = collections.deque(maxlen=tree[3])
        self._objects[tree[1]] = target
        items = self._items(tree, live)
        target.clear()
        target.extend(items)
        return target

    def _set(self, tree: Tree, live: Any) -> Any:
        target = live if type(live) is set else set()
        self._objects[tree[1]] = target
        items = self._items(tree, live)
        target.clear()
        target.update(items)
        return target

    def _tuple(self, tree: Tree, live: Any) -> Any:
        items = tuple(self._items(tree, live))
        is_unchanged = type(live) is tuple and len(live) == len(items)
        if is_unchanged and all(old is new for old, new in zip(live, items, strict=True)):
            items = live
        self._objects[tree[1]] = items
        return items

    def _frozenset(self, tree: Tree, live: Any) -> Any:
        items = frozenset(self._items(tree, live))
        self._objects[tree[1]] = items
        return items

    def _dict(self, tree: Tree, live: Any) -> Any:
        target = live
        if type(live) not in MAPPINGS:
            target = _MAPPINGS_BY_NAME[tree[3]]()
        self._objects[tree[1]] = target
        entries = self._entries(tree, target)
        target.clear()
        target.update(entries)
        return target

    def _entries(self, tree: Tree, present: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return the entries of a dict, restored in place where they exist already."""
        entries = {}
        for saved_key, item in tree[2]:
            key = self._tuple(saved_key, None) if isinstance(saved_key, list) else saved_key
            value = self.value_of(item, present.get(key, _MISSING))
            entries[key] = None if value is _MISSING else value
        return entries

    # --- objects

    def _object(self, tree: Tree, live: Any) -> Any:
        _, number, name, attributes, items = tree
        target = live
        if live is _MISSING or class_name(type(live)) != name or _is_frozen(live):
            cls = _find_class(name)
            if cls is None:
                return live
            target = cls.__new__(cls)  # type: ignore[call-overload] # not `type` itself
        self._objects[number] = target
        present = vars(target)
        # At the save, the object did not have these attributes yet, or no longer.
        for name_now in list(present):
            if name_now not in attributes and isinstance(present[name_now], SCALARS):
                del present[name_now]
        self._set_attributes(present, attributes)
        if items is not None:
            self._set_items(target, items)
        return target

    def _set_items(self, target: Any, items: Tree) -> None:
        """Restore the items of an object whose class is derived from ``dict`` or ``list``.

        The saved items have the number of the object, which stands for the object itself.
        """
        if has_type(target, dict):
            entries = self._entries(items, dict(target))
            target.clear()
            target.update(entries)
        else:
            target[:] = self._items(items, list(target))

    def _set_attributes(self, present: dict[str, Any], attributes: Mapping[str, Tree]) -> None:
        for name, tree in attributes.items():
            value = self.value_of(tree, present.get(name, _MISSING))
            if value is not _MISSING:
                present[name] = value

    def _enum(self, tree: Tree, live: Any) -> Any:
        cls = _find_class(tree[1])
        return live if cls is None else getattr(cls, tree[2], live)

    def _class(self, tree: Tree, live: Any) -> Any:
        if isinstance(live, type) and class_name(live) == tree[2]:
            for name, attribute in tree[3].items():
                setattr(live, name, self.value_of(attribute, vars(live).get(name, _MISSING)))
        return live

    def _tensor(self, tree: Tree, live: Any) -> Any:
        _, number, saved, requires_grad, device = tree
        target = live
        if _can_be_overwritten(live, saved):
            with torch.no_grad():
                live.copy_(saved)
        else:
            target = saved.to(device, copy=True).requires_grad_(requires_grad)
        self._objects[number] = target
        return target

    def _array(self, tree: Tree, live: Any) -> Any:
        _, number, saved = tree
        target = live
        if (
            isinstance(live, np.ndarray)
            and (live.shape, live.dtype) == (saved.shape, saved.dtype)
            and live.flags.writeable
        ):
            live[...] = saved
        else:
            target = saved
        self._objects[number] = target
        return target

    def _generator(self, tree: Tree, live: Any) -> Any:
        if isinstance(live, GENERATOR_TYPES):
            _restore_generator(live, tree[1])
        return live

    def _loader(self, tree: Tree, live: Any) -> Any:
        if live is not _MISSING:
            restore_sources(live, tree[1])
            self.restore_samplers(live, tree[2])
        return live

    def restore_samplers(self, loader: Any, trees: Iterable[Tree]) -> None:
        """Restore what `VariableWriter.trees_of_samplers` has returned."""
        for sampler, tree in zip(samplers_of(loader), trees, strict=False):
            self.value_of(tree, sampler)

    def _stateful(self, tree: Tree, live: Any) -> Any:
        if live is not _MISSING and class_name(type(live)) == tree[1]:
            if isinstance(live, LRScheduler):
                load_state(live, copied(tree[2]))
            else:
                live.load_state_dict(copied(tree[2]))
        return live

    def _module(self, tree: Tree, live: Any) -> Any:
        if not isinstance(live, nn.Module):
            return live
        if tree[2] is not None:
            live.load_state_dict(tree[2])
        for name, module in live.named_modules():
            attributes = dict(tree[1].get(name, {}))
            for buffer in module._non_persistent_buffers_set & attributes.keys():
                module._buffers[buffer] = self.value_of(
                    attributes.pop(buffer), module._buffers.get(buffer)
                )
            self._set_attributes(vars(module), attributes)
        return live


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
