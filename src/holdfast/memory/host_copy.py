"""Copy tensors to the host while the host continues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class HostCopy:
    """A copy of a tensor in host memory, which the device makes while the host continues.

    Args:
        values: The tensor. A tensor on the CPU is not copied, so it must not change until it is
            read.
        blocking: Whether to wait for the copy at once. Otherwise, the device must have events
            (``torch.cuda.Event`` and its counterparts).
    """

    def __init__(self, values: Tensor, *, blocking: bool = False) -> None:
        self._event: Any = None
        if blocking or values.is_cpu:
            self._copy = values.cpu()
            return
        # A copy to the host is asynchronous only if its target is pinned.
        self._copy = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
        self._copy.copy_(values, non_blocking=True)
        self._event = torch.get_device_module(values.device).Event()
        self._event.record()

    @property
    def is_complete(self) -> bool:
        """Return whether `read` would return without waiting."""
        return self._event is None or bool(self._event.query())

    def read(self) -> Tensor:
        """Return the copy, a CPU tensor. If it is not complete yet, this waits for it."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy


class HostCopies:
    """Copies of many small tensors, which are copied together.

    Args:
        tensors: The tensors. They are joined to one tensor for each device and dtype.
        blocking: Whether to wait for the copies at once; see `HostCopy`.
    """

    def __init__(self, tensors: Sequence[Tensor], *, blocking: bool) -> None:
        self._shapes = [tensor.shape for tensor in tensors]
        # The positions in `tensors` of those that are joined.
        groups: dict[object, list[int]] = {}
        for position, tensor in enumerate(tensors):
            groups.setdefault(_group_of(position, tensor), []).append(position)
        self._copies: list[tuple[list[int], HostCopy]] = []
        for positions in groups.values():
            joined = _joined([tensors[position] for position in positions])
            # A wrapper of tensors cannot be copied into a plain tensor.
            is_blocking = blocking or is_traceable_wrapper_subclass(joined)
            self._copies.append((positions, HostCopy(joined, blocking=is_blocking)))

    def read(self) -> list[Tensor]:
        """Return the copies, which are CPU tensors, in the order of the tensors."""
        copies: dict[int, Tensor] = {}
        for positions, copy in self._copies:
            sizes = [self._shapes[position].numel() for position in positions]
            parts = torch.split(copy.read().reshape(-1), sizes)
            for position, part in zip(positions, parts, strict=True):
                copies[position] = part.reshape(self._shapes[position])
        return [copies[position] for position in range(len(self._shapes))]


def _group_of(position: int, tensor: Tensor) -> object:
    """Return a key that is equal for tensors that can be joined."""
    is_wrapper: bool = is_traceable_wrapper_subclass(tensor)
    if is_wrapper:
        # A wrapper of tensors, such as a DTensor, may not support `torch.cat`.
        return position
    return tensor.device, tensor.dtype


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of all tensors as one tensor, or a single tensor itself."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
