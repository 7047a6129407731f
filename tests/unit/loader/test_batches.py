"""What an epoch fetches.

Which samples, what a position counts, and samplers of the user taken as they are.
"""

from __future__ import annotations

import json
import multiprocessing
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.loader.samples import Samples, items
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)

from holdfast.core.errors import LoaderError
from holdfast.loader.loader import DataLoader
from holdfast.loader.order.orders import Sequential
from holdfast.loader.order.sampler_order import SamplerOrder


class FromPython:
    """A sampler that shuffles with python's random numbers."""

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(20), 20))


@pytest.mark.parametrize(
    "sampler", [FromPython(), RandomSampler(range(20))], ids=["python", "torch"]
)
def test_a_sampler_is_drawn_from_seed_and_epoch_alone(sampler: Any) -> None:
    """Whatever was drawn before, an epoch's indices are the same, epochs and seeds differ, and
    nothing is drawn.
    """
    first = SamplerOrder(sampler, 1).drawn(0)
    random.seed(9)
    torch.manual_seed(9)
    before = random.getstate(), torch.get_rng_state()
    again = SamplerOrder(sampler, 1)
    assert again.drawn(1) != first
    assert again.drawn(0) == first
    assert SamplerOrder(sampler, 2).drawn(0) != first
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_a_sampler_that_repeats_by_mistake_is_refused() -> None:
    """Repeated indices are an H609, whatever holds them, unless the sampler or the caller says
    so.
    """
    with pytest.raises(LoaderError, match="2 of 5") as caught:
        SamplerOrder([1, 2, 1, 3, 2], 1).drawn(0)
    assert caught.value.rule == "H609"
    repeating: list[tuple[Any, bool]] = [
        ([[1, 2], [2, 3]], False),
        (torch.tensor([0, 0, 1, 1]), False),
        ([np.int64(1), torch.tensor(1)], False),
        ([(torch.tensor(0), 1), (0, 1)], False),
        ([np.array([0, 0]), np.array([0, 1])], True),
        ([torch.tensor([0, 1]), torch.tensor([2, 0])], True),
    ]
    for sampler, batches in repeating:
        with pytest.raises(LoaderError, match="H609"):
            SamplerOrder(sampler, 1, batches=batches).drawn(0)
    assert SamplerOrder([1, 1], 1, repeats=True).drawn(0) == [1, 1]
    drawing = RandomSampler(range(3), replacement=True, num_samples=30)
    assert len(SamplerOrder(drawing, 1).drawn(0)) == 30
    assert len(SamplerOrder(BatchSampler(drawing, 4, drop_last=False), 1).drawn(0)) == 8
    padded = DistributedSampler(range(3), num_replicas=2, rank=1, shuffle=False)  # type: ignore[arg-type]
    assert len(SamplerOrder(padded, 1).drawn(0)) == 2


class OwnChance:
    """A sampler with a generator of its own, which nobody can seed."""

    def __init__(self) -> None:
        self.chance = random.Random(0)

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        return iter(self.chance.sample(range(40), 40))


def test_another_iterator_does_not_draw_the_epoch_anew() -> None:
    """Each sample comes once in an epoch during which another one was begun, and the position
    keeps its order.
    """
    sampler = OwnChance()
    loader = DataLoader(list(range(40)), batch_size=4, sampler=sampler)
    batches = iter(loader)
    seen = next(batches).tolist()
    other = next(iter(loader)).tolist()
    seen += next(batches).tolist()
    state = loader.state_dict()
    seen += [sample for batch in batches for sample in batch.tolist()]
    assert sorted(seen) == list(range(40))
    assert other != seen[:4]
    restarted = DataLoader(list(range(40)), batch_size=4, sampler=sampler)
    with pytest.raises(LoaderError, match="H604"):
        restarted.load_state_dict(state)


def _noisy(index: int) -> float:
    """Return what shows the epoch's order and its random numbers."""
    return index + random.random()


