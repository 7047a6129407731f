"""`Reserves`: host memory that training can do without."""

from __future__ import annotations

from holdfast.guard.saving.saves import Saving
from holdfast.guard.saving.snapshots import Snapshots


class Reserves:
    """The host memory of snapshots and of the buffers for saving.

    The engine frees it when an attempt runs out of memory on the CPU.

    Args:
        snapshots: The snapshots of the run.
        saving: Saves its checkpoints.
    """

    def __init__(self, snapshots: Snapshots, saving: Saving) -> None:
        self._snapshots = snapshots
        self._saving = saving

    def free(self) -> None:
        """Free this memory permanently: from now on there are no snapshots, and saves wait."""
        self._snapshots.give_up()
        self._saving.give_up_buffers()
