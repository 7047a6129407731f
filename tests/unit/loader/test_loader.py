"""`holdfast.DataLoader`: torch's loader in every argument, with an order that resumes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.loader.samples import Samples, noise
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data import DataLoader as TorchDataLoader

from holdfast.core.errors import LoaderError
from holdfast.loader.loader import DataLoader
from holdfast.testing import check_resumable


class Stream(IterableDataset[int]):
    """The numbers up to a length, shared out among workers."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(range(first, self.length, step))


class ReverseByEpoch(SequentialSampler):
    """A sampler that wants to be told the epoch, as a distributed one does."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = range(len(self.data_source))
        return iter(order if self.epoch % 2 == 0 else reversed(order))


def _same(first: Any, second: Any) -> bool:
    pairs = zip(first, second, strict=True)
    return type(first) is type(second) and all(
        torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs
    )


def _as_list(samples: list[Any]) -> list[Any]:
    return samples


_MAP_STYLE: dict[str, dict[str, Any]] = {
    "defaults": {},
    "batch_size": {"batch_size": 4},
    "drop_last": {"batch_size": 4, "drop_last": True},
    "no batches": {"batch_size": None},
    "collate_fn": {"batch_size": 3, "collate_fn": _as_list},
    "sampler": {"batch_size": 4, "sampler": SequentialSampler(range(7))},
    "sampler without batches": {"batch_size": None, "sampler": SequentialSampler(range(7))},
    "batch_sampler": {
        "batch_sampler": BatchSampler(SequentialSampler(range(11)), 5, drop_last=False)
    },
    "list as sampler": {"sampler": [3, 1, 2], "batch_size": 2},
}


@pytest.mark.parametrize("options", _MAP_STYLE.values(), ids=_MAP_STYLE)
def test_batches_are_those_of_torch(options: dict[str, Any]) -> None:
    """Where nothing is random, the batches, their types and the length are torch's own."""
    dataset = list(range(100, 111))
    ours, theirs = DataLoader(dataset, **options), TorchDataLoader(dataset, **options)
    assert len(ours) == len(theirs)
    found, expected = list(ours), list(theirs)
    assert [type(batch) for batch in found] == [type(batch) for batch in expected]
    assert [torch.as_tensor(batch).tolist() for batch in found] == [
        torch.as_tensor(b).tolist() for b in expected
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"num_workers": -1},
        {"shuffle": True, "sampler": SequentialSampler(range(3))},
        {
            "batch_size": 2,
            "batch_sampler": BatchSampler(SequentialSampler(range(3)), 1, drop_last=False),
        },
    ],
)
def test_what_torch_refuses_is_refused_in_the_same_way(options: dict[str, Any]) -> None:
    """Wrong arguments raise torch's own error, type and text."""
    with pytest.raises((ValueError, TypeError)) as ours:
        DataLoader([1, 2, 3], **options)
    with pytest.raises((ValueError, TypeError)) as theirs:
        TorchDataLoader([1, 2, 3], **options)
    assert type(ours.value) is type(theirs.value)
    assert str(ours.value) == str(theirs.value)


_RESUMABLE: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(Samples(11, noise), batch_size=3, shuffle=True, seed=4),
    "drop_last": lambda: DataLoader(Samples(11, noise), batch_size=3, shuffle=True, drop_last=True),
    "in order": lambda: DataLoader(Samples(11, noise), batch_size=4),
    "no batches": lambda: DataLoader(Samples(4, noise), batch_size=None, shuffle=True),
    "one batch": lambda: DataLoader(Samples(3, noise), batch_size=8, shuffle=True),
    "random sampler": lambda: DataLoader(
        Samples(11, noise), batch_size=3, sampler=RandomSampler(range(11))
    ),
    "sampler with generator": lambda: DataLoader(
        Samples(11, noise),
        batch_size=3,
        sampler=RandomSampler(range(11), generator=torch.Generator()),
    ),
    "weighted": lambda: DataLoader(
        Samples(11, noise), batch_size=3, sampler=WeightedRandomSampler([1.0] * 11, 7)
    ),
    "set_epoch": lambda: DataLoader(
        Samples(11, noise), batch_size=3, sampler=ReverseByEpoch(range(11))
    ),
    "batch_sampler": lambda: DataLoader(
        Samples(11, noise), batch_sampler=BatchSampler(RandomSampler(range(11)), 4, drop_last=False)
    ),
    "generator": lambda: DataLoader(
        Samples(11, noise), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(7)
    ),
}


@pytest.mark.parametrize("make_loader", _RESUMABLE.values(), ids=_RESUMABLE)
def test_it_resumes_exactly_after_any_batch(make_loader: Callable[[], Any]) -> None:
    """Order and augmentation continue exactly, whatever decides the order."""
    check_resumable(make_loader, _same)


def test_the_seed_of_a_generator_is_used() -> None:
    """Torch's ``generator=`` decides the order by its initial seed, also when it was drawn from
    since.
    """
    generator = torch.Generator().manual_seed(7)
    torch.rand(3, generator=generator)
    by_generator = DataLoader(list(range(20)), batch_size=None, shuffle=True, generator=generator)
    assert list(by_generator) == list(
        DataLoader(list(range(20)), batch_size=None, shuffle=True, seed=7)
    )


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("seed", lambda: DataLoader(list(range(10)), shuffle=True, seed=6)),
        ("kind", lambda: DataLoader(list(range(10)), seed=5)),
        ("length", lambda: DataLoader(list(range(9)), shuffle=True, seed=5)),
    ],
)
def test_a_position_of_another_order_is_refused(name: str, other: Callable[[], DataLoader]) -> None:
    """A changed seed, shuffling or dataset is an H604 that names it, and the position is not
    taken over.
    """
    state = {**DataLoader(list(range(10)), shuffle=True, seed=5).state_dict(), "consumed": 4}
    loader = other()
    with pytest.raises(LoaderError, match=f"{name}=") as caught:
        loader.load_state_dict(state)
    assert caught.value.rule == "H604"
    assert loader.state_dict()["consumed"] == 0


def test_what_is_no_position_or_no_seed_is_refused() -> None:
    """The state of another loader is an H604 that names what it lacks, and a seed that is no
    whole number an H607.
    """
    with pytest.raises(LoaderError, match=r"(?s)consumed.*order") as caught:
        DataLoader([1, 2, 3]).load_state_dict({"epoch": 0})
    assert caught.value.rule == "H604"
    with pytest.raises(LoaderError, match="consumed=-1"):
        DataLoader([1, 2, 3]).load_state_dict(
            {**DataLoader([1, 2, 3]).state_dict(), "consumed": -1}
        )
    with pytest.raises(LoaderError, match="seed=") as caught:
        DataLoader([1, 2, 3], seed=1.5)
    assert caught.value.rule == "H607"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_is_drawn_from_is_found_out_once(num_workers: int) -> None:
    """A first batch that draws from numpy is read twice.

    With that known, no batch of later epochs is.
    """
    reads = torch.zeros(1, dtype=torch.int64).share_memory_()

    def read(index: int) -> float:
        reads.add_(1)
        return float(np.random.random())

    loader = DataLoader(Samples(6, read), batch_size=2, num_workers=num_workers)
    epochs = []
    for expected in (8, 14):
        epochs.append([batch.tolist() for batch in loader])
        assert reads.item() == expected
    assert epochs[0] != epochs[1]
