"""Record a training process's current phase, and the duration and memory use of its steps.

The training process writes two files; other processes read them, even after the training process
has ended. The *board* is a single page with the current phase, the time at which the phase began,
and progress counters. The *sample ring* holds one record per step. Both files are memory-mapped, so
that a write needs no system call and survives SIGKILL.

``supervise`` decides when a phase has taken too long. ``black_box`` records events.
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
# Progress, phase, steps in this process, start of the phase, step, micro-steps, progress. If the
# two copies of the progress counter differ, the board was read while it was being written, or the
# writer was killed during a write.
_STANDING = struct.Struct("<QIIQQQQ")
_STANDING_OFFSET = 64
# The number of the newest request to trace memory.
_REQUEST = struct.Struct("<Q")
_REQUEST_OFFSET = 256
# The total time spent in each phase in nanoseconds, indexed by `ProcessPhase`. It excludes the time
# since the current phase began.
_PHASE_COUNT = 10
_SPENT = struct.Struct(f"<{_PHASE_COUNT}q")
_SPENT_OFFSET = 320
# The minimum interval in nanoseconds between two writes of these totals. Writing them whenever a
# phase begins would be too slow, because a phase may last only microseconds.
_SPENT_INTERVAL = 20_000_000
# The fields of `LoopTimes`: four counts, the flag for a device, and seven times in nanoseconds.
_LOOP = struct.Struct("<5Q7q")
_LOOP_OFFSET = 448

# --- The layout of a sample.

# Step, micro-steps, flags, loss, gradient norm, learning rate, duration, the part of the duration
# spent waiting for data, and four memory sizes in bytes.
_SAMPLE = struct.Struct("<QIIdddddQQQQ")
_FLOAT = struct.Struct("<d")
# Offsets in a sample, in bytes.
_FLAGS_OFFSET = 12
_LOSS_OFFSET = 16
_NORM_OFFSET = 24
# In a slot, the payload follows the sequence number and the time, which take up 8 bytes each.
_PAYLOAD_OFFSET = 16
_CAPACITY = 32_768


class ProcessPhase(IntEnum):
    """What a training process is currently doing, as far as holdfast can observe it."""

    # Importing modules and building the model; training has not begun.
    STARTING = 1
    # From the first forward pass to the end of the first step, or while torch compiles a model.
    FIRST_STEP = 2
    # The training loop is waiting for a batch from the loader.
    DATA_WAIT = 3
    FORWARD_BACKWARD = 4
    OPTIMIZER = 5
    # The loader returned a batch with gradients disabled, or a module was put into eval mode.
    EVALUATION = 6
    SAVING = 7
    # The loader is exhausted and no other phase has begun.
    END_OF_EPOCH = 8
    # The interpreter is shutting down.
    ENDING = 9


class LoopTimes(NamedTuple):
    """What a training loop has spent its time on, from the end of its first step to its newest.

    The first step is not included, because workers start and torch compiles during that step. The
    time that is in none of the parts was spent in forward passes and in the script's own code.

    Args:
        steps: The number of steps.
        epochs: How often the loop began to iterate over a loader.
        evaluations: The number of evaluations.
        saves: The number of calls that saved something.
        uses_device: Whether the process holds memory of a device such as a GPU.
        seconds: The duration of all steps together.
        wait_seconds: The time spent waiting for the loader, except in evaluations.
        restart_seconds: The part of `wait_seconds` that passed until the first batch of an epoch.
        evaluation_seconds: The duration of all evaluations.
        saving_seconds: The duration of all saves.
        backward_seconds: The time spent in backward calls. If several ranks reduce gradients during
            backward, it includes waiting for the other ranks.
        optimizer_seconds: The time spent in optimizer steps.
    """

    steps: int
    epochs: int = 0
    evaluations: int = 0
    saves: int = 0
    uses_device: bool = False
    seconds: float = 0.0
    wait_seconds: float = 0.0
    restart_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    saving_seconds: float = 0.0
    backward_seconds: float = 0.0
    optimizer_seconds: float = 0.0

    @property
    def own_share(self) -> float:
        """Return the share of time spent in forward passes and in the script's own code."""
        if self.seconds <= 0.0:
            return 0.0
        other_seconds = (
            self.wait_seconds
            + self.evaluation_seconds
            + self.saving_seconds
            + self.backward_seconds
            + self.optimizer_seconds
        )
        return max(0.0, 1.0 - other_seconds / self.seconds)


