"""The items of a stream, each with random numbers of its own, and the state with which they go on
after any of them.

What an iterator draws as it begins, such as the order of an epoch in the head of a generator's
``__iter__``, belongs to the call that gives its first item. It has to come out alike wherever the
stream goes on, so that this call is made with the seed of the epoch's first item; and since nothing
shows where the head ends and the item begins, the item that comes with it is then one that was
handed out before, and dropped. Where the first item draws nothing, the head has drawn nothing
either, and no item is read twice.
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

_BEHIND = "holdfast_items_behind"


def behind(items: int, state: Any) -> dict[str, Any]:
    """Return the state from which a stream goes on if so many items after it are dropped."""
    return {_BEHIND: items, "state": state}


def quietly(board: Board | None) -> contextlib.AbstractContextManager[None]:
    """Return a context that leaves training's random state alone.

    In a worker there is none to leave alone.
    """
    return isolated() if board is None else contextlib.nullcontext()


class StreamError(Exception):
    """What a stream has raised, as its cause."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__()  # without its text, which may be broken
        self.cause = cause


class Items:
    """The items of a stream, and their count.

    Their random numbers depend on `parts` and an item's number.
    """

    def __init__(
        self, dataset: Any, parts: tuple[Any, ...], board: Board | None, *, keeps_state: bool
    ) -> None:
        self._dataset = dataset
        self._parts = parts
        self._board = board
        self._keeps_state = keeps_state
        self._iterator: Iterator[Any] = iter(())
        self._head_draws: bool | None = None  # None: no item of this iterator has been read
        # Of the call that lets the iterator begin, where it is not the item's
        self._first_seed: int | None = None
        # A place to go on from, at the last item or before it
        self._kept: tuple[int, Any] = (0, None)
        self.show: Callable[[], None] = lambda: None
        self.number = 0
        self.ended = False

    def open(self, items: int, state: Any) -> None:
        """Go to the place after so many items, by the state that `state` returned there."""
        self.show()  # what follows may take its time: a worker that reads over is no idle one
        dropped = items if state is None else 0
        if isinstance(state, dict) and _BEHIND in state:
            dropped, state = state[_BEHIND], state["state"]
        self.number = items - dropped
        self._first_seed = 0 if dropped else None
        self._kept = self.number, state
        with self._guarded():
            seed_cpu(derive_seed(*self._parts, -1))
            if state is not None:
                self._dataset.load_state_dict(copy.deepcopy(state))
            self._iterator = iter(self._dataset)
        while self.number < items and next(self, self) is not self:
            self.show()

    def remember(self) -> None:
        """Keep the place before the next item to go on from.

        Not before the first, where many have none.
        """
        if self._keeps_state and self._head_draws is not False and self.number > self._kept[0]:
            self._kept = self.number, self._own_state()

    def state(self) -> Any:
        """Return what `open` needs to go on here, or None if it is to read over."""
        if not self._keeps_state:
            return None
        if self._head_draws is False:
            return self._own_state()
        number, state = self._kept
        return None if state is None else behind(self.number - number, state)

    def _own_state(self) -> Any:
        with self._guarded():
            return copy.deepcopy(self._dataset.state_dict())

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Leave training's random state alone, and raise what the dataset raises as a
        `StreamError`.
        """
        try:
            with quietly(self._board):
                yield
        except (Exception, SystemExit) as error:
            let_through(error)
            raise StreamError(error) from error

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.ended:  # as torch: one that is asked again may begin anew
            raise StopIteration
        seed, self._first_seed = self.number if self._first_seed is None else self._first_seed, None
        with self._guarded():
            seed_cpu(derive_seed(*self._parts, seed))
            before = capture() if self._head_draws is None else None
            item = next(self._iterator, self)
            if before is not None:
                self._head_draws = _differs(before, capture())
        if item is self:
            self.ended = True
            raise StopIteration
        self.number += 1
        return item


def _differs(one: RandomState, other: RandomState) -> bool:
    # An object that nothing was drawn from is the same one.
    return (
        one.python is not other.python
        or one.numpy is not other.numpy
        or not torch.equal(one.cpu, other.cpu)
    )
