"""How much memory of its devices an attempt took, and how much they have left: read seldom, for CUDA only.

Peaks are counted anew for it (`torch.cuda.reset_peak_memory_stats`), so it is done only where something depends on
it: in a step that ran out of memory, and in the third of a run that has a forecast.

Does not: decide (``memory.ladder``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What an attempt took of the device that is nearest to its end.

    Args:
        used_bytes: At its peak, beyond what was allocated before it.
        free_bytes: What the allocator could still get at that peak, from its own cache and from the driver.
        peak_bytes: Most that was allocated on any device.
    """

    used_bytes: int
    free_bytes: int
    peak_bytes: int


class RoomMeter:
    """Measures attempts on the CUDA devices among these.

    Args:
        devices: Of the models.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = [device for device in devices if device.type == "cuda"]
        self._before: list[int] = []

    def begin(self) -> None:
        """Count the peak from now on."""
        for device in self._devices:
            torch.cuda.reset_peak_memory_stats(device)
        self._before = [torch.cuda.memory_allocated(device) for device in self._devices]

    def look(self) -> Room | None:
        """Return what was taken since `begin`; None without such a device."""
        found = [self._of(device, before) for device, before in zip(self._devices, self._before, strict=True)]
        if not found:
            return None
        tightest = min(found, key=lambda room: room.free_bytes)
        return Room(
            used_bytes=tightest.used_bytes,
            free_bytes=tightest.free_bytes,
            peak_bytes=max(room.peak_bytes for room in found),
        )

    @staticmethod
    def _of(device: torch.device, before: int) -> Room:
        peak = torch.cuda.max_memory_allocated(device)
        driver, _ = torch.cuda.mem_get_info(device)
        free = driver + torch.cuda.memory_reserved(device) - peak
        return Room(used_bytes=max(0, peak - before), free_bytes=max(0, free), peak_bytes=peak)
