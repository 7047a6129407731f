"""Numbers out of one-element tensors, without a synchronisation or a trace in autograd.

On the host the memory is read as it lies. On a GPU the value is copied to pinned memory, in the stream of the script,
and read at a later step when it has arrived; nothing waits for it.

Does not: know what the values mean (``steps`` does).
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

_SLOTS = 16  # copies under way: far more than a GPU lags behind at one or two for each step


class OnItsWay:
    """A value that a GPU has been asked for.

    Args:
        slot: Pinned memory of one element.
        event: Of the script's stream, after the copy.
        reader: Reads an element at an address.
    """

    def __init__(self, slot: Any, event: Any, reader: Callable[[int], float]) -> None:
        self.slot = slot
        self.event = event
        self._reader = reader

    def arrived(self) -> bool:
        """Return whether it can be read."""
        return bool(self.event.query())

    def value(self) -> float:
        """Return it, once it has arrived."""
        return self._reader(self.slot.data_ptr())


class ValueReader:
    """Read one-element tensors.

    Args:
        torch: The module: nothing in this room imports it.
    """

    def __init__(self, torch: ModuleType) -> None:
        self._torch: Any = torch
        self._tensor, self._strided = torch.Tensor, torch.strided
        self._readers: dict[Any, Callable[[int], float]] = {
            torch.float32: lambda address: ctypes.c_float.from_address(address).value,
            torch.float64: lambda address: ctypes.c_double.from_address(address).value,
            torch.float16: lambda address: _half(address, "<e", b""),
            torch.bfloat16: lambda address: _half(address, "<f", b"\0\0"),  # the upper half of a float32
        }
        # Modes of the script that look at every call to torch must not see ours.
        self._unseen: Any = getattr(torch._C, "DisableTorchFunction", nullcontext)
        self._modes: Any = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
        self._free: dict[Any, list[tuple[Any, Any]]] = {}
        self._given_up: list[Any] = []

    def begin(self, under_way: list[Any]) -> None:
        """Begin anew in a forked process, which cannot use the GPU of its parent, not even to free what is its.

        Args:
            under_way: What else belongs to that GPU.
        """
        self._given_up += [self._free, *under_way]
        self._free = {}

    def read(self, tensor: Any) -> float | OnItsWay | None:
        """Return the value of a tensor, or a promise of it.

        A tensor of ``torch.distributed.tensor`` counts as its local part where every rank holds all of it.

        None for what is no plain tensor of one floating-point element on the host or a CUDA device, and for a value
        that cannot be had without being seen.
        """
        tensor = _replicated(tensor)
        if type(tensor) is not self._tensor:
            return None  # any other subclass may do anything when it is touched, such as talk to the other ranks
        unseen: AbstractContextManager[Any] = self._unseen()
        with unseen:
            reader = self._readers.get(tensor.dtype)
            if reader is None or tensor.numel() != 1 or tensor.layout is not self._strided:
                return None
            try:
                if tensor.is_cpu:
                    address = tensor.data_ptr()
                    return reader(address) if address else None
                if tensor.is_cuda and not self._modes() and not self._torch.cuda.is_current_stream_capturing():
                    return self._send(tensor, reader)
            except (RuntimeError, NotImplementedError):  # wrapped by a transform of torch.func: it has no memory
                pass
        return None

    def all_zero(self, tensors: Iterable[Any]) -> bool:
        """Return whether all elements that lie here are 0; a host sync for each tensor until one is not."""
        with self._unseen():
            try:
                return not any(bool(getattr(tensor, "_local_tensor", tensor).any()) for tensor in tensors)
            except (RuntimeError, NotImplementedError):  # such as a sparse tensor, or one without data
                return False

    def _send(self, tensor: Any, reader: Callable[[int], float]) -> OnItsWay | None:
        free = self._free.get(tensor.dtype)
        if free is None:
            memory = self._torch.empty(_SLOTS, dtype=tensor.dtype, device="cpu", pin_memory=True)
            free = [(memory[index : index + 1], self._torch.cuda.Event()) for index in range(_SLOTS)]
            self._free[tensor.dtype] = free
        if not free:
            return None
        slot, event = free.pop()
        try:
            with self._torch.cuda.device(tensor.device):
                slot.copy_(tensor.detach().reshape(1), non_blocking=True)
                event.record()
        except BaseException:
            free.append((slot, event))
            raise
        return OnItsWay(slot, event, reader)

    def give_back(self, sent: OnItsWay) -> None:
        """Let the place of a value that has arrived be used again."""
        free = self._free.get(sent.slot.dtype)
        if free is not None:
            free.append((sent.slot, sent.event))


def _replicated(tensor: Any) -> Any:
    """Return the local part of a ``DTensor`` that every rank holds whole, as that of FSDP2 for a norm of gradients.

    Its attributes are read and nothing is computed with it, which could talk to the other ranks.
    """
    distributed: Any = sys.modules.get("torch.distributed.tensor")
    if distributed is None or type(tensor) is not distributed.DTensor:
        return tensor
    if not all(each.is_replicate() for each in tensor._spec.placements):
        return None
    local = tensor._local_tensor
    # What a collective still has to fill is waited for by who uses it: never by us.
    return local.elem if getattr(local, "completed", False) else local


def _half(address: int, code: str, before: bytes) -> float:
    value: float = struct.unpack(code, before + ctypes.string_at(address, 2))[0]
    return value
