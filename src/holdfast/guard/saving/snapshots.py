"""Snapshots: copies of the last good states in host memory.

A rollback to a snapshot loses fewer steps than a rollback to a checkpoint. Two snapshots are kept,
because the state in the newer one may already have gone bad unnoticed. ``run/steps.py`` decides
when to roll back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.checkpoint.kinds import bytes_of
from holdfast.core.clock import Clock
from holdfast.guard.state.trees import children_of, copied_to_host, is_flat

# How many snapshots are kept in memory.
_KEPT = 2
# After this many failures in a row, no more snapshots are taken.
_MOST_FAILURES = 3
# The largest share of the training time that snapshots may take.
_MOST_TIME = 0.01
# The largest share of the available memory that a snapshot may take. The rest is left for
# activations, loaders and the script.
_MOST_MEMORY = 0.25
# A state up to this size is copied without measuring the available memory, since measuring takes
# milliseconds.
_SMALL_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSnapshot:
    """A copy of the training state in host memory."""

    # The number of optimizer steps in the state.
    global_step: int
    # The state by component, as returned by ``components.gather``, with tensors in host memory.
    trees: Mapping[str, Any]


class Snapshots:
    """The snapshots of one run.

    Args:
        interval_steps: The number of steps between two snapshots, or None for no snapshots.
        clock: The source of time.
        available: Function that returns the available host memory in bytes, or None if unknown.
    """

    def __init__(
        self, interval_steps: int | None, clock: Clock, available: Callable[[], int | None]
    ) -> None:
        self._interval = interval_steps
        self._clock = clock
        self._available = available
        self._snapshots: list[HostSnapshot] = []
        self._last_step = 0
        # The number of failures in a row.
        self._failures = 0
        # When the last snapshot was taken, and how long it took.
        self._last_seconds = clock.monotonic_seconds()
        self._took_seconds = 0.0

    def is_due(self, global_step: int) -> bool:
        """Return whether the interval and enough time have passed since the last snapshot."""
        if self._interval is None:
            return False
        # No multiple of the interval has been reached since the last snapshot.
        if global_step // self._interval <= self._last_step // self._interval:
            return False
        passed_seconds = self._clock.monotonic_seconds() - self._last_seconds
        return self._took_seconds <= _MOST_TIME * passed_seconds

    def take(self, global_step: int, read: Callable[[], Mapping[str, Any] | None]) -> bool:
        """Take a snapshot.

        Args:
            global_step: The current step.
            read: Function that returns the state by component, or None if the state contains NaN or
                Inf. In that case, no snapshot is taken.

        Returns:
            False if the state does not fit into host memory, otherwise True. If it does not fit, no
            more snapshots are taken.
        """
        started = self._clock.monotonic_seconds()
        trees = read()
        if trees is None:
            self._last_step = global_step
            return True
        size = sum(bytes_of(tensor) for tensor in _tensors_in(trees))
        if not self._fits(size):
            self.give_up()
            return False
        # Free old snapshots before copying, so that no more than `_KEPT` are ever in memory.
        del self._snapshots[: 1 - _KEPT]
        self._snapshots.append(HostSnapshot(global_step=global_step, trees=copied_to_host(trees)))
        now = self._clock.monotonic_seconds()
        self._took_seconds = now - started
        self._last_step = global_step
        self._last_seconds = now
        self._failures = 0
        return True

    def _fits(self, size: int) -> bool:
        """Return whether a snapshot with this many bytes leaves enough memory."""
        if size <= _SMALL_BYTES:
            return True
        available = self._available()
        return available is None or size <= _MOST_MEMORY * available

    def failed(self, global_step: int) -> None:
        """Count a failed snapshot. After `_MOST_FAILURES` in a row, no more are taken."""
        self._last_step = global_step
        self._last_seconds = self._clock.monotonic_seconds()
        self._failures += 1
        if self._failures == _MOST_FAILURES:
            self.give_up()

    def newest(self, before_step: int) -> HostSnapshot | None:
        """Return the newest snapshot from step `before_step` or an earlier one, or None."""
        for snapshot in reversed(self._snapshots):
            if snapshot.global_step <= before_step:
                return snapshot
        return None

    def returned_to(self, global_step: int) -> None:
        """Discard the snapshots of later steps, after a rollback to step `global_step`."""
        self._snapshots = [
            snapshot for snapshot in self._snapshots if snapshot.global_step <= global_step
        ]
        self._last_step = global_step
        self._last_seconds = self._clock.monotonic_seconds()

    def distrust(self, distrusted: HostSnapshot) -> None:
        """Discard a snapshot that the run has rolled back to, since the failure may repeat."""
        self._snapshots = [snapshot for snapshot in self._snapshots if snapshot is not distrusted]

    def give_up(self) -> None:
        """Discard all snapshots and take no more, because the memory is needed elsewhere."""
        self._snapshots = []
        self._interval = None


def _tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif not is_flat(tree):
        for inner in children_of(tree):
            yield from _tensors_in(inner)
