"""Iterable datasets: each item once, in the order of one process, whatever the workers, ranks and restarts."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from holdfast.core.errors import LoaderError
from holdfast.loader.loader import DataLoader
from holdfast.loader.streams.sharding import shards_itself
from holdfast.loader.streams.stream import keeps_state

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    # A lost worker interrupts what torch does in its wait, such as opening a file.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def _noise(index: int) -> torch.Tensor:
    return torch.tensor([index, random.random(), np.random.rand(), float(torch.rand(()))], dtype=torch.float64)


class Plain(IterableDataset[torch.Tensor]):
    """Noisy items; one of them may kill its worker, once."""

    def __init__(self, length: int, kills: Path | None = None) -> None:
        self.length = length
        self.kills = kills

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(self.length):
            self.meet(index)
            yield _noise(index)

    def meet(self, index: int) -> None:
        if index == 17 and self.kills is not None and get_worker_info() is not None and not self.kills.exists():
            self.kills.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Stateful(Plain):
    """The same with a position of its own; counts what it reads."""

    at = 0
    read = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < self.length:
            self.meet(self.at)
            self.at, self.read = self.at + 1, self.read + 1
            yield _noise(self.at - 1)
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
        for index in range(first, self.length, step):
            self.meet(index)
            yield _noise(index)


def _loader(dataset: Any, **options: Any) -> DataLoader:
    loader = DataLoader(dataset, **{"batch_size": 4, "seed": 3, **options})
    loader._record = lambda data: None
    return loader


def _same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _items(batches: list[torch.Tensor]) -> list[tuple[float, ...]]:
    return [tuple(item) for batch in batches for item in batch.tolist()]


def test_who_shards_itself_is_known_from_its_code() -> None:
    """Asking for the worker's number in any of its functions counts, and so do the attributes of known libraries."""
    assert shards_itself(Own(3))

    assert not shards_itself(type("Quiet", (IterableDataset,), {"__iter__": lambda self: iter(())})())
    assert keeps_state(Stateful(3))
    assert not keeps_state(Plain(3))


@pytest.mark.parametrize("kind", [Plain, Stateful])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_nothing(kind: type[Plain], drop_last: bool, workers: int) -> None:
    """Items, their order and their augmentation are those of one process, also in a last batch that is not full."""
    options = {"drop_last": drop_last, "sharded": False}
    expected = list(_loader(kind(22), **options))
    assert len(expected) == (5 if drop_last else 6)
    assert _same(list(_loader(kind(22), num_workers=workers, **options)), expected)


@pytest.mark.parametrize("kind", [Plain, Stateful])
def test_a_stream_goes_on_at_any_batch_with_other_workers_and_batch_sizes(kind: type[Plain]) -> None:
    """After any cut the rest of the items follows, with the same augmentation."""
    expected = _items(list(_loader(kind(22), sharded=False)))
    for cut, (workers, new_workers, new_size) in zip(
        range(7), [(0, 0, 3), (2, 0, 4), (0, 2, 5), (1, 0, 1), (0, 1, 4), (0, 0, 7), (0, 0, 4)], strict=True
    ):
        stopped = _loader(kind(22), num_workers=workers, sharded=False)
        batches = iter(stopped)
        head = [next(batches) for _ in range(cut)]
        resumed = _loader(kind(22), num_workers=new_workers, batch_size=new_size, sharded=False)
        resumed.load_state_dict(stopped.state_dict())
        batches.close()  # type: ignore[attr-defined] # it is a generator
        assert _items(head + list(resumed)) == expected


def test_an_epoch_that_was_left_takes_nothing_from_the_next() -> None:
    """A look at the first batch moves the dataset of this process; the next epoch begins at its first item anyway."""
    loader = DataLoader(Stateful(40), batch_size=4)
    next(iter(loader))
    assert [int(item[0]) for batch in loader for item in batch] == list(range(40))


