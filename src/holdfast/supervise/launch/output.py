"""Copy the output of a supervised command to our own streams and into the log.

The command gets a pseudo-terminal exactly where our own stream is a terminal, so progress bars work
in a terminal and log files stay plain. Nothing waits for the end of a stream, because an orphaned
process may hold it open forever.

Does not: keep the log within its size (``output_log`` does).
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import termios
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from holdfast.supervise.launch.output_log import OutputLog

_READ_BYTES = 64 << 10
# poll(2) reports a pipe as writable once this many bytes fit without waiting.
_WRITE_BYTES = select.PIPE_BUF
# After reading only a line or two, pause: otherwise a command that prints hundreds of lines a
# second would wake us hundreds of times a second.
_SMALL_READ_BYTES = 4096
_REST_SECONDS = 0.02
# How much data may wait for one of our own streams before the command has to wait too.
_MAX_PENDING_BYTES = 1 << 20
_READABLE = select.POLLIN | select.POLLHUP | select.POLLERR
_STDERR = 2
# Descriptors, each with an event mask of `select.poll`.
PollEvents: TypeAlias = list[tuple[int, int]]


class OwnStream:
    """One of our own output streams, written only as fast as it accepts data.

    What a paused terminal (Ctrl-S) does not accept is dropped, since it is in the log. A full pipe
    blocks the command, as it would without us.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.pending = bytearray()
        # Whether the last data written ended with a line feed.
        self.at_line_start = True
        self._is_broken = False
        self._is_terminal = os.isatty(descriptor)

    @property
    def is_full(self) -> bool:
        """Return whether the command has to wait."""
        return len(self.pending) > _MAX_PENDING_BYTES

    def add(self, data: bytes) -> None:
        """Add data, to be written when the stream is ready."""
        self.at_line_start = data.endswith(b"\n")
        if self._is_broken:
            return
        self.pending += data
        if self._is_terminal and self.is_full:
            self.pending[:] = b"\r\n--- holdfast: output left out here, see output.log ---\r\n"

    def add_and_write(self, data: bytes) -> None:
        """Add data and write immediately what the stream accepts."""
        self.add(data)
        while self.pending and self._is_writable():
            self.write_pending()

    def write_pending(self) -> None:
        """Write what the stream accepts without waiting; drop everything if its reader is gone."""
        try:
            written = os.write(self.descriptor, memoryview(self.pending)[:_WRITE_BYTES])
        except BlockingIOError:
            return
        except OSError:
            self._is_broken = True
            self.pending.clear()
            return
        del self.pending[:written]

    def _is_writable(self) -> bool:
        ready = poll_once([(self.descriptor, select.POLLOUT)], seconds=0.0)
        return any(events & select.POLLOUT for _, events in ready)


