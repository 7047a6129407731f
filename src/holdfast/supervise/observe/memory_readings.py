"""Memory of this process and of its devices, read as seldom as is enough to see where it goes.

Does not: judge (``memory.leaks`` does), start CUDA.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

# A look at /proc costs a system call, and one at the allocator's statistics 0.1 ms for each device: with these pauses
# both stay far below 1 % of any step.
_HOST_NANOSECONDS = 20_000_000
_DEVICE_NANOSECONDS = 250_000_000
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class MemoryReadings:
    """Read memory, at most so often.

    Args:
        torch: The module.
    """

    def __init__(self, torch: ModuleType) -> None:
        self._cuda: Any = torch.cuda
        self.begin()

    def begin(self) -> None:
        """Begin in this process, which may be a fork."""
        self._statm: int | None = None
        self._next_device = 0
        self.next_at = 0
        """When the next look is due, in nanoseconds of the monotonic clock."""

    def look(self, now: int) -> tuple[int, int, int, int]:
        """Return the resident memory, and of all devices what is allocated, reserved, and was allocated at most.

        What was read a short time ago is 0, and so is what the system does not tell.

        Args:
            now: Nanoseconds of the monotonic clock.
        """
        self.next_at = now + _HOST_NANOSECONDS
        try:
            if self._statm is None:
                self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
            resident = int(os.pread(self._statm, 64, 0).split()[1]) * _PAGE_BYTES
        except (
            OSError,
            ValueError,
            IndexError,
        ):  # a script that became a daemon has closed it
            self._statm = None
            return 0, 0, 0, 0
        if now < self._next_device or not self._cuda.is_initialized():
            return resident, 0, 0, 0
        return resident, *self._devices(now)

    def _devices(self, now: int) -> tuple[int, int, int]:
        count = self._cuda.device_count()
        self._next_device = now + count * _DEVICE_NANOSECONDS
        allocated = reserved = peak = 0
        for device in range(count):
            stats = self._cuda.memory_stats_as_nested_dict(device)
            allocated += stats["allocated_bytes"]["all"]["current"]
            reserved += stats["reserved_bytes"]["all"]["current"]
            peak += stats["allocated_bytes"]["all"]["peak"]
        return allocated, reserved, peak
