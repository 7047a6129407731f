"""The ladder: which remedy comes next, what it promises, and when more is tried again."""

from __future__ import annotations

import json

from holdfast.core.events.decisions import Decision, Grow, Recompute, Retry, Split, Stop
from holdfast.core.policy.policy import Policy
from holdfast.memory.ladder import MemoryLadder, Remedies, StepPlan

_BLOCKS = Remedies(recompute=("layers.0", "layers.1"))


def _ladder(*, largest: int | None = None, grow_after_steps: int = 3) -> MemoryLadder:
    return MemoryLadder(largest=largest, grow_after_steps=grow_after_steps)


def _fail(
    ladder: MemoryLadder, times: int, remedies: Remedies, *, batch_size: int = 8
) -> list[Decision]:
    """Return the decisions after so many out-of-memory errors within one step."""
    return [
        ladder.decide_after_oom(batch_size=batch_size, failures=number, remedies=remedies)
        for number in range(1, times + 1)
    ]


def _clean(ladder: MemoryLadder, steps: int, *, batch_size: int = 8) -> list[Decision | None]:
    return [ladder.decide_after_step(batch_size=batch_size, attempts=1) for _ in range(steps)]


def test_exact_remedies_come_before_inexact_ones() -> None:
    """The order is retry, recompute, halve, halve, ... and stop, each with its promise."""
    decisions = _fail(_ladder(), 6, _BLOCKS)
    assert [type(decision) for decision in decisions] == [
        Retry,
        Recompute,
        Split,
        Split,
        Split,
        Stop,
    ]
    assert [decision.promise for decision in decisions[:3]] == [
        "bit-exact",
        "bit-exact",
        "equal up to rounding",
    ]
    assert [d.micro_batch_size for d in decisions if isinstance(d, Split)] == [4, 2, 1]
    assert isinstance(decisions[1], Recompute)
    assert decisions[1].modules == _BLOCKS.recompute


def test_more_is_recomputed_before_anything_is_split() -> None:
    """As long as further modules help they are recomputed too.

    All of that is exact, and a split is not.
    """
    ladder = _ladder()
    found = [
        ladder.decide_after_oom(batch_size=8, failures=number, remedies=Remedies(recompute=names))
        for number, names in enumerate([(), ("a",), ("a", "b"), ("a", "b")], start=1)
    ]
    assert [type(decision) for decision in found] == [Retry, Recompute, Recompute, Split]
    assert ladder.plan == StepPlan(micro_batch_size=4, recompute=("a", "b"))


def test_a_batch_that_may_not_be_split_stops_with_the_reason() -> None:
    """After recompute failed too, the stop says why splitting was refused, and the plan is
    untouched.
    """
    ladder = _ladder()
    decisions = _fail(
        ladder, 3, Remedies(recompute=("layers.0",), no_split="the loss couples samples")
    )
    assert isinstance(decisions[-1], Stop)
    assert "the loss couples samples" in decisions[-1].reason
    assert ladder.plan.micro_batch_size is None


def test_a_size_is_tried_again_only_after_enough_clean_steps() -> None:
    """Growth comes at the very step that the policy names, not one earlier, and doubles."""
    ladder = _ladder(grow_after_steps=3)
    _fail(ladder, 3, Remedies())
    ladder.decide_after_step(batch_size=8, attempts=4)
    assert ladder.plan.micro_batch_size == 2
    found = _clean(ladder, 3)
    assert found[:2] == [None, None]
    assert found[2] == Grow(
        reason="3 clean steps", promise="equal up to rounding", micro_batch_size=4
    )
    assert ladder.plan.micro_batch_size == 4


