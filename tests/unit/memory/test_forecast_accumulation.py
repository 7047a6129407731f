"""Micro-batches whose gradients add up, edited from a trace with one: against the same step played with several."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.unit.memory.made_steps import Layer, make_step

from holdfast.memory.forecast.accumulation import with_accumulation
from holdfast.memory.forecast.allocator import replay
from holdfast.memory.forecast.recomputation import with_recompute
from holdfast.memory.forecast.trace import OWNERS, Trace, live_by_owner, live_bytes, live_peak, played

BLOCKS = [(Layer("linear", 4096), Layer("relu", 4096)), (Layer("linear", 2048), Layer("dropout", 2048))]
GRADIENTS = OWNERS.index("gradients")
LOSS_BYTES = 4


def gradient_bytes(trace: Trace) -> int:
    return int(trace.size_bytes[list(trace.resident)][trace.owner[list(trace.resident)] == GRADIENTS].sum())


def test_the_gradients_of_the_first_micro_batch_live_while_the_second_runs():
    """Beside the gradients of the first, the second has as many activations as it, and the first's loss waits."""
    trace = make_step(BLOCKS, 4, optimizer_bytes=1000)
    both = with_accumulation(trace, 8)
    alone, together = live_by_owner(trace), live_by_owner(both)
    assert live_peak(both) > live_peak(trace)
    half = len(both.events) // 2
    assert int(together[GRADIENTS, half:].max()) >= gradient_bytes(trace)
    row = OWNERS.index("activations")
    assert together[row].max() == alone[row].max() + LOSS_BYTES


def test_each_gradient_of_the_second_is_gone_when_it_is_added():
    """No more than the gradients of one layer live beside the sum: a layer's own, until the next operation."""
    trace = make_step(BLOCKS, 4)
    sums = gradient_bytes(trace)
    most = int(live_by_owner(with_accumulation(trace, 8))[GRADIENTS].max())
    assert sums < most <= sums + max(16 * 4096 + 4, 16 * 2048 + 4)


@pytest.mark.parametrize("edit", [lambda trace: trace, lambda trace: with_recompute(trace, trace.blocks)])
@pytest.mark.parametrize("variant", [None, "foreach", "for-loop"])
def test_steps_in_a_row_free_what_they_allocate(edit, variant):
    """Played five times, plain or with recomputation, nothing piles up and nothing is freed twice."""
    both = with_accumulation(edit(make_step(BLOCKS, 4, optimizer_bytes=5000)), 12)
    ends = []
    for steps in (1, 2, 5):
        events, sizes = played(both, steps, variant)
        replay(events, sizes)  # raises for what is freed twice, or lives when it is allocated
        ends.append(int(live_bytes(events, sizes)[-1]))
    assert len(set(ends)) == 1


def test_variants_are_found_again():
    """The events of each implementation of the optimizer are those of before."""
    trace = make_step(BLOCKS, 4, optimizer_bytes=5000)
    both = with_accumulation(trace, 8)
    for one, moved in zip(trace.variants, both.variants, strict=True):
        before, after = trace.events[slice(*one.events)], both.events[slice(*moved.events)]
        assert np.array_equal(np.sign(before), np.sign(after))
        assert np.array_equal(trace.size_bytes[np.abs(before) - 1], both.size_bytes[np.abs(after) - 1])


def test_the_whole_batch_waits_on_the_device():
    """What of a batch made in the step is not in work is held too: 3 of 4 parts beside the one that is."""
    trace = make_step(BLOCKS, 4)
    batch = len(trace.size_bytes)
    one = lambda array, value: np.append(array, np.array([value], dtype=array.dtype))  # noqa: E731
    trace = replace(
        trace,
        events=np.concatenate([[batch + 1], trace.events, [-batch - 1]]).astype(np.int32),
        event_phase=np.concatenate([[0], trace.event_phase, [3]]).astype(np.int8),
        operation_event=trace.operation_event + 1,
        size_bytes=one(trace.size_bytes, 1000),
        owner=one(trace.owner, OWNERS.index("batch")),
        module=one(trace.module, 0),
        line=one(trace.line, 0),
    )
    row = OWNERS.index("batch")
    assert live_by_owner(with_accumulation(trace, 16))[row].max() == live_by_owner(trace)[row].max() + 3000
    assert live_by_owner(with_accumulation(trace, 16))[row, -1] == live_by_owner(trace)[row, -1]


def test_what_needs_no_accumulation_stays_as_it_is():
    """A global batch of one micro-batch, or of fewer samples, is the step itself."""
    trace = make_step(BLOCKS, 4)
    assert with_accumulation(trace, 4) is trace
    assert with_accumulation(trace, 3) is trace
