"""The ladder against an adversary: it always finds a plan that fits, and it does not thrash."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.events.decisions import Decision, Stop
from holdfast.memory.ladder import MemoryLadder, Remedies, StepPlan

_SETTINGS = settings(deadline=None, max_examples=80)


@dataclass(frozen=True)
class Device:
    """What fits: so many samples in one pass, and more of them with recomputation."""

    plain: int
    recomputed: int
    blocks: bool
    smallest: int

    def fits(self, plan: StepPlan, batch_size: int) -> bool:
        return plan.samples(batch_size) <= (self.recomputed if plan.recompute else self.plain)

    def remedies(self) -> Remedies:
        return Remedies(recompute=("block",) if self.blocks else (), smallest=self.smallest)

    def has_room(self, batch_size: int) -> bool:
        best = self.recomputed if self.blocks else self.plain
        return best >= min(self.smallest, batch_size)


@st.composite
def _devices(draw: st.DrawFn) -> Device:
    plain = draw(st.integers(0, 70))
    return Device(
        plain, plain + draw(st.integers(0, 70)), draw(st.booleans()), draw(st.integers(1, 4))
    )


_LARGEST = st.none() | st.integers(1, 80)


def _step(ladder: MemoryLadder, device: Device, batch_size: int) -> tuple[list[Decision], bool]:
    """Run one step; return the decisions about its failures, and whether it was committed."""
    decisions: list[Decision] = []
    attempts = 1
    while not device.fits(ladder.plan, batch_size):
        decisions.append(
            ladder.decide_after_oom(
                batch_size=batch_size, failures=attempts, remedies=device.remedies()
            )
        )
        if isinstance(decisions[-1], Stop):
            return decisions, False
        attempts += 1
        assert attempts < 50, "the step never ends"
    ladder.decide_after_step(batch_size=batch_size, attempts=attempts)
    return decisions, True


@_SETTINGS
@given(
    _devices(), _LARGEST, st.lists(st.integers(1, 64), min_size=1, max_size=60), st.integers(1, 5)
)
def test_a_step_ends_at_a_plan_that_fits_if_there_is_one(
    device: Device, largest: int | None, batch_sizes: list[int], grow_after_steps: int
) -> None:
    """Whatever fits, and however batch sizes change, a step stops only where nothing can fit."""
    ladder = MemoryLadder(largest=largest, grow_after_steps=grow_after_steps)
    for size in batch_sizes:
        decisions, committed = _step(ladder, device, size)
        assert largest is None or (ladder.plan.micro_batch_size or largest + 1) <= largest
        assert len(decisions) <= 4 + math.ceil(math.log2(64))
        if not committed:
            assert not device.has_room(size)
            return
        assert device.fits(ladder.plan, size) or ladder.state_dict()["fallback"] is not None


@_SETTINGS
@given(_devices(), _LARGEST, st.integers(1, 64), st.integers(1, 6))
def test_failed_attempts_are_few(
    device: Device, largest: int | None, batch_size: int, grow_after_steps: int
) -> None:
    """Over 600 steps the attempts that fail grow with the logarithm of the steps, up to the
    longest wait.
    """
    steps = 600
    ladder = MemoryLadder(largest=largest, grow_after_steps=grow_after_steps)
    failed = 0
    for _ in range(steps):
        decisions, committed = _step(ladder, device, batch_size)
        failed += len(decisions)
        if not committed:
            return
    descent = 3 + math.ceil(math.log2(batch_size))
    trials = min(7, math.log2(steps / grow_after_steps + 1)) + steps / (64 * grow_after_steps)
    assert failed <= descent + math.ceil(trials) + 1


@_SETTINGS
@given(_devices(), st.integers(1, 64), st.integers(1, 6))
def test_more_memory_is_used_again(device: Device, batch_size: int, grow_after_steps: int) -> None:
    """When the device has room again, the plan comes back to the whole batch without
    recomputation.
    """
    ladder = MemoryLadder(largest=None, grow_after_steps=grow_after_steps)
    if not _step(ladder, device, batch_size)[1]:
        return
    roomy = Device(1000, 1000, device.blocks, device.smallest)
    for _ in range(20 * grow_after_steps):
        decisions, committed = _step(ladder, roomy, batch_size)
        assert committed
        assert decisions == []
    assert ladder.plan.samples(batch_size) == batch_size
    assert not ladder.plan.recompute


@_SETTINGS
@given(_devices(), _LARGEST, st.integers(1, 64), st.integers(1, 4), st.integers(0, 40))
def test_the_state_goes_through_json_at_any_step(
    device: Device, largest: int | None, batch_size: int, grow_after_steps: int, saved_after: int
) -> None:
    """A ladder that was saved, written as JSON and loaded decides as the one that went on."""
    ladder = MemoryLadder(largest=largest, grow_after_steps=grow_after_steps)
    for _ in range(saved_after):
        if not _step(ladder, device, batch_size)[1]:
            return
    twin = MemoryLadder(largest=largest, grow_after_steps=grow_after_steps)
    twin.load_state_dict(json.loads(json.dumps(ladder.state_dict())))
    for _ in range(40):
        assert _step(twin, device, batch_size) == _step(ladder, device, batch_size)
        assert twin.plan == ladder.plan
