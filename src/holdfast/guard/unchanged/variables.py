"""Save the variables of the script, and restore their values after a resume.

The variables are the local variables of the script's functions on the stack, and the global
variables of its modules. Objects are restored in place where possible, since other objects may
refer to them too. ``variable_kinds`` determines what is saved.
"""

from __future__ import annotations

import collections
import copy
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
from torch.utils.data import Dataset

from holdfast.guard.scheduler_state import load_state, state_of
from holdfast.guard.state.trees import copied
from holdfast.guard.unchanged.refusal import resume_differs
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
    attributes_of_object,
    can_be_stored,
    class_name,
    has_type,
    has_variables,
    kind_of,
    numbers_of_dataset,
    slots_of,
    variables_of_closure,
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
# Stands for a variable, an item or an attribute that does not exist.
_MISSING = object()
# The kinds of saved values whose second entry is their number, and that are restored in place.
_RESTORED_IN_PLACE = frozenset({"list", "deque", "set", "dict", "object", "tensor", "array"})
# On an accelerator, a checksum adds up this number of bytes at once.
_BYTES_OF_CHECKSUM_ROW = 4096
# Classes of Python that a `defaultdict` often calls for a new entry.
_FACTORIES = {
    class_name(cls): cls
    for cls in (int, float, bool, str, list, dict, set, tuple, *MAPPINGS, collections.deque)
}


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
        # The version counter and checksum of each large tensor, and the checksum of each large
        # array, by `id`. The objects are kept alive so that their ids are not reused.
        self._tensors: dict[int, tuple[torch.Tensor, int, int]] = {}
        self._arrays: dict[int, tuple[np.ndarray[Any, Any], int]] = {}

    def _record(self, value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.nbytes > SMALL_BYTES:
            if not value.requires_grad and not value.is_inference():
                self._tensors[id(value)] = (value, value._version, _checksum_of_tensor(value))
        elif isinstance(value, np.ndarray) and value.nbytes > SMALL_BYTES:
            self._arrays[id(value)] = (value, _checksum(value))

    def is_unchanged(self, value: Any) -> bool:
        """Return whether a value was recorded, and still has the same contents."""
        if self.is_recording:
            self._record(value)
        if id(value) in self._tensors:
            _, version, checksum = self._tensors[id(value)]
            # A change through `value.data` or a NumPy array leaves the version counter as it is.
            return bool(value._version == version) and _checksum_of_tensor(value) == checksum
        if id(value) in self._arrays:
            return _checksum(value) == self._arrays[id(value)][1]
        return False


def _checksum(array: np.ndarray[Any, Any]) -> int:
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data)


