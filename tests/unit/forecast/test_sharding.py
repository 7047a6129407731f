"""The memory of one of several GPUs: which model states are divided, and which buffers are added."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.unit.forecast.made_steps import Block, Layer, make_step

from holdfast.forecast.plan.sharding import KINDS, Kind, Sharding, sharded, state_shares
from holdfast.forecast.trace.events import (
    OWNERS,
    Trace,
    live_bytes,
    live_peak,
    owners_at_peak,
    repeat_steps,
)

GPUS = 4
BLOCKS: list[Block] = [(Layer("linear", 1 << 16), Layer("gelu", 1 << 16))] * 4
# The parameters of a block, as `make_step` computes them.
BLOCK_BYTES = 16 * (1 << 16) + 4
PARAMETER_BYTES = 4 * BLOCK_BYTES


def step() -> Trace:
    """Return a step whose parameters belong to four blocks, with one optimizer state of each."""
    trace = make_step(BLOCKS, 2, optimizer_bytes=1 << 20)
    modules = trace.module.copy()
    modules[:4] = [1, 2, 3, 4]
    owners = trace.owner.copy()
    batch = len(trace.resident) - 1
    owners[batch] = OWNERS.index("optimizer state")
    sizes = trace.size_bytes.copy()
    sizes[batch] = 2 * PARAMETER_BYTES
    return replace(trace, module=modules, owner=owners, size_bytes=sizes)


@pytest.mark.parametrize(
    ("kind", "parameters", "gradients", "optimizer_state"),
    [
        ("ddp", 1, 1, 1),
        ("zero1", 1, 1, GPUS),
        ("zero2", 1, GPUS, GPUS),
        ("full", GPUS, GPUS, GPUS),
    ],
)
def test_the_model_states_are_divided_as_in_the_zero_paper(
    kind: Kind, parameters: int, gradients: int, optimizer_state: int
) -> None:
    """Section 5 of the paper; rounded up."""
    result = state_shares(step(), Sharding(gpus=GPUS, kind=kind))
    assert [share.state for share in result] == ["parameters", "gradients", "optimizer state"]
    assert [share.whole_bytes for share in result] == [
        PARAMETER_BYTES,
        PARAMETER_BYTES,
        2 * PARAMETER_BYTES,
    ]
    assert [share.gpu_bytes for share in result] == [
        -(-PARAMETER_BYTES // parameters),
        -(-PARAMETER_BYTES // gradients),
        -(-2 * PARAMETER_BYTES // optimizer_state),
    ]


@pytest.mark.parametrize("kind", ["ddp", "zero1"])
def test_ddp_keeps_the_gradients_twice(kind: Kind) -> None:
    """Its buckets are a copy of all gradients."""
    result = {share.state: share for share in state_shares(step(), Sharding(gpus=GPUS, kind=kind))}
    assert result["gradients"].buffer_bytes == PARAMETER_BYTES
    assert result["parameters"].buffer_bytes == 0


def test_fully_sharded_parameters_are_gathered_by_block() -> None:
    """The block in use and the next one are gathered, and its gradients are held twice."""
    result = {
        share.state: share for share in state_shares(step(), Sharding(gpus=GPUS, kind="full"))
    }
    assert result["parameters"].buffer_bytes == 2 * BLOCK_BYTES
    assert result["gradients"].buffer_bytes == 2 * BLOCK_BYTES


def test_parameters_outside_the_blocks_stay_gathered() -> None:
    """They are one more unit, which is not freed after the forward pass."""
    trace = step()
    modules = trace.module.copy()
    modules[0] = 0
    result = state_shares(replace(trace, module=modules), Sharding(gpus=GPUS, kind="full"))
    assert result[0].buffer_bytes == 3 * BLOCK_BYTES
    # Their gradients are reduced last, so they exist beside those of a block.
    assert result[1].buffer_bytes == 3 * BLOCK_BYTES


@pytest.mark.parametrize("kind", ["zero2", "full"])
def test_an_evaluation_has_no_buffers_for_gradients(kind: Kind) -> None:
    """It has no backward pass."""
    trace = step()
    evaluation = replace(trace, event_phase=np.zeros_like(trace.event_phase))
    result = state_shares(evaluation, Sharding(gpus=GPUS, kind=kind))
    assert result[0].buffer_bytes > 0
    assert result[1].buffer_bytes == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_step_can_be_repeated(kind: Kind) -> None:
    """Each step frees what the step before has left, so memory does not grow."""
    trace = sharded(step(), Sharding(gpus=GPUS, kind=kind))
    after = []
    for steps in (1, 2, 3):
        live = live_bytes(*repeat_steps(trace, steps))
        assert live.min() >= 0
        after.append(int(live[-1]))
    assert len(set(after)) == 1


def test_ddp_needs_its_buckets_more_than_one_gpu() -> None:
    """The peak is higher by one copy of the gradients, to the byte."""
    trace = step()
    several = sharded(trace, Sharding(gpus=GPUS, kind="ddp"))
    assert live_peak(several) == live_peak(trace) + PARAMETER_BYTES


def test_each_kind_needs_less_than_the_one_before() -> None:
    """With enough GPUs, and if a block is a small part of the model."""
    blocks: list[Block] = [BLOCKS[0]] * 32
    trace = make_step(blocks, 2)
    modules = trace.module.copy()
    modules[:32] = np.arange(1, 33)
    owners = trace.owner.copy()
    sizes = trace.size_bytes.copy()
    batch = len(trace.resident) - 1
    owners[batch] = OWNERS.index("optimizer state")
    sizes[batch] = 64 * BLOCK_BYTES
    trace = replace(trace, module=modules, owner=owners, size_bytes=sizes)
    peaks = [live_peak(sharded(trace, Sharding(gpus=64, kind=kind))) for kind in KINDS]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(KINDS)


def test_one_gpu_shards_nothing() -> None:
    """No buffers are added, and no state is divided."""
    trace = step()
    alone = sharded(trace, Sharding(gpus=1, kind="full"))
    assert owners_at_peak(alone) == owners_at_peak(trace)
