"""Orders: what is promised to checkpoints, the statistics of chance, and what cannot be an order."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter

import numpy as np
import pytest
import torch

from holdfast.core.errors import LoaderError
from holdfast.loader.order.orders import (
    LengthBucketed,
    Order,
    Sequential,
    Shuffled,
    TokenBatches,
    Weighted,
)
from holdfast.loader.order.permutation import permuted
from holdfast.loader.order.ranks import rank_positions
from holdfast.loader.seeds import random_bits

_LENGTHS = np.clip(np.random.default_rng(0).lognormal(1.6, 0.6, 20_000), 0.5, 17)  # speech, seconds


def _whole(order: Order, epoch: int = 0, seed: int = 0) -> list[int]:
    return order.indices(seed, epoch, 0, len(order))


def _padding(order: Order, batch_size: int) -> float:
    """Return the share of the padded batches that is padding."""
    lengths = _LENGTHS[_whole(order)]
    batches = lengths[: len(lengths) // batch_size * batch_size].reshape(-1, batch_size)
    return 1 - float(batches.sum() / (batches.max(axis=1) * batch_size).sum())


def _chi_square(counts: list[int], expected: float) -> float:
    return sum((count - expected) ** 2 / expected for count in counts)


def _limit(freedom: int) -> float:
    """Return what chi-square passes once in 30,000 times: its mean and 4 deviations (Wilson and Hilferty, 1931)."""
    return freedom * (1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))) ** 3


def test_the_hash_is_splitmix64() -> None:
    """The outputs for the seed 1234567 are those that other implementations publish."""
    assert random_bits(np.arange(5, dtype=np.uint64), 1234567).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_permutations_are_the_same_on_every_machine() -> None:
    """These numbers are part of the promise that a position in a checkpoint means the same sample."""
    assert permuted(np.arange(8), 8, 1).tolist() == [4, 3, 7, 0, 1, 5, 6, 2]
    assert permuted(np.arange(4), 50_000_000, 2).tolist() == [31931779, 35050689, 11998094, 11268153]
    assert permuted(np.array([0, 2**62 - 1]), 2**62, 3).tolist() == [3384233096042334748, 1420770011704519321]


def test_orders_are_the_same_on_every_machine() -> None:
    """The same promise, with seed and epoch."""
    assert Shuffled(10).indices(1, 2, 0, 10) == [6, 2, 0, 4, 9, 1, 7, 8, 3, 5]
    assert Weighted([1, 2, 3, 0]).indices(1, 2, 0, 4) == [0, 2, 0, 0]
    assert LengthBucketed([5, 1, 4, 2, 3, 6], window=4, group=2).indices(1, 2, 0, 6) == [3, 2, 0, 5, 1, 4]


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_orders_of_few_samples_are_equally_likely(n: int) -> None:
    """Over many keys each permutation of a small range occurs about as often as any other."""
    keys = 200 * math.factorial(n)
    counts = Counter(tuple(permuted(np.arange(n), n, key).tolist()) for key in range(keys))
    assert _chi_square([counts[each] for each in itertools.permutations(range(n))], 200) < _limit(
        math.factorial(n) - 1
    )


@pytest.mark.parametrize("n", [20, 4096, 4097, 10_000])
def test_permutations_have_the_statistics_of_chance(n: int) -> None:
    """Fixed points, ascents, successors and correlation of neighbours are as in uniformly random permutations.

    4097 is the smallest range that the network shuffles. Means are 1, (n - 1) / 2, (n - 1) / n and about 0; the
    variances 1, (n + 1) / 12, about 1 and 1 / n.
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


