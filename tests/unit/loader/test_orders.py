"""Orders and seeds.

What is promised to checkpoints, the statistics of chance, and what cannot be an order.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from holdfast.core.errors import LoaderError
from holdfast.loader.order.orders import LengthBucketed, Order, Sequential, Shuffled, permuted
from holdfast.loader.seeds import SampleSeeds, derive_seed, random_bits

_LENGTHS = np.clip(np.random.default_rng(0).lognormal(1.6, 0.6, 20_000), 0.5, 17)  # speech, seconds


def _whole(order: Order, epoch: int = 0, seed: int = 0) -> list[int]:
    return order.indices(seed, epoch, 0, len(order))


def _padding(order: Order, batch_size: int) -> float:
    """Return the share of the padded batches that is padding."""
    lengths = _LENGTHS[_whole(order)]
    batches = lengths[: len(lengths) // batch_size * batch_size].reshape(-1, batch_size)
    return 1 - float(batches.sum() / (batches.max(axis=1) * batch_size).sum())


def test_orders_are_the_same_on_every_machine() -> None:
    """The same promise, with seed and epoch."""
    assert Shuffled(10).indices(1, 2, 0, 10) == [6, 2, 0, 4, 9, 1, 7, 8, 3, 5]
    assert LengthBucketed([5, 1, 4, 2, 3, 6], window=4, group=2).indices(1, 2, 0, 6) == [
        3,
        2,
        0,
        5,
        1,
        4,
    ]


@pytest.mark.parametrize("n", [20, 4096, 4097, 10_000])
def test_permutations_have_the_statistics_of_chance(n: int) -> None:
    """Fixed points, ascents, successors and correlation of neighbours are as in uniformly random
    permutations.

    4097 is the smallest range that the network shuffles. Means are 1, (n - 1) / 2, (n - 1) / n and
    about 0; the variances 1, (n + 1) / 12, about 1 and 1 / n.
    """
    keys, x = 400, np.arange(n)
    made = np.array([permuted(x, n, key) for key in range(keys)])
    steps = np.diff(made, axis=1)
    centred = made - (n - 1) / 2
    neighbours = (centred[:, 1:] * centred[:, :-1]).sum(axis=1) / (centred**2).sum(axis=1)
    for seen, mean, variance in [
        ((made == x).sum(axis=1), 1.0, 1.0),
        ((steps > 0).sum(axis=1), (n - 1) / 2, (n + 1) / 12),
        ((steps == 1).sum(axis=1), (n - 1) / n, 1.0),
        (neighbours, -1 / n, 1 / n),
    ]:
        assert abs(seen.mean() - mean) < 4 * math.sqrt(variance / keys)
        assert 0.6 * variance < seen.var() < 1.5 * variance


@pytest.mark.parametrize("lengths", [[1.0, -1.0], [1.0, math.nan], [[1.0], [2.0]], ["a"]])
def test_lengths_without_a_meaning_are_refused(lengths: list[float]) -> None:
    """What is no number for each sample, finite and at least 0, is an H605."""
    with pytest.raises(LoaderError) as caught:
        LengthBucketed(lengths)
    assert caught.value.rule == "H605"


def test_buckets_save_most_padding() -> None:
    """Padding falls at least twentyfold at a batch size that divides a group, and fivefold at
    one that does not.
    """
    bucketed, shuffled = LengthBucketed(_LENGTHS), Shuffled(len(_LENGTHS))
    assert _padding(bucketed, 32) < _padding(shuffled, 32) / 20
    assert _padding(bucketed, 40) < _padding(shuffled, 40) / 5


def test_identities_tell_orders_apart_and_survive_json() -> None:
    """Whatever changes the order changes its identity, which is made of JSON values."""
    lengths = list(range(600))
    orders = [
        Sequential(600),
        Shuffled(600),
        Shuffled(601),
        LengthBucketed(lengths),
        LengthBucketed(lengths[::-1]),
        LengthBucketed(lengths, window=512),
        LengthBucketed(lengths, window=256, group=128),
    ]
    identities = [json.dumps(order.identity()) for order in orders]
    assert len(set(identities)) == len(orders)
    assert [json.loads(each) for each in identities] == [order.identity() for order in orders]
    assert (
        LengthBucketed(np.array(lengths, dtype=np.int16)).identity()
        == LengthBucketed(lengths).identity()
    )


def test_seeds_are_the_same_on_every_machine() -> None:
    """These numbers are part of the promise that a run resumes exactly under another version."""
    assert derive_seed(0, 3, 17) == 7844788038898977603
    assert derive_seed(1, 0, "order") == 5281409493250303880


def test_the_seeds_of_samples_are_outputs_of_splitmix() -> None:
    """As arrays compute them, from (seed, epoch).

    The first one is part of the promise of an exact resume too.
    """
    indices, seeds = [0, 3, 10**12, 2**63], SampleSeeds(5)
    for epoch in (0, 7):
        bits = random_bits(np.array(indices, dtype=np.uint64), derive_seed(5, epoch, "samples"))
        assert seeds.of_samples(epoch, indices) == (bits >> np.uint64(1)).tolist()
        many = [*range(50), 10**12, 2**64 - 1]
        assert seeds.of_samples(epoch, many) == [seeds.of_sample(epoch, index) for index in many]
        assert seeds.of_samples(epoch, [*many, -1, 2**64]) == [
            seeds.of_sample(epoch, index) for index in [*many, -1, 2**64]
        ]
    assert SampleSeeds(0).of_sample(3, 17) == 2563759855497273831
