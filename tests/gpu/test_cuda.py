"""What only a CUDA machine can show.

Elsewhere each test is skipped by name; run them there with `make gpu`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.gpu.marks import NEEDS_CUDA, waits
from torch import nn

import holdfast

pytestmark = NEEDS_CUDA


@pytest.fixture
def small_memory() -> Iterator[None]:
    """Let CUDA's own allocator refuse memory beyond 1 GiB."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(2**30 / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def make(*layers: nn.Module) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(
        *layers or (nn.Linear(512, 512), nn.Dropout(0.1), nn.ReLU(), nn.Linear(512, 8))
    ).cuda()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}


def loss_of(model: nn.Module) -> Any:
    return lambda x: model(x).float().square().mean()


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(
        torch.equal(x, y)
        for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


@pytest.mark.usefixtures("small_memory")
def test_an_out_of_memory_of_cuda_is_recovered(tmp_path) -> None:
    """A batch that CUDA's allocator refuses is split, and the gradient is that of the whole
    batch.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6))).cuda()
    twin = copy.deepcopy(model)
    x = torch.randn(131072, 1024)
    for part in x.split(8192):
        (twin(part.cuda()).square().mean() * (8192 / len(x))).backward()
    guard = holdfast.Guard(
        tmp_path,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.0),
        save_interval_steps=None,
    )
    result = guard.step(x, lambda part: model(part.cuda()).square().mean())
    assert result.attempts > 1
    assert result.micro_batch_size is not None
    assert result.micro_batch_size < len(x)
    for found, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-3, atol=1e-6)
    assert "out_of_memory" in {event.kind for event in guard.events()}


@pytest.mark.parametrize("diagnose", [False, True])
def test_a_step_reads_the_device_once(tmp_path, diagnose) -> None:
    """Where nothing goes wrong a step makes one host sync, the fused check, and reading the loss is
    the caller's.

    The diagnosis reads more, in the steps that it samples: all of the first 30, one in fifty in the
    long run.
    """
    parts = make()
    guard = holdfast.Guard(
        tmp_path,
        max_grad_norm=1.0,
        save_interval_steps=None,
        check_split=False,
        diagnose=diagnose,
        **parts,
    )
    x = torch.randn(64, 512, device="cuda")
    observer = guard._engine.diagnosis._observer
    for _ in range(35):
        guard.step(x, loss_of(parts["model"]))
    while observer is not None and observer.due():
        guard.step(x, loss_of(parts["model"]))
    assert waits(lambda: x.sum().item()) == 1
    assert waits(lambda: guard.step(x, loss_of(parts["model"]))) <= 1


def test_the_origin_of_a_nan_is_found_and_training_goes_on_without_it(tmp_path) -> None:
    """The replay on the device names the operation and the sample, and leaves no trace."""
    parts = make(nn.Linear(512, 8))
    guard = holdfast.Guard(tmp_path, save_interval_steps=None, check_split=False, **parts)
    x = torch.rand(16, 512, device="cuda") + 0.1
    guard.step(x, loss_of(parts["model"]))
    before = copy.deepcopy(parts["model"])
    x[3, 0] = 0.0
    result = guard.step(x, lambda part: parts["model"](part.log()).float().square().mean())
    assert result.skipped
    assert "log" in str(result.reason)
    assert "sample 3" in str(result.reason)
    assert equal(before, parts["model"])


def test_a_rollback_brings_the_device_back_to_a_copy_on_the_host(tmp_path) -> None:
    """After a divergence the weights are those of a state that lay in host memory."""
    parts = make(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    model = parts["model"]
    guard = holdfast.Guard(
        tmp_path,
        save_interval_steps=None,
        snapshot_interval_steps=50,
        spike_action="roll_back",
        **parts,
    )
    kept = {}
    drawn = torch.Generator().manual_seed(0)
    for number in range(300):
        x = torch.randn(32, 64, generator=drawn).cuda()
        if number == 220:
            with torch.no_grad():
                model[0].weight.mul_(1000.0)
        result = guard.step(
            x, lambda part: (model(part) - part.sum(1, keepdim=True)).square().mean()
        )
        kept.setdefault(guard.global_step, copy.deepcopy(model))
        if "rolled back" in (result.reason or ""):
            assert equal(kept[guard.global_step], model)
            return
    pytest.fail("no rollback")
