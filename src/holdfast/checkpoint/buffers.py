"""Host memory into which state is copied at a step boundary, so that training can continue.

It is one block, reused from save to save. Its pages are touched ahead of time, because the first
touch of a page costs many times its copy. Forked processes do not inherit it: otherwise each page
that a save writes to would be copied first, and loader workers would keep the old pages.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Mapping
from typing import Any

import torch

# A cache line, which is more than the alignment of any dtype.
_ALIGNMENT_BYTES = 64
# Bytes touched in one call, which releases the GIL.
_CHUNK_BYTES = 64 * 2**20

Groups = Mapping[str, Mapping[str, torch.Tensor]]


class HostBuffers:
    """Memory for the copies of one state.

    Args:
        size_bytes: The size returned by `needed_bytes`.
        cuda: The device for which the memory is pinned, or None.

    Raises:
        OSError: The memory cannot be allocated.
    """

    def __init__(self, size_bytes: int, *, cuda: torch.device | None = None) -> None:
        self.size_bytes = size_bytes
        self._cuda = cuda
        memory = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_DONTFORK)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)

    def touch(self) -> None:
        """Make all pages resident, and pin them if requested.

        May run in another thread, before `fill`.
        """
        address = self._bytes.data_ptr()
        for begin in range(0, self.size_bytes, _CHUNK_BYTES):
            ctypes.memset(address + begin, 0, min(_CHUNK_BYTES, self.size_bytes - begin))
        if self._cuda is not None and self.size_bytes:
            self._pin(self._cuda, address)

    def _pin(self, device: torch.device, address: int) -> None:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        # A new thread has another current device, on which a context would take memory.
        with torch.cuda.device(device):
            failed = int(runtime.cudaHostRegister(address, self.size_bytes, 0))
        # If it failed, copies are merely slower.
        if not failed:
            weakref.finalize(self, runtime.cudaHostUnregister, address)

    def fill(self, groups: Groups) -> dict[str, dict[str, torch.Tensor]]:
        """Return contiguous copies of all tensors, in the same groups. Overwrites earlier copies.

        Cost: one pass over memory. Copies from CUDA devices run concurrently; the call then waits
        for one event per device. Nothing is allocated on devices, except for a tensor that is not
        contiguous.
        """
        position = 0
        devices: set[torch.device] = set()
        copies: dict[str, dict[str, torch.Tensor]] = {}
        for group, tensors in groups.items():
            copies[group] = {}
            for name, tensor in tensors.items():
                copies[group][name] = self._copy(tensor, position)
                position += _aligned(tensor.nbytes)
                if tensor.is_cuda:
                    devices.add(tensor.device)
        for device in devices:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            event.synchronize()
        return copies

    def _copy(self, tensor: torch.Tensor, position: int) -> torch.Tensor:
        if not tensor.numel():
            return torch.empty_like(tensor)
        memory = self._bytes[position : position + tensor.nbytes]
        copy = memory.view(tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor, non_blocking=tensor.is_cuda)


def needed_bytes(groups: Groups) -> int:
    """Return the bytes that the copies of these tensors take."""
    return sum(
        _aligned(tensor.nbytes) for tensors in groups.values() for tensor in tensors.values()
    )


def _aligned(size_bytes: int) -> int:
    """Return a size rounded up to the alignment."""
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
