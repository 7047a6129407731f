"""`watch` names faults in loops of one's own, changes no result, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from holdfast.core.errors import PolicyError
from holdfast.learning.watch import watch

X = torch.randn(256, 10, generator=torch.Generator().manual_seed(1))
Y = (X @ torch.randn(10, 4, generator=torch.Generator().manual_seed(2))).argmax(1)


class Net(nn.Module):
    """A classifier with everything that has a state: dropout, batch norm, a rectifier."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def train(
    *,
    watched: bool = True,
    steps: int = 60,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    clear: bool = True,
    lr: float = 1e-2,
    **options: Any,
) -> tuple[list[Any], nn.Module]:
    """Train the net in an ordinary loop; return what was found, and the net."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    with watch(model, optimizer, **options) if watched else contextlib.nullcontext() as watching:
        for _ in range(steps):
            rows = torch.randint(256, (32,))
            if clear:
                optimizer.zero_grad()
            value = loss(model(X[rows]), Y[rows])
            value.backward()
            optimizer.step()
    if watching is None:
        return [], model
    assert watching._observer.failure is None
    return watching.findings(), model


def steps_of(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 1) -> None:
    """Make plain steps."""
    for _ in range(count):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()


def rules(found: list[Any]) -> list[str]:
    return [finding.rule for finding in found if finding.severity != "note"]


@pytest.mark.parametrize("steps", [3, 31, 120])
def test_watching_changes_no_bit(steps: int) -> None:
    """Weights, running statistics and random numbers are the same with and without, dropout
    included.
    """
    _, bare = train(watched=False, steps=steps)
    after_bare = torch.rand(1)
    _, watched = train(steps=steps)
    assert torch.equal(after_bare, torch.rand(1))
    for key, value in bare.state_dict().items():
        assert torch.equal(value, watched.state_dict()[key]), key


def test_a_finding_is_logged_once_and_in_time(caplog: pytest.LogCaptureFixture) -> None:
    """The log holds each finding once, with its fix and its rule, in the level of its severity."""
    with caplog.at_level(logging.INFO, logger="holdfast"):
        train(loss=lambda z, y: F.cross_entropy(z.softmax(1), y))
    assert [(record.levelname, "[H836]" in record.message) for record in caplog.records] == [
        ("ERROR", True)
    ]


def test_an_ignored_rule_and_a_frozen_parameter_are_not_reported() -> None:
    """What the caller declares is believed."""
    assert train(clear=False, ignore=("H811",))[0] == []

    def cut(**options: Any) -> list[str]:
        model = Net()
        optimizer = torch.optim.Adam(model.parameters())
        with watch(model, optimizer, **options) as watching:
            for _ in range(40):
                optimizer.zero_grad()
                F.cross_entropy(model.head(model.body(X).detach()), Y).backward()
                optimizer.step()
        return rules(watching.findings())

    assert "H814" in cut()
    assert "H814" not in cut(frozen=("body.*",))
    assert "H814" not in cut(frozen=("body",))
    with pytest.raises(PolicyError, match=r"(?s)'body.weihgt'.*'body.[01].weight'.*H102"):
        cut(frozen=("head.*", "body.weihgt"))


@pytest.mark.parametrize("leaves", ["normally", "by an error", "never entered"])
def test_no_hook_stays_behind(leaves: str) -> None:
    """However it is left, the model, the optimizer and torch are as they were."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = watch(model, optimizer)
    with contextlib.suppress(ZeroDivisionError):
        if leaves != "never entered":
            with made:
                steps_of(model, optimizer)
                if leaves == "by an error":
                    raise ZeroDivisionError
    assert torch._C._len_torch_function_stack() == 0
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    for parameter in model.parameters():
        assert not parameter._backward_hooks
        assert not parameter._post_accumulate_grad_hooks


def test_a_failure_of_the_diagnosis_does_not_reach_the_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged once, nothing is observed any more, and the weights are those of the bare
    loop.
    """

    def fail(*args: Any, **named: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr("holdfast.learning.layers.LayerObserver.measure_gradients", fail)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer) as watching:
        steps_of(model, optimizer, 5)
    assert watching._observer.failure == "RuntimeError: planted"
    assert sum("diagnosis failed" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("is_frozen", [True, False])
def test_evaluation_mode_of_a_frozen_part_is_no_mistake(is_frozen: bool) -> None:
    """Training in evaluation mode is reported unless all batch norm and dropout is frozen."""
    model = Net().eval()
    model.body.requires_grad_(not is_frozen)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(learning, lr=0.01)
    with watch(model, optimizer) as watching:
        steps_of(model, optimizer, 200)
    assert ("H834" in rules(watching.findings())) is not is_frozen


def test_lbfgs_is_watched_through_its_closure() -> None:
    """Losses inside a closure are seen, and the closure's repeated gradients are no leak."""
    model = nn.Linear(10, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X).softmax(1), Y)
        loss.backward()
        return loss

    with watch(model, optimizer) as watching:
        for _ in range(5):
            optimizer.step(closure)
    assert rules(watching.findings()) == ["H836"]


def test_arguments_of_the_wrong_kind_are_refused() -> None:
    """A list of parameters is no optimizer, and the error says what is."""
    with pytest.raises(PolicyError, match="H105") as caught:
        watch(Net(), [nn.Parameter(torch.ones(1))])  # type: ignore[arg-type]
    assert caught.value.rule == "H105"
    for option, rule in (({"objective": "gan"}, "H102"), ({"ignore": ("H811", "H899")}, "H702")):
        with pytest.raises(PolicyError, match=rule):
            watch(Net(), torch.optim.SGD(Net().parameters(), lr=0.1), **option)  # type: ignore[arg-type]


def test_traces_and_transforms_are_not_looked_into() -> None:
    """Gradients by sample with torch.func, and a trace of the model, are as without.

    Their values cannot be read.
    """
    model = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, weights, (x[None],)), y[None])

    def by_sample() -> dict[str, Tensor]:
        weights = {name: p.detach() for name, p in model.named_parameters()}
        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, X[:8], Y[:8])

    expected, graph = by_sample(), str(make_fx(model)(X[:8]).graph)
    with watch(model, optimizer) as watching:
        assert all(torch.equal(gradient, expected[name]) for name, gradient in by_sample().items())
        assert str(make_fx(model)(X[:8]).graph) == graph
        steps_of(model, optimizer)
        assert watching.facts()["inputs"]["model"]["calls"] == 1
    assert watching._observer.failure is None


def test_a_mode_of_the_callers_own_stays_where_it_is() -> None:
    """A function mode that is entered and left around each step is not disturbed by ours."""

    class Counting(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer) as watching:
        for _ in range(50):
            with Counting():
                steps_of(model, optimizer)
            assert torch._C._len_torch_function_stack() <= 1
    assert watching._observer.failure is None
    assert torch._C._len_torch_function_stack() == 0
