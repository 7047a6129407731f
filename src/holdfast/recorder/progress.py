"""Record the phase of a training process, and the duration and memory of each of its steps.

They are written inside the process and read from outside, even after it has ended. A *board* is one
small page: the phase that the process is in, since when, and how much it has done. A *ring of
samples* holds one record per step. Both are mapped files, so a record costs no system call and
survives SIGKILL.

What takes too long is decided in ``supervise``; events are recorded by ``black_box``.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from enum import IntEnum
from pathlib import Path
from time import monotonic_ns as _now
from typing import NamedTuple

from holdfast.core.files import create_file, open_to_write, read_file
from holdfast.recorder.ring import (
    HEADER_BYTES,
    LOSS_IS_READ,
    NORM_IS_READ,
    OPTIMIZER_SHIFT,
    RATE_IS_READ,
    VERSION,
    Record,
    RingWriter,
    read_ring,
    unreadable,
    value_or_none,
)
from holdfast.recorder.run_files import Optimizers

# --- The layout of a board, by offset.

BOARD_BYTES = 4096
_MAGIC = b"HOLDPROG"
# Magic, version, process ID.
_HEADER = struct.Struct("<8sII")
_HEADER_OFFSET = 0
# Progress, phase, steps made, since, step, micro-steps, progress. If the first and the last differ,
# the write was torn.
_STANDING = struct.Struct("<QIIQQQQ")
_STANDING_OFFSET = 64
# The number of the newest request to trace memory.
_REQUEST = struct.Struct("<Q")
_REQUEST_OFFSET = 256
# Nanoseconds in each phase that has ended, by the phase's number.
_PHASE_COUNT = 10
_SPENT = struct.Struct(f"<{_PHASE_COUNT}q")
_SPENT_OFFSET = 320
# Nanoseconds between two writes of these times, since a phase may last only microseconds.
_SPENT_INTERVAL = 20_000_000

# --- The layout of a sample: step, micro-steps, flags, loss, gradient norm, learning rate, seconds,
# seconds of waiting, and four sizes in bytes.

_SAMPLE = struct.Struct("<QIIdddddQQQQ")
_FLOAT = struct.Struct("<d")
# Offsets in a sample.
_FLAGS_OFFSET = 12
_LOSS_OFFSET = 16
_NORM_OFFSET = 24
# Sequence and time come before the payload of a slot.
_PAYLOAD_OFFSET = 16
_CAPACITY = 32_768


class ProcessPhase(IntEnum):
    """What a training process is doing, as far as can be observed."""

    # Importing and building; nothing was trained yet.
    STARTING = 1
    # From the first forward to the end of the first step, or while torch compiles.
    FIRST_STEP = 2
    # In the loader: the loop waits for a batch.
    DATA_WAIT = 3
    FORWARD_BACKWARD = 4
    OPTIMIZER = 5
    # A batch was handed out while gradients are off, or a module was put into eval mode.
    EVALUATION = 6
    SAVING = 7
    # A loader is exhausted and nothing else has begun.
    END_OF_EPOCH = 8
    # The interpreter exits.
    ENDING = 9


class Standing(NamedTuple):
    """The state of a process, as its board shows it."""

    pid: int
    phase: ProcessPhase
    # When the phase began, on the system's monotonic clock, which all processes share.
    since_seconds: float
    # Counts phases, micro-steps and steps. It stays the same as long as nothing happens.
    progress: int
    # Optimizer steps of the run. If a guard counts them, those of earlier attempts are included.
    step: int
    # Number of backward calls.
    micro_step: int
    # Optimizer steps in this process, modulo 2**32.
    steps_made: int = 0
    # Seconds in each phase, by its number, without the current one.
    spent: tuple[float, ...] = ()


class ProgressBoard:
    """Shows what this process is doing, to readers outside of it.

    Args:
        path: The file of the board, which is replaced if it exists, or None for private memory.

    Raises:
        OSError: The file cannot be created.
    """

    def __init__(self, path: Path | None) -> None:
        self._map = _new_map(path)
        self._pack_into = _STANDING.pack_into
        self.progress = 0
        self.phase = ProcessPhase.STARTING
        self.step = 0
        self.steps_made = 0
        self.micro_step = 0
        self._spent = [0] * _PHASE_COUNT
        self._since = _now()
        # When the times per phase are written next.
        self._spent_due = 0
        self.enter(ProcessPhase.STARTING)
        _HEADER.pack_into(self._map, _HEADER_OFFSET, _MAGIC, VERSION, os.getpid())

    def enter(self, phase: ProcessPhase) -> int:
        """Show that a phase begins. Entering the current phase again also counts as progress.

        Returns: The current time in monotonic nanoseconds.
        """
        progress = self.progress + 1
        self.progress = progress
        now = _now()
        self._spent[self.phase] += now - self._since
        self._since = now
        self.phase = phase
        if now >= self._spent_due:
            self._spent_due = now + _SPENT_INTERVAL
            _SPENT.pack_into(self._map, _SPENT_OFFSET, *self._spent)
        self._pack_into(
            self._map,
            _STANDING_OFFSET,
            progress,
            phase,
            self.steps_made,
            now,
            self.step,
            self.micro_step,
            progress,
        )
        return now

    def trace_requested(self) -> int:
        """Return the number of the newest request to trace memory, 0 if there was none."""
        number: int = _REQUEST.unpack_from(self._map, _REQUEST_OFFSET)[0]
        return number

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()


def _new_map(path: Path | None) -> mmap.mmap:
    if path is None:
        return mmap.mmap(-1, BOARD_BYTES)
    with create_file(path) as file:
        os.posix_fallocate(file.fileno(), 0, BOARD_BYTES)
        return mmap.mmap(file.fileno(), BOARD_BYTES)


def read_board(path: Path) -> Standing | None:
    """Return what a board shows, or None if it is missing, torn, truncated or not a board.

    Raises:
        RunDirectoryError: H305 if a newer holdfast wrote it.
    """
    try:
        data = read_file(path)
    except OSError:
        return None
    if len(data) < BOARD_BYTES:
        return None
    magic, version, pid = _HEADER.unpack_from(data, _HEADER_OFFSET)
    if magic != _MAGIC:
        return None
    if version > VERSION:
        raise unreadable(path, f"version {version}")
    progress, phase, steps_made, since, step, micro_step, progress_at_end = _STANDING.unpack_from(
        data, _STANDING_OFFSET
    )
    if progress != progress_at_end or phase not in set(ProcessPhase):
        return None
    spent_nanoseconds = _SPENT.unpack_from(data, _SPENT_OFFSET)
    return Standing(
        pid=pid,
        phase=ProcessPhase(phase),
        since_seconds=since / 1e9,
        progress=progress,
        step=step,
        micro_step=micro_step,
        steps_made=steps_made,
        spent=tuple(nanoseconds / 1e9 for nanoseconds in spent_nanoseconds),
    )


def request_trace(path: Path, number: int) -> None:
    """Ask the process of a board to trace in its next steps what holds its memory."""
    with open_to_write(path, "rb+") as file:
        file.seek(_REQUEST_OFFSET)
        file.write(_REQUEST.pack(number))


class StepSample(NamedTuple):
    """One step as observed by hooks.

    Args:
        step: Optimizer steps so far, this one included, as the guard counts them if there is one;
            the number of backward calls if no optimizer steps.
        micro_steps: Number of backward calls in it.
        loss: Loss of the last backward call, None if it was not read. A NaN is a loss that is NaN.
        grad_norm: Gradient norm, None if it was not computed.
        learning_rate: Learning rate of the first parameter group, None if unknown.
        seconds: Time since the end of the previous step.
        wait_seconds: The part of `seconds` spent waiting for the loader.
        host_bytes: Resident memory of the process, 0 if not read in this step.
        device_allocated_bytes: Allocated memory of all devices together, 0 if there is no device or
            it was not read.
        device_reserved_bytes: Reserved memory of all devices together, likewise.
        device_peak_bytes: Peak of the allocated memory, likewise.
        unix_seconds: When the step ended; set by the ring.
        optimizer: The number of the optimizer that stepped, see `Optimizers`; 0 if unknown.
    """

    step: int
    micro_steps: int
    loss: float | None
    grad_norm: float | None
    learning_rate: float | None
    seconds: float
    wait_seconds: float
    host_bytes: int = 0
    device_allocated_bytes: int = 0
    device_reserved_bytes: int = 0
    device_peak_bytes: int = 0
    unix_seconds: float = 0.0
    optimizer: int = 0


class SampleRing(RingWriter):
    """Appends samples of steps. The newest 32,768 are kept in 4 MiB and can still be completed.

    Earlier ones are summarized in the history. The file is created or continued.

    Raises:
        OSError: As `RingWriter`.
    """

    def __init__(self, path: Path) -> None:
        self.optimizers = Optimizers(path.parent)
        super().__init__(path, payload_bytes=_SAMPLE.size, capacity=_CAPACITY, has_history=True)

    def write(
        self,
        step: int,
        micro_steps: int,
        loss: float | None,
        grad_norm: float | None,
        learning_rate: float | None,
        *others: float,
        optimizer: int = 0,
    ) -> int:
        """Write a sample. Cost: below 1 microsecond; no system call.

        Args:
            step: As in `StepSample`, like the following.
            micro_steps: Number of backward calls in the step.
            loss: None if it was not read.
            grad_norm: None if it was not computed.
            learning_rate: None if unknown.
            *others: The fields of `StepSample` from ``seconds`` to ``device_peak_bytes``.
            optimizer: As in `StepSample`.

        Returns:
            The number of the sample, for `amend`.
        """
        flags = optimizer << OPTIMIZER_SHIFT
        if loss is None:
            loss = math.nan
        else:
            flags |= LOSS_IS_READ
        if grad_norm is None:
            grad_norm = math.nan
        else:
            flags |= NORM_IS_READ
        if learning_rate is None:
            learning_rate = math.nan
        else:
            flags |= RATE_IS_READ
        payload = _SAMPLE.pack(step, micro_steps, flags, loss, grad_norm, learning_rate, *others)
        self.append(payload)
        return self._sequence

    def amend(
        self, number: int, *, loss: float | None = None, grad_norm: float | None = None
    ) -> None:
        """Complete a sample with values that arrived later, such as a loss from a device.

        Args:
            number: As `write` returned it. A sample that has been overwritten is left alone.
            loss: The loss, or None to keep the recorded one.
            grad_norm: Likewise.
        """
        if number <= self._sequence - self._capacity:
            # A newer record has taken the slot.
            return
        slot = HEADER_BYTES + (number % self._capacity) * self._slot_bytes
        payload = slot + _PAYLOAD_OFFSET
        if loss is not None:
            self._set_value(payload, _LOSS_OFFSET, loss, LOSS_IS_READ)
        if grad_norm is not None:
            self._set_value(payload, _NORM_OFFSET, grad_norm, NORM_IS_READ)

    def _set_value(self, payload: int, offset: int, value: float, flag: int) -> None:
        _FLOAT.pack_into(self._map, payload + offset, value)
        # The flag is written last because a reader trusts the number once the flag is set.
        self._map[payload + _FLAGS_OFFSET] |= flag


def read_samples(path: Path) -> list[StepSample]:
    """Return the samples of a ring, oldest first.

    Raises:
        RunDirectoryError: H305, as `read_ring`.
    """
    samples = [sample_of(record) for record in read_ring(path)]
    return [sample for sample in samples if sample is not None]


def sample_of(record: Record) -> StepSample | None:
    """Decode a record of a ring of samples; return None if it belongs to another kind of ring."""
    if len(record.payload) != _SAMPLE.size:
        return None
    (
        step,
        micro_steps,
        flags,
        loss,
        grad_norm,
        learning_rate,
        seconds,
        wait_seconds,
        host_bytes,
        allocated_bytes,
        reserved_bytes,
        peak_bytes,
    ) = _SAMPLE.unpack(record.payload)
    return StepSample(
        step=step,
        micro_steps=micro_steps,
        unix_seconds=record.nanoseconds / 1e9,
        loss=value_or_none(loss, flags & LOSS_IS_READ),
        grad_norm=value_or_none(grad_norm, flags & NORM_IS_READ),
        learning_rate=value_or_none(learning_rate, flags & RATE_IS_READ),
        seconds=seconds,
        wait_seconds=wait_seconds,
        host_bytes=host_bytes,
        device_allocated_bytes=allocated_bytes,
        device_reserved_bytes=reserved_bytes,
        device_peak_bytes=peak_bytes,
        optimizer=flags >> OPTIMIZER_SHIFT & 0xFF,
    )
