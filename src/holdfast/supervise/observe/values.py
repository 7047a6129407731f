"""Read one-element tensors and memory use without synchronizing with the GPU.

A number on the host is read directly from its memory address, which neither autograd nor any torch
mode of the script notices. A number on a GPU is copied to pinned memory in the script's stream. It
is read at a later step, once it has arrived, so training never waits for it. This module never
initializes CUDA.

The torch module is passed in as an argument, never imported.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, NamedTuple

# Maximum number of pending copies per dtype. With one or two copies per step, a GPU never lags
# behind this far.
_SLOTS = 16
# Minimum time between readings. Reading /proc costs a system call, and reading the allocator's
# statistics costs 0.1 ms per device. At these intervals, both take far less than 1 % of the time.
_HOST_PAUSE_NANOSECONDS = 20_000_000
_DEVICE_PAUSE_NANOSECONDS = 250_000_000
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MAX_STATM_BYTES = 64


class _Float16:
    """A float16 number that can be read from an address, like a ctypes type."""

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
    """A number that is still being copied from a GPU.

    Args:
        slot: One-element tensor in pinned memory, the target of the copy.
        event: A CUDA event recorded after the copy.
        number_type: The ctypes-like type with which the number is read from the slot.
    """

    def __init__(self, slot: Any, event: Any, number_type: Any) -> None:
        self.slot = slot
        self.event = event
        self._number_type = number_type

    def has_arrived(self) -> bool:
        """Return whether the number has arrived."""
        return bool(self.event.query())

    def value(self) -> float:
        """Return the number. Call this only after `has_arrived` has returned True."""
        number: float = self._number_type.from_address(self.slot.data_ptr()).value
        return number


class ValueReader:
    """Reads the number in a one-element tensor."""

    def __init__(self, torch: ModuleType) -> None:
        self._torch: Any = torch
        self._tensor_type = torch.Tensor
        self._number_types: dict[Any, Any] = {
            torch.float32: ctypes.c_float,
            torch.float64: ctypes.c_double,
            torch.float16: _Float16,
            torch.bfloat16: _BFloat16,
        }
        # Hides the reader's calls from the script's torch-function modes.
        self._disable_torch_function: Any = torch._C.DisableTorchFunction
        self._is_torch_function_mode_enabled: Callable[[], bool] = (
            torch._C._is_torch_function_mode_enabled
        )
        self._dispatch_mode_count: Any = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
        # Free slots in pinned memory with their CUDA events, keyed by dtype.
        self._free_slots: dict[Any, list[tuple[Any, Any]]] = {}
        # Slots of the parent process; see `reset_after_fork`.
        self._abandoned: list[Any] = []

    def reset_after_fork(self, pending: list[Any]) -> None:
        """Discard all slots in a forked process, which must not use its parent's CUDA context.

        A forked process must not even free CUDA objects, so references to them are kept.

        Args:
            pending: Objects that refer to the values that the parent was copying.
        """
        self._abandoned += [self._free_slots, *pending]
        self._free_slots = {}

    def read(self, tensor: Any) -> float | PendingValue | None:
        """Return the number in a tensor, or a `PendingValue` for it.

        A replicated ``DTensor`` is read through its local tensor.

        Returns:
            The number, or None if it cannot be read without side effects. Only a plain tensor with
            one floating-point element on the host or a CUDA device can be read.
        """
        if type(tensor) is not self._tensor_type:
            tensor = _replicated_part(tensor)
            # Any use of another tensor subclass may run arbitrary code, such as a collective.
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
            # A tensor inside a torch.func transform, or with a sparse layout, has no memory that
            # can be read directly.
            return None
        return None

    def _may_copy(self) -> bool:
        """Return whether a copy affects neither a torch dispatch mode nor a CUDA graph capture."""
        if self._dispatch_mode_count():
            return False
        return not self._torch.cuda.is_current_stream_capturing()

    def _start_copy(self, tensor: Any, number_type: Any) -> PendingValue | None:
        """Start copying a number to the host; return None if all slots are in use."""
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
        """Make the slot of a value available for another copy."""
        free_slots = self._free_slots.get(pending.slot.dtype)
        if free_slots is not None:
            free_slots.append((pending.slot, pending.event))

    def all_zero(self, tensors: Iterable[Any]) -> bool:
        """Return whether these tensors contain only zeros on this rank.

        On a GPU, this synchronizes once per tensor, up to the first tensor with a nonzero element.
        If a tensor cannot be read, the result is False.
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
    """Return the local tensor of a replicated ``DTensor``, or None if it is sharded.

    FSDP2 returns gradient norms as replicated tensors. Only attributes are read, because any
    computation could communicate with other ranks. Other tensors are returned unchanged.
    """
    distributed: Any = sys.modules.get("torch.distributed.tensor")
    if distributed is None or type(tensor) is not distributed.DTensor:
        return tensor
    if not all(placement.is_replicate() for placement in tensor._spec.placements):
        return None
    local = tensor._local_tensor
    # A collective may still be filling this tensor. Using it would wait for the collective, so read
    # it only if the collective has completed.
    return local.elem if getattr(local, "completed", False) else local


class MemoryUse(NamedTuple):
    """Memory use in bytes; 0 means not read or unknown.

    Args:
        resident: Resident memory of this process on the host.
        allocated: Memory allocated by tensors, over all devices.
        reserved: Memory reserved by the caching allocator, over all devices.
        peak: Peak of `allocated` on each device, summed over all devices.
    """

    resident: int = 0
    allocated: int = 0
    reserved: int = 0
    peak: int = 0


NOT_READ = MemoryUse()


class MemoryReader:
    """Reads the memory use of this process and its devices, at limited intervals."""

    def __init__(self, torch: ModuleType) -> None:
        self._cuda: Any = torch.cuda
        self.reset()

    def reset(self) -> None:
        """Forget the open file and all reading times, as needed after a fork."""
        self._statm_descriptor: int | None = None
        # Monotonic time in nanoseconds before which `read` should not be called.
        self.next_read = 0
        self._next_device_read = 0

    def read(self, now: int) -> MemoryUse:
        """Return the memory use. Device memory is read less often than host memory.

        Args:
            now: Monotonic time in nanoseconds, not before `next_read`.
        """
        self.next_read = now + _HOST_PAUSE_NANOSECONDS
        try:
            resident = self._read_resident_bytes()
        except (OSError, ValueError, IndexError):
            # The script has closed the file, for example to run as a daemon.
            self._statm_descriptor = None
            return NOT_READ
        if now < self._next_device_read or not self._cuda.is_initialized():
            return MemoryUse(resident=resident)
        return self._read_devices(resident, now)

    def _read_resident_bytes(self) -> int:
        if self._statm_descriptor is None:
            self._statm_descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        # The second word is the number of resident pages; see proc_pid_statm(5).
        words = os.pread(self._statm_descriptor, _MAX_STATM_BYTES, 0).split()
        return int(words[1]) * _PAGE_BYTES

    def _read_devices(self, resident: int, now: int) -> MemoryUse:
        """Return the memory use of the process, with device memory summed over all devices."""
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
