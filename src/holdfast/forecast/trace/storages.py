"""The storages of a device that are alive, by weak references and numbers, and who owns them.

The owner is found by looking where training keeps its tensors; activations, nobody's, are known by
`recording`.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor

from holdfast.forecast.trace.attribution import Places
from holdfast.forecast.trace.recording import OTHER, Ledger, Recording
from holdfast.memory.tensors import tensors_of


class _Held(weakref.ref[torch.UntypedStorage]):
    """A storage that is watched; its number is -1 while it is empty."""

    __slots__ = ("key", "number", "size_bytes")
    key: int
    number: int
    size_bytes: int


class Storages:
    """Watch the storages of tensors on one type of device; `phase` returns what is running."""

    def __init__(self, device_type: str, phase: Callable[[], int]) -> None:
        self.ledger = Ledger()
        self.record: Recording | None = None
        self.place = (0, 0)  # module and line of what is running
        self._device_type = device_type
        self._phase = phase
        self._live: dict[int, _Held] = {}

    def living(self) -> list[int]:
        """Return the numbers of what is alive, in the order of allocation."""
        return sorted(held.number for held in self._live.values() if held.number >= 0)

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Return the number of a tensor's storage, or None if it is empty or not watched."""
        storage = _storage_of(tensor)
        held = None if storage is None else self._live.get(storage._cdata)
        return None if held is None or held.number < 0 else held.number

    def is_here(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the device."""
        # A fake tensor's `device` is a property that asks who asks (`stand_ins`).
        device: torch.device = (
            tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        )
        return device.type == self._device_type

    def hold_all(self, out: Any, born: int) -> bool | None:
        """Watch what an operation returned.

        Return whether a tensor is on the device, None if there are none.
        """
        if isinstance(out, torch.Tensor):
            return self.hold(out, born)
        here = None
        if isinstance(out, (list, tuple)):
            for item in out:
                here = self.hold_all(item, born) or here
        return here

    def hold(self, tensor: torch.Tensor, born: int) -> bool:
        """Watch the storage of a tensor, new ones born in this phase.

        Return whether it is on the device.
        """
        if not self.is_here(tensor):
            return False
        storage = _storage_of(tensor)
        if storage is None:
            return True
        held = self._live.get(storage._cdata)
        if held is None:
            held = _Held(storage, self._ended)
            held.key, held.number, held.size_bytes = storage._cdata, -1, 0
            self._live[held.key] = held
        if held.size_bytes != storage.nbytes():
            self._resize(held, storage.nbytes(), born)
        return True

    def hold_unknown(self) -> None:
        """Watch tensors that were made before, as far as Python knows them.

        Those of the kind that is traced.
        """
        fake = active_fake_mode() is not None
        for item in gc.get_objects():
            kind = type(item)
            if issubclass(kind, torch.Tensor) and issubclass(kind, FakeTensor) == fake:
                self.hold(item, OTHER)

    def use(self, size_bytes: int, phase: int) -> None:
        """Note memory that an operation takes for itself and gives back."""
        if self.record is not None:
            number = self.ledger.add(size_bytes, *self.place, phase)
            self.ledger.own(number, "scratch")
            self.record.allocate(number, phase)
            self.record.free(number, phase)

    def _resize(self, held: _Held, size_bytes: int, born: int) -> None:
        """Note that a storage has another size.

        The new memory is there before the old is given back.
        """
        old = held.number
        held.size_bytes = size_bytes
        held.number = self.ledger.add(size_bytes, *self.place, born) if size_bytes else -1
        if old >= 0 and held.number >= 0 and old in self.ledger.owner:
            self.ledger.owner[held.number] = self.ledger.owner[old]
        if self.record is not None:
            if held.number >= 0:
                self.record.allocate(held.number, self._phase())
            if old >= 0:
                self.record.free(old, self._phase())

    def _ended(self, held: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(held, _Held)
        if self._live.get(held.key) is held:
            del self._live[held.key]
            if held.number >= 0 and self.record is not None:
                self.record.free(held.number, self._phase())


class Owners:
    """Note the owners of storages in their ledger."""

    def __init__(self, storages: Storages, places: Places) -> None:
        self._storages = storages
        self._places = places
        self._models: list[nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []

    def watch(
        self, models: Mapping[str, nn.Module], optimizers: Iterable[torch.optim.Optimizer]
    ) -> None:
        """Look at these too from now on."""
        self._places.name_modules(models)
        self._models += models.values()
        self._optimizers += [
            one for one in optimizers if all(one is not other for other in self._optimizers)
        ]

    def claim(self, tensors: Any, owner: str, module: int = 0) -> None:
        """Note who owns the storages of tensors, in nested lists, tuples and mappings."""
        for tensor in tensors_of(tensors):
            if self._storages.hold(tensor, OTHER):
                number = self._storages.number_of(tensor)
                if number is not None:
                    self._storages.ledger.own(number, owner, module)

    def find_all(self) -> None:
        """Look everywhere."""
        for model in self._models:
            for module in model.modules():
                number = self._places.number_of(module)
                self.claim(list(module.parameters(recurse=False)), "parameters", number)
                self.claim(list(module.buffers(recurse=False)), "buffers", number)
        self.claim(list(self._optimized()), "parameters")
        self.find_gradients()
        for optimizer in self._optimizers:
            self.find_state(optimizer)

    def find_gradients(self) -> None:
        """Look at the parameters' gradients."""
        for parameter in (
            *(p for model in self._models for p in model.parameters()),
            *self._optimized(),
        ):
            if parameter.is_leaf and parameter.grad is not None:
                self.claim(parameter.grad, "gradients", self._module_of(parameter))

    def find_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at an optimizer's state."""
        for parameter, state in optimizer.state.items():
            module = self._module_of(parameter) if isinstance(parameter, torch.Tensor) else 0
            self.claim(state, "optimizer state", module)

    def _optimized(self) -> Iterator[torch.Tensor]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    def _module_of(self, parameter: torch.Tensor) -> int:
        number = self._storages.number_of(parameter)
        return 0 if number is None else self._storages.ledger.module[number]


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    # A sparse one; its parts are watched by themselves
    except (NotImplementedError, RuntimeError, ValueError):
        return None
