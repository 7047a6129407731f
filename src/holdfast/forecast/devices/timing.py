"""Estimate how long a step takes on a device, accurately enough to rank plans.

The estimate is a roofline model: an operation takes as long as its arithmetic or its memory
traffic, whichever is longer. It also takes at least as long as the host needs to launch it, because
eager operations are launched one by one while the device runs earlier ones. Larger micro-batches
are therefore more efficient: more samples share the launches, the reads of the weights, and the
optimizer's update.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from holdfast.forecast.devices.catalogue import Device
from holdfast.forecast.trace.events import DTYPES, PHASES, Trace

# The fraction of the datasheet's dense rate that large matrix products reach: 87 % on A100 SXM,
# 84 % on GH200, 81 % on A100 PCIe and 80 % on H100 SXM (stas00/ml-engineering, "Maximum Achievable
# Matmul FLOPS comparison table", torch 2.5 to 2.7).
COMPUTE_EFFICIENCY = 0.8
# The fraction of the datasheet's bandwidth that large transfers reach: 0.90 on an A100 above 100 MB
# (calculon-ai/calculon, systems/a100_80g.json, "MB_efficiency").
BANDWIDTH_EFFICIENCY = 0.9
# The host time for launching one eager operation. For a matrix product on an H100, it takes 5 to
# 25 µs to get from Python to the driver (jiahuanglin.xyz, GPU kernel lessons, 18 "From PyTorch op
# to kernel launch"). 10 µs is roughly the geometric mean.
LAUNCH_SECONDS = 10e-6

_OPTIMIZER = PHASES.index("optimizer")


def operation_seconds(trace: Trace, device: Device) -> npt.NDArray[np.float64]:
    """Return the estimated duration of each operation in a step, in seconds.

    Returns:
        Shape ``(operations,)``.
    """
    rates = np.array([device.flops_per_second(dtype) for dtype in DTYPES])
    arithmetic = trace.flops / (rates[trace.dtype] * COMPUTE_EFFICIENCY)
    traffic = trace.moved_bytes / (device.bandwidth * BANDWIDTH_EFFICIENCY)
    return np.maximum(np.maximum(arithmetic, traffic), LAUNCH_SECONDS)


def step_seconds(trace: Trace, device: Device, *, micro_steps: int = 1) -> float:
    """Return the estimated duration of an optimizer step, in seconds.

    Args:
        trace: A step with one micro-batch.
        device: The device.
        micro_steps: How many micro-batches the step has.
    """
    seconds = operation_seconds(trace, device)
    is_optimizer = trace.operation_phase == _OPTIMIZER
    return float(micro_steps * seconds[~is_optimizer].sum() + seconds[is_optimizer].sum())
