"""Micro-batches whose gradients add up, edited from a trace with one.

Against the same step played with several.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.unit.forecast.made_steps import Layer, make_step

from holdfast.forecast.allocator.replay import replay
from holdfast.forecast.trace.accumulation import with_accumulation
from holdfast.forecast.trace.events import (
    OWNERS,
    PHASES,
    Trace,
    live_bytes,
    live_peak,
    repeat_steps,
)

BLOCKS = [
    (Layer("linear", 4096), Layer("relu", 4096)),
    (Layer("linear", 2048), Layer("dropout", 2048)),
]
GRADIENTS = OWNERS.index("gradients")
LOSS_BYTES = 4


def gradient_bytes(trace: Trace) -> int:
    return int(
        trace.size_bytes[list(trace.resident)][trace.owner[list(trace.resident)] == GRADIENTS].sum()
    )


def live_of(trace: Trace, owner: str) -> np.ndarray:
    """Return how many bytes of an owner live after each event."""
    events, sizes = repeat_steps(trace, 1)
    storage = np.abs(events) - 1
    return np.cumsum(
        np.where(trace.owner[storage] == OWNERS.index(owner), np.sign(events) * sizes[storage], 0)
    )


def test_the_gradients_of_the_first_micro_batch_live_while_the_second_runs():
    """Beside the gradients of the first, the second has as many activations as it, and the
    first's loss waits.
    """
    trace = make_step(BLOCKS, 4, optimizer_bytes=1000)
    both = with_accumulation(trace, 8)
    assert live_peak(both) > live_peak(trace)
    assert live_of(both, "gradients")[len(repeat_steps(both, 1)[0]) // 2 :].max() >= gradient_bytes(
        trace
    )
    assert live_of(both, "activations").max() == live_of(trace, "activations").max() + LOSS_BYTES


def with_batch(trace: Trace, dies: int) -> Trace:
    """Return the step with a batch of 1000 bytes, made at its beginning and freed before an
    event.
    """
    batch = len(trace.size_bytes)
    one = lambda array, value: np.append(array, np.array([value], dtype=array.dtype))  # noqa: E731

    def later(at: int) -> int:
        return at + 1 + (at > dies)

    return replace(
        trace,
        events=np.insert(trace.events, [0, dies], [batch + 1, -batch - 1]).astype(np.int32),
        event_phase=np.insert(
            trace.event_phase, [0, dies], [0, trace.event_phase[dies - 1]]
        ).astype(np.int8),
        operation_event=np.array([later(at) for at in trace.operation_event], dtype=np.int32),
        optimizer_steps=tuple((later(begin), later(end)) for begin, end in trace.optimizer_steps),
        size_bytes=one(trace.size_bytes, 1000),
        owner=one(trace.owner, OWNERS.index("batch")),
        module=one(trace.module, 0),
        line=one(trace.line, 0),
    )


def after_the_optimizer(trace: Trace) -> Trace:
    """Return the step with a batch that is freed right after the optimizer's step."""
    return with_batch(trace, trace.optimizer_steps[-1][1])


@pytest.mark.parametrize("recompute", [(), (0, 1)])
def test_steps_in_a_row_free_what_they_allocate(recompute):
    """Played five times, with a batch and with recomputation, nothing piles up and nothing is
    freed twice.
    """
    step = make_step(BLOCKS, 4, optimizer_bytes=5000, recompute=recompute)
    both = with_accumulation(after_the_optimizer(step), 12)
    ends = []
    for steps in (1, 2, 5):
        events, sizes = repeat_steps(both, steps)
        replay(events, sizes)  # raises for what is freed twice, or alive when it is allocated
        ends.append(int(live_bytes(events, sizes)[-1]))
    assert len(set(ends)) == 1


def test_the_whole_batch_waits_on_the_device():
    """What of a batch made in the step is not in work is held too.

    3 of 4 parts beside the one that is.
    """
    plain = make_step(BLOCKS, 4)
    trace = with_batch(plain, len(plain.events))
    alone, together = live_of(trace, "batch"), live_of(with_accumulation(trace, 16), "batch")
    assert together.max() == alone.max() + 3000
    assert together[-1] == alone[-1]


def test_a_batch_that_the_loss_function_moves_does_not_wait_on_the_device():
    """Where each micro-batch is gone when its backward pass is done, the rest of the batch is on
    the host.
    """
    plain = make_step(BLOCKS, 4)
    backward = int(np.flatnonzero(plain.event_phase == PHASES.index("backward"))[-1])
    trace = with_batch(plain, backward)
    assert live_of(with_accumulation(trace, 4000), "batch").max() == live_of(trace, "batch").max()


@pytest.mark.parametrize("total", [10**12, 10**18])
def test_a_batch_beyond_all_memory_fits_nowhere(total):
    """Sizes that no 64-bit integer holds come out as more than any device has, and not as less
    than nothing.
    """
    plain = make_step(BLOCKS, 4)
    both = with_accumulation(with_batch(plain, len(plain.events)), total)
    assert live_peak(both) > 1 << 47
    assert live_bytes(*repeat_steps(both, 6)).min() >= 0
