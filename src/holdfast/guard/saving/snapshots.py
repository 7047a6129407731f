"""Copies of the last good states in host memory, so that a rollback loses less than the way to a checkpoint.

Two are kept, since the newer one may be of a state that was bad already before anybody noticed.

Does not: decide when to return, or survive the process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.core.clock import Clock
from holdfast.guard.state.trees import copied_to_host, is_flat

_KEPT = 2
_MOST_FAILURES = 3
# Of the time since the last copy: above that, copies are made half as often.
_MOST_TIME = 0.01
# Of the memory that is available: the rest belongs to activations, loaders and the caller.
_MOST_MEMORY = 0.25
_SMALL_BYTES = 4 * 2**20  # that much is there: to ask how much takes milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One copy."""

    global_step: int  # optimizer steps in it
    trees: Mapping[str, Any]  # state by component, as ``components.gather`` returns it; tensors on the host


class Snapshots:
    """The copies of one run."""

    def __init__(self, interval_steps: int | None, clock: Clock, available: Callable[[], int | None]) -> None:
        self._interval = interval_steps
        self._clock = clock
        self._available = available
        self._kept: list[Kept] = []
        self._last_step = 0
        self._failures = 0  # in a row
        self._last_seconds = clock.monotonic_seconds()

    def is_due(self, global_step: int) -> bool:
        """Return whether a multiple of the interval was passed since the last copy."""
        return self._interval is not None and global_step // self._interval > self._last_step // self._interval

    def keep(self, global_step: int, trees: Mapping[str, Any]) -> bool:
        """Copy a state that is known to be good, if that fits; return whether it was copied.

        A state that does not fit is not asked for again.
        """
        assert self._interval is not None
        started = self._clock.monotonic_seconds()
        size = _size_bytes(trees)
        if size > _SMALL_BYTES and (available := self._available()) is not None and size > _MOST_MEMORY * available:
            self.give_up()
            return False
        del self._kept[: -_KEPT + 1]
        self._kept.append(Kept(global_step=global_step, trees=copied_to_host(trees)))
        now = self._clock.monotonic_seconds()
        if now - started > _MOST_TIME * (started - self._last_seconds):
            self._interval *= 2
        self._last_step, self._last_seconds, self._failures = global_step, now, 0
        return True

    def failed(self, global_step: int) -> None:
        """Note that a state could not be read or copied: it is tried again an interval later, a few times."""
        self._last_step, self._last_seconds = global_step, self._clock.monotonic_seconds()
        self._failures += 1
        if self._failures == _MOST_FAILURES:
            self.give_up()

    def newest(self, before_step: int) -> Kept | None:
        """Return the newest copy of at most so many steps, or None."""
        return next((kept for kept in reversed(self._kept) if kept.global_step <= before_step), None)

    def returned_to(self, global_step: int) -> None:
        """Note that the run is at an earlier step again: newer copies go, the next is due an interval later."""
        self._kept = [kept for kept in self._kept if kept.global_step <= global_step]
        self._last_step, self._last_seconds = global_step, self._clock.monotonic_seconds()

    def distrust(self, kept: Kept) -> None:
        """Drop a copy that led to the same trouble again."""
        self._kept = [each for each in self._kept if each is not kept]

    def give_up(self) -> None:
        """Give all memory back, and keep no more copies: it is needed elsewhere."""
        self._kept, self._interval = [], None


def _size_bytes(tree: Any) -> int:
    if isinstance(tree, torch.Tensor):
        return tree.nbytes
    if isinstance(tree, dict):
        return sum(map(_size_bytes, tree.values()))
    return sum(map(_size_bytes, tree)) if type(tree) in (list, tuple) and not is_flat(tree) else 0
