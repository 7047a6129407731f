"""Jobs whose hooks act while backward runs: the forecast against the peak of the same job on the real CPU.

The real peak is that of the allocator's own events over three steps; the trace is of a job that was built with real
weights, as where build() needs values, and was moved to the fake device afterwards, its hooks with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.forecast.allocations import real_allocations
from torch import nn

from holdfast.core.errors import PolicyError
from holdfast.forecast.fake.device import forecast_device
from holdfast.forecast.job import building
from holdfast.forecast.job.jobs import Job, StepOptions
from holdfast.forecast.job.tracing import TraceRequest, trace_job
from holdfast.forecast.kernels import scratch_cpu
from holdfast.forecast.trace.events import live_peak
from holdfast.forecast.trace.tracer import Tracer

WIDTH, DEPTH, SAMPLES = 192, 6, 16
Built = dict[str, Any]


def net() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))


def with_step(model: nn.Module, optimizers: Any, step: Callable[[Any], None]) -> Built:
    return {"model": model, "optimizer": optimizers, "step": step, "batch": torch.randn(SAMPLES, WIDTH)}


def backward_of(model: nn.Module) -> Callable[[Any], None]:
    return lambda batch: model(batch).square().mean().backward()


def in_backward(model: nn.Module, make: Callable[[Any], torch.optim.Optimizer]) -> dict[str, torch.optim.Optimizer]:
    """Step an optimizer for each parameter as soon as its gradient is there, as torch's tutorial has it."""
    optimizers = {parameter: make([parameter]) for parameter in model.parameters()}

    def hook(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    return {name: optimizers[parameter] for name, parameter in model.named_parameters()}


def adamw_in_backward() -> Built:
    model = net()
    optimizers = in_backward(model, lambda each: torch.optim.AdamW(each, foreach=False))
    return with_step(model, optimizers, backward_of(model))


def real_peak() -> int:
    """Return the most bytes that the host's allocator held at once in three steps."""

    def train() -> Any:
        made = adamw_in_backward()
        for _ in range(3):
            made["step"](made["batch"])
        return made

    return real_allocations(train)[0]


def traced_peak() -> int:
    """Return the peak of a trace, as the child process makes it where build() ran with real weights."""
    with forecast_device("cpu") as device:
        options: dict[str, Any] = {"size": SAMPLES, "length": None, "loading": contextlib.nullcontext}
        with device.suspended():
            built = building.call_factory("jobs.py:build", adamw_in_backward, **options)
        traced = Job(built, device, StepOptions())
        with Tracer(device.device, scratch=scratch_cpu.scratch_of) as tracer:
            tracer.watch(models=traced.models, optimizers=traced.optimizers.values(), blocks=traced.blocks)
            traced.settle(SAMPLES, None)
            traced.step(SAMPLES)
            with tracer.recording():
                traced.step(SAMPLES)
    return live_peak(tracer.trace(micro_batch_size=SAMPLES))


@pytest.mark.slow
@pytest.mark.usefixtures("prepared_forecasts")
def test_hooks_of_backward_are_traced_as_they_run() -> None:
    """Gradients that hooks free are free in the trace, on the host and on the fake accelerator: within 1 %."""
    real = real_peak()
    (trace,) = trace_job(TraceRequest(factory=f"{__file__}:adamw_in_backward", sizes=(SAMPLES,))).traces
    assert traced_peak() == pytest.approx(real, rel=0.01)
    assert live_peak(trace) == pytest.approx(real, rel=0.01)


@pytest.mark.slow
@pytest.mark.usefixtures("prepared_forecasts")
@pytest.mark.parametrize(
    ("name", "rule", "said"),
    [
        ("hooks_on_nodes", "H426", "AccumulateGrad node of a parameter that was moved"),
        ("never_trained", "H412", r"one call of the step .* did not step \['rare'\]"),
        ("of_another_model", "H412", r"gives no gradient to what \['optimizer'\] steps"),
    ],
)
def test_what_would_not_be_counted_is_refused(name: str, rule: str, said: str) -> None:
    """Hooks that a forecast cannot run, and optimizers that one call does not step, end in an error."""
    with pytest.raises(PolicyError, match=said) as caught:
        trace_job(TraceRequest(factory=f"{__file__}:{name}"))
    assert caught.value.rule == rule


def hooks_on_nodes() -> Built:
    """Megatron's way before there were hooks after accumulation."""
    model = net()
    model.nodes = [p.expand_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]  # type: ignore[union-attr]
    for node, parameter in zip(model.nodes, model.parameters(), strict=True):
        node.register_hook(lambda *_, parameter=parameter: setattr(parameter, "grad", None))
    return with_step(model, torch.optim.SGD(model.parameters(), 0.1), backward_of(model))


def never_trained() -> Built:
    """The second of two turns comes in another call."""
    model = net()
    optimizers = {"often": torch.optim.Adam(model[0].parameters()), "rare": torch.optim.Adam(model[1:].parameters())}
    model[1:].requires_grad_(requires_grad=False)

    def step(batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()
        optimizers["often"].step()
        optimizers["often"].zero_grad()

    return with_step(model, optimizers, step)


def of_another_model() -> Built:
    """The optimizer got the parameters of a copy."""
    model = net()
    optimizer = torch.optim.Adam(net().parameters())
    batch = torch.randn(SAMPLES, WIDTH)
    return {"model": model, "optimizer": optimizer, "loss_fn": lambda x: model(x).square().mean(), "batch": batch}
