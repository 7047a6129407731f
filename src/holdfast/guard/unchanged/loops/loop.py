"""A loop of the script over a torch ``DataLoader``, and the iterator that the loop gets."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

from torch.utils.data import DataLoader

from holdfast.guard.unchanged.loops.places import LoopPlace
from holdfast.guard.unchanged.loops.wrappers import EnumerateCounter, find_enumerate_counters
from holdfast.guard.unchanged.saved_script import LoaderStart
from holdfast.loader.random_state import RandomState

# torch's own ``DataLoader.__iter__``.
StartIterator = Callable[[DataLoader[Any]], Iterator[Any]]


@dataclass(slots=True, eq=False)
class Loop:
    """A loop that has begun to iterate a loader.

    It must not keep its `LoopIterator` alive. When the script leaves the loop, nothing else refers
    to the iterator, so Python frees it, and this is how the end of the loop is noticed.
    """

    loader: DataLoader[Any]
    start: LoaderStart
    # The iterator that torch has created. None in a finished loop that is not run again.
    torch_iterator: Iterator[Any] | None
    # The file and line in which the script called ``iter`` or began the ``for`` statement.
    created_at: str
    # The iterator that the script has received. Functions must not get it as an argument: a call
    # with ``*args`` creates a tuple, which would refer to it and count as a wrapper around it.
    script_iterator: weakref.ref[LoopIterator] | None = None
    # The number of batches that the loader yields. None if that is known only at the end.
    length: int | None = None
    # The statement that requests the batches. None before the first request.
    place: LoopPlace | None = None
    # The values of the targets of all enclosing ``for`` statements when the loop began.
    enclosing_targets: dict[str, Any] = field(default_factory=dict)
    # The number of batches that the script has received.
    batch_count: int = 0
    # The last batch that the script has received.
    last_batch: Any = None
    # The random state before that batch was fetched.
    state_before_last_batch: RandomState | None = None
    # Whether an optimizer has stepped in this loop.
    has_steps: bool = False
    # The counters of the `enumerate` objects around the iterator. None if the loop cannot be
    # resumed in its middle, or if the wrappers have not been searched yet.
    enumerate_counters: list[EnumerateCounter] | None = None
    has_searched_wrappers: bool = False
    # Whether the loader has raised an error.
    has_failed: bool = False
    is_finished: bool = False

    def find_enumerate_counters(self, frame: FrameType) -> list[EnumerateCounter] | None:
        """Return the counters of the ``enumerate`` objects around the iterator of the script.

        Args:
            frame: The frame that requests a batch.

        Returns:
            The counters, or None if there is a wrapper that cannot continue in the middle.
        """
        assert self.script_iterator is not None
        return find_enumerate_counters(self.script_iterator(), frame)


class LoopWatcher(Protocol):
    """Provides the batches of a `LoopIterator`, and is informed when the script leaves its loop."""

    def next_batch(self, loop: Loop, frame: FrameType) -> Any:
        """Return the next batch of a loop, or raise StopIteration."""

    def note_left(self, loop: Loop, frame: FrameType | None) -> None:
        """Record that the script has left a loop before its iterator was exhausted."""


class LoopIterator:
    """The iterator that the script gets from a ``DataLoader``, instead of torch's own.

    Args:
        watcher: Provides the batches.
        loop: The loop that this iterator belongs to.
    """

    def __init__(self, watcher: LoopWatcher, loop: Loop) -> None:
        self._watcher = watcher
        self._loop = loop
        loop.script_iterator = weakref.ref(self)

    def __iter__(self) -> LoopIterator:
        return self

    def __next__(self) -> Any:
        return self._watcher.next_batch(self._loop, sys._getframe(1))

    def __len__(self) -> int:
        return len(self._loop.loader)

    def __getattr__(self, name: str) -> Any:
        # A script may use other attributes of torch's iterator. `copy` and `pickle` look up special
        # methods before `_loop` exists, which would call this method again without end.
        if name.startswith("__") or name in ("_loop", "_watcher"):
            raise AttributeError(name)
        return getattr(self._loop.torch_iterator, name)

    def __del__(self) -> None:
        loop = self.__dict__.get("_loop")
        if loop is not None and not loop.is_finished:
            # The frame is None if Python frees the iterator while it shuts down.
            self._watcher.note_left(loop, sys._getframe().f_back)