def test_a_failed_trial_costs_one_attempt_and_doubles_the_wait() -> None:
    """The size that is known to fit comes back at once, without the retry, and the next trial is
    later.
    """
    ladder = _ladder(grow_after_steps=2)
    _fail(ladder, 2, Remedies())
    ladder.decide_after_step(batch_size=8, attempts=3)
    waits = []
    for _ in range(3):
        steps = 0
        while ladder.plan.micro_batch_size == 4:
            ladder.decide_after_step(batch_size=8, attempts=1)
            steps += 1
        waits.append(steps)
        (decision,) = _fail(ladder, 1, Remedies())
        assert decision == Split(
            reason="the larger plan on trial does not fit",
            promise="equal up to rounding",
            micro_batch_size=4,
        )
        ladder.decide_after_step(batch_size=8, attempts=2)
    assert waits == [2, 4, 8]


def test_a_split_that_is_not_allowed_is_taken_back() -> None:
    """After `without_split` the plan is the whole batch, keeps recomputation, and no fallback
    brings parts back.
    """
    ladder = _ladder(grow_after_steps=1)
    _fail(ladder, 3, _BLOCKS)
    ladder.decide_after_step(batch_size=8, attempts=4)
    ladder.decide_after_step(batch_size=8, attempts=1)
    ladder.without_split()
    assert ladder.plan == StepPlan(micro_batch_size=None, recompute=_BLOCKS.recompute)
    assert ladder.state_dict()["fallback"] is None
    decisions = _fail(ladder, 2, Remedies(recompute=_BLOCKS.recompute, no_split="not this loss"))
    assert [type(decision) for decision in decisions] == [Retry, Stop]


def test_a_failed_trial_does_not_bring_back_a_split_that_is_not_allowed() -> None:
    """A resumed run may find out only after a failed trial that its loss couples samples."""
    ladder = _ladder(grow_after_steps=1)
    _fail(ladder, 2, Remedies())
    for attempts in (3, 1):
        ladder.decide_after_step(batch_size=8, attempts=attempts)
    assert ladder.on_trial

    (decision,) = _fail(ladder, 1, Remedies(no_split="this loss couples samples"))

    assert isinstance(decision, Stop)


def test_a_lower_limit_wins_over_the_saved_plan() -> None:
    """A run that is continued with a smaller micro-batch in its policy keeps to it at once."""
    old = _ladder(grow_after_steps=1)
    _fail(old, 2, Remedies(), batch_size=32)
    old.decide_after_step(batch_size=32, attempts=3)
    old.decide_after_step(batch_size=32, attempts=1)  # a trial is under way: fallback 16
    new = _ladder(largest=4)
    new.load_state_dict(json.loads(json.dumps(old.state_dict())))
    assert new.plan.micro_batch_size == 4
    decision = new.decide_after_oom(batch_size=32, failures=1, remedies=Remedies())
    assert isinstance(decision, Split)
    assert decision.micro_batch_size == 4


def test_a_short_last_batch_confirms_no_trial() -> None:
    """Epochs that end with a short batch do not make the ladder try in vain again and again."""
    ladder = MemoryLadder(largest=None, grow_after_steps=4)
    failures = 0
    for batch_size in ([64] * 5 + [8]) * 400:
        attempts = 1
        while ladder.plan.samples(batch_size) > 8:
            ladder.decide_after_oom(batch_size=batch_size, failures=attempts, remedies=Remedies())
            failures, attempts = failures + 1, attempts + 1
        ladder.decide_after_step(batch_size=batch_size, attempts=attempts)
    assert failures < 30


def test_a_forecast_is_where_it_starts() -> None:
    """It begins with the size and the recomputation of the forecast, and grows.

    Recomputation stays.
    """
    policy = Policy(forecast_micro_batch_size=2, recompute=("layers.0",), grow_after_steps=3)
    ladder = MemoryLadder.of(policy)
    assert ladder.plan == StepPlan(micro_batch_size=2, recompute=("layers.0",))
    (grown,) = [decision for decision in _clean(ladder, 3) if decision is not None]
    assert isinstance(grown, Grow)
    assert ladder.plan == StepPlan(micro_batch_size=4, recompute=("layers.0",))
    _clean(ladder, 8)
    assert ladder.plan == StepPlan(micro_batch_size=None, recompute=("layers.0",))
    assert _clean(ladder, 50)[-1] is None