class OutputCopier:
    """Copy what the command prints to the log and to our own streams.

    Args:
        log: The log.
        quiet: Whether to print none of the supervisor's own messages.
    """

    def __init__(self, log: OutputLog, *, quiet: bool = False) -> None:
        self._log = log
        self._quiet = quiet
        # The stream that each source descriptor is copied to.
        self._targets: dict[int, OwnStream] = {}
        self._own_streams: dict[int, OwnStream] = {}

    def add_sources(self, sources: Sequence[OutputSource]) -> None:
        """Read from these descriptors from now on; each is closed when its stream ends."""
        for source in sources:
            os.set_blocking(source.descriptor, False)
            self._targets[source.descriptor] = self._own_stream(source.copied_to)

    def print_message(self, text: str) -> None:
        """Print a line of the supervisor on stderr, without waiting for the stream.

        Unprintable characters become question marks.
        """
        if self._quiet:
            return
        printable = "".join(letter if letter.isprintable() else "?" for letter in text)
        self.begin_line(_STDERR)
        line = f"holdfast: {printable}\n"
        self._own_stream(_STDERR).add_and_write(line.encode(errors="replace"))

    def begin_line(self, descriptor: int) -> None:
        """Start a new line if the command left an unfinished one, such as a progress bar."""
        stream = self._own_stream(descriptor)
        same_place = [
            other
            for other in self._own_streams.values()
            if other is stream or _is_same_file(other.descriptor, descriptor)
        ]
        if all(other.at_line_start for other in same_place):
            return
        stream.add_and_write(b"\n")
        for other in same_place:
            other.at_line_start = True

    def wanted_events(self) -> PollEvents:
        """Return what to poll: sources that may be read, and our own streams with pending data."""
        readable = [
            (source, select.POLLIN)
            for source, target in self._targets.items()
            if not target.is_full
        ]
        writable = [
            (stream.descriptor, select.POLLOUT)
            for stream in self._own_streams.values()
            if stream.pending
        ]
        return readable + writable

    def serve(self, ready: PollEvents) -> None:
        """Read and write on the descriptors that `poll` reported as ready."""
        for descriptor, events in ready:
            if descriptor in self._targets and events & _READABLE:
                self._read(descriptor)
            stream = self._own_streams.get(descriptor)
            if stream is not None and stream.pending and events & ~select.POLLIN:
                stream.write_pending()

    def drain(self, *, quiet_seconds: float, flush_seconds: float) -> None:
        """Copy the remaining output after the command ended, without waiting for streams to close.

        Args:
            quiet_seconds: A source that is silent for this long counts as finished: only an
                orphaned process can still hold it open.
            flush_seconds: How long our own streams may take to accept everything.
        """
        deadline = time.monotonic() + flush_seconds
        while True:
            wanted = self.wanted_events()
            left_seconds = deadline - time.monotonic()
            if not wanted or left_seconds <= 0:
                break
            wait_seconds = left_seconds
            if any(events == select.POLLIN for _, events in wanted):
                wait_seconds = min(quiet_seconds, left_seconds)
            ready = poll_once(wanted, wait_seconds)
            self.serve(ready)
            if not ready and not any(stream.pending for stream in self._own_streams.values()):
                break
        for source in self._targets:
            os.close(source)
        self._targets.clear()

    def _own_stream(self, descriptor: int) -> OwnStream:
        if descriptor not in self._own_streams:
            self._own_streams[descriptor] = OwnStream(descriptor)
        return self._own_streams[descriptor]

    def _read(self, source: int) -> None:
        """Copy what a source has to offer, or close it at its end."""
        try:
            data = os.read(source, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            # EIO: no process has the other side of the terminal open any more.
            data = b""
        if not data:
            del self._targets[source]
            os.close(source)
            return
        self._log.write(data)
        self._targets[source].add_and_write(data)
        if len(data) < _SMALL_READ_BYTES:
            # Let more output accumulate, so that each line does not wake us separately.
            time.sleep(_REST_SECONDS)


def poll_once(wanted: PollEvents, seconds: float) -> PollEvents:
    """Wait up to `seconds` for any of these events; return those that occurred."""
    poll = select.poll()
    for descriptor, events in wanted:
        poll.register(descriptor, events)
    return poll.poll(max(0.0, seconds) * 1e3)


@dataclass(frozen=True, slots=True)
class OutputSource:
    """A descriptor to read the command's output from, and our own descriptor to copy it to."""

    descriptor: int
    copied_to: int


class CommandStreams:
    """The two output streams of a command: the ends that it writes to, and the ends we read.

    Args:
        own: Our own stdout and stderr, which decide what the command gets: a terminal for a
            terminal, and a single pipe if both lead to the same file.
    """

    def __init__(self, own: tuple[int, int] = (1, 2)) -> None:
        # The command's stdout and stderr, which we close once the command has started.
        self.command_ends: list[int] = []
        self.sources: list[OutputSource] = []
        # Our side of the command's terminal, and our own terminal, whose size it copies.
        self._terminal: int | None = None
        self._own_terminal: int | None = None
        pipe_end: int | None = None
        for descriptor in own:
            if os.isatty(descriptor):
                self.command_ends.append(self._open_terminal(descriptor))
            elif pipe_end is not None and _is_same_file(*own):
                # Both lead to the same file, as after 2>&1: a single pipe keeps the order of the
                # output.
                self.command_ends.append(os.dup(pipe_end))
            else:
                our_end, pipe_end = os.pipe()
                self.command_ends.append(pipe_end)
                self.sources.append(OutputSource(our_end, copied_to=descriptor))

    def _open_terminal(self, own_terminal: int) -> int:
        """Return the command's end of the pseudo-terminal, opening it for the first stream."""
        if self._terminal is not None:
            return os.dup(self.command_ends[0])
        self._own_terminal = own_terminal
        self._terminal, command_end = os.openpty()
        settings = termios.tcgetattr(command_end)
        # Our own terminal translates line feeds, so that the log gets exactly what was printed.
        settings[1] &= ~termios.OPOST
        settings[3] &= ~termios.ECHO
        termios.tcsetattr(command_end, termios.TCSANOW, settings)
        self.sources.append(OutputSource(self._terminal, copied_to=own_terminal))
        self.copy_terminal_size()
        return command_end

    def copy_terminal_size(self) -> None:
        """Resize the command's terminal to match ours."""
        if self._terminal is None or self._own_terminal is None:
            return
        with suppress(OSError):
            empty_size = struct.pack("HHHH", 0, 0, 0, 0)
            size = fcntl.ioctl(self._own_terminal, termios.TIOCGWINSZ, empty_size)
            fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, size)

    def close_command_ends(self) -> None:
        """Close our copies of the command's ends, once the command has started."""
        for descriptor in self.command_ends:
            os.close(descriptor)
        self.command_ends.clear()


def open_missing_streams() -> None:
    """Open any of the three standard descriptors that is closed (``>&-``).

    Otherwise a file that we open would get its number and be mistaken for a standard stream.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # The system uses the lowest free number, which is this one.
            opened = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(opened, True)  # noqa: FBT003 - the parameter is positional only


def _is_same_file(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:
        return False
