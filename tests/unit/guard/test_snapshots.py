"""Copies of good states in host memory: when they are made, what they hold, and when they are given up."""

from __future__ import annotations

import collections

import torch

from holdfast.guard.saving.snapshots import Snapshots
from holdfast.guard.state.trees import copied_to_host
from holdfast.testing import FakeClock


def snapshots(interval: int | None = 10, available: int | None = None, clock: FakeClock | None = None) -> Snapshots:
    return Snapshots(interval, clock or FakeClock(), lambda: available)


def test_a_copy_shares_nothing_with_the_live_state_and_has_its_types() -> None:
    """Training on changes no copy, and what a rollback puts back goes on counting as it did."""
    weight, counts, history = torch.ones(3), collections.defaultdict(int, a=1), [1.0]
    copy = copied_to_host({"weight": weight, "counts": counts, "seen": (1, collections.Counter("aab"), history)})
    weight.fill_(7.0)
    counts["a"] += 1
    history.append(2.0)
    copy["counts"]["new"] += 1
    assert copy.pop("weight").tolist() == [1.0, 1.0, 1.0]
    assert copy == {"counts": {"a": 1, "new": 1}, "seen": (1, collections.Counter("aab"), [1.0])}
    assert type(copy["seen"][1]) is collections.Counter


def test_a_copy_that_fails_is_tried_again_and_costs_none_that_is_there() -> None:
    """A few times in a row; then no more are made."""
    kept = snapshots(10)
    kept.keep(10, {"step": 10})
    for step in (20, 30):
        kept.failed(step)
        assert not kept.is_due(step + 9)
        assert kept.is_due(step + 10)
    assert kept.newest(before_step=100) is not None
    kept.failed(40)
    assert not kept.is_due(1000)


def test_a_state_that_takes_too_much_of_the_memory_is_not_copied() -> None:
    """What would take more than a quarter of the available memory is left alone, and not asked for again."""
    state = {"weight": torch.zeros(2**21)}
    assert snapshots(available=2**25 + 1).keep(10, state)
    tight = snapshots(available=2**25 - 1)
    assert not tight.keep(10, state)
    assert not tight.is_due(20)
