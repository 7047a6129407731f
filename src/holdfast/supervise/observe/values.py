"""Numbers out of one-element tensors, and of memory, without a synchronisation or a trace in
autograd.

On the host memory is read as it lies. On a GPU the value is copied to pinned memory, in the stream
of the script, and read at a later step when it has arrived; nothing waits for it, and CUDA is not
started.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

_SLOTS = 16  # copies under way: far more than a GPU lags behind at one or two for each step
# A look at /proc costs a system call, and one at the allocator's statistics 0.1 ms for each device:
# with these pauses both stay far below 1 % of any step.
_HOST_NANOSECONDS = 20_000_000
_DEVICE_NANOSECONDS = 250_000_000
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class OnItsWay:
    """A value that a GPU has been asked for."""

    def __init__(self, slot: Any, event: Any, reader: Callable[[int], float]) -> None:
        self.slot, self.event, self._reader = slot, event, reader

    def arrived(self) -> bool:
        """Return whether it can be read."""
        return bool(self.event.query())

    def value(self) -> float:
        """Return it, once it has arrived."""
        return self._reader(self.slot.data_ptr())


class ValueReader:
    """Read one-element tensors; nothing in this package imports torch, which is passed in."""

    def __init__(self, torch: ModuleType) -> None:
        self._torch: Any = torch
        self._kind = torch.Tensor
        self._readers: dict[Any, Callable[[int], float]] = {
            torch.float32: lambda address: ctypes.c_float.from_address(address).value,
            torch.float64: lambda address: ctypes.c_double.from_address(address).value,
            torch.float16: lambda address: _half(address, "<e", b""),
            # The upper half of a float32
            torch.bfloat16: lambda address: _half(address, "<f", b"\0\0"),
        }
        # Modes of the script that look at every call to torch must not see ours.
        self._unseen: Any = torch._C.DisableTorchFunction
        self._is_looked_at: Callable[[], bool] = torch._C._is_torch_function_mode_enabled
        self._modes: Any = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
        self._free: dict[Any, list[tuple[Any, Any]]] = {}
        self._given_up: list[Any] = []

    def begin(self, under_way: list[Any]) -> None:
        """Begin anew in a forked process, which cannot use the GPU of its parent, not even to
        free what is its.
        """
        self._given_up += [self._free, *under_way]
        self._free = {}

    def read(self, tensor: Any) -> float | OnItsWay | None:
        """Return the value of a tensor, or a promise of it.

        A tensor of ``torch.distributed.tensor`` counts as its local part where every rank holds all
        of it. None for what is no plain tensor of one floating-point element on the host or a CUDA
        device, and for a value that cannot be had without being seen.
        """
        if type(tensor) is not self._kind and type(tensor := _replicated(tensor)) is not self._kind:
            # Any other subclass may do anything when it is touched, such as talk to the other ranks
            return None
        if self._is_looked_at():
            with self._unseen():
                return self.read(tensor)
        reader = self._readers.get(tensor.dtype)
        if reader is None or tensor.numel() != 1:
            return None
        try:
            if tensor.is_cpu:
                address = tensor.data_ptr()
                return reader(address) if address else None
            if (
                tensor.is_cuda
                and not self._modes()
                and not self._torch.cuda.is_current_stream_capturing()
            ):
                return self._send(tensor, reader)
        except (RuntimeError, NotImplementedError):
            # Wrapped by a transform of torch.func, sparse or of another layout: it has no memory
            pass
        return None

    def all_zero(self, tensors: Iterable[Any]) -> bool:
        """Return whether all elements that lie here are 0.

        A host sync for each tensor until one is not.
        """
        with self._unseen():
            try:
                return not any(
                    bool(getattr(tensor, "_local_tensor", tensor).any()) for tensor in tensors
                )
            # Such as a sparse tensor, or one without data
            except (RuntimeError, NotImplementedError):
                return False

    def _send(self, tensor: Any, reader: Callable[[int], float]) -> OnItsWay | None:
        free = self._free.get(tensor.dtype)
        if free is None:
            memory = self._torch.empty(_SLOTS, dtype=tensor.dtype, device="cpu", pin_memory=True)
            free = [
                (memory[index : index + 1], self._torch.cuda.Event()) for index in range(_SLOTS)
            ]
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
        if (free := self._free.get(sent.slot.dtype)) is not None:
            free.append((sent.slot, sent.event))


def _replicated(tensor: Any) -> Any:
    """Return the local part of a ``DTensor`` that every rank holds whole, as that of FSDP2 for a
    norm of gradients.

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


class MemoryReadings:
    """Read the memory of this process and of its devices, as seldom as is enough to see where it
    goes.
    """

    def __init__(self, torch: ModuleType) -> None:
        self._cuda: Any = torch.cuda
        self.begin()

    def begin(self) -> None:
        """Begin in this process, which may be a fork."""
        self._statm: int | None = None
        self.next_look = self._next_device = 0

    def look(self, now: int) -> tuple[int, int, int, int]:
        """Return the resident memory, and of all devices what is allocated, reserved, and was
        allocated at most.

        What was read a short time ago is 0, and so is what the system does not say. `now`:
            monotonic nanoseconds,
        not before `next_look`.
        """
        self.next_look = now + _HOST_NANOSECONDS
        try:
            if self._statm is None:
                self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
            resident = int(os.pread(self._statm, 64, 0).split()[1]) * _PAGE_BYTES
        except (OSError, ValueError, IndexError):  # a script that became a daemon has closed it
            self._statm = None
            return 0, 0, 0, 0
        if now < self._next_device or not self._cuda.is_initialized():
            return resident, 0, 0, 0
        count = self._cuda.device_count()
        self._next_device = now + count * _DEVICE_NANOSECONDS
        allocated = reserved = peak = 0
        for device in range(count):
            stats = self._cuda.memory_stats_as_nested_dict(device)
            allocated += stats["allocated_bytes"]["all"]["current"]
            reserved += stats["reserved_bytes"]["all"]["current"]
            peak += stats["allocated_bytes"]["all"]["peak"]
        return resident, allocated, reserved, peak