def _distributed(length: int = 12) -> Any:
    return DistributedSampler(range(length), num_replicas=1, rank=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("batches", [False, True])
def test_an_epoch_that_is_set_on_a_sampler_is_the_next_one(batches: bool) -> None:
    """Order and random numbers are those of ``set_epoch``, as torch's documents have it.

    Else the loader counts.
    """

    def make(sampler: Any) -> DataLoader:
        if batches:
            return DataLoader(
                Samples(12, _noisy), batch_sampler=BatchSampler(sampler, 4, drop_last=False)
            )
        return DataLoader(Samples(12, _noisy), batch_size=4, sampler=sampler)

    counting = make(_distributed())
    epochs = [items(counting) for _ in range(8)]
    assert len({tuple(epoch) for epoch in epochs}) == 8
    sampler = _distributed()
    loader = make(sampler)
    for epoch in (5, 6, 2):
        sampler.set_epoch(epoch)
        assert items(loader) == epochs[epoch]
    assert items(loader) == epochs[3], "nobody has set one"
    next(iter(loader))
    sampler.set_epoch(7)
    assert items(loader) == epochs[7], "an epoch that was left"
    sampler.set_epoch(1)
    assert items(make(sampler)) == epochs[1], "set before the loader was made"


@pytest.mark.parametrize("cut", [0, 1])
def test_a_position_that_was_loaded_comes_before_an_epoch_that_nobody_set(cut: int) -> None:
    """The sampler's default of 0, or what was set before, does not lead a resumed loader back."""
    loader = DataLoader(Samples(12, _noisy), batch_size=4, sampler=_distributed())
    epochs = [items(loader) for _ in range(4)]
    loader.go_to(3)
    for _ in range(cut):
        next(iter(loader))
    for before in (None, 2):
        sampler = _distributed()
        if before is not None:
            sampler.set_epoch(before)
        resumed = DataLoader(Samples(12, _noisy), batch_size=4, sampler=sampler)
        resumed.load_state_dict(loader.state_dict())
        if cut:
            sampler.set_epoch(1)  # in the middle of an epoch it is too late
        assert items(resumed) == epochs[3][4 * cut :]


_DATA = list(range(60))


class ByEpoch:
    """Batches of samples that fit together, other ones and other many in each epoch, as
    `set_epoch` says.
    """

    def __init__(self, length: int = 60) -> None:
        self.length = length
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        order, size = random.Random(epoch).sample(range(self.length), self.length), 3 + epoch % 4
        self.batches = [order[first : first + size] for first in range(0, self.length, size)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


class Indices:
    """The samples of such batches one by one: a sampler whose length depends on the epoch."""

    def __init__(self) -> None:
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self.indices = random.Random(epoch).sample(range(60), 40 + 4 * epoch)

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)


_MAKE: dict[str, Callable[[], DataLoader]] = {
    "set_epoch": lambda: DataLoader(_DATA, batch_sampler=ByEpoch()),
    "sampler": lambda: DataLoader(_DATA, batch_size=4, sampler=Indices()),
}


@pytest.mark.parametrize("make", _MAKE.values(), ids=_MAKE)
@pytest.mark.parametrize("made", [0, 1, 5])
def test_a_length_that_depends_on_the_epoch_resumes_and_rolls_back(
    make: Callable[[], DataLoader], made: int
) -> None:
    """In a new process and in the same one, at the beginning of an epoch and within it, in any
    epoch.
    """
    undisturbed = make()
    epochs = [[batch.tolist() for batch in undisturbed] for _ in range(5)]
    assert len({len(epoch) for epoch in epochs}) > 2
    loader, states = make(), []
    for epoch in range(5):
        states.append((epoch, loader.state_dict()))
        for number, _ in enumerate(loader, 1):
            if number == made:
                states.append((epoch, loader.state_dict()))
    assert len(states) == (10 if made else 5)
    for other in (make, lambda: loader):
        for epoch, state in states:
            continued = other()
            continued.load_state_dict(json.loads(json.dumps(state)))
            assert [batch.tolist() for batch in continued] == epochs[epoch][
                state["consumed"] and made :
            ]


# --- ranks


def test_ranks_are_given_for_orders_of_holdfast_only() -> None:
    """A sampler of your own says itself what a rank gets, or all ranks would train on the same
    batches: H607.
    """
    divided = DistributedSampler(_DATA, num_replicas=2, rank=1)  # type: ignore[arg-type,var-annotated]
    for own in (
        {"sampler": WeightedRandomSampler([1.0] * 60, 60)},
        {"sampler": divided},
        {"batch_sampler": BatchSampler(SequentialSampler(range(60)), 4, drop_last=False)},
    ):
        with pytest.raises(LoaderError, match="rank=1, world_size=2") as caught:
            DataLoader(_DATA, rank=1, world_size=2, **own)
        assert caught.value.rule == "H607"
        assert len(DataLoader(_DATA, rank=0, world_size=1, **own))
    assert len(list(DataLoader(_DATA, sampler=divided))) == 30
    assert len(list(DataLoader(_DATA, sampler=Sequential(60), rank=1, world_size=2))) == 30


# --- the rest


class Both(Dataset[int]):
    """Samples that can be read one by one and many at once."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: Any) -> Any:
        return torch.arange(8)[index]

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        raise AssertionError(indices)


class OnlyMany(Dataset[int]):
    """Samples that can only be read many at once."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


def test_samples_are_read_one_by_one_or_as_one_key() -> None:
    """Never by ``__getitems__``: with a sampler of lists each batch is one read.

    Without ``__getitem__`` an H607.
    """
    for dataset in (Both(), Subset(Both(), range(8))):
        assert [batch.tolist() for batch in DataLoader(dataset, batch_size=4)] == [
            [0, 1, 2, 3],
            [4, 5, 6, 7],
        ]
    lists = BatchSampler(SequentialSampler(range(8)), 4, drop_last=False)
    first, _ = DataLoader(Both(), batch_size=None, sampler=lists)
    assert first.tolist() == [0, 1, 2, 3]
    with pytest.raises(LoaderError, match="__getitem__"):
        DataLoader(OnlyMany(), sampler=range(8))


def test_a_loader_that_is_made_sets_no_start_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with torch, the program may still choose how workers are started."""
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", None)  # type: ignore[attr-defined]
    for workers in (0, 1):
        DataLoader(_DATA, num_workers=workers)
        assert multiprocessing.get_start_method(allow_none=True) is None
