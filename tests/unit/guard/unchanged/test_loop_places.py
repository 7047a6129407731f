"""Which statement of a script iterates a loader, and how it leaves its loop."""

from __future__ import annotations

import contextlib
import dis
import io
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

import pytest
from tqdm import tqdm

from holdfast.guard.unchanged.loops.bytecode import (
    leaves_like_an_exhausted_loop,
    targets_of_enclosing_loops,
    targets_of_loop,
)
from holdfast.guard.unchanged.loops.places import LoopPlace, find_place, loop_frame
from holdfast.guard.unchanged.loops.wrappers import EnumerateCounter, find_enumerate_counters


class Batches:
    """An iterator that records who requests its numbers, and how it is dropped."""

    def __init__(self, count: int = 5) -> None:
        self.left = count
        self.place: LoopPlace | None = None
        # The number of `enumerate` objects around the iterator. None if it has other wrappers.
        self.counters: int | None = None
        self.ends: list[bool] = []
        self.names: list[str] = []

    def __iter__(self) -> Iterator[int]:
        return _Iterator(self)

    def request(self, iterator: object, frame: FrameType) -> None:
        """Record a request, in place of a watched loader."""
        if self.place is None:
            self.place = find_place(frame)
            counters = find_enumerate_counters(iterator, frame)
            self.counters = None if counters is None else len(counters)
            own_frame = loop_frame(frame, self.place)
            assert own_frame is not None
            self.names = sorted(targets_of_enclosing_loops(own_frame.f_code, own_frame.f_lasti))

    def drop(self, frame: FrameType | None) -> None:
        """Record how the loop ends."""
        assert self.place is not None
        own_frame = None if frame is None else loop_frame(frame, self.place)
        self.ends.append(
            own_frame is not None
            and leaves_like_an_exhausted_loop(self.place.code, self.place.offset, own_frame.f_lasti)
        )


class _Iterator:
    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __iter__(self) -> _Iterator:
        return self

    def __next__(self) -> int:
        self.batches.request(self, sys._getframe(1))
        self.batches.left -= 1
        if self.batches.left < 0:
            raise StopIteration
        return self.batches.left

    def __del__(self) -> None:
        if self.batches.left >= 0:
            self.batches.drop(sys._getframe().f_back)


def end_of_islice(batches: Batches) -> str:
    for _ in itertools.islice(batches, 3):
        pass
    return "after"


def plain_break(batches: Batches) -> str:
    for number in batches:
        if number == 2:
            break
    return "after"


def break_at_the_end(batches: Batches) -> None:
    for number in batches:
        if number == 2:
            break


def break_in_a_context(batches: Batches) -> str:
    for number in batches:
        with contextlib.suppress(ValueError):
            if number == 2:
                break
    return "after"


def break_with_else(batches: Batches) -> str:
    for number in batches:
        if number == 2:
            break
    else:
        return "else"
    return "after"


def early_return(batches: Batches) -> int:
    for number in batches:
        if number == 2:
            return number
    return -1


def bare_return(batches: Batches) -> None:
    for number in batches:
        if number == 2:
            return


def exception(batches: Batches) -> str:
    try:
        for number in batches:
            if number == 2:
                raise ValueError  # noqa: TRY301 - it leaves the loop
    except ValueError:
        pass
    return "after"


def break_through_enumerate(batches: Batches) -> str:
    for _, number in enumerate(tqdm(batches, disable=True)):
        if number == 2:
            break
    return "after"


@pytest.mark.parametrize(
    ("loop", "is_like_exhaustion"),
    [
        (plain_break, True),
        (break_at_the_end, True),
        (break_in_a_context, True),
        (break_through_enumerate, True),
        (end_of_islice, True),
        (bare_return, True),
        (break_with_else, False),
        (early_return, False),
        (exception, False),
    ],
)
def test_end_of_a_loop(loop: Callable[[Batches], object], *, is_like_exhaustion: bool) -> None:
    """A loop can be skipped only if the code after it is the code after an exhausted loop."""
    batches = Batches()

    loop(batches)

    assert batches.ends == [is_like_exhaustion]


def test_targets_of_enclosing_loops_are_known() -> None:
    """The names that the loops around a loop assign are found, such as the epoch."""
    batches = Batches()

    for epoch, _ in enumerate(range(1)):
        for number in batches:
            assert epoch <= number

    assert batches.names == ["_", "epoch"]


def of_list(batches: Batches) -> object:
    return [2 * number for number in batches]


def of_sum(batches: Batches) -> object:
    return sum(number for number in batches)


def of_next(batches: Batches) -> object:
    return next(iter(batches))


def of_for(batches: Batches) -> None:
    for _ in batches:
        pass


def of_yield_from(batches: Batches) -> None:
    def same() -> Iterator[int]:
        yield from batches

    for _ in same():
        pass


def of_wrapped_for(batches: Batches) -> None:
    def doubled() -> Iterator[int]:
        for number in batches:
            yield 2 * number

    for _ in enumerate(doubled()):
        pass


@pytest.mark.parametrize(
    ("loop", "is_resumable"),
    [
        (of_for, True),
        (of_wrapped_for, True),
        (of_yield_from, True),
        (of_list, False),
        (of_sum, False),
        (of_next, False),
    ],
)
def test_only_for_statements_are_resumable(
    loop: Callable[[Batches], object], *, is_resumable: bool
) -> None:
    """The values that a comprehension collects are in no variable, and so cannot be restored."""
    batches = Batches()

    loop(batches)

    assert batches.place is not None
    assert (batches.place.problem is None) == is_resumable


def test_counters_of_wrappers() -> None:
    """A loop through `enumerate` and tqdm can continue in the middle; one through `zip` cannot."""
    wrappers = ((iter, 0), (enumerate, 1), (enumerate_of_tqdm, 1), (tqdm_of_enumerate, 1))
    for wrapper, count in wrappers:
        batches = Batches(1)
        for _ in wrapper(batches):
            pass
        assert batches.counters == count
    for blocked in (lambda b: zip(b, b, strict=False), lambda b: itertools.islice(b, 3)):
        batches = Batches(1)
        for _ in blocked(batches):
            pass
        assert batches.counters is None


def enumerate_of_tqdm(batches: Batches) -> Iterator[object]:
    return enumerate(tqdm(batches, disable=True))


def tqdm_of_enumerate(batches: Batches) -> Iterable[object]:
    return tqdm(enumerate(batches), file=io.StringIO())


def test_enumerate_continues_at_a_later_number() -> None:
    """The counter of `enumerate` can be set."""
    counter = enumerate("abc", start=10)
    next(counter)

    EnumerateCounter(counter).value = 41

    assert next(counter) == (41, "b")


def test_targets_of_a_loop_are_named() -> None:
    """All names that a `for` statement assigns are found, also in tuples."""
    batches = Batches(1)
    for i, (first, *rest) in enumerate([number, number] for number in batches):
        assert i == first == rest[0] == 0
    frame = sys._getframe()
    offsets = [
        offset
        for offset in range(0, len(frame.f_code.co_code), 2)
        if frame.f_code.co_code[offset] == dis.opmap["FOR_ITER"]
    ]
    assert targets_of_loop(frame.f_code, offsets[0]) == {"i", "first", "rest"}
