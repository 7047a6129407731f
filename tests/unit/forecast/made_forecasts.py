"""Forecasts for the tests of how they are presented.

Of made steps, without a process that traces.
"""

from __future__ import annotations

from dataclasses import replace

from tests.unit.forecast.made_steps import Block, Layer, make_step

from holdfast.forecast.devices.catalogue import Device, find_device
from holdfast.forecast.job.tracing import TraceResult
from holdfast.forecast.plan.forecasting import (
    Forecast,
    ForecastRequest,
    Verification,
    plan_target,
)
from holdfast.forecast.plan.planning import TracedStep
from holdfast.forecast.plan.sharding import Sharding
from holdfast.forecast.trace.events import Assumption
from holdfast.forecast.trace.extrapolation import extrapolate

MIB = 1 << 20
BLOCKS: list[Block] = [(Layer("linear", MIB), Layer("gelu", MIB), Layer("dropout", MIB))] * 4
ASSUMED = (
    Assumption(what="bool(tensor) was assumed to be True", line="model.py:31 in forward"),
    Assumption(what="bool(tensor) was assumed to be True", line="model.py:40 in forward"),
)


def small_device(mib: int, name: str = "T4") -> Device:
    """Return a device with little memory."""
    return replace(find_device("T4"), name=name, usable_bytes=mib * MIB, context_bytes=10 * MIB)


def make_plans(
    *devices: Device,
    total: int | None = 64,
    accumulates: bool = True,
    micro_batch_size: int | None = None,
    sharding: Sharding | None = None,
) -> Forecast:
    """Return the forecast of a made step for devices."""
    traces = tuple(make_step(BLOCKS, size, optimizer_bytes=MIB) for size in (2, 4))
    result = TraceResult(
        traces=traces,
        route="privateuse1",
        parameters=4_000_000,
        trainable_parameters=4_000_000,
        accumulates=accumulates,
        host_bytes=1,
        build_seconds=0.1,
        trace_seconds=(0.1, 0.1),
        assumptions=ASSUMED,
    )
    order = ForecastRequest(
        factory="train.py:build",
        devices=devices,
        precisions=("fp32",),
        global_batch_size=total,
        micro_batch_size=micro_batch_size,
        margin_bytes=0,
        sharding=sharding,
    )
    plain = replace(extrapolate(traces), accumulates=accumulates)
    every = range(len(BLOCKS))
    recomputed = extrapolate(
        [make_step(BLOCKS, size, optimizer_bytes=MIB, recompute=every) for size in (2, 4)]
    )
    step = {"fp32": TracedStep(plain=plain, recomputed=lambda: recomputed)}
    plans = [plan_target(order.target(device), step) for device in devices]
    found = Verification(live_bytes=1000 * MIB, forecast_bytes=1001 * MIB, fits=True)
    plans = [replace(plan, verification=found) if plan.best else plan for plan in plans]
    return Forecast(request=order, traced={"fp32": result}, plans=tuple(plans), assumptions=ASSUMED)