def _checksum_of_tensor(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        return 0
    content = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if content.device.type == "cpu":
        return zlib.crc32(content.numpy().data)
    # The sums of rows are weighted by their position, so that an exchange of rows is noticed.
    row = min(content.numel(), _BYTES_OF_CHECKSUM_ROW)
    rows = content[: content.numel() // row * row].view(-1, row).sum(1, dtype=torch.int64)
    weights = torch.arange(1, rows.numel() + 1, device=rows.device)
    rest = content[rows.numel() * row :].sum(dtype=torch.int64)
    return int((rows * weights).sum() + rest)


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
            if name not in _OWN_NAMES_OF_MODULES and name not in omitted and _is_saved(value)
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
            return ["dict", number, entries, kind, _name_of_factory(value)]
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
        attributes = self._attributes(attributes_of_object(value))
        return ["object", number, class_name(type(value)), attributes, items]

    def _namedtuple(self, value: Any, number: int) -> Tree:
        return [
            "namedtuple",
            number,
            class_name(type(value)),
            [self.tree_of(item) for item in value],
        ]

    def _dataset(self, value: Any, number: int) -> Tree:
        return ["dataset", number, numbers_of_dataset(value)]

    def _function(self, value: FunctionType, number: int) -> Tree:
        closure = {name: cell.cell_contents for name, cell in variables_of_closure(value).items()}
        defaults = [self.tree_of(item) for item in value.__defaults__ or ()]
        return [
            "function",
            number,
            self._attributes(vars(value)),
            self._attributes(closure),
            defaults,
        ]

    def _class(self, value: type, number: int) -> Tree:
        return ["class", number, class_name(value), self._attributes(attributes_of_class(value))]

    def _attributes(self, attributes: Mapping[str, Any]) -> dict[str, Tree]:
        return {
            name: self.tree_of(value)
            for name, value in list(attributes.items())
            if type(name) is str and _is_saved(value)
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
        is_part_of_model = storage_address(value) in self._guarded_ids
        return [
            *("tensor", number, value.detach().clone(), requires_grad, str(value.device)),
            is_part_of_model,
        ]

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

    def _module(self, value: nn.Module, number: int | None = None) -> Tree:
        attributes = {
            name: self._attributes(attributes_of_module(module))
            for name, module in value.named_modules()
        }
        state = None
        if not _saves_all(self._guarded_ids, value) and not self._only_small:
            state = copied(dict(value.state_dict()))
            if not can_be_stored(state):
                state = None
        return ["module", number, class_name(type(value)), attributes, state]


def _is_saved(value: Any) -> bool:
    """Return whether a variable is saved at all, unlike a module or most functions."""
    if has_type(value, FunctionType):
        return has_variables(value)
    return not has_type(value, ModuleType)


def _name_of_factory(value: Any) -> str | None:
    """Return the name of the class that a `defaultdict` calls for a new entry, or None."""
    factory = getattr(value, "default_factory", None)
    if isinstance(factory, type) and (
        class_name(factory) in _FACTORIES or is_script_class(factory)
    ):
        return class_name(factory)
    return None


def storage_address(tensor: torch.Tensor) -> int | None:
    """Return where the contents of a tensor are in memory, or None if it has none."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.numel() == 0:
        return None
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return None


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
    """Restores the variables of the script from a tree that `VariableWriter` has returned.


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
        # The restored objects by their number.
        self._objects: dict[int, Any] = {}
        # The number of the saved object that was restored into each live one, by the `id` of the
        # latter, which is kept alive.
        self._targets: dict[int, tuple[int, Any]] = {}

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
        if kind in _RESTORED_IN_PLACE:
            live = self._own(live, tree[1])
        reader: Callable[[Tree, Any], Any] = getattr(self, f"_{kind}")
        return reader(tree, live)

    def _own(self, live: Any, number: int) -> Any:
        """Return an object, or `_MISSING` if another saved object was restored into it.

        Two variables may refer to one object when the script starts, and to two of them later, such
        as the current and the best weights.
        """
        if live is _MISSING or live is None:
            return live
        owner, _ = self._targets.setdefault(id(live), (number, live))
        return live if owner == number else _MISSING

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
        has_same_limit = type(live) is collections.deque and live.maxlen == tree[3]
        target = live if has_same_limit else collections.deque(maxlen=tree[3])
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
        target = live if type(live).__name__ == tree[3] else _new_mapping(tree[3], tree[4])
        self._objects[tree[1]] = target
        entries = self._entries(tree, target)
        target.clear()
        target.update(entries)
        return target

    def _entries(self, tree: Tree, present: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return the entries of a dict, restored in place where they exist already."""
        factory = getattr(present, "default_factory", None)
        entries = {}
        for saved_key, item in tree[2]:
            key = self._tuple(saved_key, None) if isinstance(saved_key, list) else saved_key
            entry = present.get(key, _MISSING)
            if entry is _MISSING and factory is not None and isinstance(item, list):
                # The script has added the entry by asking for it.
                entry = factory()
            value = self.value_of(item, entry)
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
        present = attributes_of_object(target)
        # At the save, the object did not have these attributes yet, or no longer.
        for name_now, value_now in present.items():
            if name_now not in attributes and isinstance(value_now, SCALARS):
                _delete_attribute(target, name_now)
        for key, attribute in attributes.items():
            value = self.value_of(attribute, present.get(key, _MISSING))
            if value is not _MISSING and value is not present.get(key, _MISSING):
                _set_attribute(target, key, value)
        if items is not None:
            self._set_items(target, items)
            self._objects[number] = target
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
                present = vars(live).get(name, _MISSING)
                value = self.value_of(attribute, present)
                if value is not _MISSING and value is not present:
                    setattr(live, name, value)
        return live

    def _namedtuple(self, tree: Tree, live: Any) -> Any:
        _, number, name, items = tree
        is_same_class = class_name(type(live)) == name
        cls: Any = type(live) if is_same_class else _find_class(name)
        if cls is None:
            raise resume_differs(f"no class of the script has the name {name!r}")
        present = list(live) if is_same_class else [_MISSING] * len(items)
        values = map(self.value_of, items, present)
        restored = cls._make(None if value is _MISSING else value for value in values)
        self._objects[number] = restored
        return restored

    def _dataset(self, tree: Tree, live: Any) -> Any:
        if isinstance(live, Dataset):
            self._objects[tree[1]] = live
            for name in tree[2].keys() & numbers_of_dataset(live).keys():
                _set_attribute(live, name, tree[2][name])
        return live

    def _function(self, tree: Tree, live: Any) -> Any:
        _, number, attributes, closure, defaults = tree
        if not isinstance(live, FunctionType):
            return live
        self._objects[number] = live
        self._set_attributes(vars(live), attributes)
        cells = variables_of_closure(live)
        for name in closure.keys() & cells.keys():
            cell = cells[name]
            value = self.value_of(closure[name], cell.cell_contents)
            if value is not cell.cell_contents:
                cell.cell_contents = value
        for default, present in zip(defaults, live.__defaults__ or (), strict=False):
            # A default value that is a list is restored in place.
            self.value_of(default, present)
        return live

    def _tensor(self, tree: Tree, live: Any) -> Any:
        _, number, saved, requires_grad, device, is_part_of_model = tree
        target = live
        # A tensor that was not part of a model must not overwrite one that is now.
        if _can_be_overwritten(live, saved) and (
            is_part_of_model or storage_address(live) not in self._guarded_ids
        ):
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
        _, number, cls, attributes_of_parts, state = tree
        if state is not None:
            live = self._module_of_its_own(number, cls, state, live)
        if not isinstance(live, nn.Module):
            return live
        if number is not None:
            self._objects[number] = live
        if state is not None:
            live.load_state_dict(state)
        for name, module in live.named_modules():
            attributes = dict(attributes_of_parts.get(name, {}))
            for buffer in module._non_persistent_buffers_set & attributes.keys():
                module._buffers[buffer] = self.value_of(
                    attributes.pop(buffer), module._buffers.get(buffer)
                )
            self._set_attributes(vars(module), attributes)
        return live

    def _module_of_its_own(self, number: int, cls: str, state: Mapping[str, Any], live: Any) -> Any:
        """Return a module for a saved one that the guard does not save.

        Args:
            number: The number of the saved module.
            cls: The name of its class.
            state: Its ``state_dict``.
            live: The current value of the variable. It may be a model of the guard, if the script
                makes a copy of that only later.

        Raises:
            UnchangedScriptError: H739 if there is no such module.
        """
        if isinstance(live, nn.Module) and id(live) not in self._guarded_ids:
            own = self._own(live, number)
            if own is not _MISSING:
                return own
        for model in self._models:
            for module in model.modules():
                if class_name(type(module)) == cls and _has_state_like(module, state):
                    return copy.deepcopy(module)
        if live is _MISSING:
            # The script creates the module in the loop.
            return live
        raise resume_differs(
            f"a variable referred to a {cls.partition(':')[2]} of its own, and refers to"
            f" {'a model that is trained' if isinstance(live, nn.Module) else repr(live)}"
        )


def _has_state_like(module: nn.Module, state: Mapping[str, Any]) -> bool:
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
    factory_class = None if factory is None else _FACTORIES.get(factory) or _find_class(factory)
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
