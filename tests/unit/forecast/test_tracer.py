"""The tracer against torch's own CPU allocator, and what it says of phases, owners, lines and
optimizers.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.forecast.allocations import real_allocations
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from holdfast.forecast.fake.device import forecast_device
from holdfast.forecast.kernels.scratch import Uncalibrated, scratch_of
from holdfast.forecast.trace.events import (
    DTYPES,
    OWNERS,
    PHASES,
    Trace,
    first_products,
    live_peak,
    owners_at_peak,
)
from holdfast.forecast.trace.tracer import Tracer

CPU = torch.device("cpu")
Step = Callable[[], None]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.dropout(
            self.down(functional.gelu(self.up(self.norm(x)))), 0.1, self.training
        )


class Net(nn.Module):
    def __init__(self, width: int = 48, depth: int = 3, *, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            # The state of the host's generator, 5056 bytes each, would be allocated past the
            # dispatcher.
            options = {"use_reentrant": False, "preserve_rng_state": False}
            x = checkpoint(layer, x, **options) if self.recompute else layer(x)
        return self.head(x)


def classify(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x), y)


def plain(samples: int = 64, **options: Any) -> tuple[dict[str, Any], Step]:
    model = Net(**options)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        x, y = torch.randn(samples, 48), torch.randint(0, 10, (samples,))
        optimizer.zero_grad()
        classify(model, x, y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return {"models": {"model": model}, "optimizers": [optimizer]}, step


def recomputed() -> tuple[dict[str, Any], Step]:
    return plain(recompute=True)


JOBS = [plain, recomputed]


def trace_of(
    build: Callable[[], tuple[dict[str, Any], Step]], *, fake: bool = False, warm: int = 2
) -> Trace:
    gc.freeze()  # what is loaded is not looked through; the tracer before has undone that
    with forecast_device("cpu") if fake else contextlib.nullcontext(), Tracer(CPU) as tracer:
        watched, step = build()
        tracer.watch(**watched)
        for _ in range(warm):
            step()
        with tracer.recording():
            step()
        return tracer.trace(micro_batch_size=64)


@functools.cache
def traced(build: Callable[[], tuple[dict[str, Any], Step]], *, fake: bool = True) -> Trace:
    return trace_of(build, fake=fake)


def measured_growth(build: Callable[[], tuple[dict[str, Any], Step]]) -> int:
    """Return by how much the real CPU allocator's live bytes rise at most within the third step."""

    def train() -> None:
        _, step = build()
        step()
        step()
        with torch.profiler.record_function("the step"):
            step()

    gc.disable()
    try:
        return real_allocations(train, since="the step")[0]
    finally:
        gc.enable()


def growth(trace: Trace) -> int:
    """Return by how much live bytes rise at most within the traced step."""
    return live_peak(trace) - int(trace.size_bytes[list(trace.resident)].sum())


@pytest.mark.parametrize("build", JOBS, ids=lambda build: build.__name__)
def test_live_bytes_are_those_of_the_real_allocator(
    build: Callable[[], tuple[dict[str, Any], Step]],
) -> None:
    """A step's rise of live bytes is the CPU allocator's, up to scalars.

    Without data it is the same, each time.
    """
    uses_onednn = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # it repacks bfloat16 matrices for each product
    try:
        real = measured_growth(build)
    finally:
        torch._C._set_mkldnn_enabled(uses_onednn)
    with_data, fake, again = (
        traced(build, fake=False),
        traced(build),
        trace_of(build, fake=True, warm=3),
    )
    assert growth(with_data) == pytest.approx(real, rel=0, abs=64)
    assert len(fake.optimizer_steps) == len(with_data.optimizer_steps)
    assert growth(fake) == growth(with_data)
    assert fake.growth_bytes == with_data.growth_bytes == 0
    for column in ("events", "size_bytes", "owner", "operation_name"):
        assert getattr(fake, column).tolist() == getattr(again, column).tolist(), column
    assert fake.names == again.names


def by_owner(trace: Trace, owner: str) -> int:
    return int(trace.size_bytes[trace.owner == OWNERS.index(owner)].sum())


def test_owners_have_their_exact_bytes() -> None:
    """Parameters, gradients, state and batch are owned to the byte.

    Activations are what backward waits for.
    """
    fake = traced(plain)
    parameters = sum(p.numel() * 4 for p in Net().parameters())
    assert by_owner(fake, "parameters") == parameters
    assert by_owner(fake, "gradients") == 2 * parameters  # those found and those left
    assert by_owner(fake, "optimizer state") >= 2 * parameters
    assert by_owner(fake, "optimizer state") <= 2 * parameters + 4 * len(list(Net().parameters()))
    # Per block: two normalizations' means and deviations, four inputs of operations, GELU's input,
    # dropout's mask.
    assert by_owner(fake, "activations") > 3 * 64 * 48 * 4 * 9
    largest = max(
        owners_at_peak(fake, "module"), key=lambda path: owners_at_peak(fake, "module")[path]
    )
    assert largest.startswith("model.layers.")


