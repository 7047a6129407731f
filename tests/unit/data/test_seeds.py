"""Seeds: they depend on (seed, epoch, index) and on nothing else."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from holdfast.data.random_state import capture
from holdfast.data.seeds import SeededDataset, derive_seed, shuffled


class Noise:
    """A dataset that draws from all three generators."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))


class BatchedNoise(Noise):
    def __getitems__(self, indices: list[int]) -> list[tuple[int, float, float, float]]:
        return [self[index] for index in indices]


def test_seeds_are_the_same_on_every_machine() -> None:
    """These numbers are part of the promise that a run resumes exactly under another version."""
    assert derive_seed(0, 3, 17) == 7844788038898977603
    assert derive_seed(1, 0, "order") == 5281409493250303880
    assert shuffled(8, seed=1, epoch=0) == [5, 1, 7, 6, 2, 0, 3, 4]


def test_numpy_and_torch_integers_seed_like_python_ones() -> None:
    """An index that came out of an array gives the same sample as the plain number."""
    assert derive_seed(0, np.int64(3), torch.tensor(17)) == derive_seed(0, 3, 17)


def test_text_and_numbers_do_not_collide() -> None:
    """The parts are told apart: neither their kind nor their border is lost."""
    seeds = {derive_seed(*parts) for parts in [(1, 23), (12, 3), (1, 2, 3), (123,), ("1", 23), ("1/23",)]}
    assert len(seeds) == 6


def test_samples_do_not_depend_on_their_neighbours() -> None:
    """A sample is the same alone, in a batch, and at another place of it."""
    dataset = SeededDataset(Noise(), seed=5)
    batch = dataset.__getitems__([(2, 7), (2, 1), (2, 3)])
    assert dataset[2, 1] == batch[1]
    assert dataset.__getitems__([(2, 3), (2, 7)]) == [batch[2], batch[0]]


def test_samples_differ_between_epochs_seeds_and_indices() -> None:
    """Augmentation is drawn anew for each epoch, each sample and each seed."""
    draws = {
        SeededDataset(Noise(), seed)[epoch, index][1:] for seed in (0, 1) for epoch in (0, 1) for index in (0, 1)
    }
    assert len(draws) == 8
    assert all(len({draw[place] for draw in draws}) == 8 for place in range(3))


def test_loading_leaves_the_random_state_of_training_alone() -> None:
    """In the main process nothing is drawn from the global generators, also when a sample fails."""

    class Broken(Noise):
        def __getitem__(self, index: int) -> tuple[int, float, float, float]:
            super().__getitem__(index)
            raise LookupError("broken sample")

    before = capture()
    SeededDataset(Noise(), 0).__getitems__([(0, 1), (0, 2)])
    with pytest.raises(LookupError):
        SeededDataset(Broken(), 0)[0, 1]
    after = capture()
    assert after.python == before.python
    assert np.array_equal(after.numpy[1], before.numpy[1])
    assert after.numpy[2:] == before.numpy[2:]
    assert torch.equal(after.cpu, before.cpu)


def test_a_dataset_that_reads_batches_is_still_seeded_for_each_sample() -> None:
    """Subset and others with ``__getitems__`` give the same samples as any dataset, whatever the batch."""
    dataset = SeededDataset(BatchedNoise(), seed=5)
    plain = SeededDataset(Noise(), seed=5)
    assert dataset.__getitems__([(0, 4), (0, 2)]) == [plain[0, 4], plain[0, 2]]
    subset = SeededDataset(Subset(BatchedNoise(), [9, 8, 7]), seed=5)  # type: ignore[arg-type]
    assert subset.__getitems__([(0, 1), (0, 2)]) == [subset[0, 1], subset[0, 2]]
    assert [sample[0] for sample in subset.__getitems__([(0, 1), (0, 2)])] == [8, 7]
