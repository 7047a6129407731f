"""For tests, here and in your own project.

Real faults to inject, a clock that is set by hand, a check for loaders.

The faults are the system's own: an allocation fails because the kernel refuses it, a disk is full
because it is.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.core.durable import free_bytes
from holdfast.memory.host_memory import UNDER_A_LIMIT_BYTES, set_malloc_threshold, trim_heap


class FakeClock:
    """A clock that stands still until it is advanced.

    Example:
        >>> clock = FakeClock(); clock.advance(2.5); clock.monotonic_seconds()
        2.5
    """

    def __init__(self) -> None:
        self._seconds = 0.0

    def advance(self, seconds: float) -> None:
        """Move forward."""
        self._seconds += seconds

    def unix_seconds(self) -> float:
        """Return the seconds since this clock was made."""
        return self._seconds

    def monotonic_seconds(self) -> float:
        """Return the seconds since this clock was made."""
        return self._seconds


def limit_memory(headroom_bytes: int | None) -> None:
    """Let allocations of this process fail for real beyond what it has now and some headroom.

    Limits the data segment (``RLIMIT_DATA``), which counts heap and private mappings, and the stack
    of each thread
    but the main one: mostly 8 MiB, so leave room for those that start meanwhile. The first limit
        also sets glibc's
    malloc as a guard sets it under one: what is freed goes back to the system, and does not pass
        for headroom.

    Args:
        headroom_bytes: What may still be allocated; None takes the limit away.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if headroom_bytes is not None and soft == resource.RLIM_INFINITY:
        set_malloc_threshold(UNDER_A_LIMIT_BYTES)
        trim_heap()
    limit = hard if headroom_bytes is None else data_segment_bytes() + headroom_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def data_segment_bytes() -> int:
    """Return the size of this process's data segment, as ``RLIMIT_DATA`` counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmData: memory can be limited on Linux only")


@contextmanager
def memory_limited(headroom_bytes: int) -> Iterator[None]:
    """Limit memory as `limit_memory` does, while the context lasts."""
    limit_memory(headroom_bytes)
    try:
        yield
    finally:
        limit_memory(None)


def flip_bit(path: Path, bit: int) -> None:
    """Flip one bit of a file, counted from its beginning."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))
        file.flush()
        os.fsync(file.fileno())


def fill_disk(file: Path, *, leave_bytes: int = 0) -> None:
    """Write a file until its disk is full. Only for small disks of a test's own."""
    with file.open("wb") as filler:
        while (left := free_bytes(file.parent) - leave_bytes) > 0:
            try:
                filler.write(b"\0" * min(left, 2**20))
                filler.flush()
            except OSError:
                return


def check_resumable(make_loader: Callable[[], Any], same: Callable[[Any, Any], bool]) -> None:
    """Check that a loader continues exactly.

    Stopped after any batch, the rest of two epochs is the same.

    Args:
        make_loader: Returns a new loader with ``state_dict`` and ``load_state_dict``, the same each
            time.
        same: Says whether two batches are equal.

    Raises:
        AssertionError: naming the first batch that differs.
        TypeError: for a loader without these methods.

    Example:
        >>> from holdfast import DataLoader
        >>> def make_loader():
        ...     return DataLoader(list(range(5)), batch_size=2, shuffle=True)
        >>> check_resumable(make_loader, lambda a, b: a.equal(b))
    """
    undisturbed = make_loader()
    if not (hasattr(undisturbed, "state_dict") and hasattr(undisturbed, "load_state_dict")):
        raise TypeError(
            f"make_loader() returned a {type(undisturbed).__name__} without state_dict and"
            " load_state_dict: it cannot say where it is. Fix: holdfast.DataLoader has both."
        )
    whole = [batch for _ in range(2) for batch in undisturbed]
    for cut in range(len(whole)):
        first, rest = make_loader(), make_loader()
        iterator = iter(())
        for _ in range(cut):
            try:
                next(iterator)
            except StopIteration:
                iterator = iter(first)
                next(iterator)
        rest.load_state_dict(first.state_dict())
        continued: list[Any] = []
        for _ in range(3):  # the rest of this epoch, which may be empty, and the next
            if cut + len(continued) < len(whole):
                continued += list(rest)
        for number, (expected, found) in enumerate(
            zip(whole[cut:], continued, strict=False), start=cut
        ):
            if not same(expected, found):
                raise AssertionError(
                    f"stopped after {cut} batches, batch {number} is {found!r}, not {expected!r}"
                )
        if cut + len(continued) != len(whole):
            raise AssertionError(
                f"stopped after {cut} batches, {len(continued)} follow, not {len(whole) - cut}"
            )