class Standing(NamedTuple):
    """The content of a board: the phase and progress that a process published."""

    pid: int
    phase: ProcessPhase
    # When the phase began, on the monotonic clock, which all processes on a machine share.
    since_seconds: float
    # A counter that increases with every phase, micro-step and step. While it does not change, the
    # process makes no progress.
    progress: int
    # The number of optimizer steps. With a Guard, this includes the steps of earlier attempts.
    step: int
    # The number of backward calls.
    micro_step: int
    # The number of optimizer steps in this process, modulo 2**32.
    steps_made: int = 0
    # The total time spent in each phase in seconds, indexed by `ProcessPhase`. It excludes the time
    # since the current phase began.
    spent: tuple[float, ...] = ()
    # None until the second step has ended.
    loop: LoopTimes | None = None


class ProgressBoard:
    """Publishes the phase and progress of this process, so that other processes can read them.

    Args:
        path: The board file. An existing file is replaced. If None, the board is kept in private
            memory, where no other process can read it.

    Raises:
        OSError: If the file cannot be created.
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
        # The time of the next write of the totals per phase, in monotonic nanoseconds.
        self._spent_due = 0
        self.enter(ProcessPhase.STARTING)
        _HEADER.pack_into(self._map, _HEADER_OFFSET, _MAGIC, VERSION, os.getpid())

    def enter(self, phase: ProcessPhase) -> int:
        """Publish that a phase begins. Entering the current phase again also counts as progress.

        Returns:
            The current time in monotonic nanoseconds.
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

    def count_wait_as_evaluation(self, nanoseconds: int) -> None:
        """Move time from the total of `DATA_WAIT` to that of `EVALUATION`."""
        self._spent[ProcessPhase.DATA_WAIT] -= nanoseconds
        self._spent[ProcessPhase.EVALUATION] += nanoseconds

    def write_loop_times(self, *values: int) -> None:
        """Publish what the training loop has spent its time on.

        Args:
            *values: The fields of `LoopTimes` in order, with times in nanoseconds.
        """
        _LOOP.pack_into(self._map, _LOOP_OFFSET, *values)

    def trace_requested(self) -> int:
        """Return the number of the newest request for a memory trace, or 0 if there was none."""
        number: int = _REQUEST.unpack_from(self._map, _REQUEST_OFFSET)[0]
        return number

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()


def _new_map(path: Path | None) -> mmap.mmap:
    """Return the memory of a new board: a mapped file, or private memory if `path` is None."""
    if path is None:
        return mmap.mmap(-1, BOARD_BYTES)
    with create_file(path) as file:
        os.posix_fallocate(file.fileno(), 0, BOARD_BYTES)
        return mmap.mmap(file.fileno(), BOARD_BYTES)


def read_board(path: Path) -> Standing | None:
    """Return the content of a board file.

    Return None if the file is missing, is truncated, is not a board, or was being written.

    Raises:
        RunDirectoryError: H305 if a newer version of holdfast wrote the file.
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
        loop=_loop_times_in(data),
    )


def _loop_times_in(data: bytes) -> LoopTimes | None:
    """Return the loop's times in the content of a board, or None if there are none yet."""
    steps, epochs, evaluations, saves, uses_device, *nanoseconds = _LOOP.unpack_from(
        data, _LOOP_OFFSET
    )
    if steps == 0:
        return None
    return LoopTimes(
        steps,
        epochs,
        evaluations,
        saves,
        bool(uses_device),
        *(time / 1e9 for time in nanoseconds),
    )


