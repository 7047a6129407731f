"""Positions behind the last batch of an epoch, which hosts read in two ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, WeightedRandomSampler

from holdfast.loader.loader import DataLoader


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(8))


_LOADERS: dict[str, Callable[[], DataLoader]] = {
    "shuffled": lambda: DataLoader(list(range(8)), batch_size=2, shuffle=True),
    "sampler": lambda: DataLoader(
        list(range(8)), batch_size=2, sampler=WeightedRandomSampler([1.0] * 8, 8)
    ),
    "list": lambda: DataLoader(list(range(8)), batch_size=2, sampler=[3, 1, 4, 0, 5, 2, 6, 7]),
    "batch sampler": lambda: DataLoader(
        list(range(8)), batch_sampler=BatchSampler(RandomSampler(range(8)), 2, drop_last=False)
    ),
    "stream": lambda: DataLoader(Stream(), batch_size=2),
}


def epoch_of(loader: DataLoader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def saved_at_the_last_batch(make: Callable[[], DataLoader], epochs: int = 1) -> dict[str, Any]:
    loader = make()
    for _ in range(epochs - 1):
        list(loader)
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    return loader.state_dict()


@pytest.mark.parametrize("make", _LOADERS.values(), ids=_LOADERS)
def test_the_name_of_the_epoch_decides_what_follows_the_last_batch(
    make: Callable[[], DataLoader],
) -> None:
    """Unnamed, or named as it was saved, the rest is empty and the next epoch follows.

    A later name is that epoch.
    """
    whole = make()
    epochs = [epoch_of(whole) for _ in range(3)]
    state = saved_at_the_last_batch(make)
    for name, expected in (
        (None, [[], epochs[1]]),
        (0, [[], epochs[1]]),
        (1, epochs[1:]),
        (2, epochs[2:]),
    ):
        resumed = make()
        resumed.load_state_dict(state)
        if name is not None:
            resumed.set_epoch(name)
        assert [epoch_of(resumed) for _ in expected] == expected, name


def test_an_empty_iteration_is_said_unless_the_epoch_was_named() -> None:
    """A loop that counts the epoch as done, and does not say so, would lose one: it is warned."""
    make, events = _LOADERS["shuffled"], []
    for name in (None, 0):
        resumed = make()
        resumed._record = lambda data, name=name: events.append((name, data.kind))
        resumed.load_state_dict(saved_at_the_last_batch(make))
        if name is not None:
            resumed.set_epoch(name)
        list(resumed)
    assert events == [(None, "nothing_left")]


def test_hosts_name_it_at_the_sampler_as_to_torchs() -> None:
    """``loader.sampler.set_epoch`` is understood where the sampler has none of its own.

    One of its own is kept.
    """
    for kind in ("shuffled", "sampler", "batch sampler", "stream"):
        loader = _LOADERS[kind]()
        loader.load_state_dict(saved_at_the_last_batch(_LOADERS[kind]))
        loader.sampler.set_epoch(1)
        assert len(epoch_of(loader)) == 4, kind

    class Own(RandomSampler):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    def make() -> DataLoader:
        return DataLoader(list(range(8)), batch_size=2, sampler=Own(range(8)))

    whole = make()
    epochs = [epoch_of(whole) for _ in range(2)]
    loader = make()
    loader.load_state_dict(saved_at_the_last_batch(make))
    loader.sampler.set_epoch(1)
    assert epoch_of(loader) == epochs[1]


def test_a_loader_that_counts_other_epochs_than_its_host_goes_on_right() -> None:
    """A look at a batch, and a short loader that is repeated within an epoch, shift the count.

    It is kept.
    """
    make = _LOADERS["shuffled"]
    peeked = make()
    next(iter(peeked))
    peeked.set_epoch(0)
    whole = make()
    epochs = [epoch_of(whole) for _ in range(5)]
    assert epoch_of(peeked) == epochs[0]

    short = make()
    for epoch in range(2):  # each epoch of the host has two of its own
        short.set_epoch(epoch)
        assert [epoch_of(short), epoch_of(short)] == epochs[2 * epoch : 2 * epoch + 2]
    short = make()
    short.set_epoch(0)
    list(short)
    iterator = iter(short)
    next(iterator), next(iterator)
    state = short.state_dict()
    for name in (0, None):
        rest = make()
        rest.load_state_dict(state)
        if name is not None:
            rest.set_epoch(name)
        assert epoch_of(rest) == epochs[1][2:]
