"""Find the lines of a loss function at which the host reads a value from a device.

At each of them, the host waits for the device, which then runs out of work. The guard cannot avoid
this.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Common functions that wait until a tensor's values are on the host, with the names that users
# know. The list is not complete: indexing with a mask also waits.
_READS: dict[Callable[..., Any], str] = {
    torch.Tensor.item: "item()",
    torch.Tensor.tolist: "tolist()",
    torch.Tensor.numpy: "numpy()",
    torch.Tensor.cpu: "cpu()",
    torch.Tensor.__float__: "float()",
    torch.Tensor.__int__: "int()",
    torch.Tensor.__bool__: "bool()",
    torch.Tensor.nonzero: "nonzero()",
    torch.nonzero: "nonzero()",
    torch.equal: "equal()",
    torch.Tensor.equal: "equal()",
}
# The folders of torch and holdfast. They end with a separator, because other packages have names
# that begin with theirs, such as torchvision.
_TORCH = str(Path(torch.__file__).parent) + os.sep
_HOLDFAST = str(Path(__file__).parents[2]) + os.sep


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRead:
    """A line at which the host reads a value from a device."""

    # The name of the function that reads, such as ``"item()"``.
    function: str
    file: str
    line: int


class HostReads(TorchFunctionMode):
    """Records the host's reads inside its context. Enter it only in eager mode.

    Args:
        device_type: The type of device whose values are read, such as ``"cuda"``.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self.reads: list[HostRead] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Record a read, and call the function."""
        name = _READS.get(func)
        if name is not None and self._is_on_device(args):
            self._record(name)
        return func(*args, **(kwargs or {}))

    def _is_on_device(self, args: Sequence[Any]) -> bool:
        if not args or not isinstance(args[0], torch.Tensor):
            return False
        return args[0].device.type == self._device_type

    def _record(self, name: str) -> None:
        # Frame 0 is this method, and frame 1 is `__torch_function__`.
        frame = _frame_outside_torch(sys._getframe(2))
        if frame is not None and not frame.f_code.co_filename.startswith(_HOLDFAST):
            self.reads.append(
                HostRead(function=name, file=frame.f_code.co_filename, line=frame.f_lineno)
            )


def _frame_outside_torch(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame that is not in torch, or None."""
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return frame
