"""Iterable datasets.

Each item once, in the order of one process, whatever the workers, ranks and restarts.
"""

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
    return random.random() + np.random.rand() + float(torch.rand(()))


def _varying(place: int) -> float:
    return sum(random.random() for _ in range(1 + random.randrange(2)))


def _late(place: int) -> float:
    return float(torch.rand(())) if place > 20 else 0.0


class Plain(IterableDataset[torch.Tensor]):
    """Draws its order as its generator begins, and noise with each item.

    One may kill its worker, once.
    """

    def __init__(
        self,
        length: int,
        kills: Path | None = None,
        order: Callable[[int], list[int]] = _in_order,
        noise: Callable[[int], float] = _fixed,
    ) -> None:
        self.length, self.kills, self.order, self.noise = length, kills, order, noise

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = self.order(self.length)
        for place in range(self.length):
            yield self.item(order, place)

    def item(self, order: list[int], place: int) -> torch.Tensor:
        if (
            place == 17
            and self.kills is not None
            and get_worker_info() is not None
            and not self.kills.exists()
        ):
            self.kills.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor([order[place], self.noise(place)], dtype=torch.float64)


class Stateful(Plain):
    """The same with a position of its own; counts what it reads."""

    at = read = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = self.order(self.length)
        while self.at < self.length:
            self.at, self.read = self.at + 1, self.read + 1
            yield self.item(order, self.at - 1)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Own(Plain):
    """The same, dealt out to workers by itself."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        order = self.order(self.length)
        for place in range(first, self.length, step):
            yield self.item(order, place)


def _ordered(
    order: Callable[[int], list[int]], noise: Callable[[int], float], kills: Path | None = None
) -> Stateful:
    return Stateful(LENGTH, kills, order, noise)


def _loader(dataset: Any, **options: Any) -> DataLoader:
    loader = DataLoader(dataset, **{"batch_size": 4, "seed": 3, **options})
    loader._record = lambda data: None
    return loader


def _same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


def _items(batches: list[torch.Tensor]) -> list[tuple[float, ...]]:
    return [tuple(item) for batch in batches for item in batch.tolist()]


@pytest.mark.parametrize("kind", [Plain, Stateful])
def test_a_stream_goes_on_at_any_batch_with_other_workers_and_batch_sizes(
    kind: type[Plain],
) -> None:
    """After any cut the rest of the items follows, with the same augmentation."""
    expected = _items(list(_loader(kind(22), sharded=False)))
    for cut, (workers, new_workers, new_size) in zip(
        range(7),
        [(0, 0, 3), (2, 0, 4), (0, 2, 5), (1, 0, 1), (0, 1, 4), (0, 0, 7), (0, 0, 4)],
        strict=True,
    ):
        stopped = _loader(kind(22), num_workers=workers, sharded=False)
        batches = iter(stopped)
        head = [next(batches) for _ in range(cut)]
        resumed = _loader(kind(22), num_workers=new_workers, batch_size=new_size, sharded=False)
        resumed.load_state_dict(stopped.state_dict())
        batches.close()  # type: ignore[attr-defined] # it is a generator
        assert _items(head + list(resumed)) == expected


class Telling(Plain):
    """As Hugging Face's streams.

    Tells where its last iteration stands, and is told where the next one begins.
    """

    stands = begins = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.stands, self.begins = self.begins, 0
        while self.stands < self.length:
            self.stands += 1
            yield self.item(self.order(self.length), self.stands - 1)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.stands}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begins = state["at"]


@pytest.mark.parametrize("kind", [Stateful, Telling])
def test_an_epoch_begins_at_its_first_item_whatever_was_read_before_it(kind: type[Plain]) -> None:
    """Whole epochs, epochs that were left, and those after them."""
    loader = DataLoader(kind(16), batch_size=4)
    for _ in range(2):
        assert [int(item[0]) for batch in loader for item in batch] == list(range(16))
        for _ in range(3):
            assert [int(item[0]) for item in next(iter(loader))] == list(range(4))


def test_a_stream_without_state_is_read_over() -> None:
    """It goes on all the same, and that is an event with the number of items."""
    plain, events = _loader(Plain(22), sharded=False), []
    plain._record = lambda data: events.append((data.kind, data.facts().get("items")))
    stopped = _loader(Plain(22), sharded=False)
    batches = iter(stopped)
    next(batches), next(batches)
    plain.load_state_dict(stopped.state_dict())
    assert len(list(plain)) == 4
    assert ("stream_read_over", 8) in events


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "make", [lambda: ValueError("broken item"), lambda: SystemExit(2)], ids=["error", "exit"]
)
def test_an_item_that_raises_ends_the_epoch_with_its_error(
    workers: int, make: Callable[[], BaseException]
) -> None:
    """An iterator that has raised is over, so nothing is set aside.

    Its error comes, after the batches before it.
    """

    def broken(place: int) -> float:
        if place == 9:
            raise make()
        return 0.0

    found = []
    with pytest.raises((ValueError, LoaderError)) as caught:
        found.extend(_loader(Plain(22, noise=broken), sharded=False, num_workers=workers))
    assert "stream" in "".join(caught.value.__notes__)
    del found


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
def test_an_iterator_that_has_ended_is_not_asked_again(
    workers: int, drop_last: bool, length: int
) -> None:
    """Batches are torch's in each epoch, also if the next call would begin anew and the last
    batch is not full.
    """
    expected = [
        batch.tolist()
        for batch in torch.utils.data.DataLoader(Resetting(length), 4, drop_last=drop_last)
    ]
    dataset = Resetting(length)
    loader = _loader(dataset, num_workers=workers, drop_last=drop_last, sharded=False)
    for epoch in range(2):
        found = [batch.tolist() for batch in itertools.islice(loader, len(expected) + 1)]
        assert found == expected
        assert dataset.ends == (0 if workers else epoch + 1)


# --- what is drawn as an iterator begins
# -------------------------------------------------------------------


ORDERS = [_by_torch, _by_python, _by_numpy, _in_order]
NOISES = [_nothing, _fixed, _varying, _late]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("size", [1, 4])
def test_an_order_that_is_drawn_as_the_iterator_begins_is_the_same_after_any_cut(
    order: Callable[[int], list[int]], noise: Callable[[int], float], size: int
) -> None:
    """So is the noise of each item, in new processes and if that is cut again, with positions
    that are plain text.
    """
    expected = _items(_loader(_ordered(order, noise), batch_size=size))
    assert sorted(item[0] for item in expected) == list(range(LENGTH))
    for cut in (0, 1, 2, 3, 7) if size == 4 else (1, 2, 10, 17, 30):
        found, state = list[tuple[float, float]](), None
        for length in (cut, 2, LENGTH):
            loader = _loader(_ordered(order, noise), batch_size=size)
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            found += _items(itertools.islice(loader, length))
            state = loader.state_dict()
            if len(found) == LENGTH:
                break
        assert found == expected


_KILLED: dict[str, Callable[[Path | None], Any]] = {
    "plain": lambda kills: Plain(40, kills),
    "with state": lambda kills: Stateful(40, kills),
    "divided": lambda kills: Own(40, kills),
    "ordered": lambda kills: _ordered(_by_torch, _nothing, kills),
    "ordered, noisy": lambda kills: _ordered(_by_torch, _varying, kills),
}


@pytest.mark.parametrize("make", _KILLED.values(), ids=_KILLED)
def test_a_worker_that_dies_changes_nothing(
    make: Callable[[Path | None], Any], tmp_path: Path
) -> None:
    """A stream goes on at the batch that was next, in the order that the epoch's beginning drew."""
    options = {"num_workers": 2, "sharded": isinstance(make(None), Own)}
    loader, causes = _loader(make(tmp_path / "killed"), **options), []
    loader._record = lambda data: causes.append(str(data.facts().get("cause")))
    assert _same(list(loader), list(_loader(make(None), **options)))
    assert any("SIGKILL" in cause for cause in causes), causes


