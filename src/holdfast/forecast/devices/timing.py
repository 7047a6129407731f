"""Estimate how long a step takes on a device: well enough to rank plans, not to predict times.

It is a roofline. An operation takes as long as its arithmetic or its traffic, whichever is longer,
and at least as long as the host needs to launch it, because eager operations are launched one by
one while the device runs earlier ones. So larger micro-batches are more efficient: more samples
share the launches, the optimizer's step and the reading of the weights.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from holdfast.forecast.devices.catalogue import Device
from holdfast.forecast.trace.events import DTYPES, PHASES, Trace

# The share of the data sheet's dense rate that large matrix products reach: A100 SXM 87 %, GH200
# 84 %, A100 PCIe 81 %, H100 SXM 80 % (stas00/ml-engineering, "Maximum Achievable Matmul FLOPS
# comparison table", torch 2.5 to 2.7).
COMPUTE_EFFICIENCY = 0.8
# The share of the data sheet's bandwidth that large transfers reach: 0.90 for the A100 above 100 MB
# (calculon-ai/calculon, systems/a100_80g.json, "MB_efficiency").
BANDWIDTH_EFFICIENCY = 0.9
# Host time of one eager operation, from Python to the driver: 5 to 25 µs for a matrix
# product on an H100 (jiahuanglin.xyz, GPU kernel lessons, 18 "From PyTorch op to kernel launch").
# This is the geometric mean, rounded.
LAUNCH_SECONDS = 10e-6

_OPTIMIZER = PHASES.index("optimizer")


def operation_seconds(trace: Trace, device: Device) -> npt.NDArray[np.float64]:
    """Return how long each operation of a step takes, in seconds; shape ``(operations,)``."""
    rates = np.array([device.flops_per_second(dtype) for dtype in DTYPES])
    arithmetic = trace.flops / (rates[trace.dtype] * COMPUTE_EFFICIENCY)
    traffic = trace.moved_bytes / (device.bandwidth * BANDWIDTH_EFFICIENCY)
    return np.maximum(np.maximum(arithmetic, traffic), LAUNCH_SECONDS)


def step_seconds(trace: Trace, device: Device, *, micro_steps: int = 1) -> float:
    """Return how long an optimizer step takes, in seconds.

    Args:
        trace: A step with one forward and backward pass.
        device: The device.
        micro_steps: How many such passes the step has.
    """
    seconds = operation_seconds(trace, device)
    is_optimizer = trace.operation_phase == _OPTIMIZER
    return float(micro_steps * seconds[~is_optimizer].sum() + seconds[is_optimizer].sum())
