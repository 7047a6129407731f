"""Who owns a storage: found by looking where training keeps its tensors, whenever that has changed.

Does not: tell activations, which are nobody's (`recording`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from holdfast.forecast.trace.attribution import Places
from holdfast.forecast.trace.block_runs import tensors_in
from holdfast.forecast.trace.recording import OTHER
from holdfast.forecast.trace.storages import Storages


class Owners:
    """Note the owners of storages in their ledger.

    Args:
        storages: What lives.
        places: Knows the modules.
    """

    def __init__(self, storages: Storages, places: Places) -> None:
        self._storages = storages
        self._places = places
        self._models: list[nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []

    def watch(self, models: Mapping[str, nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Look at these too from now on."""
        self._places.name_modules(models)
        self._models += models.values()
        self._optimizers += [one for one in optimizers if all(one is not other for other in self._optimizers)]

    def claim(self, tensors: Any, owner: str, module: int = 0) -> None:
        """Note who owns the storages of tensors, in nested lists, tuples and mappings."""
        for tensor in tensors_in(tensors):
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
        for model in self._models:
            self._find_gradients(model.parameters())
        self._find_gradients(self._optimized())

    def find_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at an optimizer's state."""
        for parameter, state in optimizer.state.items():
            module = self._module_of(parameter) if isinstance(parameter, torch.Tensor) else 0
            self.claim(state, "optimizer state", module)

    def _find_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            if parameter.is_leaf and parameter.grad is not None:
                self.claim(parameter.grad, "gradients", self._module_of(parameter))

    def _optimized(self) -> Iterator[torch.Tensor]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    def _module_of(self, parameter: torch.Tensor) -> int:
        number = self._storages.number_of(parameter)
        return 0 if number is None else self._storages.ledger.module[number]
