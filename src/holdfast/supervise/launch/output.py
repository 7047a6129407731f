"""Copy the output of a supervised command to the supervisor's streams and to the log.

Each stream of the command is a pseudo-terminal if the supervisor's corresponding stream is a
terminal; otherwise, it is a pipe. Progress bars therefore work in a terminal, and log files remain
plain text. This module never waits for the end of a stream, because an orphaned process may hold it
open forever.

The size of the log is limited by ``output_log``.
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
# poll(2) reports a pipe as writable once this many bytes can be written without waiting.
_WRITE_BYTES = select.PIPE_BUF
# Pause after a read smaller than this. Otherwise, a command that prints hundreds of lines a second
# would wake the supervisor hundreds of times a second.
_SMALL_READ_BYTES = 4096
_REST_SECONDS = 0.02
# Size of the buffer for each of the supervisor's streams. When it is full, the command has to wait.
_MAX_PENDING_BYTES = 1 << 20
_READABLE = select.POLLIN | select.POLLHUP | select.POLLERR
_STDERR = 2
# File descriptors with their event masks, as in `select.poll`.
PollEvents: TypeAlias = list[tuple[int, int]]


class OwnStream:
    """A buffered, non-blocking writer for the supervisor's stdout or stderr.

    If a terminal is paused (Ctrl-S) and the buffer is full, output is dropped; it is still in the
    log. A full pipe makes the command wait, as it would without the supervisor.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.pending = bytearray()
        # Whether the data added last ended with a newline.
        self.at_line_start = True
        self._is_broken = False
        self._is_terminal = os.isatty(descriptor)

    @property
    def is_full(self) -> bool:
        """Return whether the buffer is full, so that the command has to wait."""
        return len(self.pending) > _MAX_PENDING_BYTES

    def add(self, data: bytes) -> None:
        """Buffer data, which is written when the stream can accept it."""
        self.at_line_start = data.endswith(b"\n")
        if self._is_broken:
            return
        self.pending += data
        if self._is_terminal and self.is_full:
            self.pending[:] = b"\r\n--- holdfast: output left out here, see output.log ---\r\n"

    def add_and_write(self, data: bytes) -> None:
        """Buffer data, then write as much as the stream accepts immediately."""
        self.add(data)
        while self.pending and self._is_writable():
            self.write_pending()

    def write_pending(self) -> None:
        """Write as much as possible without waiting; drop everything if the reader is gone."""
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
    """Copies the command's output to the log and to the supervisor's own streams.

    Args:
        log: The log file of the run.
        quiet: Whether to suppress the supervisor's own messages.
    """

    def __init__(self, log: OutputLog, *, quiet: bool = False) -> None:
        self._log = log
        self._quiet = quiet
        # Target stream of each source descriptor.
        self._targets: dict[int, OwnStream] = {}
        self._own_streams: dict[int, OwnStream] = {}

    def add_sources(self, sources: Sequence[OutputSource]) -> None:
        """Start reading from these sources. Each descriptor is closed at the end of its stream."""
        for source in sources:
            os.set_blocking(source.descriptor, False)
            self._targets[source.descriptor] = self._own_stream(source.copied_to)

    def print_message(self, text: str) -> None:
        """Print one of the supervisor's messages on stderr, without waiting for the stream.

        Unprintable characters become question marks.
        """
        if self._quiet:
            return
        printable = "".join(letter if letter.isprintable() else "?" for letter in text)
        self.begin_line(_STDERR)
        line = f"holdfast: {printable}\n"
        self._own_stream(_STDERR).add_and_write(line.encode(errors="replace"))

    def begin_line(self, descriptor: int) -> None:
        """Start a new line if the command's last line is unfinished, such as a progress bar."""
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
        """Return the events to poll for: readable sources, and streams with data to write."""
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
        """Read from and write to the descriptors that `poll` reported as ready."""
        for descriptor, events in ready:
            if descriptor in self._targets and events & _READABLE:
                self._read(descriptor)
            stream = self._own_streams.get(descriptor)
            if stream is not None and stream.pending and events & ~select.POLLIN:
                stream.write_pending()

    def drain(self, *, quiet_seconds: float, flush_seconds: float) -> None:
        """Copy the remaining output after the command has ended, even if a stream stays open.

        Args:
            quiet_seconds: Time without output after which a source counts as finished. Only an
                orphaned process can still hold it open.
            flush_seconds: Time limit for writing everything to the supervisor's own streams.
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
        """Copy the available output of a source, or close the source at its end."""
        try:
            data = os.read(source, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            # EIO: no process has the pseudo-terminal open anymore.
            data = b""
        if not data:
            del self._targets[source]
            os.close(source)
            return
        self._log.write(data)
        self._targets[source].add_and_write(data)
        if len(data) < _SMALL_READ_BYTES:
            # Let more output accumulate instead of waking up for every line.
            time.sleep(_REST_SECONDS)


def poll_once(wanted: PollEvents, seconds: float) -> PollEvents:
    """Wait up to `seconds` for any of these events; return those that occurred."""
    poll = select.poll()
    for descriptor, events in wanted:
        poll.register(descriptor, events)
    return poll.poll(max(0.0, seconds) * 1e3)


@dataclass(frozen=True, slots=True)
class OutputSource:
    """A descriptor from which to read the command's output, and the one to which to copy it."""

    descriptor: int
    copied_to: int


