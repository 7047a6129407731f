"""Host memory that the state is copied into at a boundary, so that it can be written while training
goes on.

One piece, reused from save to save. Its pages are touched ahead: the first touch of a page costs
many times its copy. Forked processes do not get it: after a fork each page of it that a save writes
to would be copied first, and the old ones would stay with the loader workers.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Mapping
from typing import Any

import torch

_ALIGN = 64  # bytes: a cache line, and more than any type of tensor needs
_PIECE_BYTES = 64 * 2**20  # touched at once; the interpreter's lock is free meanwhile

Groups = Mapping[str, Mapping[str, torch.Tensor]]


class HostBuffers:
    """Memory for the copies of one state, as `needed_bytes` says, pinned for a device.

    OSError if it is refused.
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
        """Make all pages resident, and pin them if that was asked for.

        May run in another thread, before `fill`.
        """
        address = self._bytes.data_ptr()
        for begin in range(0, self.size_bytes, _PIECE_BYTES):
            ctypes.memset(address + begin, 0, min(_PIECE_BYTES, self.size_bytes - begin))
        if self._cuda is not None and self.size_bytes:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            # In a new thread another one, whose context would take memory there
            with torch.cuda.device(self._cuda):
                failed = int(runtime.cudaHostRegister(address, self.size_bytes, 0))
            if not failed:  # else copies are slower
                weakref.finalize(self, runtime.cudaHostUnregister, address)

    def fill(self, groups: Groups) -> dict[str, dict[str, torch.Tensor]]:
        """Return contiguous copies of all tensors, in the same groups.

        Earlier ones are overwritten.

        Cost: one pass over memory. Copies from CUDA devices run side by side, then one event of
        each device is waited for; nothing is allocated there but for a tensor that does not lie in
        one piece.
        """
        position = 0
        devices: set[torch.device] = set()
        copies: dict[str, dict[str, torch.Tensor]] = {}
        for group, tensors in groups.items():
            copies[group] = {}
            for name, tensor in tensors.items():
                place = self._bytes[position : position + tensor.nbytes]
                copy = (
                    place.view(tensor.dtype).view(tensor.shape)
                    if tensor.numel()
                    else torch.empty_like(tensor)
                )
                copies[group][name] = (
                    copy.copy_(tensor, non_blocking=tensor.is_cuda) if tensor.numel() else copy
                )
                position += _aligned(tensor.nbytes)
                if tensor.is_cuda:
                    devices.add(tensor.device)
        for device in devices:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            event.synchronize()
        return copies


def needed_bytes(groups: Groups) -> int:
    """Return the bytes that the copies of these tensors take."""
    return sum(
        _aligned(tensor.nbytes) for tensors in groups.values() for tensor in tensors.values()
    )


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGN) * _ALIGN
