"""Streams whose iterators draw as they begin, reset themselves at their end, or have nothing to give."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from holdfast.core.errors import LoaderError
from holdfast.loader.loader import DataLoader

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    # A lost worker interrupts what torch does in its wait, such as opening a file.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

LENGTH = 30


def _loader(dataset: Any, **options: Any) -> DataLoader:
    loader = DataLoader(dataset, **{"batch_size": 4, "seed": 3, **options})
    loader._record = lambda data: None
    return loader


def _items(batches: Any) -> list[tuple[float, float]]:
    return [tuple(item) for batch in batches for item in batch.tolist()]


class Resetting(IterableDataset[int]):
    """Its own iterator, which is ready for the next epoch as soon as it has ended."""

    at = ends = 0

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.at == self.length:
            self.at, self.ends = 0, self.ends + 1
            raise StopIteration
        self.at += 1
        return self.at - 1


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [3, 8, 10, 14])
def test_an_iterator_that_has_ended_is_not_asked_again(workers: int, drop_last: bool, length: int) -> None:
    """Batches are torch's in each epoch, also if the next call would begin anew and the last batch is not full."""
    expected = [batch.tolist() for batch in torch.utils.data.DataLoader(Resetting(length), 4, drop_last=drop_last)]
    dataset = Resetting(length)
    loader = _loader(dataset, num_workers=workers, drop_last=drop_last, sharded=False)
    for epoch in range(2):
        found = [batch.tolist() for batch in itertools.islice(loader, len(expected) + 1)]
        assert found == expected
        assert dataset.ends == (0 if workers else epoch + 1)


# --- what is drawn as an iterator begins -------------------------------------------------------------------


def _by_torch(length: int) -> list[int]:
    return torch.randperm(length).tolist()


def _by_python(length: int) -> list[int]:
    return random.sample(range(length), length)


def _by_numpy(length: int) -> list[int]:
    return np.random.permutation(length).tolist()


def _in_order(length: int) -> list[int]:
    return list(range(length))


def _nothing(place: int) -> float:
    return 0.0


def _fixed(place: int) -> float:
    return random.random() + float(torch.rand(()))


def _varying(place: int) -> float:
    return sum(random.random() for _ in range(1 + random.randrange(2)))


def _late(place: int) -> float:
    return float(torch.rand(())) if place > 20 else 0.0


class Ordered(IterableDataset[torch.Tensor]):
    """Draws its order as its generator begins, and noise with each item; may kill its worker, once."""

    at = read = 0

    def __init__(
        self, order: Callable[[int], list[int]], noise: Callable[[int], float], kills: Path | None = None
    ) -> None:
        self.order, self.noise, self.kills = order, noise, kills

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = self.order(LENGTH)
        while self.at < LENGTH:
            self.at, self.read = self.at + 1, self.read + 1
            if self.at == 17 and self.kills is not None and get_worker_info() and not self.kills.exists():
                self.kills.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield torch.tensor([order[self.at - 1], self.noise(self.at - 1)], dtype=torch.float64)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


ORDERS = [_by_torch, _by_python, _by_numpy, _in_order]
NOISES = [_nothing, _fixed, _varying, _late]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("size", [1, 4])
def test_an_order_that_is_drawn_as_the_iterator_begins_is_the_same_after_any_cut(
    order: Callable[[int], list[int]], noise: Callable[[int], float], size: int
) -> None:
    """So is the noise of each item, in new processes and if that is cut again, with positions that are plain text."""
    expected = _items(_loader(Ordered(order, noise), batch_size=size))
    assert sorted(item[0] for item in expected) == list(range(LENGTH))
    for cut in (0, 1, 2, 3, 7) if size == 4 else (1, 2, 10, 17, 30):
        found, state = list[tuple[float, float]](), None
        for length in (cut, 2, LENGTH):
            loader = _loader(Ordered(order, noise), batch_size=size)
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            found += _items(itertools.islice(loader, length))
            state = loader.state_dict()
            if len(found) == LENGTH:
                break
        assert found == expected


@pytest.mark.parametrize("noise", [_nothing, _varying])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_worker_that_dies_leaves_the_order_as_it_was_drawn(
    noise: Callable[[int], float], workers: int, tmp_path: Path
) -> None:
    """The workers after it draw the order of the epoch's beginning."""
    expected = _items(_loader(Ordered(_by_torch, noise)))
    loader, causes = _loader(Ordered(_by_torch, noise, tmp_path / "killed"), num_workers=workers, sharded=False), []
    loader._record = lambda data: causes.append(data.facts().get("cause"))
    assert _items(loader) == expected
    assert any("SIGKILL" in cause for cause in causes if cause), causes


