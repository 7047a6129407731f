"""Seeds and orders: permutations that depend on their inputs and on nothing else."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.data.seeds import derive_seed, shuffled

_FAST = settings(deadline=None, max_examples=60)
_SEEDS = st.integers(0, 2**63 - 1)
_PARTS = st.lists(st.one_of(st.integers(-(2**70), 2**70), st.text(max_size=5)), min_size=1, max_size=4)


@_FAST
@given(st.integers(0, 300), _SEEDS, st.integers(0, 1000), st.integers())
def test_an_order_is_a_permutation_that_depends_on_seed_and_epoch_only(
    length: int, seed: int, epoch: int, noise: int
) -> None:
    """Each index occurs once, and whatever was drawn before makes no difference to it nor it to what follows."""
    torch.manual_seed(noise % 2**63)
    random.seed(noise)
    before = torch.get_rng_state()
    order = shuffled(length, seed, epoch)
    assert sorted(order) == list(range(length))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert shuffled(length, seed, epoch) == order


@_FAST
@given(st.integers(20, 200), _SEEDS, st.lists(st.integers(0, 10**6), min_size=2, max_size=5, unique=True))
def test_no_two_epochs_have_the_same_order(length: int, seed: int, epochs: list[int]) -> None:
    """Different epochs of one seed are shuffled differently."""
    assert len({tuple(shuffled(length, seed, epoch)) for epoch in epochs}) == len(epochs)


@_FAST
@given(_PARTS, _PARTS)
def test_seeds_collide_only_for_equal_parts(first: list[object], second: list[object]) -> None:
    """A derived seed fits torch and numpy, is repeatable, and differs whenever the parts differ."""
    seed = derive_seed(*first)
    assert 0 <= seed < 2**63
    assert derive_seed(*first) == seed
    assert (derive_seed(*second) == seed) == (first == second)
