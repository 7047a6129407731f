"""What a command prints.

Kept in a file of bounded size, copied without waiting, never waited for.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import termios
from pathlib import Path

import pytest

from holdfast.supervise.launch.output import CommandStreams, OutputCopier, OutputSource, OwnStream
from holdfast.supervise.launch.output_log import OutputLog

MOST = 1 << 20


@pytest.fixture
def log(tmp_path: Path):
    made = OutputLog(tmp_path / "output.log", MOST)
    yield made
    made.close()


def lines(count: int, first: int = 0) -> bytes:
    return b"".join(b"line %09d\n" % number for number in range(first, first + count))


def test_attempts_are_separated_by_a_line_of_their_own(log, tmp_path):
    """Also after output that did not end with a line feed."""
    log.begin_attempt(0)
    log.write(b"50%")
    log.begin_attempt(1)
    log.write(b"100%\n")
    expected = b"--- holdfast: attempt 0 ---\n50%\n--- holdfast: attempt 1 ---\n100%\n"
    assert (tmp_path / "output.log").read_bytes() == expected


def test_of_too_much_the_head_and_the_newest_part_are_kept(log, tmp_path):
    """Twenty times the size leaves a file below it, with the first and the last line and the
    line of the attempt.
    """
    log.begin_attempt(0)
    for number in range(0, 1_500_000, 5000):
        log.write(lines(5000, number))
    data = (tmp_path / "output.log").read_bytes()
    assert len(data) <= MOST + len(lines(5000))
    assert data.startswith(b"--- holdfast: attempt 0 ---\nline 000000000\n")
    assert data.endswith(b"line 001499999\n")
    assert b"bytes left out ---\n" in data


def test_whose_output_the_newest_part_is_stays_known(log, tmp_path):
    """The line of an attempt that began in the part that is cut stands before what is left of
    its output, once.
    """
    log.begin_attempt(0)
    log.write(lines(30_000))
    log.begin_attempt(1)
    for number in range(0, 300_000, 5000):
        log.write(lines(5000, number))
    data = (tmp_path / "output.log").read_bytes()
    assert data.count(b"--- holdfast: attempt 1 ---\n") == 1
    assert data.index(b"attempt 1 ---") < data.index(b"line 000299999")


def test_a_pipe_that_takes_nothing_holds_the_command_up(log):
    """With a megabyte waiting for a slow reader no more is read, as if the command wrote to that
    reader itself.
    """
    ours, target = os.pipe()
    sink = OwnStream(target)
    sink.add(b"x" * ((1 << 20) + 1))
    assert sink.is_full
    os.close(ours)
    os.close(target)


def test_a_terminal_that_takes_nothing_does_not(log):
    """After Ctrl-S the training goes on; what the terminal missed is in the log."""
    master, slave = os.openpty()
    sink = OwnStream(slave)
    sink.add(b"x" * ((1 << 20) + 1))
    assert not sink.is_full
    assert b"output left out here" in sink.pending
    os.close(master)
    os.close(slave)


def test_a_stream_is_a_terminal_exactly_where_ours_is_one():
    """Stream by stream, so that progress bars draw where they are seen.

    The size of the window is passed on.
    """
    master, slave = os.openpty()
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 99, 0, 0))
    reading, writing = os.pipe()
    streams = CommandStreams((writing, slave))
    assert [os.isatty(each) for each in streams.command_ends] == [False, True]
    assert os.get_terminal_size(streams.command_ends[1]) == (99, 33)
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 132, 0, 0))
    streams.copy_terminal_size()
    assert os.get_terminal_size(streams.command_ends[1]) == (132, 40)
    streams.close_command_ends()
    for each in (
        master,
        slave,
        reading,
        writing,
        *(source.descriptor for source in streams.sources),
    ):
        os.close(each)


def test_two_streams_into_one_file_stay_in_order():
    """After 2>&1 both are one pipe, so that a traceback stands where it was printed."""
    reading, writing = os.pipe()
    again = os.dup(writing)
    streams = CommandStreams((writing, again))
    assert len(streams.sources) == 1
    assert os.path.sameopenfile(*streams.command_ends)
    streams.close_command_ends()
    for each in (reading, writing, again, streams.sources[0].descriptor):
        os.close(each)


def test_a_line_of_ours_never_continues_an_unfinished_one(log, tmp_path):
    """Each stream counts by itself, and two that lead to the same file count as one."""
    (bar, bar_writes), (rest, rest_writes) = os.pipe(), os.pipe()
    one, two = ((tmp_path / name).open("wb") for name in ("one", "two"))
    with one, two:
        copier = OutputCopier(log)
        copier._own_streams[2] = OwnStream(two.fileno())
        copier._own_streams[two.fileno()] = copier._own_streams[2]
        copier.add_sources([OutputSource(bar, two.fileno()), OutputSource(rest, one.fileno())])
        os.write(bar_writes, b"\r 50%")
        copier.serve([(bar, select.POLLIN)])
        os.write(rest_writes, b"printed\n")
        copier.serve([(rest, select.POLLIN)])
        copier.print_message("a")
        copier.print_message("b")
        os.write(rest_writes, b"unfinished")
        copier.serve([(rest, select.POLLIN)])
        copier.print_message("c")
        copier.begin_line(one.fileno())
        copier.begin_line(one.fileno())
    assert (tmp_path / "two").read_bytes() == b"\r 50%\nholdfast: a\nholdfast: b\nholdfast: c\n"
    assert (tmp_path / "one").read_bytes() == b"printed\nunfinished\n"
    for each in (bar, bar_writes, rest, rest_writes):
        os.close(each)


def test_where_output_is_lost_is_said_at_once_and_in_its_place(tmp_path, monkeypatch):
    """One call when a disk fills up, and a line between what came before and after, as soon as
    there is room.
    """
    written, said = os.write, []
    log = OutputLog(tmp_path / "output.log", MOST, on_loss=said.append)
    full = [False]

    def write(descriptor: int, data: bytes) -> int:
        if full[0]:
            raise OSError(28, "No space left on device")
        return written(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    for full[0], data in (
        (False, b"one\n"),
        (True, b"two\n"),
        (True, b"three\n"),
        (False, b"four\n"),
    ):
        log.write(data)
    log.close()
    assert [error.strerror for error in said] == ["No space left on device"]
    text = (tmp_path / "output.log").read_text()
    assert text == "one\n\n--- holdfast: output is missing here ---\nfour\n"
