"""Jobs whose hooks act while backward runs.

The forecast against the peak of the same job on the real CPU.

The real peak is that of the allocator's own events over three steps.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.forecast.allocations import real_allocations
from torch import nn

from holdfast.forecast.job.tracing import TraceRequest, trace_job
from holdfast.forecast.trace.events import live_peak

WIDTH, DEPTH, SAMPLES = 192, 6, 16


def adamw_in_backward() -> dict[str, Any]:
    """Step an optimizer for each parameter as soon as its gradient is there, as torch's tutorial
    has it.
    """
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    optimizers = {
        parameter: torch.optim.AdamW([parameter], foreach=False) for parameter in model.parameters()
    }

    def hook(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    def step(batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    named = {name: optimizers[parameter] for name, parameter in model.named_parameters()}
    return {"model": model, "optimizer": named, "step": step, "batch": torch.randn(SAMPLES, WIDTH)}


def real_peak() -> int:
    """Return the most bytes that the host's allocator held at once in three steps."""

    def train() -> Any:
        made = adamw_in_backward()
        for _ in range(3):
            made["step"](made["batch"])
        return made

    return real_allocations(train)[0]


@pytest.mark.slow
@pytest.mark.usefixtures("prepared_forecasts")
def test_hooks_of_backward_are_traced_as_they_run() -> None:
    """Gradients that hooks free are free in the trace, as on the real host: within 1 %."""
    real = real_peak()
    (trace,) = trace_job(
        TraceRequest(factory=f"{__file__}:adamw_in_backward", sizes=(SAMPLES,))
    ).traces
    assert live_peak(trace) == pytest.approx(real, rel=0.01)
