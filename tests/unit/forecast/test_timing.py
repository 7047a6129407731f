"""Tests of holdfast.forecast.devices.timing: the roofline, and what shares a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.unit.forecast.made_steps import Layer, make_step

from holdfast.forecast.devices.catalogue import find_device
from holdfast.forecast.devices.timing import (
    BANDWIDTH_EFFICIENCY,
    COMPUTE_EFFICIENCY,
    LAUNCH_SECONDS,
    operation_seconds,
    step_seconds,
)
from holdfast.forecast.trace.events import DTYPES, PHASES, Trace

DEVICE = replace(
    find_device("A100-80GB"),
    bandwidth=1e12 / BANDWIDTH_EFFICIENCY,
    flops={"fp32": 1e13 / COMPUTE_EFFICIENCY, "bf16": 1e14 / COMPUTE_EFFICIENCY},
)


def work(flops: list[int], moved_bytes: list[int], dtype: str = "fp32") -> Trace:
    """Return a step that does this."""
    count = len(flops)
    return replace(
        make_step([(Layer("relu", 4),)], 2),
        operation_name=np.zeros(count, dtype=np.int32),
        operation_event=np.zeros(count, dtype=np.int32),
        operation_phase=np.zeros(count, dtype=np.int8),
        flops=np.array(flops),
        moved_bytes=np.array(moved_bytes),
        dtype=np.full(count, DTYPES.index(dtype), dtype=np.int8),
    )


def test_an_operation_takes_what_takes_it_longest() -> None:
    """Arithmetic, traffic or the launch: the longest of them is the time of an operation."""
    trace = work([10**10, 10**10, 10], [10**6, 10**10, 10])
    assert operation_seconds(trace, DEVICE) == pytest.approx([1e-3, 1e-2, LAUNCH_SECONDS])


def test_the_optimizer_steps_once_for_all_micro_steps() -> None:
    """Micro-steps multiply forward and backward, not the optimizer's step."""
    trace = make_step([(Layer("linear", 4000),)], 4, optimizer_bytes=10**10)
    in_model = int((trace.operation_phase != PHASES.index("optimizer")).sum()) * LAUNCH_SECONDS
    assert step_seconds(trace, DEVICE) == pytest.approx(in_model + 1e-2)
    assert step_seconds(trace, DEVICE, micro_steps=8) == pytest.approx(8 * in_model + 1e-2)