class Telling(Plain):
    """As Hugging Face's streams: tells where its last iteration stands, and is told where the next one begins."""

    stands = begins = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.stands, self.begins = self.begins, 0
        while self.stands < self.length:
            self.stands += 1
            yield _noise(self.stands - 1)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.stands}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begins = state["at"]


def test_an_epoch_begins_at_its_first_item_whatever_was_read_before_it() -> None:
    """Whole epochs, epochs that were left, and those after them."""
    loader = DataLoader(Telling(16), batch_size=4)
    for _ in range(2):
        assert [int(item[0]) for batch in loader for item in batch] == list(range(16))
        for _ in range(3):
            assert [int(item[0]) for item in next(iter(loader))] == list(range(4))


def test_batches_that_were_timed_here_are_in_the_next_epoch_too() -> None:
    """With ``"auto"`` the first batches are read in this process; a worker of later epochs is forked from it.

    One only: three would hide the waits, if not each had to read the whole stream.
    """

    class Slow(Stateful):
        def meet(self, index: int) -> None:
            time.sleep(0.01)

    loader = DataLoader(Slow(160), batch_size=4, num_workers="auto", sharded=False)
    for _ in range(2):
        seen = []
        for batch in loader:
            seen += [int(item[0]) for item in batch]
            time.sleep(0.02)
        assert seen == list(range(160))
    assert loader.num_workers == 1


def test_a_stream_with_state_goes_on_where_it_stopped() -> None:
    """One item is read again, since its first one drew; without ``state_dict`` all are, and that is an event."""
    stopped = _loader(Stateful(22), sharded=False)
    batches = iter(stopped)
    next(batches), next(batches)
    state = stopped.state_dict()
    dataset = Stateful(22)
    resumed = _loader(dataset, sharded=False)
    resumed.load_state_dict(state)
    assert len(list(resumed)) == 4
    assert dataset.read == 22 - 8 + 1

    plain, events = _loader(Plain(22), sharded=False), []
    plain._record = lambda data: events.append((data.kind, data.facts().get("items")))
    batches.close()  # type: ignore[attr-defined] # it is a generator
    stopped = _loader(Plain(22), sharded=False)
    batches = iter(stopped)
    next(batches), next(batches)
    plain.load_state_dict(stopped.state_dict())
    assert len(list(plain)) == 4
    assert ("stream_read_over", 8) in events


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("length", [1, 22, 24])
def test_ranks_share_a_stream(world_size: int, length: int) -> None:
    """Every rank has equally many batches, and together they have each item."""
    parts = [
        list(_loader(Plain(length), sharded=False, rank=rank, world_size=world_size)) for rank in range(world_size)
    ]
    assert len({len(part) for part in parts}) == 1
    found = {item[0] for part in parts for item in _items(part)}
    assert found == set(range(length))


@pytest.mark.parametrize("kind", [Plain, Stateful, Own])
def test_a_worker_that_dies_changes_nothing(kind: type[Plain], tmp_path: Path) -> None:
    """A stream goes on at the batch that was next, whoever deals out its items."""
    options = {"num_workers": 2, "sharded": kind is Own}
    expected = list(_loader(kind(40), **options))
    loader, causes = _loader(kind(40, tmp_path / "killed"), **options), []
    loader._record = lambda data: causes.append(data.facts().get("cause"))
    assert _same(list(loader), expected)
    assert any("SIGKILL" in cause for cause in causes if cause), causes


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [lambda: ValueError("broken item"), lambda: SystemExit(2)], ids=["error", "exit"])
def test_an_item_that_raises_ends_the_epoch_with_its_error(workers: int, make: Callable[[], BaseException]) -> None:
    """An iterator that has raised is over, so nothing is set aside: its error comes, after the batches before it."""

    class Broken(Plain):
        def meet(self, index: int) -> None:
            if index == 9:
                raise make()

    found = []
    with pytest.raises((ValueError, LoaderError)) as caught:
        found.extend(_loader(Broken(22), sharded=False, num_workers=workers))
    assert "while making the batch of a stream" in "".join(caught.value.__notes__)
    del found
