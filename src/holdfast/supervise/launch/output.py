"""What a supervised command prints: copied to our own streams, and kept in a file of bounded size.

A stream of the command is a pseudo-terminal exactly where our own is a terminal, so that progress
bars work there and a log file stays a log file. Nothing waits for the end of a stream, since an
orphan may hold it open for ever.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import termios
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from holdfast.core.durable import free_bytes
from holdfast.core.files import close_descriptor, created, open_file, opened
from holdfast.recorder.run_files import ATTEMPT_LINE

_READ_BYTES = 1 << 16
# Poll says "writable" when this much goes into a pipe without waiting
_WRITE_BYTES = select.PIPE_BUF
# After a line or two a rest: a command that prints hundreds of lines a second would be read as
# often, for nothing.
_FEW_BYTES, _REST_SECONDS = 4096, 0.02
_MOST_PENDING = 1 << 20
_HEAD_SHARE, _NEWEST_SHARE = 4, 2  # of a full log: its first quarter and its newest half are kept
_FREE_BYTES = 1 << 16  # that a full disk must have again before it is written to
_READABLE = select.POLLIN | select.POLLHUP | select.POLLERR
Polled = list[tuple[int, int]]
"""Descriptors, each with events of `select.poll`."""


class OutputLog:
    """Append what was printed to a file, or continue it.

    Of more than `most_bytes` keep the head and the newest part.

    While it is cut, a second file of up to three quarters of that exists. OSError if the file
    cannot be opened.
    """

    def __init__(self, path: Path, most_bytes: int) -> None:
        self._path = path
        self._most = most_bytes
        self._file = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._size = os.fstat(self._file).st_size
        self._attempt, self._attempt_at = b"", 0
        self._fails = False
        self._at_line_start = True
        self.lost_bytes = 0
        """What could not be written since something could, such as on a full disk."""
        self.on_loss: Callable[[OSError], None] = lambda _: None
        """Called once when writing begins to fail, not again until something could be written."""

    def begin(self, attempt: int) -> None:
        """Write the line that separates attempts."""
        self._attempt = ATTEMPT_LINE.format(number=attempt).encode() + b"\n"
        if not self._at_line_start:
            self.write(b"\n")
        self._attempt_at = self._size
        self.write(self._attempt)

    def write(self, data: bytes) -> None:
        """Append; a disk that is full loses data and no more, and where it was lost is said once
        there is space.
        """
        self._at_line_start = data.endswith(b"\n")
        if self._size + len(data) > self._most:
            try:
                self._cut()
            except OSError:
                self._most += self._most // _HEAD_SHARE  # not again at the next write
        if self._say_what_is_lost():
            self._append(data)
        else:
            self.lost_bytes += len(data)

    def _say_what_is_lost(self) -> bool:
        """Return whether nothing is lost that is not said in the file by now."""
        lost = self.lost_bytes
        if lost:
            with suppress(OSError):
                if free_bytes(self._path.parent) < _FREE_BYTES:
                    return False  # half of a note would say nothing
            self.lost_bytes = 0
            self._append(b"\n--- holdfast: %d bytes could not be written ---\n" % lost)
            if self.lost_bytes:
                self.lost_bytes = lost
        return self.lost_bytes == 0

    def close(self) -> None:
        """Close the file."""
        close_descriptor(self._file)

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                written = os.write(self._file, view)
            except OSError as error:
                self.lost_bytes += len(view)
                if not self._fails:
                    self._fails = True
                    self.on_loss(error)
                return
            self._fails = False
            self._size += written
            view = view[written:]

    def _cut(self) -> None:
        """Replace the file by its head and its newest part."""
        head, newest = self._most // _HEAD_SHARE, self._most // _NEWEST_SHARE
        resumes = self._size - newest
        if resumes <= head:
            return
        middle = b"\n--- holdfast: %d bytes left out ---\n" % (resumes - head)
        # Whoever reads the log must know whose output follows
        if head <= self._attempt_at < resumes:
            self._attempt_at = head + len(middle)
            middle += self._attempt
        elif self._attempt_at >= resumes:
            self._attempt_at += head + len(middle) - resumes
        temporary = self._path.with_name(f".tmp-{self._path.name}")
        try:
            with opened(self._path) as old, created(temporary) as new:
                new.write(old.read(head) + middle)
                old.seek(resumes)
                while piece := old.read(_MOST_PENDING):
                    new.write(piece)
            temporary.replace(self._path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        close_descriptor(self._file)
        self._file = open_file(self._path, os.O_WRONLY | os.O_APPEND)
        self._size = os.fstat(self._file).st_size


class Sink:
    """One of our own streams, written to only as fast as it takes the data.

    Data for a terminal that takes nothing (Ctrl-S) is dropped, since it is in the log. A pipe that
    takes nothing holds the command up, as it would without us.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.pending = bytearray()
        self.at_line_start = True
        """Whether the last that was passed on ended with a line feed."""
        self._broken = False
        self._terminal = os.isatty(descriptor)

    @property
    def full(self) -> bool:
        """Return whether the command has to wait."""
        return len(self.pending) > _MOST_PENDING

    def add(self, data: bytes) -> None:
        """Take data to be written when the stream is ready."""
        self.at_line_start = data.endswith(b"\n")
        if not self._broken:
            self.pending += data
            if self._terminal and self.full:
                self.pending[:] = b"\r\n--- holdfast: output left out here, see output.log ---\r\n"

    def pass_on(self, data: bytes) -> None:
        """Take data and write what goes at once.

        The common case, without another round of the loop.
        """
        self.add(data)
        while self.pending and _poll([(self.descriptor, select.POLLOUT)], 0.0, select.POLLOUT):
            self.flush_ready()

    def flush_ready(self) -> None:
        """Write what goes without waiting; a reader that is gone is none to write to."""
        try:
            written = os.write(self.descriptor, memoryview(self.pending)[:_WRITE_BYTES])
        except BlockingIOError:
            return
        except OSError:
            self._broken = True
            self.pending.clear()
            return
        del self.pending[:written]


