"""`LargeData`: recognize data of the script that need not be saved, such as a dataset in memory."""

from __future__ import annotations

import operator
import zlib
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast.guard.unchanged.variables.kinds import (
    MOST_ENTRIES,
    SCALARS,
    SMALL_BYTES,
    is_container,
)

# On an accelerator, a checksum adds up this number of bytes at once.
_BYTES_OF_CHECKSUM_ROW = 4096
# A container of numbers and strings with at most this number of entries is always saved.
_MOST_ENTRIES_OF_SHORT = 10_000
# The depth to which containers in a container are compared.
_MOST_LEVELS = 8


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
        # The contents of each container of a dataset when training began, by `id`.
        self._containers: dict[int, tuple[Any, _Contents]] = {}

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

    def is_unchanged_container(self, value: Any) -> bool:
        """Return whether a container of a dataset was recorded, and still has the same contents.

        A dataset may hold a list of a hundred thousand samples, so its entries are compared by
        identity. A change inside an entry is noticed if the entry is a container, a tensor or a
        small array. A short container of numbers and strings is never recorded, because it costs
        nothing to save.
        """
        # A container with more entries is never saved, so there is nothing to compare.
        if not is_container(value) or len(value) > MOST_ENTRIES or _is_short(value):
            return False
        if self.is_recording:
            self._containers[id(value)] = (value, _contents(value))
        if id(value) not in self._containers:
            return False
        _, recorded = self._containers[id(value)]
        now = _contents(value)
        return (
            len(now.entries) == len(recorded.entries)
            and all(map(operator.is_, now.entries, recorded.entries))
            and now.versions == recorded.versions
        )


class _Contents(NamedTuple):
    """What a container held at one moment."""

    # The keys and entries, and those of the containers inside it. They are compared by identity.
    entries: list[Any]
    # The version counter of each tensor, the checksum of each small array, and the size of each
    # large one.
    versions: list[int]


def _is_short(container: Any) -> bool:
    """Return whether a container has only a few entries, which are all numbers or strings."""
    if len(container) > _MOST_ENTRIES_OF_SHORT:
        return False
    values = container.values() if isinstance(container, dict) else container
    return {type(value) for value in values} <= set(SCALARS)


def _contents(container: Any, levels: int = _MOST_LEVELS) -> _Contents:
    """Return what a container holds now.

    Args:
        container: The container.
        levels: The depth to which containers inside it are searched.
    """
    entries: list[Any] = []
    versions: list[int] = []
    if isinstance(container, dict):
        entries += container.keys()
        values = list(container.values())
    else:
        values = list(container)
    entries += values
    for value in values:
        if type(value) in SCALARS:
            continue
        if is_container(value) and levels > 1:
            inner = _contents(value, levels - 1)
            entries += inner.entries
            versions += inner.versions
        elif isinstance(value, torch.Tensor) and not value.is_inference():
            versions.append(value._version)
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            versions.append(_checksum(value) if value.nbytes <= SMALL_BYTES else value.nbytes)
    return _Contents(entries, versions)


def _checksum(array: np.ndarray[Any, Any]) -> int:
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data)


def _checksum_of_tensor(tensor: torch.Tensor) -> int:
    if tensor.is_quantized:
        return 0
    # A conjugate or negative may be a view that computes its values when they are used.
    values = tensor.detach().resolve_conj().resolve_neg()
    content = values.contiguous().view(-1).view(torch.uint8)
    if content.device.type == "cpu":
        return zlib.crc32(content.numpy().data)
    # The sums of rows are weighted by their position, so that an exchange of rows is noticed.
    row = min(content.numel(), _BYTES_OF_CHECKSUM_ROW)
    rows = content[: content.numel() // row * row].view(-1, row).sum(1, dtype=torch.int64)
    weights = torch.arange(1, rows.numel() + 1, device=rows.device)
    rest = content[rows.numel() * row :].sum(dtype=torch.int64)
    return int((rows * weights).sum() + rest)