class CommandStreams:
    """The stdout and stderr of a command: the ends that it writes to, and those that are read.

    Args:
        own: The supervisor's own stdout and stderr. For a terminal, the command gets a
            pseudo-terminal. If both refer to the same file, the command gets a single pipe for
            both.
    """

    def __init__(self, own: tuple[int, int] = (1, 2)) -> None:
        # Descriptors of the command's stdout and stderr. The supervisor's copies are closed once
        # the command has started.
        self.command_ends: list[int] = []
        self.sources: list[OutputSource] = []
        # The supervisor's end of the command's pseudo-terminal, and the supervisor's own terminal,
        # whose size the pseudo-terminal copies.
        self._terminal: int | None = None
        self._own_terminal: int | None = None
        pipe_end: int | None = None
        for descriptor in own:
            if os.isatty(descriptor):
                self.command_ends.append(self._open_terminal(descriptor))
            elif pipe_end is not None and _is_same_file(*own):
                # Both refer to the same file, as after 2>&1. A single pipe preserves the order of
                # the output.
                self.command_ends.append(os.dup(pipe_end))
            else:
                our_end, pipe_end = os.pipe()
                self.command_ends.append(pipe_end)
                self.sources.append(OutputSource(our_end, copied_to=descriptor))

    def _open_terminal(self, own_terminal: int) -> int:
        """Return the command's end of the pseudo-terminal, which is opened on the first call."""
        if self._terminal is not None:
            return os.dup(self.command_ends[0])
        self._own_terminal = own_terminal
        self._terminal, command_end = os.openpty()
        settings = termios.tcgetattr(command_end)
        # Turn off echo and newline translation: the supervisor's own terminal does both, and the
        # log must contain exactly the bytes that were printed. Entry 1 contains the output flags,
        # and entry 3 the local flags.
        settings[1] &= ~termios.OPOST
        settings[3] &= ~termios.ECHO
        termios.tcsetattr(command_end, termios.TCSANOW, settings)
        self.sources.append(OutputSource(self._terminal, copied_to=own_terminal))
        self.copy_terminal_size()
        return command_end

    def copy_terminal_size(self) -> None:
        """Resize the command's pseudo-terminal to match the supervisor's terminal."""
        if self._terminal is None or self._own_terminal is None:
            return
        with suppress(OSError):
            empty_size = struct.pack("HHHH", 0, 0, 0, 0)
            size = fcntl.ioctl(self._own_terminal, termios.TIOCGWINSZ, empty_size)
            fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, size)

    def close_command_ends(self) -> None:
        """Close the supervisor's copies of the command's stdout and stderr after the start."""
        for descriptor in self.command_ends:
            os.close(descriptor)
        self.command_ends.clear()


def open_missing_streams() -> None:
    """Open ``/dev/null`` in place of each standard stream that is closed (``>&-``).

    Otherwise, the next file to be opened would get its descriptor and be mistaken for that stream.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # The system assigns the lowest free descriptor, which is this one.
            opened = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(opened, True)  # noqa: FBT003 - the parameter is positional only


def _is_same_file(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:
        return False