def test_activations_and_backward_carry_line_and_module_of_the_forward_pass() -> None:
    """What backward allocates for an operation carries the line and the module that ran its
    forward pass.
    """
    fake = traced(plain)
    births = fake.events[fake.events > 0] - 1
    backward = births[fake.event_phase[fake.events > 0] == PHASES.index("backward")]
    lines = {fake.lines[fake.line[one]] for one in backward}
    assert any(
        line.startswith("test_tracer.py:") and line.endswith(" in forward") for line in lines
    )
    modules = {fake.modules[fake.module[one]] for one in backward}
    assert {"model.layers.0.up", "model.layers.2.down", "model.head"} <= modules
    assert not any(
        "torch" in line or "tracer.py" in line.replace("test_tracer.py", "") for line in fake.lines
    )


def test_the_first_products_end_where_their_results_are_made() -> None:
    """Those of the first linear layer, and of the gradient of what the last one got."""
    found = traced(plain)
    last = [at - len(found.resident) - 1 for at in first_products(found)]
    assert [PHASES[found.event_phase[at]] for at in last] == ["forward", "backward"]
    assert found.size_bytes[found.events[last] - 1].tolist() == [64 * 4 * 48 * 4, 64 * 48 * 4]


def test_flops_moved_bytes_and_types() -> None:
    """A product counts two operations for each multiplication and moves its three matrices, in
    its own type.
    """

    def build() -> tuple[dict[str, Any], Step]:
        left, right = (
            torch.randn(30, 20, dtype=torch.bfloat16),
            torch.randn(20, 10, dtype=torch.bfloat16),
        )
        return {}, lambda: (left @ right, left.t().contiguous())[0]

    fake = trace_of(build, fake=True)
    assert [fake.names[name] for name in fake.operation_name] == ["aten.mm", "aten.clone"]
    assert fake.flops.tolist() == [2 * 30 * 20 * 10, 0]
    assert fake.moved_bytes.tolist() == [2 * (600 + 200 + 300), 2 * 2 * 600]
    assert [DTYPES[number] for number in fake.dtype] == ["bf16", "bf16"]


def test_resized_storages_are_followed() -> None:
    """Memory that a storage is resized to by an operation counts."""

    def build() -> tuple[dict[str, Any], Step]:
        kept = torch.zeros(100)

        def step() -> None:
            kept.resize_(3000)
            torch.mul(torch.ones(50), 2, out=torch.empty(0))

        return {}, step

    trace = trace_of(build, warm=0)
    sizes = trace.size_bytes[np.abs(trace.events) - 1] * np.sign(trace.events)
    assert sizes.tolist()[:3] == [12000, -400, 200]
    assert sizes.tolist()[3:].count(200) == 1


def test_scratch_lies_on_top_of_what_the_operation_returns() -> None:
    """What the table says of an operation is allocated after its output and freed at once, and
    owned as scratch.
    """
    images, weights = torch.randn(4, 3, 32, 32), torch.randn(8, 3, 3, 3)
    args = (images, weights, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    out = torch.ops.aten.convolution.default(*args)
    expected = scratch_of(torch.ops.aten.convolution.default, args, {}, out)
    assert expected is not None
    assert expected.bytes > 0
    uncalibrated = Uncalibrated()
    with Tracer(CPU, scratch=scratch_of, uncalibrated=uncalibrated) as tracer:
        with tracer.recording():
            made = functional.conv2d(images, weights, padding=1)
        trace = tracer.trace(micro_batch_size=4)
    sizes = (trace.size_bytes[np.abs(trace.events) - 1] * np.sign(trace.events)).tolist()
    assert sizes == [made.nbytes, expected.bytes, -expected.bytes]
    assert by_owner(trace, "scratch") == expected.bytes
    assert (
        trace.uncalibrated_bytes == uncalibrated.excess_bytes == expected.at_most - expected.bytes
    )


def test_reference_cycles_live_to_the_end_of_the_step() -> None:
    """Garbage in a cycle is freed after the step and not at a moment of the collector's choice."""

    def build() -> tuple[dict[str, Any], Step]:
        def step() -> None:
            for _ in range(3):
                cycle: list[Any] = [torch.zeros(1000)]
                cycle.append(cycle)
                del cycle
                [[] for _ in range(5000)]

        return {}, step

    trace = trace_of(build, fake=True)
    assert growth(trace) == 12000
    assert trace.growth_bytes == 0
