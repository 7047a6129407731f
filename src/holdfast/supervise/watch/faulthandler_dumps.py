"""Request the stacks of an observed process, which ``faulthandler`` writes on a signal."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.core.files import open_to_read
from holdfast.explain.evidence import Frame
from holdfast.explain.hangs.process_samples import ThreadSample, clean_name
from holdfast.recorder.run_files import STACKS_SIGNAL
from holdfast.supervise.process_tree import catches
from holdfast.supervise.watch.py_spy import MAX_FRAMES

# Time limit for a dump. faulthandler needs about 0.003 s.
_ANSWER_SECONDS = 0.5
# A dump is complete when its file has not grown for this long.
_QUIET_SECONDS = 0.02
_MAX_BYTES = 4 << 20
_THREAD = re.compile(
    r"^(?:Current thread|Thread) 0x(?P<ident>[0-9a-f]{1,16})(?: \[(?P<name>.*?)\])? \(most recent"
    r" call first\):"
)
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')


def ask_for_stacks(pid: int, file: Path) -> tuple[ThreadSample, ...] | None:
    """Signal an observed process to append its stacks to a file, and return these stacks.

    Args:
        pid: PID of the observed process.
        file: The file to which the process appends its stacks.

    Returns:
        The threads of the process; None if it has no handler for the signal or does not respond.
    """
    try:
        size_before = file.stat().st_size
        # Opening something other than a regular file, such as a pipe, could block. The signal would
        # kill a process that has no handler for it.
        if not file.is_file() or not catches(pid, STACKS_SIGNAL):
            return None
        os.kill(pid, STACKS_SIGNAL)
        _wait_for_dump(file, size_before)
        with open_to_read(file) as dump:
            dump.seek(size_before)
            text = dump.read(_MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    return read_faulthandler(text) or None


def _wait_for_dump(file: Path, size_before: int) -> None:
    last_size = size_before
    deadline = time.monotonic() + _ANSWER_SECONDS
    while time.monotonic() < deadline:
        time.sleep(_QUIET_SECONDS)
        size = file.stat().st_size
        if size == last_size > size_before:
            return
        last_size = size


@dataclass(slots=True)
class _DumpedThread:
    """A thread in a dump.

    `ident` is not the kernel's thread ID, but it is the same in every dump of a process.
    """

    ident: int
    name: str
    frames: list[Frame] = field(default_factory=list)


def read_faulthandler(text: str) -> tuple[ThreadSample, ...]:
    """Return the threads in a faulthandler dump, in which the main thread comes last."""
    threads: list[_DumpedThread] = []
    for line in text.splitlines():
        thread = _THREAD.match(line)
        frame = _FRAME.match(line)
        if thread is not None:
            name = clean_name(thread["name"] or "")
            threads.append(_DumpedThread(ident=int(thread["ident"], 16), name=name))
        elif frame is not None and threads and len(threads[-1].frames) < MAX_FRAMES:
            threads[-1].frames.append(
                Frame(
                    file=clean_name(frame["file"]),
                    line=int(frame["line"]),
                    function=clean_name(frame["function"]),
                )
            )
    return tuple(
        ThreadSample(
            tid=thread.ident,
            name=thread.name,
            is_main=thread is threads[-1],
            # faulthandler lists the innermost frame first.
            frames=tuple(reversed(thread.frames)),
        )
        for thread in threads
    )
