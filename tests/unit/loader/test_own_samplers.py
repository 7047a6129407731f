"""Samplers and datasets of the user's that a loader has to take as they are, and arguments that contradict them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
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
from holdfast.loader.order.orders import Weighted
from holdfast.loader.order.sampled import Sampled

_DATA = list(range(60))


def _cut(order: list[int], seed: int) -> list[list[int]]:
    chance, batches = random.Random(seed), []
    while order:
        size = chance.randint(1, 6)
        batches.append(order[:size])
        order = order[size:]
    return batches


class ByEpoch:
    """Batches of samples that fit together, other ones and other many in each epoch, as `set_epoch` says."""

    def __init__(self, length: int = 60) -> None:
        self.length = length
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.batches = _cut(random.Random(epoch).sample(range(self.length), self.length), epoch)

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
def test_a_length_that_depends_on_the_epoch_resumes_and_rolls_back(make: Callable[[], DataLoader], made: int) -> None:
    """In a new process and in the same one, at the beginning of an epoch and within it, in any epoch."""
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
            assert [batch.tolist() for batch in continued] == epochs[epoch][state["consumed"] and made :]


def test_another_order_of_such_a_kind_is_still_refused() -> None:
    """By what is drawn in the middle of an epoch, and by the length of the dataset."""
    loader = DataLoader(_DATA, batch_sampler=ByEpoch())
    list(loader)
    next(iter(loader))
    with pytest.raises(LoaderError, match="another order") as caught:
        DataLoader(_DATA, batch_sampler=ByEpoch(59)).load_state_dict(loader.state_dict())
    assert caught.value.rule == "H604"
    other = DataLoader(_DATA[:50], batch_size=4, sampler=RandomSampler(range(50)))
    with pytest.raises(LoaderError, match="length=50"):
        other.load_state_dict(DataLoader(_DATA, batch_size=4, sampler=RandomSampler(range(60))).state_dict())


# --- ranks ------------------------------------------------------------------------------------------------------


def test_ranks_are_given_for_orders_of_holdfast_only() -> None:
    """A sampler of your own says itself what a rank gets, or all ranks would train on the same batches: H607."""
    divided = DistributedSampler(_DATA, num_replicas=2, rank=1)  # type: ignore[arg-type,var-annotated]
    for own in (
        {"sampler": WeightedRandomSampler([1.0] * 60, 60)},
        {"sampler": divided},
        {"batch_sampler": BatchSampler(SequentialSampler(range(60)), 4, drop_last=False)},
    ):
        with pytest.raises(LoaderError, match="leave rank= and world_size= out") as caught:
            DataLoader(_DATA, rank=1, world_size=2, **own)
        assert caught.value.rule == "H607"
        assert len(DataLoader(_DATA, rank=0, world_size=1, **own))
    assert len(list(DataLoader(_DATA, sampler=divided))) == 30
    assert len(list(DataLoader(_DATA, sampler=Weighted([1.0] * 60), rank=1, world_size=2))) == 30


# --- indices that come twice ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampler", "batches"),
    [
        (torch.tensor([0, 0, 1, 1]), False),
        ([torch.tensor(0), torch.tensor(1), torch.tensor(0)], False),
        ([np.int64(1), 1], False),
        ([(torch.tensor(0), 1), (0, 1)], False),
        ([np.array([0, 0]), np.array([0, 1])], True),
        ([torch.tensor([0, 1]), torch.tensor([2, 0])], True),
        ([[torch.tensor(0), torch.tensor(0)]], True),
    ],
)
def test_repeated_indices_are_found_whatever_holds_them(sampler: Any, batches: bool) -> None:
    """Two tensors of the same number are the same index."""
    with pytest.raises(LoaderError, match="more than once") as caught:
        Sampled(sampler, 1, batches=batches).drawn(0)
    assert caught.value.rule == "H609"


# --- the rest ---------------------------------------------------------------------------------------------------


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
    """Never by ``__getitems__``: with a sampler of lists each batch is one read; without ``__getitem__`` an H607."""
    for dataset in (Both(), Subset(Both(), range(8))):
        assert [batch.tolist() for batch in DataLoader(dataset, batch_size=4)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    lists = BatchSampler(SequentialSampler(range(8)), 4, drop_last=False)
    (first, _) = DataLoader(Both(), batch_size=None, sampler=lists)
    assert first.tolist() == [0, 1, 2, 3]
    with pytest.raises(LoaderError, match="add a __getitem__"):
        DataLoader(OnlyMany(), sampler=range(8))


_LATE = """
import torch
from holdfast import DataLoader

class Where:
    def __len__(self):
        return 2
    def __getitem__(self, index):
        import multiprocessing
        return ["fork", "spawn"].index(multiprocessing.get_start_method())

if __name__ == "__main__":
    loaders = DataLoader(Where()), DataLoader(Where(), num_workers=1), DataLoader(Where(), num_workers="auto")
    torch.multiprocessing.set_start_method("spawn")
    print([batch.item() for batch in loaders[1]])
"""


def test_a_start_method_may_be_set_after_a_loader_was_made(tmp_path: Any) -> None:
    """As with torch, workers are started in the way that is set when they are started."""
    program = tmp_path / "late.py"
    program.write_text(_LATE)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[1, 1]", done.stderr
