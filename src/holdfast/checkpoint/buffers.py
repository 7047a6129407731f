"""Host memory for a copy of the training state, so that training can continue during a save.

The memory is a single block that every save reuses. Its pages are touched in advance, because
touching a page for the first time takes many times as long as copying data into it. Forked
processes do not inherit the block. If they did, the kernel would duplicate each page that a save
writes to, and loader workers would keep the old pages alive.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Mapping
from typing import Any

import torch

# Size of a cache line, which is at least the alignment of every dtype.
_ALIGNMENT_BYTES = 64
# Number of bytes touched per call of `ctypes.memset`, which releases the GIL.
_CHUNK_BYTES = 64 * 2**20

Groups = Mapping[str, Mapping[str, torch.Tensor]]


class HostBuffers:
    """A block of host memory that holds one copy of the training state.

    Args:
        size_bytes: Size of the block, as returned by `needed_bytes`.
        cuda: The device for which to pin the memory, or None to leave it unpinned.

    Raises:
        OSError: The memory cannot be allocated.
    """

    def __init__(self, size_bytes: int, *, cuda: torch.device | None = None) -> None:
        self.size_bytes = size_bytes
        self._cuda = cuda
        # A length of 0 is not allowed.
        memory = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_DONTFORK)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)

    def touch(self) -> None:
        """Make all pages resident, and pin them if requested.

        This may run in another thread, but it must finish before `fill` is called.
        """
        address = self._bytes.data_ptr()
        for begin in range(0, self.size_bytes, _CHUNK_BYTES):
            ctypes.memset(address + begin, 0, min(_CHUNK_BYTES, self.size_bytes - begin))
        if self._cuda is not None and self.size_bytes:
            self._pin(self._cuda, address)

    def _pin(self, device: torch.device, address: int) -> None:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        # A new thread's current device is device 0. Without the next line, CUDA would create a
        # context on device 0, which takes memory.
        with torch.cuda.device(device):
            failed = int(runtime.cudaHostRegister(address, self.size_bytes, 0))
        # If pinning fails, copies are merely slower.
        if not failed:
            weakref.finalize(self, runtime.cudaHostUnregister, address)

    def fill(self, groups: Groups) -> dict[str, dict[str, torch.Tensor]]:
        """Copy all tensors into the block, overwriting earlier copies.

        Each tensor is read once. Copies from CUDA devices run asynchronously, and the call waits
        for one event per device at the end. Device memory is allocated only for tensors that are
        not contiguous.

        Returns:
            The contiguous copies, in the same groups and under the same names.
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
    """Return how many bytes `HostBuffers` needs to hold copies of these tensors."""
    return sum(
        _aligned(tensor.nbytes) for tensors in groups.values() for tensor in tensors.values()
    )


def _aligned(size_bytes: int) -> int:
    """Round a size up to a multiple of `_ALIGNMENT_BYTES`."""
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
