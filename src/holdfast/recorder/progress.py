"""Where a training process stands, and what each step took.

Written inside it, read from outside, also after its end.

A *board* is one small page: the phase that the process is in, since when, and how much it has done.
A *ring of samples* holds one record for each step. Both are mapped files, so a record costs no
system call and survives SIGKILL.

Does not: decide what is too long (``supervise``), record events (``black_box``).
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from enum import IntEnum
from pathlib import Path

from time import monotonic_ns as _now, time_ns  # isort: skip
from typing import NamedTuple

from holdfast.core.files import created, opened_to_write, read_file
from holdfast.recorder.ring import (
    HEADER_BYTES,
    VERSION,
    Record,
    RingWriter,
    newer,
    read_ring,
    value_or_none,
)
from holdfast.recorder.run_files import Optimizers

BOARD_BYTES = 4096
_MAGIC = b"HOLDPROG"
_HEADER = struct.Struct("<8sII")  # magic, version, pid
_HEADER_AT = 0
# progress | phase, steps made | since, step, micro steps | progress: torn if the ends differ
_STANDING = struct.Struct("<QIIQQQQ")
_STANDING_AT = 64
_SPENT = struct.Struct("<10q")  # nanoseconds in each phase that has ended, by its number
_SPENT_AT = 320
_PAUSE = 20_000_000  # nanoseconds between two that are written: a step may take microseconds
_REQUEST = struct.Struct("<Q")
_REQUEST_AT = 256
# step, micro steps | which of the next three are values, also if NaN; optimizer | loss, norm, rate
# | the rest
_SAMPLE = struct.Struct("<QIIdddddQQQQ")
# As a slot of a ring, see `slot_struct`
_pack_into = struct.Struct(f"<QQ{_SAMPLE.format[1:]}Q").pack_into
LOSS_IS_READ, NORM_IS_READ, RATE_IS_READ = 1, 2, 4
_READ_OFFSET, _LOSS_OFFSET, _NORM_OFFSET = 12, 16, 24  # in a sample
_FLOAT = struct.Struct("<d")
_BEFORE_PAYLOAD = 16  # in a slot of a ring: sequence and time
_CAPACITY = 32_768


class Phase(IntEnum):
    """What a training process is doing, as far as it shows."""

    STARTING = 1
    """Importing and building; nothing was trained yet."""
    FIRST_STEP = 2
    """From the first forward to the end of the first step, or while torch compiles."""
    DATA_WAIT = 3
    """In the loader: the loop waits for a batch."""
    FORWARD_BACKWARD = 4
    OPTIMIZER = 5
    EVALUATION = 6
    """A batch was handed out while gradients are off, or a module was asked to evaluate."""
    SAVING = 7
    END_OF_EPOCH = 8
    """A loader is exhausted and nothing else has begun."""
    ENDING = 9
    """The interpreter leaves."""


class Standing(NamedTuple):
    """What a board shows of a process."""

    pid: int
    phase: Phase
    # When that began, on the system's monotonic clock, which all processes share
    since_seconds: float
    # Counts everything that happened: phases, micro-steps, steps; the same while nothing moves
    progress: int
    step: int  # optimizer steps of the training, also before this process where a guard counts
    micro_step: int  # calls of backward
    made: int = 0  # steps that this process has made itself, modulo 2**32
    spent: tuple[float, ...] = ()  # seconds in each phase, by its number, without the present one


class ProgressBoard:
    """Show where this process stands, in a file that is made anew, or (None) in memory that nobody
    else sees.

    OSError if it cannot be made.
    """

    def __init__(self, path: Path | None) -> None:
        self._map = _map_new(path)
        self._pack_into = _STANDING.pack_into
        self.progress = 0
        self.phase = Phase.STARTING
        self._spent, self._since, self._due = [0] * 10, _now(), 0
        self.step = self.made = 0
        self.micro_step = 0
        self.enter(Phase.STARTING)
        _HEADER.pack_into(self._map, _HEADER_AT, _MAGIC, VERSION, os.getpid())

    def enter(self, phase: Phase) -> int:
        """Show that a phase begins, also one of the same name: progress.

        Returns when, in monotonic nanoseconds.
        """
        self.progress = progress = self.progress + 1
        now = _now()
        self._spent[self.phase] += now - self._since
        self._since, self.phase = now, phase
        if now >= self._due:
            self._due = now + _PAUSE
            _SPENT.pack_into(self._map, _SPENT_AT, *self._spent)
        counts = self.step, self.micro_step
        self._pack_into(self._map, _STANDING_AT, progress, phase, self.made, now, *counts, progress)
        return now

    def trace_requested(self) -> int:
        """Return the number of the newest request from outside to trace what memory is held by,
        0 for none.
        """
        found: int = _REQUEST.unpack_from(self._map, _REQUEST_AT)[0]
        return found

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()


def _map_new(path: Path | None) -> mmap.mmap:
    if path is None:
        return mmap.mmap(-1, BOARD_BYTES)
    with created(path) as file:
        os.posix_fallocate(file.fileno(), 0, BOARD_BYTES)
        return mmap.mmap(file.fileno(), BOARD_BYTES)


def read_board(path: Path) -> Standing | None:
    """Return what a board shows; None if it is missing, torn, cut or no board.

    H305 if a newer holdfast wrote it.
    """
    try:
        data = read_file(path)
    except OSError:
        return None
    if len(data) < BOARD_BYTES:
        return None
    magic, version, pid = _HEADER.unpack_from(data, _HEADER_AT)
    if magic != _MAGIC:
        return None
    if version > VERSION:
        raise newer(path, f"version {version}")
    first, phase, made, since, step, micro_step, last = _STANDING.unpack_from(data, _STANDING_AT)
    if first != last or phase not in set(Phase):
        return None
    return Standing(
        pid=pid,
        phase=Phase(phase),
        since_seconds=since / 1e9,
        progress=first,
        step=step,
        micro_step=micro_step,
        made=made,
        spent=tuple(each / 1e9 for each in _SPENT.unpack_from(data, _SPENT_AT)),
    )


def request_trace(path: Path, number: int) -> None:
    """Ask the process of a board to trace, at its next steps, what its memory is held by."""
    with opened_to_write(path, "rb+") as file:
        file.seek(_REQUEST_AT)
        file.write(_REQUEST.pack(number))


class StepSample(NamedTuple):
    """One step as it was seen from its hooks.

    Args:
        step: Optimizer steps so far, this one included, as the guard counts them where there is
            one; calls of backward where no optimizer steps.
        micro_steps: Calls of backward in it.
        loss: Of the last backward; None if it was not read. NaN is a loss that is NaN.
        grad_norm: None if nobody computed it.
        learning_rate: Of the first parameter group; None if unknown.
        seconds: Since the end of the step before.
        wait_seconds: Of these, waiting for the loader.
        host_bytes: Resident memory of the process; 0 if not read at this step.
        device_allocated_bytes: Of all devices together; 0 if there is none or it was not read.
        device_reserved_bytes: The same of what is reserved.
        device_peak_bytes: The most that was allocated.
        unix_seconds: When it ended; set by the ring.
        optimizer: Number of the one that stepped, see `Optimizers`; 0 if nobody said.
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
    """Append samples of steps; the newest 32,768 are kept, in 4 MiB, and can still be completed.

    Others in short.

    The file is made or continued; OSError as `RingWriter`.
    """

    def __init__(self, path: Path) -> None:
        self.optimizers = Optimizers(path.parent)
        super().__init__(path, payload_bytes=_SAMPLE.size, capacity=_CAPACITY, has_history=True)

    def append(self, sample: StepSample) -> None:  # type: ignore[override] # a record here is a sample
        """Write one sample."""
        self.write(*sample[:-2], optimizer=sample.optimizer)

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
        """Write a sample, the fields of `StepSample` in order but for the time.

        Return its number, for `amend`.

        Cost: below 1 microsecond; no system call.
        """
        is_read = (loss is not None) + 2 * (grad_norm is not None) + 4 * (learning_rate is not None)
        number = self._sequence + 1
        if number == self._turn:
            self._turn_over()
        _pack_into(
            self._map,
            HEADER_BYTES + (number % self._capacity) * self._slot_bytes,
            number,
            time_ns(),
            step,
            micro_steps,
            is_read + (optimizer << 8),
            math.nan if loss is None else loss,
            math.nan if grad_norm is None else grad_norm,
            math.nan if learning_rate is None else learning_rate,
            *others,
            number,
        )
        self._sequence = number
        return number

    def amend(
        self, number: int, *, loss: float | None = None, grad_norm: float | None = None
    ) -> None:
        """Complete a sample with what became known later, such as a loss that had to come from a
        device.

        `number` is as `write` returned it; a sample that was overwritten since is left alone, and
        so is a None.
        """
        if number <= self._sequence - self._capacity:
            return  # its slot belongs to another record by now
        start = HEADER_BYTES + (number % self._capacity) * self._slot_bytes + _BEFORE_PAYLOAD
        for offset, value, is_read in (
            (_LOSS_OFFSET, loss, LOSS_IS_READ),
            (_NORM_OFFSET, grad_norm, NORM_IS_READ),
        ):
            if value is not None:
                _FLOAT.pack_into(self._map, start + offset, value)
                # Last: until then nobody takes it for a value
                self._map[start + _READ_OFFSET] |= is_read


def read_samples(path: Path) -> list[StepSample]:
    """Return the samples of a ring, oldest first; H305 as `read_ring`."""
    return [sample for sample in map(sample_of, read_ring(path)) if sample is not None]


def sample_of(record: Record) -> StepSample | None:
    """Return what a record of a ring of samples says, None if it is of another kind of ring or a
    damaged one.
    """
    if len(record.payload) != _SAMPLE.size:
        return None
    step, micro_steps, is_read, loss, norm, rate, seconds, wait, host, allocated, reserved, peak = (
        _SAMPLE.unpack(record.payload)
    )
    return StepSample(
        step=step,
        micro_steps=micro_steps,
        unix_seconds=record.nanoseconds / 1e9,
        loss=value_or_none(loss, is_read & LOSS_IS_READ),
        grad_norm=value_or_none(norm, is_read & NORM_IS_READ),
        learning_rate=value_or_none(rate, is_read & RATE_IS_READ),
        seconds=seconds,
        wait_seconds=wait,
        host_bytes=host,
        device_allocated_bytes=allocated,
        device_reserved_bytes=reserved,
        device_peak_bytes=peak,
        optimizer=is_read >> 8 & 0xFF,
    )
