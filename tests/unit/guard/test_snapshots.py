"""Copies of good states in host memory.

When they are made, what they hold, and when they are given up.
"""

from __future__ import annotations

import collections

import torch

from holdfast.guard.saving.snapshots import Snapshots
from holdfast.guard.state.trees import copied_to_host
from holdfast.testing import FakeClock


def snapshots(
    interval: int | None = 10, available: int | None = None, clock: FakeClock | None = None
) -> Snapshots:
    return Snapshots(interval, clock or FakeClock(), lambda: available)


def test_a_copy_shares_nothing_with_the_live_state_and_has_its_types() -> None:
    """Training on changes no copy, and what a rollback puts back goes on counting as it did."""
    weight, counts, history = torch.ones(3), collections.defaultdict(int, a=1), [1.0]
    copy = copied_to_host(
        {"weight": weight, "counts": counts, "seen": (1, collections.Counter("aab"), history)}
    )
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
    kept.take(10, lambda: {"step": 10})
    for step in (20, 30):
        kept.failed(step)
        assert not kept.is_due(step + 9)
        assert kept.is_due(step + 10)
    assert kept.newest(before_step=100) is not None
    kept.failed(40)
    assert not kept.is_due(1000)


def test_a_state_that_takes_too_much_of_the_memory_is_not_copied() -> None:
    """What would take more than a quarter of the available memory is left alone, and not asked
    for again.
    """
    state = {"weight": torch.zeros(2**23)}
    assert snapshots(available=2**27 + 1).take(10, lambda: state)
    tight = snapshots(available=2**27 - 1)
    assert not tight.take(10, lambda: state)
    assert not tight.is_due(20)


def test_a_copy_waits_until_the_last_one_is_a_hundredth_of_the_time() -> None:
    """However many steps that takes.

    A small model makes a hundred of them in a tenth of a second.
    """
    clock = FakeClock()
    kept = snapshots(10, clock=clock)

    def read() -> dict[str, int]:
        clock.advance(0.5)
        return {"step": 10}

    assert kept.take(10, read)
    clock.advance(49.0)
    assert not kept.is_due(20)
    clock.advance(2.0)
    assert kept.is_due(21)
    assert not kept.is_due(19)


def test_a_state_that_is_not_good_is_not_copied() -> None:
    """It is asked for again an interval later, and those that are there stay."""
    kept = snapshots(10)
    kept.take(10, lambda: {"step": 10})
    assert kept.take(20, lambda: None)
    newest = kept.newest(100)
    assert newest is not None
    assert newest.global_step == 10
    assert not kept.is_due(29)
    assert kept.is_due(30)
