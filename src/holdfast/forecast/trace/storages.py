"""Track the live storages of a device and their owners.

Storages are watched by weak references. Owners are found by looking where training code keeps its
tensors: in modules, in gradients and in optimizer state. Activations have no owner there;
`recording` recognizes them by their lifetime.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor

from holdfast.forecast.trace.attribution import Location, Locator
from holdfast.forecast.trace.recording import OTHER, RawStep, StorageTable
from holdfast.memory.tensors import tensors_of

# The number of a watched storage that has no memory.
_EMPTY = -1


class _WatchedStorage(weakref.ref[torch.UntypedStorage]):
    """A storage that is watched, with its number in the table."""

    __slots__ = ("key", "number", "size_bytes")
    key: int
    number: int
    size_bytes: int


class Storages:
    """Watches the storages of tensors on one type of device.

    Args:
        device_type: The type of the device, such as ``"cuda"``.
        phase: Returns the phase that is running.
    """

    def __init__(self, device_type: str, phase: Callable[[], int]) -> None:
        self.table = StorageTable()
        # The step that is recorded, if any.
        self.record: RawStep | None = None
        # The module and line of the running operation.
        self.location = Location(0, 0)
        self._device_type = device_type
        self._phase = phase
        self._live: dict[int, _WatchedStorage] = {}

    def living(self) -> list[int]:
        """Return the numbers of the storages that are alive, in the order of allocation."""
        return sorted(storage.number for storage in self._live.values() if storage.number != _EMPTY)

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Return the number of a tensor's storage, or None if it is empty or not watched."""
        storage = _storage_of(tensor)
        watched = None if storage is None else self._live.get(storage._cdata)
        if watched is None or watched.number == _EMPTY:
            return None
        return watched.number

    def is_here(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the device."""
        if isinstance(tensor, FakeTensor):
            # Its `device` is a property that depends on the caller (`fake.stand_ins`).
            device: torch.device = tensor.fake_device
        else:
            device = tensor.device
        return device.type == self._device_type

    def watch_result(self, out: Any, born: int) -> bool | None:
        """Watch the tensors that an operation returned.

        Returns:
            Whether one of them is on the device; None if it returned no tensors.
        """
        if isinstance(out, torch.Tensor):
            return self.watch(out, born)
        is_here = None
        if isinstance(out, (list, tuple)):
            for item in out:
                is_here = self.watch_result(item, born) or is_here
        return is_here

    def watch(self, tensor: torch.Tensor, born: int) -> bool:
        """Watch the storage of a tensor.

        Args:
            tensor: The tensor, on any device.
            born: The phase in which its storage was allocated, if it is new.

        Returns:
            Whether the tensor is on the device.
        """
        if not self.is_here(tensor):
            return False
        storage = _storage_of(tensor)
        if storage is None:
            return True
        watched = self._live.get(storage._cdata)
        if watched is None:
            watched = _WatchedStorage(storage, self._on_freed)
            watched.key = storage._cdata
            watched.number = _EMPTY
            watched.size_bytes = 0
            self._live[watched.key] = watched
        if watched.size_bytes != storage.nbytes():
            self._resize(watched, storage.nbytes(), born)
        return True

    def watch_existing(self) -> None:
        """Watch all existing tensors that Python can find.

        In a fake mode these are the fake tensors, otherwise the real ones.
        """
        wants_fake = active_fake_mode() is not None
        for candidate in gc.get_objects():
            # Not isinstance: it reads an attribute of some objects, which may run code.
            kind = type(candidate)
            if issubclass(kind, torch.Tensor) and issubclass(kind, FakeTensor) == wants_fake:
                self.watch(candidate, OTHER)

    def use_scratch(self, size_bytes: int, phase: int) -> None:
        """Record scratch memory that an operation allocates and frees while it runs."""
        assert self.record is not None, "no step is recorded"
        number = self.table.add(size_bytes, *self.location, phase)
        self.table.own(number, "scratch")
        self.record.allocate(number, phase)
        self.record.free(number, phase)

    def _resize(self, watched: _WatchedStorage, size_bytes: int, born: int) -> None:
        """Record that a storage was resized: the new memory is allocated, the old freed."""
        old = watched.number
        watched.size_bytes = size_bytes
        watched.number = _EMPTY
        if size_bytes:
            watched.number = self.table.add(size_bytes, *self.location, born)
            if old in self.table.owner:
                self.table.owner[watched.number] = self.table.owner[old]
        if self.record is None:
            return
        if watched.number != _EMPTY:
            self.record.allocate(watched.number, self._phase())
        if old != _EMPTY:
            self.record.free(old, self._phase())

    def _on_freed(self, watched: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(watched, _WatchedStorage)
        if self._live.get(watched.key) is not watched:
            return
        del self._live[watched.key]
        if watched.number != _EMPTY and self.record is not None:
            self.record.free(watched.number, self._phase())


class Owners:
    """Find the owners of storages, and note them in the table."""

    def __init__(self, storages: Storages, locator: Locator) -> None:
        self._storages = storages
        self._locator = locator
        self._models: list[nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []

    def add_models(self, models: Mapping[str, nn.Module]) -> None:
        """Add models, by name, that own tensors."""
        self._locator.name_modules(models)
        self._models += models.values()

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Add an optimizer that owns tensors, unless it was added before."""
        if all(optimizer is not known for known in self._optimizers):
            self._optimizers.append(optimizer)

    def claim(self, tensors: Any, owner: str, module: int = 0) -> None:
        """Note who owns tensors, in nested lists, tuples and mappings."""
        for tensor in tensors_of(tensors):
            if self._storages.watch(tensor, OTHER):
                number = self._storages.number_of(tensor)
                if number is not None:
                    self._storages.table.own(number, owner, module)

    def find_all(self) -> None:
        """Note the owners of parameters, buffers, gradients and optimizer state.

        New storages are numbered in the order in which ``Module.to`` moves them to a device.
        """
        for model in self._models:
            for module in model.modules():
                number = self._locator.number_of(module)
                self.claim(list(module.parameters(recurse=False)), "parameters", number)
                self.claim(list(module.buffers(recurse=False)), "buffers", number)
        self.claim(list(self._optimized_parameters()), "parameters")
        self.find_gradients()
        for optimizer in self._optimizers:
            self.find_state(optimizer)

    def find_gradients(self) -> None:
        """Note the gradients of all parameters."""
        parameters = [parameter for model in self._models for parameter in model.parameters()]
        for parameter in (*parameters, *self._optimized_parameters()):
            if parameter.is_leaf and parameter.grad is not None:
                self.claim(parameter.grad, "gradients", self._module_of(parameter))

    def find_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the state of an optimizer."""
        for parameter, state in optimizer.state.items():
            module = self._module_of(parameter) if isinstance(parameter, torch.Tensor) else 0
            self.claim(state, "optimizer state", module)

    def _optimized_parameters(self) -> Iterator[torch.Tensor]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    def _module_of(self, parameter: torch.Tensor) -> int:
        number = self._storages.number_of(parameter)
        return 0 if number is None else self._storages.table.module[number]


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor; None if it is sparse, because its parts are watched."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError, ValueError):
        return None
