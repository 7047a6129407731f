"""Seeds: they depend on (seed, epoch, index) and on nothing else."""

from __future__ import annotations

import numpy as np
import torch

from holdfast.data.seeds import SampleSeeds, derive_seed


def test_seeds_are_the_same_on_every_machine() -> None:
    """These numbers are part of the promise that a run resumes exactly under another version."""
    assert derive_seed(0, 3, 17) == 7844788038898977603
    assert derive_seed(1, 0, "order") == 5281409493250303880


def test_numpy_and_torch_integers_seed_like_python_ones() -> None:
    """An index that came out of an array gives the same sample as the plain number."""
    assert derive_seed(0, np.int64(3), torch.tensor(17)) == derive_seed(0, 3, 17)


def test_text_and_numbers_do_not_collide() -> None:
    """The parts are told apart: neither their kind nor their border is lost."""
    seeds = {derive_seed(*parts) for parts in [(1, 23), (12, 3), (1, 2, 3), (123,), ("1", 23), ("1/23",)]}
    assert len(seeds) == 6


def test_the_seeds_of_samples_are_derived_seeds() -> None:
    """The quick way to a sample's seed gives what `derive_seed` gives, for any kind of index."""
    seeds = SampleSeeds(5)
    for epoch, index in [(0, 3), (0, 10**12), (7, -1), (7, "a/b"), (0, np.int64(3)), (1, (2, "x")), (0, True)]:
        assert seeds.of(epoch, index) == derive_seed(5, epoch, index)
