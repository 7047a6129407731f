"""`Reserves`: host memory that training can do without."""

from __future__ import annotations

from holdfast.guard.saving.saves import Saving
from holdfast.guard.saving.snapshots import Snapshots


class Reserves:
    """The host memory that snapshots and the buffers for saving occupy.

    The engine frees this memory when an attempt runs out of memory on the CPU.

    Args:
        snapshots: The snapshots of the run.
        saving: The object that saves the run's checkpoints.
    """

    def __init__(self, snapshots: Snapshots, saving: Saving) -> None:
        self._snapshots = snapshots
        self._saving = saving

    def free(self) -> None:
        """Free this memory permanently.

        From now on, no snapshots are taken, and saves run in the training thread.
        """
        self._snapshots.give_up()
        self._saving.give_up_buffers()
