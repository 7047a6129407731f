"""What an epoch fetches: which samples in which batch, what stands in for bad ones, and what a position counts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler

from holdfast.core.errors import LoaderError
from holdfast.loader.loader import DataLoader
from holdfast.loader.order.orders import Sequential
from holdfast.loader.order.plan import ByBatch, ByPosition
from holdfast.loader.order.sampled import Sampled


def _plan(length: int = 22, **changes: Any) -> ByPosition:
    options = {"seed": 1, "batch_size": 4, "drop_last": False, "rank": 0, "world_size": 1, **changes}
    return ByPosition(order=Sequential(length), **options)


def test_entries_are_the_order_cut_into_batches() -> None:
    """Each position is in one entry, and the position after an entry is where the next one begins."""
    found = list(_plan().entries(0, 0, ()))
    assert [entry.number for entry, _ in found] == list(range(6))
    assert [index for entry, _ in found for index in entry.indices] == list(range(22))
    assert [after for _, after in found] == [4, 8, 12, 16, 20, 22]
    for start in (0, 4, 20, 22):
        rest = [entry.indices for entry, _ in _plan().entries(0, start, ())]
        assert rest == [entry.indices for entry, after in found if after > start]
        assert _plan().steps(start) == len(rest)


def test_spares_follow_in_the_order_and_begin_anew_at_its_end() -> None:
    """What may stand in for a bad sample comes next in the order, also where the batch is the whole epoch."""
    entries = [entry for entry, _ in _plan().entries(0, 0, ())]
    assert entries[0].spares == tuple(range(4, 20))
    assert entries[-1].indices == (20, 21)
    assert entries[-1].spares == tuple(range(16))
    (whole, _), *_ = _plan(3).entries(0, 0, ())
    assert whole.indices == (0, 1, 2)
    assert whole.spares == (0, 1, 2)


def test_an_entry_knows_what_is_quarantined_when_it_is_made() -> None:
    """The set is read for each entry, so a sample that goes meanwhile is known to the entries after it."""
    bad = {5}
    entries = _plan(60).entries(0, 0, bad)
    assert next(entries)[0].bad == (5,)
    bad.add(17)
    assert next(entries)[0].bad == (5, 17)
    assert next(entries)[0].bad == (17,)


def test_what_is_quarantined_takes_no_place_among_those_that_may_stand_in() -> None:
    """There are always as many good ones, at the places that they have without it."""
    entries = [entry for entry, _ in _plan(60).entries(0, 0, set(range(5, 25)))]
    assert entries[0].spares == (*range(4, 40),)
    assert entries[6].spares == (*range(28, 44),)
    batches = ByBatch(Sampled([[0, 1], [2], [3, 4], [5]], 1))
    found = [entry.spares[:3] for entry, _ in batches.entries(0, 0, {2, 3})]
    assert found == [(2, 3, 4), (3, 4, 5), (5, 0, 1), (0, 1, 2)]


def test_a_batch_samplers_batches_stay_as_they_are() -> None:
    """A position counts its batches, and the batches that follow have the spares."""
    plan = ByBatch(Sampled([[3, 1], [2], [0, 4]], 1))
    found = list(plan.entries(0, 0, ()))
    assert [(entry.indices, after) for entry, after in found] == [((3, 1), 1), ((2,), 2), ((0, 4), 3)]
    assert [entry.spares for entry, _ in found] == [(2, 0, 4, 3, 1), (0, 4, 3, 1, 2), (3, 1, 2, 0, 4)]
    assert [entry.indices for entry, _ in plan.entries(0, 2, ())] == [(0, 4)]
    assert plan.steps(2) == 1


class FromPython:
    """A sampler that shuffles with python's random numbers."""

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(20), 20))


