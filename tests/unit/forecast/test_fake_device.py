"""The device that has no memory: what runs on it, and that modules reach it as the same objects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.forecast.in_child import answer, case, results_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from holdfast.core.errors import PolicyError
from holdfast.forecast.fake.device import forecast_device


def _actual(tensor: torch.Tensor) -> str:
    assert isinstance(tensor, FakeTensor)
    return str(tensor.fake_device)


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


FACTORIES: dict[str, Any] = {
    "zeros": lambda d: torch.zeros(2, 3, device=d),
    "empty": lambda d: torch.empty(2, 3, device=d, dtype=torch.float16),
    "full": lambda d: torch.full((2,), 3.0, device=d),
    "arange": lambda d: torch.arange(5, device=d),
    "linspace": lambda d: torch.linspace(0, 1, 5, device=d),
    "randn": lambda d: torch.randn(2, device=d, requires_grad=True),
    "randint": lambda d: torch.randint(0, 5, (2,), device=d),
    "randperm": lambda d: torch.randperm(4, device=d),
    "eye": lambda d: torch.eye(3, device=d),
    "tensor": lambda d: torch.tensor([1.0, 2.0], device=d),
    "as_tensor": lambda d: torch.as_tensor([1, 2], device=d),
    "zeros_like": lambda d: torch.zeros_like(torch.empty(2), device=d),
    "new_zeros": lambda d: torch.empty(2).new_zeros(3, device=d),
    "new_tensor": lambda d: torch.empty(2).new_tensor([1.0], device=d),
    "to": lambda d: torch.empty(2).to(d),
    "to_by_name": lambda d: torch.empty(2).to(device=d, dtype=torch.float16),
    "to_and_type": lambda d: torch.empty(2).to(d, torch.float64),
    "module": lambda d: nn.Linear(2, 2, device=d).weight,
    "normal_in_place": lambda d: torch.empty(2, device=d).normal_(),
}


@case
def factories() -> Any:
    with forecast_device():
        found = {
            f"{name} on {place!r}": _actual(make(place))
            for name, make in FACTORIES.items()
            for place in ("cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0))
        }
        found["cuda()"] = _actual(torch.empty(2).cuda())
        found["cuda(0)"] = _actual(torch.empty(2).cuda(0, non_blocking=True))
        with torch.device("cuda"):
            found["default"] = _actual(torch.zeros(2))
        found["to the host"] = _actual(torch.zeros(2, device="cuda").cpu())
        found["as another is"] = _actual(torch.zeros(2, device=torch.zeros(1, device="cuda").device))
        return found


def _step(device: str) -> list[str]:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(144, 5)
    ).to(device)
    x = torch.zeros(2, 3, 8, 8, device=device)
    checkpoint(model, x, use_reentrant=False)
    optimizer = torch.optim.AdamW(model.parameters())
    with _Operators() as operators:
        loss = checkpoint(model, x, use_reentrant=False).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return operators.names


@case
def a_step() -> Any:
    with forecast_device():
        names = _step("cuda")
        big = torch.zeros(2**40, device="cuda")  # 4 TiB
        return {
            "dropout": "aten.native_dropout.default" in names,
            "foreach": sum("_foreach_" in name for name in names) > 5,
            "for_loop": sum(name == "aten.addcdiv_.default" for name in names),
            "big": big.untyped_storage().nbytes(),
        }


def _tied() -> nn.ModuleDict:
    model = nn.ModuleDict(
        {"embedding": nn.Embedding(11, 4), "rnn": nn.GRU(4, 4), "head": nn.Linear(4, 11, bias=False)}
    )
    model["head"].weight = model["embedding"].weight
    model.register_buffer("positions", torch.arange(5))
    return model


def _look_after(model: Any, before: list[torch.Tensor], optimizer: Any) -> dict[str, Any]:
    head = model["head"](model["embedding"](torch.zeros(2, 3, dtype=torch.long, device="cuda")))
    head.sum().backward()
    optimizer.step()
    return {
        "same objects": [id(p) for p in model.parameters()] == [id(p) for p in before],
        "parameters": all(isinstance(p, nn.Parameter) and p.requires_grad and p.is_leaf for p in model.parameters()),
        "there": sorted({_actual(t) for t in (*model.parameters(), *model.buffers())}),
        "tied": model["head"].weight is model["embedding"].weight and model["head"].weight.grad is not None,
        "flat": all(a is b for a, b in zip(model["rnn"]._flat_weights, model["rnn"].parameters(), strict=True)),
        "stepped": len(optimizer.state),
    }


@case
def moves() -> Any:
    found: dict[str, Any] = {}
    real = _tied()
    for name, move in {
        "to": lambda m, d: m.to("cuda"),
        "cuda": lambda m, d: m.cuda(),
        "to_type": lambda m, d: m.to("cuda", torch.float64),
        "place": lambda m, d: d.place(m),
        "place_real": lambda m, d: d.place(m),
    }.items():
        with forecast_device() as device:
            model = real if name == "place_real" else _tied()
            before, optimizer = list(model.parameters()), torch.optim.Adam(model.parameters())
            move(model, device)
            found[name] = _look_after(model, before, optimizer)
            found[name]["type"] = str(model["head"].weight.dtype)
    return found


@case
def real_tensors() -> Any:
    with forecast_device() as device:
        with device.suspended():
            batch = torch.arange(6).reshape(2, 3)
        twin = batch.to("cuda")
        with device.suspended():
            pretrained = nn.Linear(2, 2).to("cuda")
            pretrained(torch.ones(1, 2, device="cuda")).sum().backward()
            is_real = type(pretrained.weight.grad) is torch.Tensor and pretrained.cuda().weight.device.type == "cpu"
            weights = torch.ones(3)
            moved = (weights.to("cuda") * 2)[:2]
        of_class = [_actual(moved + 1), _actual(weights + 1), _actual(torch.zeros(2, device="cuda") * moved)]
        device.place(pretrained)
        placed = [_actual(pretrained.weight), _actual(pretrained.weight.grad), is_real]
        again = device.mode.adopted(batch) is device.mode.adopted(batch)
        return [
            type(batch) is torch.Tensor,
            _actual(twin),
            again,
            int(twin.max()),
            type(batch + 1) is FakeTensor,
            *placed,
            *of_class,
        ]


@case
def operators_without_a_rule() -> Any:
    library = torch.library.Library("holdfast_test", "DEF")
    library.define("fold(Tensor x) -> Tensor")
    found: list[str] = []
    with forecast_device():
        x = torch.zeros(4, 3, device="cuda")
        try:
            torch.ops.holdfast_test.fold(x)
        except PolicyError as error:
            found += [error.rule, str(error)]
        torch.library.register_fake("holdfast_test::fold", lambda x: torch.empty(2, 3, device=x.device))
        found.append(str(list(torch.ops.holdfast_test.fold(x).shape)))
        try:
            doubled(x)
        except PolicyError as error:
            found += [error.rule, error.what]
    return found


@torch.library.custom_op("holdfast_test::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@case
def the_host_as_the_device() -> Any:
    with forecast_device("cpu") as device:
        as_cuda = [torch.cuda.is_available(), _actual(nn.Linear(2, 2).cuda().weight), str(device.device)]
    with forecast_device("cpu", as_cuda=False):
        return [*as_cuda, torch.cuda.is_available()]


@case
def afterwards() -> Any:
    before = [torch.cuda.is_available, nn.Module._apply, torch.compile, torch.clear_autocast_cache, torch.Generator]
    names = [set(vars(torch.Tensor)), set(vars(torch.cuda))]
    with forecast_device(), torch.autocast("cuda"):
        torch.zeros(2, 2, device="cuda") @ torch.zeros(2, 2, device="cuda")
    after = [torch.cuda.is_available, nn.Module._apply, torch.compile, torch.clear_autocast_cache, torch.Generator]
    real = nn.Linear(2, 2).double()
    return [
        all(a is b for a, b in zip(before, after, strict=True)),
        names == [set(vars(torch.Tensor)), set(vars(torch.cuda))],
        type(torch.zeros(1)) is torch.Tensor and str(real.weight.dtype) == "torch.float64",
    ]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """What the cases gave."""
    return results_of(__file__)


def test_whatever_is_asked_for_on_cuda_comes_to_the_device(results: dict[str, Any]) -> None:
    """Every way to make or move a tensor to CUDA leads to the fake device, and host tensors stay on the host."""
    found = results["factories"]
    assert found.pop("to the host") == "cpu"
    assert len(found) == 4 * len(FACTORIES) + 4
    assert {name: place for name, place in found.items() if place != "forecast:0"} == {}


def test_a_step_takes_the_way_of_cuda(results: dict[str, Any]) -> None:
    """Checkpointing, BatchNorm, clipping and AdamW run, with native dropout and foreach kernels, without memory."""
    assert results["a_step"] == {"dropout": True, "foreach": True, "for_loop": 0, "big": 2**42}


@pytest.mark.parametrize("way", ["to", "cuda", "to_type", "place", "place_real"])
def test_a_module_is_moved_as_the_same_object(results: dict[str, Any], way: str) -> None:
    """Parameters keep their identity and their ties, buffers come along, and an older optimizer steps them."""
    assert results["moves"][way] == {
        "same objects": True,
        "parameters": True,
        "there": ["forecast:0"],
        "tied": True,
        "flat": True,
        "stepped": 1,
        "type": "torch.float64" if way == "to_type" else "torch.float32",
    }


def test_real_tensors_become_fake_with_known_values(results: dict[str, Any]) -> None:
    """A real batch is given one fake twin, whose integers are still known on the device."""
    assert results["real_tensors"][:5] == [True, "forecast:0", True, 5, True]


def test_a_real_model_is_built_while_the_mode_is_suspended(results: dict[str, Any]) -> None:
    """CUDA means the CPU there, tensors are real, and come to the device by ``place`` or when they are used."""
    assert results["real_tensors"][5:] == ["forecast:0", "forecast:0", True, "forecast:0", "cpu", "forecast:0"]


def test_an_operator_without_a_rule_is_named_with_the_line(results: dict[str, Any]) -> None:
    """H422 says operator, line and the call that helps; after ``register_fake`` the operator runs."""
    rule, text, shape, *of_a_function = results["operators_without_a_rule"]
    assert of_a_function[0] == "H422"
    assert of_a_function[1].startswith("operator holdfast_test::doubled has no rule")
    assert rule == "H422"
    assert "holdfast_test::fold" in text
    assert "test_fake_device.py:" in text
    assert "in operators_without_a_rule" in text
    assert 'torch.library.register_fake("holdfast_test::fold")' in text
    assert shape == "[2, 3]"


def test_the_host_can_be_the_device(results: dict[str, Any]) -> None:
    """Route "cpu" answers for CUDA if it is asked to, and not in a comparison with a real run."""
    assert results["the_host_as_the_device"] == [True, "cpu", "cpu", torch.cuda.is_available()]


def test_everything_is_put_back(results: dict[str, Any]) -> None:
    """After the context torch is as it was, down to the attributes of its classes."""
    assert results["afterwards"] == [True, True, True]


if __name__ == "__main__":
    answer()
