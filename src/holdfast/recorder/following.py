"""Read only what was appended since the last look, while the process that records goes on or after
it was killed.

A look costs one system call for every 256 new records; the whole ring is read at the first look,
and again if the writer went around it in between. Does not: wait or poll (the caller does), write.
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
from holdfast.recorder.reader import EventParts, mark_of
from holdfast.recorder.ring import HEADER, HEADER_BYTES, MAGIC, Record, read_ring, slot_struct

_BLOCK = 256
_HELD_SAMPLES, _HELD_SECONDS = 16, 2.0  # far above how long a copy from a device takes


class RingFollower:
    """Follow one ring; a file that does not exist yet has no records, and one that is none
    raises H305.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sequence = self._inode = 0
        self._read_whole = False
        self.lost = 0
        """Records that were overwritten before they were read."""

    def records(self) -> list[Record]:
        """Return the whole records since the last call, oldest first; H305 as `read_ring`."""
        try:
            descriptor = open_file(self._path)
        except OSError:
            return []
        try:
            status = os.fstat(descriptor)
            # The first look, or a writer with another layout began anew
            if status.st_ino != self._inode:
                self._inode, self._sequence, self._read_whole = status.st_ino, 0, False
            header = os.pread(descriptor, HEADER.size, 0)
            if len(header) < HEADER.size or not header.strip(b"\0"):
                return []  # being made, or cut
            if not self._read_whole or not header.startswith(MAGIC):
                return self._all()
            return self._after(descriptor, header, status.st_size)
        except OSError:
            return []
        finally:
            close_descriptor(descriptor)

    def _all(self) -> list[Record]:
        found = [record for record in read_ring(self._path) if record.sequence > self._sequence]
        if found:
            self.lost += found[0].sequence - self._sequence - 1
            self._sequence = found[-1].sequence
        self._read_whole = True
        return found

    def _after(self, descriptor: int, header: bytes, size: int) -> list[Record]:
        _, _, payload_bytes, capacity = HEADER.unpack(header)
        slot = slot_struct(payload_bytes)
        found: list[Record] = []
        while capacity:
            start = (self._sequence + 1) % capacity
            wanted = min(_BLOCK, capacity - start)
            place = HEADER_BYTES + start * slot.size
            data = os.pread(descriptor, max(0, min(wanted * slot.size, size - place)), place)
            for first, nanoseconds, payload, last in slot.iter_unpack(
                data[: len(data) // slot.size * slot.size]
            ):
                if first == last and first > self._sequence + 1:
                    return found + self._all()
                if first != last or first <= self._sequence:
                    return found
                found.append(Record(first, nanoseconds, payload))
                self._sequence = first
            if len(data) < wanted * slot.size:
                break
        return found


class SampleFollower(RingFollower):
    """Follow the samples of a process's steps, or a guard's marks of those that were made or
    refused.

    A loss that comes from a device is written into its sample some steps later. So a sample without
    a loss is held back, with those after it, until 16 newer ones or 2 seconds have passed.
    """

    def new(self, *, hold_back: bool = True) -> list[StepSample]:
        """Return the samples since the last call, oldest first.

        Without `hold_back` all, such as at the last look.
        """
        records = self.records()
        pairs = [
            (record.sequence, sample)
            for record in records
            if (sample := _sample_in(record)) is not None
        ]
        recent = time.time() - _HELD_SECONDS
        for index in range(max(0, len(pairs) - _HELD_SAMPLES), len(pairs) if hold_back else 0):
            sequence, sample = pairs[index]
            if sample.loss is None and sample.unix_seconds > recent:
                self._sequence = sequence - 1  # the next look begins again with it
                del pairs[index:]
                break
        return [sample for _, sample in pairs]


def _sample_in(record: Record) -> StepSample | None:
    mark = mark_of(record)
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
    """Follow the events of a process."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._parts = EventParts()

    def new(self) -> list[Event]:
        """Return the events that were finished since the last call, oldest first."""
        return [
            event for record in self.records() if (event := self._parts.add(record)) is not None
        ]
