"""Seeds: they depend on (seed, epoch, index) and on nothing else."""

from __future__ import annotations

import numpy as np
import torch

from holdfast.loader.seeds import SampleSeeds, derive_seed, random_bits


def test_seeds_are_the_same_on_every_machine() -> None:
    """These numbers are part of the promise that a run resumes exactly under another version."""
    assert derive_seed(0, 3, 17) == 7844788038898977603
    assert derive_seed(1, 0, "order") == 5281409493250303880


def test_the_seeds_of_samples_are_outputs_of_splitmix() -> None:
    """As arrays compute them, from (seed, epoch); the first one is part of the promise of an exact resume too."""
    indices, seeds = [0, 3, 10**12, 2**63], SampleSeeds(5)
    for epoch in (0, 7):
        bits = random_bits(np.array(indices, dtype=np.uint64), derive_seed(5, epoch, "samples"))
        assert seeds.all(epoch, indices) == (bits >> np.uint64(1)).tolist()
        many = [*range(50), 10**12, 2**64 - 1]
        assert seeds.all(epoch, many) == [seeds.of(epoch, index) for index in many]
        assert seeds.all(epoch, [*many, -1, 2**64]) == [seeds.of(epoch, index) for index in [*many, -1, 2**64]]
    assert SampleSeeds(0).of(3, 17) == 2563759855497273831


def test_each_kind_of_index_has_a_seed() -> None:
    """Numbers from arrays seed as plain ones; text and tuples, which have no number, as their own derived seeds."""
    seeds = SampleSeeds(5)
    assert seeds.all(0, [np.int64(3), torch.tensor(3), True]) == [seeds.of(0, 3), seeds.of(0, 3), seeds.of(0, 1)]
    assert seeds.all(7, ["a/b", (2, "x")]) == [derive_seed(5, 7, "a/b"), derive_seed(5, 7, (2, "x"))]
    assert 0 <= seeds.of(0, -1) < 2**63 != seeds.of(0, 0)
