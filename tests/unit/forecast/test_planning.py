"""Plans for a device.

The largest micro-batch by brute force, the order of recommendation, what is missing.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.forecast.made_steps import Block, Layer, make_step

from holdfast.forecast.devices.catalogue import Device, find_device
from holdfast.forecast.job.tracing import TraceRequest
from holdfast.forecast.plan import forecasting
from holdfast.forecast.plan.fit import check_fit
from holdfast.forecast.plan.forecasting import (
    Forecaster,
    ForecastRequest,
    make_forecast,
    plan_target,
)
from holdfast.forecast.plan.planning import (
    MemoryPlan,
    Target,
    TracedStep,
    Variation,
    find_plans,
    recommend,
)
from holdfast.forecast.trace.accumulation import with_accumulation
from holdfast.forecast.trace.events import repeat_steps
from holdfast.forecast.trace.extrapolation import (
    ScaledTrace,
    extrapolate,
    extrapolate_parameter,
)

MIB = 1 << 20
BLOCKS = [(Layer("linear", MIB), Layer("gelu", MIB), Layer("dropout", MIB))] * 4


def device(mib: int) -> Device:
    return replace(
        find_device("T4"), name=f"{mib} MiB", usable_bytes=mib * MIB, context_bytes=10 * MIB
    )


def steps(blocks: list[Block] = BLOCKS, *, accumulates: bool = False) -> TracedStep:
    every = range(len(blocks))
    plain, recomputed = (
        extrapolate(
            [make_step(blocks, size, optimizer_bytes=MIB, recompute=those) for size in (2, 4)]
        )
        for those in ((), every)
    )
    return TracedStep(plain=replace(plain, accumulates=accumulates), recomputed=lambda: recomputed)


def ask(mib: int, total: int | None = None) -> Target:
    return Target(device=device(mib), global_batch_size=total, margin_bytes=0)


def holds(step: TracedStep, row: MemoryPlan, samples: int, question: Target) -> bool:
    """Return whether a plan holds at a size, by the allocator alone.

    For long, if it had to give back its cache.
    """
    trace = step.with_recompute(row.modules).at(samples)
    total = question.global_batch_size
    trace = with_accumulation(trace, total) if step.plain.accumulates and total else trace
    replays = [
        check_fit(*repeat_steps(trace, count), question.device, margin_bytes=0) for count in (2, 6)
    ]
    if not replays[0].fits or not replays[0].replay.retries:
        return replays[0].fits
    return replays[1].fits and replays[0].replay.retries == replays[1].replay.retries


layers = st.builds(
    Layer,
    st.sampled_from(["linear", "gelu", "relu", "dropout", "add"]),
    st.integers(MIB // 4, 2 * MIB),
    scratch=st.sampled_from([0, MIB]),
)


@settings(max_examples=25, deadline=None)
@given(
    blocks=st.lists(st.lists(layers, min_size=1, max_size=4).map(tuple), min_size=1, max_size=4),
    mib=st.integers(60, 250),
    total=st.integers(1, 12),
    accumulates=st.booleans(),
)
def test_a_plan_holds_at_its_size_and_not_at_the_next(blocks, mib, total, accumulates):
    """By brute force over sizes.

    Each micro-batch fits, one sample more does not, none is beyond the batch.
    """
    step, question = steps(blocks, accumulates=accumulates), ask(mib, total)
    for row in find_plans({"fp32": step}, question):
        size = row.micro_batch_size
        assert 0 <= size <= total
        assert (row.missing_bytes > 0) == (size == 0)
        assert size == 0 or holds(step, row, size, question)
        if size < total:
            assert not holds(step, row, size + 1, question)


@pytest.mark.parametrize("mib", [60, 90, 130, 250])
@pytest.mark.parametrize("samples", [1, 3, 8])
def test_a_fixed_micro_batch_is_the_only_size_that_is_tried(mib: int, samples: int) -> None:
    """Each plan fits exactly if the micro-batch holds, and its policy keeps the size."""
    step = steps(accumulates=True)
    target = replace(ask(mib, total=16), micro_batch_size=samples)

    plans = find_plans({"fp32": step}, target)

    assert len(plans) == (1 if plans[0].fits else 2)
    for plan in plans:
        assert plan.micro_batch_size == samples
        assert plan.fits == holds(step, plan, samples, target)
        assert plan.policy()["micro_batch_size"] == samples
        assert "forecast_micro_batch_size" not in plan.policy()


def varied_step(parameter: str = "seq_len") -> TracedStep:
    """Return a step that grows as a parameter does, with micro-batches of 2 samples."""

    def scaled(recompute: tuple[int, ...]) -> ScaledTrace:
        traces = {}
        for value in (4, 8, 16):
            made = make_step(BLOCKS, value, optimizer_bytes=MIB, recompute=recompute)
            traces[value] = replace(made, micro_batch_size=2)
        return extrapolate_parameter(parameter, traces)

    return TracedStep(plain=scaled(()), recomputed=lambda: scaled(tuple(range(len(BLOCKS)))))


@pytest.mark.parametrize("mib", [90, 130, 250])
def test_the_largest_value_of_a_parameter_is_found(mib: int) -> None:
    """It is a multiple of the step, the next one does not fit, and it is recommended."""
    step = varied_step()
    variation = Variation(name="seq_len", step=4)
    target = replace(ask(mib), micro_batch_size=2, variation=variation)

    plans = find_plans({"fp32": step}, target)

    for plan in plans:
        assert plan.micro_batch_size == 2
        assert plan.value is not None
        assert plan.value % 4 == 0
        assert plan.fits == holds(step, plan, plan.value, target)
        assert not holds(step, plan, plan.value + 4, target)
    best = recommend(plans)
    fitting = [plan.value or 0 for plan in plans if plan.fits]
    assert (best.value if best else None) == max(fitting, default=None)


def row(**changes: object) -> MemoryPlan:
    plain = {
        "device": "T4",
        "precision": "fp32",
        "recompute": "none",
        "modules": (),
        "micro_batch_size": 4,
        "live_bytes": 1,
        "process_bytes": 1,
        "margin_bytes": 0,
        "missing_bytes": 0,
        "retries": 0,
        "sample_seconds": 1.0,
    }
    return MemoryPlan(**{**plain, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({"sample_seconds": 0.9}, {"sample_seconds": 1.0}),
        ({"sample_seconds": 1.01}, {"sample_seconds": 1.0, "modules": ("a",), "recompute": "all"}),
        ({"sample_seconds": 1.01}, {"sample_seconds": 1.0, "retries": 2}),
        (
            {"sample_seconds": 5.0},
            {"sample_seconds": 1.0, "micro_batch_size": 0, "missing_bytes": 1},
        ),
        ({"micro_batch_size": 8}, {"micro_batch_size": 4}),
        ({"value": 512, "sample_seconds": 9.0}, {"value": 256, "sample_seconds": 1.0}),
    ],
)
def test_the_fastest_is_recommended_and_of_equals_the_smallest_change(better, worse):
    """Faster by more than a roofline can tell wins; within that, fewer changes do.

    What does not fit never does.
    """
    for rows in ([row(**better), row(**worse)], [row(**worse), row(**better)]):
        assert recommend(rows) == row(**better)


def test_a_device_without_bf16_is_not_planned_for_with_it():
    """A T4 gets rows in fp16 only, unless bf16 is all that was asked for; an L4 gets both."""
    traced = {"fp16": steps(), "bf16": steps()}
    turing = Target(device=device(400), margin_bytes=0)
    ada = Target(device=replace(device(400), capability=(8, 9)), margin_bytes=0)
    assert {row.precision for row in plan_target(turing, traced).rows} == {"fp16"}
    assert {row.precision for row in plan_target(ada, traced).rows} == {"fp16", "bf16"}
    assert {row.precision for row in plan_target(turing, {"bf16": steps()}).rows} == {"bf16"}


@pytest.mark.slow
@pytest.mark.usefixtures("prepared_forecasts")
def test_a_job_with_its_own_autocast_gets_one_set_of_plans() -> None:
    """What is asked of precision does not reach its kernels.

    Plans that differ in it would be the same run twice.
    """
    factory = f"{Path(__file__).with_name('forecast_factories.py')}:casts_itself"
    precisions = ("bf16", "fp32")
    found = make_forecast(
        ForecastRequest(
            factory=factory, devices=(device(400),), precisions=precisions, verify=False
        )
    )
    assert {row.precision for plan in found.plans for row in plan.rows} == {"fp32"}
    assert any("its own precision" in said.what for said in found.assumptions)


@pytest.mark.slow
@pytest.mark.usefixtures("prepared_forecasts")
def test_where_not_all_fits_the_step_is_traced_with_its_blocks_recomputed() -> None:
    """There are plans with and without.

    Those with take more samples, and one more trace needs what was forecast.
    """
    factory = f"{Path(__file__).with_name('forecast_factories.py')}:transformer"
    order = ForecastRequest(
        factory=factory, devices=(device(600),), precisions=("fp32",), margin_bytes=0
    )
    plan = make_forecast(order).plans[0]
    largest = {
        name: max(r.micro_batch_size for r in plan.rows if r.recompute == name)
        for name in ("none", "all")
    }
    assert 0 < largest["none"] < largest["all"]
    assert plan.verification is not None
    assert abs(plan.verification.error) < 0.01


@pytest.mark.parametrize("more", [1.0, 1.3], ids=["blocks lie otherwise", "more is needed"])
def test_a_plan_that_does_not_hold_raises_the_margin(
    more: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another plan, with a smaller micro-batch, is traced and taken.

    That a trace needs more is played here.
    """
    order = ForecastRequest(
        factory="train.py:build", devices=(device(800),), precisions=("fp32",), global_batch_size=64
    )
    order = replace(order, margin_bytes=4 * MIB)
    step = {"fp32": steps()}
    heavier = [
        tuple(replace(layer, width=int(layer.width * more)) for layer in block) for block in BLOCKS
    ]
    tried: list[int] = []

    def trace_job(request: TraceRequest) -> SimpleNamespace:
        (size,) = request.sizes
        tried.append(size)
        if more == 1.0 and len(tried) == 1:
            trace = make_step(BLOCKS, 2 * size, optimizer_bytes=MIB)
            return SimpleNamespace(traces=[trace], evaluation=None)
        every = range(len(heavier) if request.recompute else 0)
        trace = make_step(heavier, size, optimizer_bytes=MIB, recompute=every)
        return SimpleNamespace(traces=[trace], evaluation=None)

    monkeypatch.setattr(forecasting, "trace_job", trace_job)
    forecaster = Forecaster(order, print)
    plan = forecaster.verify_plan(plan_target(order.target(device(800)), step), step)
    assert plan.best is not None
    assert plan.verification is not None
    assert plan.verification.fits
    assert tried[-1] == plan.best.micro_batch_size < tried[0]
    assert plan.best.margin_bytes > 4 * MIB
    assert all("did not fit" in one.what for one in forecaster.assumptions)
