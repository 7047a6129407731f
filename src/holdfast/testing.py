"""Testing tools for holdfast itself and for your own project.

This module provides real faults to inject, a clock that moves only when a test advances it, and a
check that a loader resumes exactly where it stopped. The faults are implemented in
`holdfast.chaos.faults`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from holdfast.chaos.faults import (
    data_segment_bytes,
    fill_disk,
    flip_bit,
    limit_memory,
    memory_limited,
)

__all__ = [
    "FakeClock",
    "check_resumable",
    "data_segment_bytes",
    "fill_disk",
    "flip_bit",
    "limit_memory",
    "memory_limited",
]

# `check_resumable` stops the loader after each batch of this many epochs. The second epoch tests
# that a resumed loader also continues correctly into the next epoch.
EPOCHS_COMPARED = 2


class FakeClock:
    """A clock whose time changes only when `advance` is called.

    Example:
        >>> clock = FakeClock(); clock.advance(2.5); clock.monotonic_seconds()
        2.5
    """

    def __init__(self) -> None:
        self._seconds = 0.0

    def advance(self, seconds: float) -> None:
        """Move the clock forward by the given number of seconds."""
        self._seconds += seconds

    def unix_seconds(self) -> float:
        """Return the total number of seconds by which `advance` has moved this clock forward."""
        return self._seconds

    def monotonic_seconds(self) -> float:
        """Return the total number of seconds by which `advance` has moved this clock forward."""
        return self._seconds


def check_resumable(make_loader: Callable[[], Any], same: Callable[[Any, Any], bool]) -> None:
    """Check that a loader resumes exactly, no matter after which batch it is stopped.

    For each batch in the first two epochs, a loader is stopped just before that batch, and its
    state is loaded into a new loader. The batches from the new loader are then compared with those
    from a loader that was never stopped.

    Args:
        make_loader: Returns a new loader with ``state_dict`` and ``load_state_dict`` methods. Every
            call must create the loader with the same arguments.
        same: Takes two batches and returns whether they are equal.

    Raises:
        AssertionError: If a batch differs or is missing, or if there is an extra batch.
        TypeError: If the loader lacks ``state_dict`` or ``load_state_dict``.

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
            " load_state_dict: its position cannot be saved. Fix: use holdfast.DataLoader, which"
            " has both."
        )
    expected_batches = [batch for _ in range(EPOCHS_COMPARED) for batch in undisturbed]
    for stopped_after in range(len(expected_batches)):
        stopped = make_loader()
        _consume(stopped, stopped_after)
        resumed = make_loader()
        resumed.load_state_dict(stopped.state_dict())
        remaining = expected_batches[stopped_after:]
        batches = _remaining_batches(resumed, len(remaining))
        _check_batches(batches, remaining, stopped_after, same)


def _consume(loader: Any, batch_count: int) -> None:
    """Take `batch_count` batches from a loader, starting a new epoch whenever one ends."""
    iterator: Iterator[Any] = iter(())
    for _ in range(batch_count):
        try:
            next(iterator)
        except StopIteration:
            iterator = iter(loader)
            next(iterator)


def _remaining_batches(loader: Any, batch_count: int) -> list[Any]:
    """Read whole epochs until there are at least `batch_count` batches, and return these batches.

    At most ``EPOCHS_COMPARED + 1`` epochs are read. The extra epoch is needed because the first
    epoch after resuming may be empty.
    """
    batches: list[Any] = []
    for _ in range(EPOCHS_COMPARED + 1):
        if len(batches) < batch_count:
            batches += list(loader)
    return batches


def _check_batches(
    batches: list[Any],
    expected_batches: list[Any],
    stopped_after: int,
    same: Callable[[Any, Any], bool],
) -> None:
    """Raise AssertionError if a resumed loader did not yield exactly the expected batches."""
    pairs = zip(expected_batches, batches, strict=False)
    for number, (expected, batch) in enumerate(pairs, start=stopped_after):
        if not same(expected, batch):
            raise AssertionError(
                f"stopped after {stopped_after} batches, batch {number} is {batch!r}, not"
                f" {expected!r}"
            )
    if len(batches) != len(expected_batches):
        raise AssertionError(
            f"stopped after {stopped_after} batches, {len(batches)} follow, not"
            f" {len(expected_batches)}"
        )
