"""The benchmarks of the forecast are right themselves: jobs really train, truth is added up, plans are judged."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.forecast_live import row_of
from benchmarks.forecast_models import MODELS
from benchmarks.gpu.forecast_decisions import choose, judge
from benchmarks.gpu.forecast_jobs import OUT_OF_MEMORY, STEPS, Outcome, Plan, build, train

from holdfast.forecast.allocator.replay import replay
from holdfast.forecast.devices.catalogue import find_device
from holdfast.forecast.job.tracing import trace_job
from holdfast.forecast.plan.fit import with_workspaces
from holdfast.forecast.trace.events import played
from holdfast.forecast.trace.extrapolation import ScaledTrace, fit
from holdfast.forecast.trace.recomputation import with_recompute

GIB = 1 << 30
OWN = [model for model in MODELS if model.module == "benchmarks.forecast_models"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "percent"), [("mlp", 0.01), ("encoder", 0.01), ("resnet", 2), ("unet", 2), ("lstm", 3), ("tacotron", 3)]
)
def test_forecasts_are_those_of_the_real_allocator(name: str, percent: float) -> None:
    """Two training steps peak as forecast, scratch of operations included: exact without convolutions and LSTMs."""
    row = row_of(next(model for model in MODELS if model.name == name))
    assert not row.failed
    assert row.error_percent is not None
    assert abs(row.error_percent) <= percent


def _simulated(scaled: ScaledTrace, plan: Plan, cap_bytes: int) -> Outcome:
    trace = with_recompute(scaled.at(plan.micro_batch_size), plan.modules)
    device = find_device("H100")
    found = replay(*with_workspaces(*played(trace, 4, plan.optimizer), device), cap_bytes=cap_bytes)
    return Outcome(ended=OUT_OF_MEMORY if found.failed else "done")


@pytest.mark.slow
@pytest.mark.usefixtures("prepared_forecasts")
def test_chosen_plans_come_through_on_the_simulated_device() -> None:
    """A plan chosen for 8 GiB runs there on the simulated allocator, and twice its micro-batch does not."""
    model = next(model for model in OWN if model.name == "lora")
    scaled = fit(trace_job(model.request(sizes=(2, 4))).traces)
    plan = choose(model.name, "fp32", scaled, find_device("H100"), 8 * GIB)
    assert plan is not None
    verdict = judge(plan, 8 * GIB, lambda asked, cap: _simulated(scaled, asked, cap))
    assert verdict.ended == "done"
    doubled = replace(plan, micro_batch_size=2 * plan.micro_batch_size)
    assert _simulated(scaled, doubled, 8 * GIB).ended == OUT_OF_MEMORY


@pytest.mark.slow
def test_a_plan_is_carried_out_as_it_says() -> None:
    """The micro-batch, the implementation of the optimizer and the recomputed modules are those of the plan."""
    plan = Plan(model="lora", precision="fp32", micro_batch_size=3, optimizer="foreach", modules=("blocks.0",))
    job = build(plan, "cpu")
    assert {len(tensor) for tensor in job["batch"].values()} == {3}
    assert all(group["foreach"] and not group["fused"] for group in job["optimizer"].param_groups)
    runs: list[str] = []
    for name in ("0", "1"):
        norm = job["model"].blocks.get_submodule(name).attention_norm
        norm.register_forward_hook(lambda *_, name=name: runs.append(name))
    train(plan, job, "cpu")
    assert (runs.count("0"), runs.count("1")) == (2 * STEPS, STEPS)  # the recomputed one runs twice in each step
