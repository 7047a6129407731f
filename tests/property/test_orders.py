"""Orders: bijections whatever the size, the same however they are sliced, and shared out without
loss or doubling.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.loader.order.orders import (
    LengthBucketed,
    Order,
    Sequential,
    Shuffled,
    permuted,
)
from holdfast.loader.order.ranks import rank_positions, steps_left
from holdfast.loader.seeds import derive_seed

_FAST = settings(deadline=None, max_examples=60)
_SEEDS = st.integers(0, 2**63 - 1)
_PARTS = st.lists(
    st.one_of(st.integers(-(2**70), 2**70), st.text(max_size=5)), min_size=1, max_size=4
)


@st.composite
def _orders(draw: st.DrawFn) -> Order:
    """Return an order of any kind, of few samples or of more than two blocks."""
    length = draw(st.one_of(st.integers(1, 40), st.integers(4000, 9000)))
    lengths = np.random.default_rng(draw(st.integers(0, 9))).integers(0, 100, length)
    least = 1 if length <= 40 else 300
    bucketed = LengthBucketed(
        lengths, window=draw(st.integers(least, 1000)), group=draw(st.integers(1, 40))
    )
    return draw(st.sampled_from([Sequential(length), Shuffled(length), bucketed]))


@_FAST
@given(st.one_of(st.integers(1, 300), st.integers(4090, 20_000)), st.integers())
def test_a_permutation_has_each_value_once(n: int, key: int) -> None:
    """All positions together give the whole range, for any size and any key."""
    assert np.array_equal(np.sort(permuted(np.arange(n), n, key)), np.arange(n))


@_FAST
@given(st.integers(1, 2**62), st.integers(), st.data())
def test_values_of_any_range_are_inside_it_and_differ(
    n: int, key: int, data: st.DataObject
) -> None:
    """Any positions of a range up to 2**62 give as many different values of it, alone or
    together.
    """
    positions = np.array(
        data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=50, unique=True))
    )
    values = permuted(positions, n, key)
    assert len(set(values.tolist())) == len(positions)
    assert values.min() >= 0
    assert values.max() < n
    assert permuted(positions[-1:], n, key)[0] == values[-1]


@_FAST
@given(_orders(), _SEEDS, st.integers(0, 1000), st.data())
def test_slices_join(order: Order, seed: int, epoch: int, data: st.DataObject) -> None:
    """Whatever was asked before, two neighbouring stretches are the stretch that holds both."""
    places = st.integers(0, len(order))
    first, middle, last = sorted(data.draw(st.tuples(places, places, places)))
    whole = order.indices(seed, epoch, first, last)
    order.indices(seed, epoch + 1, 0, 5)
    assert (
        order.indices(seed, epoch, first, middle) + order.indices(seed, epoch, middle, last)
        == whole
    )
    assert len(whole) == last - first


@_FAST
@given(_orders(), _SEEDS, st.integers(0, 1000))
def test_an_order_has_each_sample_once(order: Order, seed: int, epoch: int) -> None:
    """An epoch is a permutation of the data set."""
    assert sorted(order.indices(seed, epoch, 0, len(order))) == list(range(len(order)))


@_FAST
@given(
    st.integers(20, 9000),
    _SEEDS,
    st.lists(st.integers(0, 10**6), min_size=2, max_size=5, unique=True),
)
def test_no_two_epochs_have_the_same_order(length: int, seed: int, epochs: list[int]) -> None:
    """Different epochs of one seed are shuffled and bucketed differently."""
    for order in (Shuffled(length), LengthBucketed(np.arange(length))):
        assert len({tuple(order.indices(seed, epoch, 0, length)) for epoch in epochs}) == len(
            epochs
        )


@_FAST
@given(
    st.integers(0, 200),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=9),
)
def test_each_position_belongs_to_one_rank_whatever_sizes_a_run_goes_on_with(
    count: int, sizes: list[tuple[int, int]]
) -> None:
    """With another batch size and world size at every step, no position is lost or taken twice."""
    position, taken, number = 0, Counter[int](), 0
    while position < count:
        batch_size, world_size = sizes[min(number, len(sizes) - 1)]
        steps = steps_left(position, count, batch_size, world_size)
        shares = [
            rank_positions(position, count, batch_size, rank, world_size)
            for rank in range(world_size)
        ]
        there = [share for share in shares if share]
        assert len(there) == world_size
        counts = {len(share) for share in there}
        assert max(counts) <= batch_size
        assert max(counts) - min(counts) <= 1
        # Fewer left: taken twice
        taken.update(place for share in there[: count - position] for place in share)
        position, number = position + min(batch_size * world_size, count - position), number + 1
        assert steps_left(position, count, batch_size, world_size) == steps - 1
    assert taken == Counter(range(count))
    assert rank_positions(position, count, 1, 0, 1) is None


@_FAST
@given(st.integers(0, 200), st.integers(1, 9), st.integers(1, 9))
def test_drop_last_leaves_out_the_step_that_is_not_full(
    count: int, batch_size: int, world_size: int
) -> None:
    """Every rank has full batches, as many as are counted, and at most one step's positions are
    left out.
    """
    position, steps = 0, 0
    while shares := [
        share
        for rank in range(world_size)
        if (share := rank_positions(position, count, batch_size, rank, world_size, drop_last=True))
    ]:
        assert [len(share) for share in shares] == [batch_size] * world_size
        position, steps = position + batch_size * world_size, steps + 1
    assert steps == steps_left(0, count, batch_size, world_size, drop_last=True)
    assert count - position < batch_size * world_size


@_FAST
@given(_PARTS, _PARTS)
def test_seeds_collide_only_for_equal_parts(first: list[object], second: list[object]) -> None:
    """A derived seed fits torch and numpy, is repeatable, and differs whenever the parts differ."""
    seed = derive_seed(*first)
    assert 0 <= seed < 2**63
    assert derive_seed(*first) == seed
    assert (derive_seed(*second) == seed) == (first == second)
