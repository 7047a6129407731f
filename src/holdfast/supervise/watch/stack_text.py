"""Describe a sample of a process as text, for the files in a run directory and for users."""

from __future__ import annotations

from holdfast.explain.hangs.process_samples import ExaminedProcess, ThreadSample


def describe_stacks(process: ExaminedProcess) -> str:
    """Return the newest sample of a process as text, with the innermost frame first."""
    lines = [_describe_process(process)]
    if process.phase:
        lines.append(
            f"in the phase {process.phase!r} for {process.seconds:.1f} s, at step {process.step}"
        )
    for thread in process.newest.threads:
        lines += ["", _describe_thread(thread)]
        lines += [
            f'  File "{frame.file}", line {frame.line} in {frame.function}'
            for frame in reversed(thread.frames)
        ]
    return "\n".join(lines) + "\n"


def _describe_process(process: ExaminedProcess) -> str:
    """Return a line about the process as a whole and the source of its stacks."""
    sample = process.newest
    rank = "" if process.rank is None else f", rank {process.rank}"
    text = (
        f"process {process.pid} ({process.role}{rank}), state {sample.state},"
        f" {sample.cpu_seconds:.2f} s of CPU time, {sample.io_bytes} bytes read and written;"
        f" stacks from {sample.source}"
    )
    if sample.main_thread.frames:
        text += ", innermost call first"
    return text


def _describe_thread(thread: ThreadSample) -> str:
    """Return a line about a thread, with what it waits for."""
    name = thread.name
    if not name and thread.is_main:
        name = "MainThread"
    text = f"thread {thread.tid} {name}"
    if thread.waits:
        text += f": {thread.waits}"
        if thread.target:
            text += f" ({thread.target})"
    if thread.holds_gil:
        text += ", holds the interpreter's lock"
    return text
