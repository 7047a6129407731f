"""`WriterThread`: the thread that writes checkpoints, and the host buffers that it writes from.

If there is no memory for the buffers, or no thread can be started, this is recorded once, and all
later saves run in the training thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import torch

from holdfast.checkpoint.background import BackgroundJob
from holdfast.checkpoint.buffers import HostBuffers
from holdfast.core.events import run_events
from holdfast.core.text import size
from holdfast.guard.record import RunRecord, describe_error
from holdfast.guard.saving.save_writer import Save
from holdfast.memory.host_memory import available_bytes

# The largest share of the available memory that the buffers may take. The rest is left for
# activations, loaders and the script.
_MOST_MEMORY = 0.25
# Buffers up to this size are allocated and touched in the training thread, which takes about 10 ms
# (1.8 s per GiB, measured in a virtual machine). A thread prepares larger ones.
_SMALL_BYTES = 4 * 2**20
# The buffers are allocated larger than the state by this factor, because strings and positions grow
# slightly from one save to the next.
_SPARE = 1.02


class WriterThread:
    """Runs one job at a time: it either writes a checkpoint, or prepares the buffers for copies.

    Args:
        run_dir: The run directory, to which the thread writes.
        record: The record that receives events.
        cuda: The run's CUDA device, or None.
        is_enabled: Whether saves may run in a thread.
    """

    def __init__(
        self, run_dir: Path, record: RunRecord, cuda: torch.device | None, *, is_enabled: bool
    ) -> None:
        self._run_dir = run_dir
        self._record = record
        self._cuda = cuda
        self._is_enabled = is_enabled
        # The job that is running, or whose result has not been taken yet. A job that prepares the
        # buffers has no result.
        self._job: BackgroundJob[Save | None] | None = None
        self._buffers: HostBuffers | None = None
        # Whether the buffers were prepared before the first save was due.
        self._are_buffers_prepared = False

    # --- the thread

    @property
    def is_enabled(self) -> bool:
        """Return whether saves may run in the thread."""
        return self._is_enabled

    @property
    def has_job(self) -> bool:
        """Return whether a job is running, or has a result that was not taken yet."""
        return self._job is not None

    @property
    def has_ended_job(self) -> bool:
        """Return whether a job has ended, and has a result that was not taken yet."""
        return self._job is not None and not self._job.is_running

    def start(self, carry_out: Callable[[], Save]) -> None:
        """Start a save in the thread.

        Args:
            carry_out: Function that carries out the save.

        Raises:
            MemoryError, RuntimeError: If the thread cannot be started.
        """
        self._job = BackgroundJob(carry_out, self._run_dir)

    def take_result(self) -> Save | None:
        """Wait for the running job, if there is one, and return its save if it was a save."""
        job = self._job
        if job is None:
            return None
        try:
            save = job.result()
        except Exception as error:  # noqa: BLE001 - training continues without a writer
            self._job = None
            self._buffers = None
            self.disable(f"the writer thread failed: {describe_error(error)}")
            return None
        # The job is cleared only after the wait, since it is still running if the wait is
        # interrupted.
        self._job = None
        return save

    def disable(self, why: str) -> None:
        """Make all later saves run in the training thread, and record why."""
        self._is_enabled = False
        self._record.emit(run_events.SavesSynchronous(why=why))

    # --- memory for the copies

    @property
    def needs_buffers(self) -> bool:
        """Return whether the buffers should be prepared before the first save is due."""
        return self._is_enabled and not self._are_buffers_prepared

    @property
    def has_buffers(self) -> bool:
        """Return whether the buffers exist."""
        return self._buffers is not None

    def prepare_buffers(self, needed: Callable[[], int]) -> None:
        """Prepare the buffers, unless the thread is in use.

        Args:
            needed: Function that returns the size of the state in bytes.
        """
        self._are_buffers_prepared = True
        if self._job is None:
            # When the save is due, the same error will be raised again and handled.
            with contextlib.suppress(Exception):
                self.buffers_for(needed())

    def buffers_for(self, needed: int) -> HostBuffers | None:
        """Return host buffers that are large enough for copies of the state.

        Returns None if a thread is still preparing the buffers, or if there is no memory for them.

        Args:
            needed: The size of the state in bytes.
        """
        if self._buffers is not None and self._buffers.size_bytes >= needed:
            return self._buffers
        self._buffers = None
        size_bytes = int(_SPARE * needed)
        available = None if size_bytes <= _SMALL_BYTES else available_bytes()
        if available is not None and size_bytes > _MOST_MEMORY * available:
            self.disable(
                f"copies of the state would take {size(size_bytes)}, and"
                f" {size(available)} are available"
            )
            return None
        try:
            buffers = HostBuffers(size_bytes, cuda=self._cuda)
            if size_bytes > _SMALL_BYTES:
                self._job = BackgroundJob(buffers.touch, self._run_dir)
        except (OSError, RuntimeError) as error:
            # There was not enough memory, or the thread could not be started.
            self.disable(
                f"{size(size_bytes)} for copies of the state could not be allocated ({error})"
            )
            return None
        self._buffers = buffers
        if size_bytes <= _SMALL_BYTES:
            buffers.touch()
        return buffers if self._job is None else None

    def free_buffers(self) -> None:
        """Free the buffers permanently, because memory is short."""
        self._buffers = None
        self.disable("the memory for copies was freed after an out-of-memory error")
