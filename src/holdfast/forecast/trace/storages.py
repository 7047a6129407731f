"""Track the live storages on a device and their owners.

Storages are watched through weak references. To find their owners, `Owners` searches the objects
that training code keeps its tensors in: modules, gradients and optimizer state. Activations are in
none of these objects, so `recording` recognizes them by their lifetimes.
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

# The number shared by all watched storages of 0 bytes.
_EMPTY = -1


class _WatchedStorage(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a watched storage, with the storage's address, number and size.

    The number is the storage's index in the `StorageTable`, or `_EMPTY`.
    """

    __slots__ = ("key", "number", "size_bytes")
    key: int
    number: int
    size_bytes: int


class Storages:
    """Watches the storages of tensors on one type of device.

    Args:
        device_type: The type of the device, such as ``"cuda"``.
        phase: A function that returns the current phase of the step, as an index into `PHASES`.
    """

    def __init__(self, device_type: str, phase: Callable[[], int]) -> None:
        self.table = StorageTable()
        # The record of the current step, or None if no step is being recorded.
        self.record: RawStep | None = None
        # The module and line of the running operation.
        self.location = Location(0, 0)
        self._device_type = device_type
        self._phase = phase
        self._live: dict[int, _WatchedStorage] = {}

    def living(self) -> list[int]:
        """Return the numbers of all live storages, in the order in which they were allocated."""
        return sorted(storage.number for storage in self._live.values() if storage.number != _EMPTY)

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Return the number of a tensor's storage, or None if the storage is empty or unwatched."""
        storage = _storage_of(tensor)
        watched = None if storage is None else self._live.get(storage._cdata)
        if watched is None or watched.number == _EMPTY:
            return None
        return watched.number

    def is_here(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the watched device."""
        if isinstance(tensor, FakeTensor):
            # What `tensor.device` returns depends on the calling code; see `fake.stand_ins`.
            device: torch.device = tensor.fake_device
        else:
            device = tensor.device
        return device.type == self._device_type

    def watch_result(self, out: Any, born: int) -> bool | None:
        """Watch the storages of the tensors that an operation has returned.

        Args:
            out: The result of the operation.
            born: The phase in which new storages were allocated, as an index into `PHASES`.

        Returns:
            Whether any of these tensors is on the watched device; None if there are no tensors.
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
            born: The phase in which the storage was allocated, if it is new, as an index into
                `PHASES`.

        Returns:
            Whether the tensor is on the watched device.
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
        """Watch all existing tensors that Python's garbage collector tracks.

        While a fake mode is active, only fake tensors are watched; otherwise, only real ones.
        """
        wants_fake = active_fake_mode() is not None
        for candidate in gc.get_objects():
            # Do not use isinstance: it reads `__class__`, which runs code in some objects.
            kind = type(candidate)
            if issubclass(kind, torch.Tensor) and issubclass(kind, FakeTensor) == wants_fake:
                self.watch(candidate, OTHER)

    def use_scratch(self, size_bytes: int, phase: int) -> None:
        """Record the scratch memory that an operation allocates and frees while it runs."""
        assert self.record is not None, "no step is recorded"
        number = self.table.add(size_bytes, *self.location, phase)
        self.table.own(number, "scratch")
        self.record.allocate(number, phase)
        self.record.free(number, phase)

    def _resize(self, watched: _WatchedStorage, size_bytes: int, born: int) -> None:
        """Record a resized storage: an allocation of the new memory, then a free of the old memory.

        A new storage counts as resized from 0 bytes.
        """
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
    """Finds the owners of storages, and records them in the table."""

    def __init__(self, storages: Storages, locator: Locator) -> None:
        self._storages = storages
        self._locator = locator
        self._models: list[nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []

    def add_models(self, models: Mapping[str, nn.Module]) -> None:
        """Register models, keyed by name, whose parameters and buffers `find_all` looks up."""
        self._locator.name_modules(models)
        self._models += models.values()

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Register an optimizer whose state `find_all` looks up, unless it is registered."""
        if all(optimizer is not other for other in self._optimizers):
            self._optimizers.append(optimizer)

    def claim(self, tensors: Any, owner: str, module: int = 0) -> None:
        """Record who owns the storages of the given tensors.

        Args:
            tensors: A tensor, or a nested container of tensors.
            owner: One of `OWNERS`.
            module: The number of the module that the tensors belong to; 0 leaves the recorded
                module unchanged.
        """
        for tensor in tensors_of(tensors):
            if self._storages.watch(tensor, OTHER):
                number = self._storages.number_of(tensor)
                if number is not None:
                    self._storages.table.own(number, owner, module)

    def find_all(self) -> None:
        """Record which storages hold parameters, buffers, gradients and optimizer state.

        Parameters and buffers are visited in the order in which ``Module.to`` allocates them, so
        that new storages are numbered in this order.
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
        """Record which storages hold gradients, and the modules of their parameters."""
        parameters = [parameter for model in self._models for parameter in model.parameters()]
        for parameter in (*parameters, *self._optimized_parameters()):
            if parameter.is_leaf and parameter.grad is not None:
                self.claim(parameter.grad, "gradients", self._module_of(parameter))

    def find_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Record which storages hold an optimizer's state, and the modules of its parameters."""
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
    """Return a tensor's storage, or None if the tensor is sparse.

    The indices and values of a sparse tensor are separate tensors, which are watched on their own.
    """
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError, ValueError):
        return None