class Copier:
    """Move what the command prints to the log and to our streams."""

    def __init__(self, log: OutputLog, *, quiet: bool = False) -> None:
        self._log = log
        self._quiet = quiet
        self._sources: dict[int, Sink] = {}
        self._sinks: dict[int, Sink] = {}

    def take(self, sources: Sequence[tuple[int, int]]) -> None:
        """Read from these from now on; they are closed when they end."""
        for source, target in sources:
            os.set_blocking(source, False)
            self._sources[source] = self._sinks.setdefault(target, Sink(target))

    def say(self, text: str) -> None:
        """Print a line of ours to stderr, without waiting for it.

        What is not printable becomes a question mark.
        """
        if not self._quiet:
            text = "holdfast: " + "".join(each if each.isprintable() else "?" for each in text)
            self.begin_line(2)
            self._sinks[2].pass_on(text.encode(errors="replace") + b"\n")

    def begin_line(self, descriptor: int) -> None:
        """End a line that the command has left unfinished there, such as a progress bar."""
        own = self._sinks.setdefault(descriptor, Sink(descriptor))
        same = [
            each
            for each in self._sinks.values()
            if each is own or _same_file((each.descriptor, descriptor))
        ]
        if not all(each.at_line_start for each in same):
            own.pass_on(b"\n")
            for each in same:
                each.at_line_start = True

    def wishes(self) -> Polled:
        """Return descriptors to poll with the events to wait for."""
        reading = [
            (source, select.POLLIN) for source, sink in self._sources.items() if not sink.full
        ]
        return reading + [
            (sink.descriptor, select.POLLOUT) for sink in self._sinks.values() if sink.pending
        ]

    def serve(self, ready: Sequence[tuple[int, int]]) -> None:
        """Do what `poll` has found possible."""
        for descriptor, events in ready:
            if descriptor in self._sources and events & _READABLE:
                self._read(descriptor)
            sink = self._sinks.get(descriptor)
            if sink is not None and sink.pending and events & ~select.POLLIN:
                sink.flush_ready()

    def _read(self, source: int) -> None:
        try:
            data = os.read(source, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:  # EIO: nobody holds the other side of the terminal any more
            data = b""
        if not data:
            self._sources.pop(source)
            os.close(source)
            return
        self._log.write(data)
        self._sources[source].pass_on(data)
        if len(data) < _FEW_BYTES:
            time.sleep(_REST_SECONDS)

    def drain(self, *, quiet_seconds: float, flush_seconds: float) -> None:
        """After the end of the command.

        Read what is left without waiting for the end of streams, and pass it on.

        A stream that gives nothing for `quiet_seconds` gives nothing more, since whoever holds it
        is an orphan; our own streams may take `flush_seconds`.
        """
        deadline = time.monotonic() + flush_seconds
        while (wishes := self.wishes()) and (left := deadline - time.monotonic()) > 0:
            reading = any(events == select.POLLIN for _, events in wishes)
            ready = _poll(wishes, min(quiet_seconds, left) if reading else left)
            self.serve(ready)
            if not ready and not any(sink.pending for sink in self._sinks.values()):
                break
        for source in self._sources:
            os.close(source)
        self._sources.clear()


def _poll(wishes: Polled, seconds: float, wanted: int = -1) -> Polled:
    poll = select.poll()
    for descriptor, events in wishes:
        poll.register(descriptor, events)
    return [
        (descriptor, events)
        for descriptor, events in poll.poll(max(0.0, seconds) * 1e3)
        if events & wanted
    ]


class Streams:
    """The two output streams of a command: its ends for the command, ours to read from."""

    def __init__(self, ours: tuple[int, int] = (1, 2)) -> None:
        self.theirs: list[int] = []
        self.sources: list[tuple[int, int]] = []
        """Pairs of a descriptor to read from and the one of ours that it is copied to."""
        self._terminal: int | None = None
        self._like = next((each for each in ours if os.isatty(each)), None)
        pipe = -1
        for each in ours:
            if os.isatty(each):
                self.theirs.append(self._open_terminal(each))
            # As after 2>&1: the order of what is printed is kept
            elif pipe >= 0 and _same_file(ours):
                self.theirs.append(os.dup(pipe))
            else:
                reading, pipe = os.pipe()
                self.theirs.append(pipe)
                self.sources.append((reading, each))

    def _open_terminal(self, like: int) -> int:
        if self._terminal is not None:
            return os.dup(self.theirs[0])
        self._terminal, theirs = os.openpty()
        settings = termios.tcgetattr(theirs)
        settings[1] &= ~termios.OPOST  # our own terminal does that; the log gets what was printed
        settings[3] &= ~termios.ECHO
        termios.tcsetattr(theirs, termios.TCSANOW, settings)
        self.sources.append((self._terminal, like))
        self.follow_size()
        return theirs

    def follow_size(self) -> None:
        """Give the command's terminal the size of ours."""
        if self._terminal is not None and self._like is not None:
            with suppress(OSError):
                size = fcntl.ioctl(self._like, termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
                fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, size)

    def close_theirs(self) -> None:
        """Close the command's ends, once it has them."""
        for each in self.theirs:
            os.close(each)
        self.theirs.clear()


def open_missing_streams() -> None:
    """Open what was closed of the first three descriptors (``>&-``), lest a file of ours is
    taken for one of them.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest that is free
            os.set_inheritable(opened, True)  # noqa: FBT003 - its only name is positional


def _same_file(descriptors: tuple[int, int]) -> bool:
    try:
        return os.path.sameopenfile(*descriptors)
    except OSError:
        return False
