"""Follow a ring file while a process writes to it: each call returns only the new records.

Reading requires one system call for every 256 new records. The whole ring is read in the first
call, and again if the writer has overwritten records that were not yet read. Nothing in this module
waits, polls or writes; the caller decides how often to poll.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

from holdfast.core.events.event import Event
from holdfast.core.files import close_descriptor, open_file
from holdfast.recorder.black_box import StepMark
from holdfast.recorder.progress import StepSample, sample_of
from holdfast.recorder.reader import EventParts, step_record_in
from holdfast.recorder.ring import HEADER, HEADER_BYTES, MAGIC, Record, read_ring, slot_struct

# Number of records read in one system call.
_BLOCK = 256
# A sample without a loss is held back until there are this many newer samples or until this many
# seconds have passed, whichever comes first. Copying a loss from the device takes far less time.
_HELD_SAMPLES = 16
_HELD_SECONDS = 2.0


class RingFollower:
    """Follows one ring file, which need not exist yet. A missing file has no records.

    Args:
        path: The ring file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # The number of the newest record that was returned.
        self._sequence = 0
        self._inode = 0
        self._has_read_all = False
        # The number of records that were overwritten before this follower read them.
        self.lost = 0

    def records(self) -> list[Record]:
        """Return the complete records that were written since the last call, oldest first.

        Raises:
            RunDirectoryError: H305 if the file is not a ring or was written by a newer holdfast.
        """
        try:
            descriptor = open_file(self._path)
        except OSError:
            return []
        try:
            return self._records_in(descriptor)
        except OSError:
            return []
        finally:
            close_descriptor(descriptor)

    def _records_in(self, descriptor: int) -> list[Record]:
        """Return the new records in an open ring file, or all records if the file was replaced."""
        status = os.fstat(descriptor)
        if status.st_ino != self._inode:
            # This is the first call, or the file was replaced by a writer with another layout.
            self._inode = status.st_ino
            self._sequence = 0
            self._has_read_all = False
        header = os.pread(descriptor, HEADER.size, 0)
        if len(header) < HEADER.size or not header.strip(b"\0"):
            # The writer is still creating the file, or the file was truncated.
            return []
        if not self._has_read_all or not header.startswith(MAGIC):
            return self._read_all()
        return self._read_new(descriptor, header, status.st_size)

    def _read_all(self) -> list[Record]:
        """Read the whole ring and return the records that were not returned before."""
        records = [record for record in read_ring(self._path) if record.sequence > self._sequence]
        if records:
            self.lost += records[0].sequence - self._sequence - 1
            self._sequence = records[-1].sequence
        self._has_read_all = True
        return records

    def _read_new(self, descriptor: int, header: bytes, size_bytes: int) -> list[Record]:
        """Return the records after the last returned record, up to the first unwritten slot."""
        _, _, payload_bytes, capacity = HEADER.unpack(header)
        slot = slot_struct(payload_bytes)
        records: list[Record] = []
        while capacity:
            start = (self._sequence + 1) % capacity
            count = min(_BLOCK, capacity - start)
            offset = HEADER_BYTES + start * slot.size
            available_bytes = max(0, size_bytes - offset)
            data = os.pread(descriptor, min(count * slot.size, available_bytes), offset)
            whole_bytes = len(data) // slot.size * slot.size
            for first, nanoseconds, payload, last in slot.iter_unpack(data[:whole_bytes]):
                if first == last and first > self._sequence + 1:
                    # The writer has overwritten the records that were to be read next.
                    return records + self._read_all()
                if first != last or first <= self._sequence:
                    # The writer has not written the next record to this slot yet, or is writing it.
                    return records
                records.append(Record(first, nanoseconds, payload))
                self._sequence = first
            # The file is truncated, so there is nothing more to read.
            if len(data) < count * slot.size:
                break
        return records


class SampleFollower(RingFollower):
    """Follows the step samples of a process or the step records of a Guard.

    A loss that is copied from a device is added to its sample a few steps later. A sample without a
    loss is therefore held back, together with all newer samples, until there are 16 newer samples
    or 2 seconds have passed.
    """

    def new(self, *, hold_back: bool = True) -> list[StepSample]:
        """Return the samples that were written since the last call, oldest first.

        Args:
            hold_back: Whether to hold back samples whose loss is still missing. Pass False in the
                last call, after which no loss can be added.
        """
        samples: list[StepSample] = []
        sequences: list[int] = []
        for record in self.records():
            sample = _sample_in(record)
            if sample is not None:
                samples.append(sample)
                sequences.append(record.sequence)
        if not hold_back:
            return samples
        oldest_waiting = time.time() - _HELD_SECONDS
        for index in range(max(0, len(samples) - _HELD_SAMPLES), len(samples)):
            sample = samples[index]
            if sample.loss is None and sample.unix_seconds > oldest_waiting:
                # Hold this sample back by moving the position to just before it, so that the next
                # call starts with this sample.
                self._sequence = sequences[index] - 1
                return samples[:index]
        return samples


def _sample_in(record: Record) -> StepSample | None:
    """Return a sample or a Guard's completed step as a sample, or None for any other record."""
    mark = step_record_in(record)
    if mark is None or mark.mark is StepMark.BEGUN:
        return sample_of(record)
    return StepSample(
        step=mark.global_step,
        micro_steps=0,
        loss=mark.loss,
        grad_norm=mark.grad_norm,
        learning_rate=None,
        seconds=mark.seconds,
        wait_seconds=math.nan,
        unix_seconds=mark.unix_seconds,
        optimizer=mark.optimizer,
    )


class EventFollower(RingFollower):
    """Follows the event ring of a process."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._parts = EventParts()

    def new(self) -> list[Event]:
        """Return the events whose last part was written since the last call, oldest first."""
        events = [self._parts.add(record) for record in self.records()]
        return [event for event in events if event is not None]