def request_trace(path: Path, number: int) -> None:
    """Ask the process that writes a board to trace its memory during the next steps.

    Args:
        path: The board file.
        number: The number of this request. It must be higher than that of any earlier request.
    """
    with open_to_write(path, "rb+") as file:
        file.seek(_REQUEST_OFFSET)
        file.write(_REQUEST.pack(number))


class StepSample(NamedTuple):
    """One training step as measured by the observer's hooks.

    The four sizes are in bytes. A size is 0 if it was not read in this step; device sizes are also
    0 if there is no device.

    Args:
        step: The number of optimizer steps, including this step. If there is a Guard, this is the
            Guard's count. If no optimizer steps, this is the number of backward calls.
        micro_steps: The number of backward calls in the step.
        loss: The loss of the last backward call, or None if it was not read. NaN means that the
            loss itself is NaN.
        grad_norm: The gradient norm, or None if it was not computed.
        learning_rate: The learning rate of the first parameter group, or None if unknown.
        seconds: The time since the end of the previous step.
        wait_seconds: The part of `seconds` spent waiting for the loader.
        host_bytes: The resident memory of the process.
        device_allocated_bytes: The allocated memory, summed over all devices.
        device_reserved_bytes: The memory reserved by the allocator, summed over all devices.
        device_peak_bytes: The peak of the allocated memory, summed over all devices.
        unix_seconds: When the step ended; set when the sample is written.
        optimizer: The number of the optimizer that stepped (see `Optimizers`), or 0 if unknown.
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
    """Writes step samples to a ring file of 4 MiB, which is created if it does not exist.

    The ring holds the newest 32,768 samples, which `amend` can still complete. Older samples are
    summarized in the ring's history.

    Raises:
        OSError: If the file cannot be created or its space cannot be allocated.
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
        """Write a sample in less than 1 microsecond, without a system call.

        The arguments are the fields of `StepSample`.

        Args:
            step: The number of optimizer steps, including this step.
            micro_steps: The number of backward calls in the step.
            loss: The loss of the last backward call, or None if it was not read.
            grad_norm: The gradient norm, or None if it was not computed.
            learning_rate: The learning rate of the first parameter group, or None if unknown.
            *others: The fields from ``seconds`` to ``device_peak_bytes``, in the same order.
            optimizer: The number of the optimizer that stepped, or 0 if unknown.

        Returns:
            The number of the sample, which can be passed to `amend`.
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
        """Add values to a sample that became available later, such as a loss on a device.

        Args:
            number: The sample's number, as returned by `write`. If the sample has been overwritten,
                the call has no effect.
            loss: The loss, or None to keep the recorded loss.
            grad_norm: The gradient norm, or None to keep the recorded norm.
        """
        if number <= self._sequence - self._capacity:
            # The slot now holds a newer sample.
            return
        slot = HEADER_BYTES + (number % self._capacity) * self._slot_bytes
        payload = slot + _PAYLOAD_OFFSET
        if loss is not None:
            self._set_value(payload, _LOSS_OFFSET, loss, LOSS_IS_READ)
        if grad_norm is not None:
            self._set_value(payload, _NORM_OFFSET, grad_norm, NORM_IS_READ)

    def _set_value(self, payload: int, offset: int, value: float, flag: int) -> None:
        """Write a number to a sample and set the flag that says that the number was read."""
        _FLOAT.pack_into(self._map, payload + offset, value)
        # The flag must be written after the number, because a set flag tells readers that the
        # number is valid.
        self._map[payload + _FLAGS_OFFSET] |= flag


def read_samples(path: Path) -> list[StepSample]:
    """Return the samples in a ring file, oldest first.

    Raises:
        RunDirectoryError: H305 if the file is not a ring or was written by a newer holdfast.
    """
    samples = [sample_of(record) for record in read_ring(path)]
    return [sample for sample in samples if sample is not None]


def sample_of(record: Record) -> StepSample | None:
    """Decode a step sample, or return None if the record comes from another kind of ring."""
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
