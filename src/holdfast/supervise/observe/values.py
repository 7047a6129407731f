"""Read numbers from one-element tensors, and memory use, without synchronizing with the GPU.

On the host, a number is read straight from memory, invisible to autograd and to any mode of the
script. On a GPU it is copied to pinned memory in the script's stream, and read at a later step once
it has arrived. Nothing waits for it, and we never initialize CUDA.

Nothing here imports torch: the module is passed in.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, NamedTuple

# How many copies per dtype may be in flight: at one or two per step, far more than a GPU lags
# behind.
_SLOTS = 16
# Reading /proc costs a system call, and reading the allocator's statistics 0.1 ms per device. With
# these pauses both stay far below 1 % of the time.
_HOST_PAUSE_NANOSECONDS = 20_000_000
_DEVICE_PAUSE_NANOSECONDS = 250_000_000
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MAX_STATM_BYTES = 64


class _Float16:
    """A number type that can be read from an address, like a ctypes type."""

    def __init__(self, value: float) -> None:
        self.value = value

    @classmethod
    def from_address(cls, address: int) -> _Float16:
        return cls(struct.unpack("<e", ctypes.string_at(address, 2))[0])


class _BFloat16(_Float16):
    """A bfloat16 number, which is the upper half of a float32."""

    @classmethod
    def from_address(cls, address: int) -> _BFloat16:
        return cls(struct.unpack("<f", b"\0\0" + ctypes.string_at(address, 2))[0])


class PendingValue:
    """A number that is being copied from a GPU.

    Args:
        slot: One-element tensor in pinned memory, the target of the copy.
        event: A CUDA event recorded after the copy.
        number_type: How the number is read from the slot.
    """

    def __init__(self, slot: Any, event: Any, number_type: Any) -> None:
        self.slot = slot
        self.event = event
        self._number_type = number_type

    def has_arrived(self) -> bool:
        """Return whether the number has arrived."""
        return bool(self.event.query())

    def value(self) -> float:
        """Return the number; call this only once it has arrived."""
        number: float = self._number_type.from_address(self.slot.data_ptr()).value
        return number


class ValueReader:
    """Reads one-element tensors."""

    def __init__(self, torch: ModuleType) -> None:
        self._torch: Any = torch
        self._tensor_type = torch.Tensor
        self._number_types: dict[Any, Any] = {
            torch.float32: ctypes.c_float,
            torch.float64: ctypes.c_double,
            torch.float16: _Float16,
            torch.bfloat16: _BFloat16,
        }
        # The script's torch-function modes must not see our calls.
        self._disable_torch_function: Any = torch._C.DisableTorchFunction
        self._is_torch_function_mode_enabled: Callable[[], bool] = (
            torch._C._is_torch_function_mode_enabled
        )
        self._dispatch_mode_count: Any = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
        # Free slots in pinned memory, each with its event, by dtype.
        self._free_slots: dict[Any, list[tuple[Any, Any]]] = {}
        # Slots of the parent process; see `reset_after_fork`.
        self._abandoned: list[Any] = []

    def reset_after_fork(self, pending: list[Any]) -> None:
        """Start over in a forked process, which cannot use its parent's GPU.

        It cannot even free what belongs to that GPU, so references to everything are kept.

        Args:
            pending: What holds values that were being copied in the parent.
        """
        self._abandoned += [self._free_slots, *pending]
        self._free_slots = {}

    def read(self, tensor: Any) -> float | PendingValue | None:
        """Return the number in a tensor, or a `PendingValue` for it.

        A ``DTensor`` counts as its local part if every rank holds all of it.

        Returns:
            None for anything but a plain tensor with one floating-point element on the host or a
            CUDA device, and for a number that cannot be read without side effects.
        """
        if type(tensor) is not self._tensor_type:
            tensor = _replicated_part(tensor)
            # Another subclass may run any code when touched, such as communicating with other
            # ranks.
            if type(tensor) is not self._tensor_type:
                return None
        if self._is_torch_function_mode_enabled():
            with self._disable_torch_function():
                return self.read(tensor)
        number_type = self._number_types.get(tensor.dtype)
        if number_type is None or tensor.numel() != 1:
            return None
        try:
            if tensor.is_cpu:
                address = tensor.data_ptr()
                return number_type.from_address(address).value if address else None
            if tensor.is_cuda and self._may_copy():
                return self._start_copy(tensor, number_type)
        except (RuntimeError, NotImplementedError):
            # A tensor inside a torch.func transform, or with a sparse or other layout, has no
            # memory that could be read directly.
            return None
        return None

    def _may_copy(self) -> bool:
        """Return whether a copy would be invisible to modes and not be captured in a CUDA graph."""
        if self._dispatch_mode_count():
            return False
        return not self._torch.cuda.is_current_stream_capturing()

    def _start_copy(self, tensor: Any, number_type: Any) -> PendingValue | None:
        """Start copying a number to the host; None if all slots are in use."""
        free_slots = self._free_slots.get(tensor.dtype)
        if free_slots is None:
            free_slots = self._allocate_slots(tensor.dtype)
            self._free_slots[tensor.dtype] = free_slots
        if not free_slots:
            return None
        slot, event = free_slots.pop()
        try:
            with self._torch.cuda.device(tensor.device):
                slot.copy_(tensor.detach().reshape(1), non_blocking=True)
                event.record()
        except BaseException:
            free_slots.append((slot, event))
            raise
        return PendingValue(slot, event, number_type)

    def _allocate_slots(self, dtype: Any) -> list[tuple[Any, Any]]:
        memory = self._torch.empty(_SLOTS, dtype=dtype, device="cpu", pin_memory=True)
        return [(memory[index : index + 1], self._torch.cuda.Event()) for index in range(_SLOTS)]

    def release(self, pending: PendingValue) -> None:
        """Return the slot of a value to the free slots."""
        free_slots = self._free_slots.get(pending.slot.dtype)
        if free_slots is not None:
            free_slots.append((pending.slot, pending.event))

    def all_zero(self, tensors: Iterable[Any]) -> bool:
        """Return whether all elements that this rank holds are 0.

        On a GPU this waits for each tensor until one is not 0.
        """
        with self._disable_torch_function():
            try:
                for tensor in tensors:
                    local_tensor = getattr(tensor, "_local_tensor", tensor)
                    if bool(local_tensor.any()):
                        return False
            except (RuntimeError, NotImplementedError):
                # For example, the tensor is sparse or has no data.
                return False
        return True


def _replicated_part(tensor: Any) -> Any:
    """Return the local part of a replicated ``DTensor``; None if it is sharded.

    FSDP2 returns such tensors as gradient norms. Only attributes are read, since any computation
    could communicate with other ranks. Anything other than a ``DTensor`` is returned unchanged.
    """
    distributed: Any = sys.modules.get("torch.distributed.tensor")
    if distributed is None or type(tensor) is not distributed.DTensor:
        return tensor
    if not all(placement.is_replicate() for placement in tensor._spec.placements):
        return None
    local = tensor._local_tensor
    # A collective may still have to fill this tensor. Whoever uses it waits for that; we never do.
    return local.elem if getattr(local, "completed", False) else local


class MemoryUse(NamedTuple):
    """Memory use in bytes; 0 means not read or unknown.

    Args:
        resident: Resident memory of this process on the host.
        allocated: Memory allocated by tensors, over all devices.
        reserved: Memory reserved by the caching allocator, over all devices.
        peak: Sum of the devices' peaks of `allocated`.
    """

    resident: int = 0
    allocated: int = 0
    reserved: int = 0
    peak: int = 0


NOT_READ = MemoryUse()


class MemoryReader:
    """Reads the memory use of this process and its devices, often enough to follow its course."""

    def __init__(self, torch: ModuleType) -> None:
        self._cuda: Any = torch.cuda
        self.reset()

    def reset(self) -> None:
        """Start over in this process, which may have been forked."""
        self._statm_descriptor: int | None = None
        # In monotonic nanoseconds; before this time `read` need not be called.
        self.next_read = 0
        self._next_device_read = 0

    def read(self, now: int) -> MemoryUse:
        """Return the memory use; device memory only if it was not read a moment ago.

        Args:
            now: Monotonic nanoseconds, not before `next_read`.
        """
        self.next_read = now + _HOST_PAUSE_NANOSECONDS
        try:
            resident = self._read_resident_bytes()
        except (OSError, ValueError, IndexError):
            # A script that daemonized itself has closed the file.
            self._statm_descriptor = None
            return NOT_READ
        if now < self._next_device_read or not self._cuda.is_initialized():
            return MemoryUse(resident=resident)
        return self._read_devices(resident, now)

    def _read_resident_bytes(self) -> int:
        if self._statm_descriptor is None:
            self._statm_descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        words = os.pread(self._statm_descriptor, _MAX_STATM_BYTES, 0).split()
        return int(words[1]) * _PAGE_BYTES

    def _read_devices(self, resident: int, now: int) -> MemoryUse:
        """Return the memory use with the statistics of all devices added."""
        device_count = self._cuda.device_count()
        self._next_device_read = now + device_count * _DEVICE_PAUSE_NANOSECONDS
        allocated = 0
        reserved = 0
        peak = 0
        for device in range(device_count):
            statistics = self._cuda.memory_stats_as_nested_dict(device)
            allocated += statistics["allocated_bytes"]["all"]["current"]
            reserved += statistics["reserved_bytes"]["all"]["current"]
            peak += statistics["allocated_bytes"]["all"]["peak"]
        return MemoryUse(resident, allocated, reserved, peak)
