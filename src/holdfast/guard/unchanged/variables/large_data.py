"""`LargeData`: recognize data of the script that need not be saved, such as a dataset in memory."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch

from holdfast.guard.unchanged.variables.kinds import SMALL_BYTES

# On an accelerator, a checksum adds up this number of bytes at once.
_BYTES_OF_CHECKSUM_ROW = 4096


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
