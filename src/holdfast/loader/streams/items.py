"""Read the items of a stream, each with its own random numbers, and resume after any item.

An iterator may draw random numbers before its first item, for example if a generator function
``__iter__`` first shuffles the epoch. This code, called the iterator's head, runs in the call that
returns the first item. The random numbers of the head must be the same wherever the stream resumes,
so the first call is always made with the seed of the epoch's first item. After a resume, however,
this seed is wrong for the item that the call returns. A resume therefore starts at least one item
earlier, at an item that was already returned, and drops that item. If the first call draws no
random numbers, no item is read twice.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from holdfast.loader.random_state import RandomState, capture, isolated, seed_cpu
from holdfast.loader.seeds import derive_seed
from holdfast.loader.signalled import let_through
from holdfast.loader.workers.board import Board

# Key in a state for the number of items to drop after the state has been loaded.
_ITEMS_BEHIND = "holdfast_items_behind"

# Takes the place of an item's number in the seed with which ``iter(dataset)`` is called.
_SEED_OF_ITERATOR = -1


def replay_state(items: int, state: Any) -> dict[str, Any]:
    """Return a state that resumes from `state` and then drops the next `items` items."""
    return {_ITEMS_BEHIND: items, "state": state}


def isolated_from_training(board: Board | None) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that preserves the random state of training.

    Args:
        board: The workers' board, or None in the main process. In a worker, the context does
            nothing.
    """
    return isolated() if board is None else contextlib.nullcontext()


class StreamError(Exception):
    """Raised in place of another exception from a stream. That exception is in `cause`."""

    def __init__(self, cause: BaseException) -> None:
        # The message of the cause is not included, because converting it to text may raise an
        # error.
        super().__init__()
        self.cause = cause


class Items:
    """Iterates over the items of a stream, counts them, and seeds the generators before each item.

    Args:
        dataset: The iterable dataset.
        seed_parts: Values from which each item's seed is derived, together with its number.
        board: The workers' board, or None in the main process.
        keeps_state: Whether the dataset has a ``state_dict``.
        show: Called with the number of each item that is read and dropped, to show progress.
    """

    def __init__(
        self,
        dataset: Any,
        seed_parts: tuple[Any, ...],
        board: Board | None,
        *,
        keeps_state: bool,
        show: Callable[[int], None],
    ) -> None:
        self._dataset = dataset
        self._seed_parts = seed_parts
        self._board = board
        self._keeps_state = keeps_state
        self._show = show
        self._iterator: Iterator[Any] = iter(())
        # Whether the iterator's head draws random numbers. None before the first item.
        self._head_draws: bool | None = None
        # Number of the item whose seed is used for the first call, or None to use the item's own
        # seed.
        self._first_seed_number: int | None = None
        # The position from which a resume reads again: the number of items before it, and the
        # dataset's state at it.
        self._replay_number = 0
        self._replay_from: Any = None
        # Number of items read so far.
        self.number = 0
        self.ended = False

    def open(self, items: int, state: Any) -> None:
        """Start reading the stream at the position after a number of items.

        Args:
            items: The number of items.
            state: The result of `state` at this position, or None to read all items again.
        """
        # This shows that the worker is busy, because reading items again may take long.
        self._show(self.number)
        dropped = items if state is None else 0
        if isinstance(state, dict) and _ITEMS_BEHIND in state:
            dropped = state[_ITEMS_BEHIND]
            state = state["state"]
        self.number = items - dropped
        self._first_seed_number = 0 if dropped else None
        self._replay_number = self.number
        self._replay_from = state
        with self._guarded():
            seed_cpu(derive_seed(*self._seed_parts, _SEED_OF_ITERATOR))
            if state is not None:
                self._dataset.load_state_dict(copy.deepcopy(state))
            self._iterator = iter(self._dataset)
        while self.number < items and next(self, self) is not self:
            self._show(self.number)

    def remember(self) -> None:
        """Remember the position before the next item, so that a resume can start there.

        The position before the first item is not remembered, because many datasets have no state
        yet.
        """
        if (
            self._keeps_state
            and self._head_draws is not False
            and self.number > self._replay_number
        ):
            self._replay_number = self.number
            self._replay_from = self._dataset_state()

    def state(self) -> Any:
        """Return a state with which `open` can resume at the current position.

        Returns None if the dataset has no such state, so that a resume reads all items again.
        """
        if not self._keeps_state:
            return None
        if self._head_draws is False:
            return self._dataset_state()
        if self._replay_from is None:
            return None
        return replay_state(self.number - self._replay_number, self._replay_from)

    def _dataset_state(self) -> Any:
        with self._guarded():
            return copy.deepcopy(self._dataset.state_dict())

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Raise the dataset's errors as `StreamError`, and preserve the random state of training.

        Outside of workers, the random state is restored at the end of the ``with`` block.
        """
        try:
            with isolated_from_training(self._board):
                yield
        except (Exception, SystemExit) as error:
            let_through(error)
            raise StreamError(error) from error

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        # As in torch, an exhausted iterator is not called again, because it might start over.
        if self.ended:
            raise StopIteration
        seed_number = self.number
        if self._first_seed_number is not None:
            seed_number = self._first_seed_number
            self._first_seed_number = None
        with self._guarded():
            seed_cpu(derive_seed(*self._seed_parts, seed_number))
            before = capture() if self._head_draws is None else None
            item = next(self._iterator, self)
            if before is not None:
                self._head_draws = _differ(before, capture())
        if item is self:
            self.ended = True
            raise StopIteration
        self.number += 1
        return item


def _differ(before: RandomState, after: RandomState) -> bool:
    """Return whether random numbers were drawn between two captures.

    For Python and NumPy, `capture` returns the same object if nothing was drawn.
    """
    return (
        before.python is not after.python
        or before.numpy is not after.numpy
        or not torch.equal(before.cpu, after.cpu)
    )