@pytest.mark.parametrize("sampler", [FromPython(), RandomSampler(range(20))], ids=["python", "torch"])
def test_a_sampler_is_drawn_from_seed_and_epoch_alone(sampler: Any) -> None:
    """Whatever was drawn before, an epoch's indices are the same, epochs and seeds differ, and nothing is drawn."""
    first = Sampled(sampler, 1).drawn(0)
    random.seed(9)
    torch.manual_seed(9)
    before = random.getstate(), torch.get_rng_state()
    again = Sampled(sampler, 1)
    assert again.drawn(1) != first
    assert again.drawn(0) == first
    assert Sampled(sampler, 2).drawn(0) != first
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_a_sampler_that_repeats_by_mistake_is_refused() -> None:
    """Repeated indices are an H609, unless the sampler or the caller says that they are meant."""
    with pytest.raises(LoaderError, match="2 of 5 indices more than once") as caught:
        Sampled([1, 2, 1, 3, 2], 1).drawn(0)
    assert caught.value.rule == "H609"
    with pytest.raises(LoaderError, match="more than once"):
        Sampled([[1, 2], [2, 3]], 1).drawn(0)
    assert Sampled([1, 1], 1, repeats=True).drawn(0) == [1, 1]
    drawing = RandomSampler(range(3), replacement=True, num_samples=30)
    assert len(Sampled(drawing, 1).drawn(0)) == 30
    assert len(Sampled(BatchSampler(drawing, 4, drop_last=False), 1).drawn(0)) == 8
    padded = DistributedSampler(range(3), num_replicas=2, rank=1, shuffle=False)  # type: ignore[arg-type]
    assert len(Sampled(padded, 1).drawn(0)) == 2


class OwnChance:
    """A sampler with a generator of its own, which nobody can seed."""

    def __init__(self) -> None:
        self.chance = random.Random(0)

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        return iter(self.chance.sample(range(40), 40))


def test_another_iterator_does_not_draw_the_epoch_anew() -> None:
    """Each sample comes once in an epoch during which another one was begun, and the position keeps its order."""
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
    with pytest.raises(LoaderError, match="another order"):
        restarted.load_state_dict(state)


def _distributed(length: int = 12) -> Any:
    return DistributedSampler(range(length), num_replicas=1, rank=0)  # type: ignore[arg-type]


def _seen(loader: DataLoader) -> list[float]:
    return [value for batch in loader for value in batch.tolist()]


class Noisy:
    """Samples that show the epoch's order and its random numbers."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        return index + random.random()


@pytest.mark.parametrize("batches", [False, True])
def test_an_epoch_that_is_set_on_a_sampler_is_the_next_one(batches: bool) -> None:
    """Order and random numbers are those of ``set_epoch``, as torch's documents have it; else the loader counts."""

    def make(sampler: Any) -> DataLoader:
        if batches:
            return DataLoader(Noisy(), batch_sampler=BatchSampler(sampler, 4, drop_last=False))
        return DataLoader(Noisy(), batch_size=4, sampler=sampler)

    counting = make(_distributed())
    epochs = [_seen(counting) for _ in range(8)]
    assert len({tuple(epoch) for epoch in epochs}) == 8
    sampler = _distributed()
    loader = make(sampler)
    for epoch in (5, 6, 2):
        sampler.set_epoch(epoch)
        assert _seen(loader) == epochs[epoch]
    assert _seen(loader) == epochs[3], "nobody has set one"
    next(iter(loader))
    sampler.set_epoch(7)
    assert _seen(loader) == epochs[7], "an epoch that was left"
    sampler.set_epoch(1)
    assert _seen(make(sampler)) == epochs[1], "set before the loader was made"


@pytest.mark.parametrize("cut", [0, 1])
def test_a_position_that_was_loaded_comes_before_an_epoch_that_nobody_set(cut: int) -> None:
    """The sampler's default of 0, or what was set before, does not lead a resumed loader back."""
    loader = DataLoader(Noisy(), batch_size=4, sampler=_distributed())
    epochs = [_seen(loader) for _ in range(4)]
    loader.go_to(3)
    for _ in range(cut):
        next(iter(loader))
    for before in (None, 2):
        sampler = _distributed()
        if before is not None:
            sampler.set_epoch(before)
        resumed = DataLoader(Noisy(), batch_size=4, sampler=sampler)
        resumed.load_state_dict(loader.state_dict())
        if cut:
            sampler.set_epoch(1)  # in the middle of an epoch it is too late
        assert _seen(resumed) == epochs[3][4 * cut :]