@pytest.mark.parametrize(("noise", "more"), [(_nothing, 0), (_late, 0), (_fixed, 1), (_varying, 1)])
def test_an_item_is_read_twice_only_where_the_iterator_may_draw_as_it_begins(
    noise: Callable[[int], float], more: int
) -> None:
    """Where the first item draws nothing, nothing can have been drawn before it."""
    stopped = _loader(_ordered(_in_order, noise))
    assert len(list(itertools.islice(stopped, 5))) == 5
    dataset = _ordered(_in_order, noise)
    resumed = _loader(dataset)
    resumed.load_state_dict(stopped.state_dict())
    assert len(list(resumed)) == 3
    assert dataset.read == LENGTH - 20 + more


# --- nothing to give


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
    return [
        lambda rank=rank: _loader(Numbers(), rank=rank, world_size=2, **options)
        for rank in range(2)
    ]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_stream_without_items_is_an_error(workers: int) -> None:
    """It says what to look for; else a loop that counts steps would turn for ever."""
    for make in (
        lambda: _loader(Numbers(), num_workers=workers),
        *_of_two_ranks(num_workers=workers),
    ):
        loader = make()
        for _ in range(2):
            with pytest.raises(LoaderError, match="Numbers") as caught:
                next(iter(loader))
            assert caught.value.rule == "H610"
            assert caught.value.fix


def test_a_stream_that_can_be_read_only_once_is_an_error_in_the_second_epoch() -> None:
    """Epochs after the first would train nothing."""
    loader = _loader(Once(1, 2, 3))
    assert [batch.tolist() for batch in loader] == [[1, 2, 3]]
    with pytest.raises(LoaderError, match="H610"):
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


def test_a_rank_without_items_is_no_error_where_the_dataset_divides_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other ranks may have some; a process by itself has none to wait for."""
    with pytest.raises(LoaderError, match="OfRank"):
        list(_loader(OfRank(1)))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert list(_loader(OfRank(1))) == []
