"""Compare the numbers in torch's message about full GPU memory.

The message says how much was requested, how large the GPU is, how much of it is free, and how much
this process uses. A pattern cannot compare numbers, so this module does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_BYTES = {"bytes": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
_SIZE = r"(\d{1,12}(?:\.\d{1,4})?) (bytes|KiB|MiB|GiB|TiB)"
_REQUEST = re.compile(rf"Tried to allocate {_SIZE}")
# torch 2.1 and newer write the first form, older versions the second.
_CAPACITY = re.compile(rf"capaci?ty of {_SIZE}|; {_SIZE} total capacity")
_FREE = re.compile(rf"of which {_SIZE} is free|; {_SIZE} free")
# Older versions count only what the allocator has reserved, not the memory of the CUDA context.
_USED_BY_PROCESS = re.compile(
    rf"this process has {_SIZE} memory in use|; {_SIZE} (?:reserved|cached)"
)
# The CUDA context and its libraries, which older versions of torch do not count.
_CONTEXT_BYTES = 1.5 * 2.0**30
# Other processes hold most of the memory if they hold more than this share of the GPU.
_MIN_SHARE_OF_OTHERS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """The numbers of one message, in bytes."""

    requested: float
    capacity: float
    free: float
    used_by_process: float

    @property
    def exceeds_the_device(self) -> bool:
        """Return whether an empty GPU would be too small for this one request."""
        return self.requested > self.capacity

    @property
    def is_held_by_others(self) -> bool:
        """Return whether other processes hold most of the memory of the GPU."""
        others = self.capacity - self.free - self.used_by_process - _CONTEXT_BYTES
        return others > max(
            _MIN_SHARE_OF_OTHERS * (self.capacity - _CONTEXT_BYTES), self.used_by_process
        )


def read_request(text: str) -> MemoryRequest | None:
    """Return the numbers in a message about full GPU memory, or None if one of them is missing."""
    sizes = [_size(pattern, text) for pattern in (_REQUEST, _CAPACITY, _FREE, _USED_BY_PROCESS)]
    requested, capacity, free, used = sizes
    if requested is None or capacity is None or free is None or used is None:
        return None
    return MemoryRequest(requested=requested, capacity=capacity, free=free, used_by_process=used)


def _size(pattern: re.Pattern[str], text: str) -> float | None:
    """Return the size that a pattern finds, in bytes, or None."""
    match = pattern.search(text)
    if match is None:
        return None
    number, unit = [group for group in match.groups() if group is not None]
    return float(number) * _BYTES[unit]