@pytest.mark.parametrize("noise", [_nothing, _varying])
def test_a_worker_that_takes_over_leaves_the_order_as_it_was_drawn(noise: Callable[[int], float]) -> None:
    """As with ``"auto"``, where the first batches are read here, and the rest of the epoch by a worker."""
    expected = _items(_loader(Ordered(_by_torch, noise), batch_size=1))
    for cut in (1, 2, 9):
        loader = _loader(Ordered(_by_torch, noise), batch_size=1, sharded=False)
        batches = iter(loader)
        found = _items(itertools.islice(batches, cut))
        loader._recovery.change(1, 2)
        assert found + _items(batches) == expected


@pytest.mark.parametrize(("noise", "more"), [(_nothing, 0), (_late, 0), (_fixed, 1), (_varying, 1)])
def test_an_item_is_read_twice_only_where_the_iterator_may_draw_as_it_begins(
    noise: Callable[[int], float], more: int
) -> None:
    """Where the first item draws nothing, nothing can have been drawn before it."""
    stopped = _loader(Ordered(_in_order, noise))
    assert len(list(itertools.islice(stopped, 5))) == 5
    dataset = Ordered(_in_order, noise)
    resumed = _loader(dataset)
    resumed.load_state_dict(stopped.state_dict())
    assert len(list(resumed)) == 3
    assert dataset.read == LENGTH - 20 + more


# --- nothing to give ---------------------------------------------------------------------------------------


class Numbers(IterableDataset[int]):
    """Some numbers."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)


class Once(Numbers):
    """The same, and nothing the second time."""

    def __iter__(self) -> Iterator[int]:
        numbers, self.numbers = self.numbers, ()
        return iter(numbers)


class OfRank(Numbers):
    """The numbers of a rank."""

    rank = 1

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers[self.rank :: 2])


class First(Numbers):
    """Numbers for the first worker alone."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(self.numbers if info is None or info.id == 0 else ())


def _of_two_ranks(**options: Any) -> list[Callable[[], DataLoader]]:
    return [lambda rank=rank: _loader(Numbers(), rank=rank, world_size=2, **options) for rank in range(2)]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_stream_without_items_is_an_error(workers: int) -> None:
    """It says what to look for; else a loop that counts steps would turn for ever."""
    for make in (lambda: _loader(Numbers(), num_workers=workers), *_of_two_ranks(num_workers=workers)):
        loader = make()
        for _ in range(2):
            with pytest.raises(LoaderError, match="Numbers has no items") as caught:
                next(iter(loader))
            assert caught.value.rule == "H610"
            assert caught.value.fix


def test_a_stream_that_can_be_read_only_once_is_an_error_in_the_second_epoch() -> None:
    """Epochs after the first would train nothing."""
    loader = _loader(Once(1, 2, 3))
    assert [batch.tolist() for batch in loader] == [[1, 2, 3]]
    with pytest.raises(LoaderError, match="begin anew"):
        list(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_goes_on_at_its_end_is_no_error(workers: int) -> None:
    """Whether its last batch was full or not; the epoch after it is whole."""
    for numbers in (range(8), range(10)):
        stopped = _loader(Numbers(*numbers), num_workers=workers, sharded=False)
        batches = iter(stopped)
        expected = [next(batches).tolist() for _ in range(-(-len(numbers) // 4))]
        resumed = _loader(Numbers(*numbers), num_workers=workers, sharded=False)
        resumed.load_state_dict(stopped.state_dict())
        assert list(resumed) == []
        assert [batch.tolist() for batch in resumed] == expected


def test_a_worker_without_items_is_no_error_where_another_one_has_some() -> None:
    """So with fewer shards than workers, also if these are too few for a batch."""
    loader = _loader(First(1, 2, 3, 4, 5), num_workers=2)
    assert [batch.tolist() for batch in loader] == [[1, 2, 3, 4], [5]]
    assert list(_loader(First(1, 2), num_workers=2, drop_last=True)) == []
    with pytest.raises(LoaderError, match="First has no items"):
        list(_loader(First(), num_workers=2))


def test_a_rank_without_items_is_no_error_where_the_dataset_divides_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks may have some; a process by itself has none to wait for."""
    with pytest.raises(LoaderError, match="OfRank has no items"):
        list(_loader(OfRank(1)))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert list(_loader(OfRank(1))) == []
