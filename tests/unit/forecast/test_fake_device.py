"""The device that has no memory: what runs on it, and that modules reach it as the same objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from holdfast.core.errors import PolicyError
from holdfast.forecast.fake.device import ForecastDevice, forecast_device

RUNS_IN_CHILD = True


def place_of(tensor: torch.Tensor) -> str:
    assert isinstance(tensor, FakeTensor)
    return str(tensor.fake_device)


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


FACTORIES: dict[str, Any] = {
    "zeros": lambda d: torch.zeros(2, 3, device=d),
    "arange": lambda d: torch.arange(5, device=d),
    "randint": lambda d: torch.randint(0, 5, (2,), device=d),
    "tensor": lambda d: torch.tensor([1.0, 2.0], device=d),
    "zeros_like": lambda d: torch.zeros_like(torch.empty(2), device=d),
    "new_tensor": lambda d: torch.empty(2).new_tensor([1.0], device=d),
    "to": lambda d: torch.empty(2).to(d),
    "to_and_type": lambda d: torch.empty(2).to(d, torch.float64),
    "module": lambda d: nn.Linear(2, 2, device=d).weight,
    "normal_in_place": lambda d: torch.empty(2, device=d).normal_(),
}


@pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES)
def test_whatever_is_asked_for_on_cuda_comes_to_the_device(
    make: Callable[[Any], torch.Tensor],
) -> None:
    """Every way to make or move a tensor to CUDA leads to the fake device."""
    with forecast_device():
        for place in ("cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0)):
            assert place_of(make(place)) == "forecast:0"


def test_a_step_takes_the_way_of_cuda() -> None:
    """Checkpointing, BatchNorm, clipping and AdamW run, with native dropout and foreach kernels,
    without memory.
    """
    with forecast_device():
        layers = [
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Flatten(),
            nn.Linear(144, 5),
        ]
        model = nn.Sequential(*layers).to("cuda")
        x = torch.zeros(2, 3, 8, 8, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        with Operators() as operators:
            checkpoint(model, x, use_reentrant=False).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        assert torch.zeros(2**40, device="cuda").untyped_storage().nbytes() == 2**42
    assert "aten.native_dropout.default" in operators.names
    assert sum("_foreach_" in name for name in operators.names) > 5
    assert "aten.addcdiv_.default" not in operators.names


def tied() -> nn.ModuleDict:
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(11, 4),
            "rnn": nn.GRU(4, 4),
            "head": nn.Linear(4, 11, bias=False),
        }
    )
    model["head"].weight = model["embedding"].weight
    model.register_buffer("positions", torch.arange(5))
    return model


WAYS: dict[str, Callable[[nn.Module, ForecastDevice], object]] = {
    "to": lambda module, _: module.to("cuda"),
    "to_type": lambda module, _: module.to("cuda", torch.float64),
    "place": lambda module, device: device.place(module),
    "place_real": lambda module, device: device.place(module),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_module_is_moved_as_the_same_object(way: str) -> None:
    """Parameters keep their identity and their ties, buffers come along, and an older optimizer
    steps them.
    """
    real = tied()
    with forecast_device() as device:
        model: Any = real if way == "place_real" else tied()
        before, optimizer = list(model.parameters()), torch.optim.Adam(model.parameters())
        WAYS[way](model, device)
        model["head"](
            model["embedding"](torch.zeros(2, 3, dtype=torch.long, device="cuda"))
        ).sum().backward()
        optimizer.step()
        assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
        assert all(isinstance(p, nn.Parameter) and p.requires_grad and p.is_leaf for p in before)
        assert {place_of(t) for t in (*model.parameters(), *model.buffers())} == {"forecast:0"}
        assert model["head"].weight is model["embedding"].weight
        assert model["head"].weight.grad is not None
        assert all(
            a is b
            for a, b in zip(model["rnn"]._flat_weights, model["rnn"].parameters(), strict=True)
        )
        assert len(optimizer.state) == 1
        assert model["head"].weight.dtype is (torch.float64 if way == "to_type" else torch.float32)


@torch.library.custom_op("holdfast_test::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_an_operator_without_a_rule_is_named_with_the_line() -> None:
    """H422 says operator, line and the call that helps.

    After ``register_fake`` the operator runs.
    """
    library = torch.library.Library("holdfast_test", "FRAGMENT")
    library.define("fold(Tensor x) -> Tensor")
    with forecast_device():
        x = torch.zeros(4, 3, device="cuda")
        with pytest.raises(
            PolicyError, match=r"holdfast_test::fold.*test_fake_device\.py:\d+ in test_an"
        ) as caught:
            torch.ops.holdfast_test.fold(x)
        assert caught.value.rule == "H422"
        assert 'torch.library.register_fake("holdfast_test::fold")' in str(caught.value)
        torch.library.register_fake(
            "holdfast_test::fold", lambda x: torch.empty(2, 3, device=x.device)
        )
        assert torch.ops.holdfast_test.fold(x).shape == (2, 3)
        with pytest.raises(PolicyError, match="operator holdfast_test::doubled") as caught:
            doubled(x)
        assert caught.value.rule == "H422"


def test_everything_is_put_back() -> None:
    """After the context torch is as it was, down to the attributes of its classes."""

    def found() -> list[Any]:
        functions = [
            torch.cuda.is_available,
            nn.Module._apply,
            torch.compile,
            torch.clear_autocast_cache,
        ]
        return [*functions, torch.Generator, set(vars(torch.Tensor)), set(vars(torch.cuda))]

    before = found()
    with forecast_device(), torch.autocast("cuda"):
        torch.zeros(2, 2, device="cuda") @ torch.zeros(2, 2, device="cuda")
    assert found() == before
    assert type(torch.zeros(1)) is torch.Tensor
    assert nn.Linear(2, 2).double().weight.dtype is torch.float64