@pytest.mark.parametrize("n", [16, 5000])
def test_each_value_is_at_a_place_equally_often(n: int) -> None:
    """Over many keys, what is at the first, a middle and the last place is spread evenly over the range."""
    places = np.array([0, n // 2, n - 1])
    found = np.array([permuted(places, n, key) for key in range(3200)])
    for column in found.T:
        counts = np.bincount(column * 16 // n, minlength=16).tolist()
        assert _chi_square(counts, 200) < _limit(15)


def test_the_middle_of_a_huge_epoch_makes_no_list_of_it() -> None:
    """A range of 2**62 positions, of which no list could be made, is read at its end."""
    order = Shuffled(2**62)
    found = order.indices(0, 0, 2**62 - 40, 2**62)
    assert len(set(found)) == 40
    assert order.indices(0, 0, 2**62 - 5, 2**63) == found[-5:]


def test_weights_are_the_frequencies() -> None:
    """Samples are drawn in proportion to their weights, and one of weight zero never."""
    drawn = Counter(_whole(Weighted([0, 1, 2, 0, 5, 0], num_samples=80_000)))
    assert set(drawn) == {1, 2, 4}
    expected = {1: 10_000, 2: 20_000, 4: 50_000}
    assert sum((drawn[index] - count) ** 2 / count for index, count in expected.items()) < _limit(2)


def test_weights_so_small_that_products_round_up_draw_no_sample_of_weight_zero() -> None:
    """With subnormal sums a draw may round up to the sum, and is still a sample that has a weight."""
    assert set(_whole(Weighted([0.0, 5e-324, 0.0], num_samples=1000))) == {1}


def test_weights_may_be_a_tensor() -> None:
    """Torch's weights, numpy's and python's give the same order and the same identity."""
    orders = [Weighted(torch.tensor([1.0, 3.0])), Weighted(np.array([1, 3])), Weighted([1, 3])]
    assert len({json.dumps([order.identity(), _whole(order)]) for order in orders}) == 1


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([], "0 weights"),
        ([0.0, 0.0], "sum of 0"),
        ([1.0, -1.0], r"weights\[1\]=-1.0 and 0 others"),
        ([1.0, math.nan, math.inf], r"weights\[1\]=nan and 1 others"),
        ([1e308, 1e308], "sum of inf"),
        ([[1.0], [2.0]], r"shape \(2, 1\)"),
        ([[1.0], [2.0, 3.0]], "no array"),
        (["a"], "type <U1"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_weights_without_a_meaning_are_refused(weights: list[float], said: str) -> None:
    """Each wrong list of weights is an error that names the value, and the rule."""
    with pytest.raises(LoaderError, match=said) as caught:
        Weighted(weights)
    assert caught.value.rule == "H605"


@pytest.mark.parametrize("sizes", [{"group": 0}, {"group": -4}, {"window": 0}])
def test_windows_and_groups_without_a_position_are_refused(sizes: dict[str, int]) -> None:
    """A window or a group of no positions is an error."""
    with pytest.raises(LoaderError, match="at least 1") as caught:
        LengthBucketed([1, 2, 3], **sizes)
    assert caught.value.rule == "H605"


def test_buckets_save_most_padding() -> None:
    """Padding falls at least twentyfold at a batch size that divides a group, and fivefold at one that does not."""
    bucketed, shuffled = LengthBucketed(_LENGTHS), Shuffled(len(_LENGTHS))
    assert _padding(bucketed, 32) < _padding(shuffled, 32) / 20
    assert _padding(bucketed, 40) < _padding(shuffled, 40) / 5


def test_buckets_make_no_long_ramp() -> None:
    """Mean lengths of groups that follow one another are unrelated, though each window was sorted."""
    means = _LENGTHS[_whole(LengthBucketed(_LENGTHS))][:19_968].reshape(-1, 256).mean(axis=1)
    assert abs(np.corrcoef(means[1:], means[:-1])[0, 1]) < 4 / math.sqrt(len(means))


def test_samples_meet_others_in_the_next_epoch() -> None:
    """Of the pairs that share a batch of 32 in one epoch, less than a quarter share one in the next."""
    for samples in (300, 2000, 20_000):
        order = LengthBucketed(_LENGTHS[:samples])
        first, second = (np.argsort(_whole(order, epoch)) // 32 for epoch in (0, 1))
        pairs = [
            (a, b)
            for batch in range(samples // 32)
            for a, b in itertools.combinations(np.flatnonzero(first == batch), 2)
        ]
        assert np.mean([second[a] == second[b] for a, b in pairs]) < 0.25


def test_lengths_are_copied() -> None:
    """Lengths that are changed after the order was made do not change it."""
    lengths = np.arange(10)
    order = LengthBucketed(lengths, window=10, group=5)
    before = (_whole(order), order.identity())
    lengths[:] = 0
    assert (_whole(order, epoch=1), _whole(order), order.identity())[1:] == before


def test_identities_tell_orders_apart_and_survive_json() -> None:
    """Whatever changes the order changes its identity, which is made of JSON values."""
    lengths = list(range(600))
    orders = [
        Sequential(600),
        Shuffled(600),
        Shuffled(601),
        Weighted([1.0] * 600),
        Weighted([1.0] * 599 + [2.0]),
        Weighted([1.0] * 600, num_samples=5),
        LengthBucketed(lengths),
        LengthBucketed(lengths[::-1]),
        LengthBucketed(lengths, window=512),
        LengthBucketed(lengths, window=256, group=128),
    ]
    identities = [json.dumps(order.identity()) for order in orders]
    assert len(set(identities)) == len(orders)
    assert [json.loads(each) for each in identities] == [order.identity() for order in orders]
    assert LengthBucketed(np.array(lengths, dtype=np.int16)).identity() == LengthBucketed(lengths).identity()


def test_a_sample_longer_than_the_limit_is_refused() -> None:
    """No batch could hold it, and the error names it."""
    with pytest.raises(LoaderError, match="sample 2 has a length of 9") as caught:
        TokenBatches(LengthBucketed([1, 2, 9, 3]), max_tokens=8)
    assert caught.value.rule == "H606"
    with pytest.raises(LoaderError, match="max_samples=0"):
        TokenBatches(LengthBucketed([1]), max_tokens=8, max_samples=0)


def test_batches_of_tokens_are_as_large_as_they_can_be() -> None:
    """Every batch but the last would break a limit with one sample more."""
    order = LengthBucketed(_LENGTHS[:3000])
    batches = TokenBatches(order, max_tokens=200, max_samples=60)
    start = 0
    while start < len(order):
        stop = batches.stop(0, 0, start)
        lengths = _LENGTHS[order.indices(0, 0, start, stop + 1)]
        assert len(lengths[: stop - start]) * lengths[: stop - start].max() <= 200
        assert stop == len(order) or stop - start == 60 or len(lengths) * lengths.max() > 200
        start = stop


def test_a_rank_without_a_sample_of_its_own_repeats_one_and_says_so() -> None:
    """Two samples for five ranks: each rank makes the step, three with a sample that another has."""
    shares = [rank_positions(98, 100, 4, rank, 5) for rank in range(5)]
    assert [(list(share.positions), share.repeated) for share in shares if share] == [
        ([98], False),
        ([99], False),
        ([98], True),
        ([99], True),
        ([98], True),
    ]
