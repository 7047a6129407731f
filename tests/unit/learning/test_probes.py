"""Probes name the cause in faulty programs, say nothing about healthy ones, and leave no trace in either."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from holdfast.core.clock import SystemClock
from holdfast.learning.finding import Finding
from holdfast.learning.probes import probe
from holdfast.testing import FakeClock


@dataclass
class Program:
    """A small training program."""

    models: dict[str, nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]
    loss: Callable[[Any], Any]
    make_batch: Callable[[], Any]
    samples: int = 16
    clip: float | None = None
    seen: list[float] = field(default_factory=list)

    def train(self, steps: int) -> list[float]:
        for _ in range(steps):
            loss = self.loss(self.make_batch())
            for optimizer in self.optimizers.values():
                optimizer.zero_grad()
            loss.backward()
            self.before_step()
            for optimizer in self.optimizers.values():
                optimizer.step()
            self.seen.append(float(loss.detach()))
        return self.seen

    def before_step(self) -> None:
        if self.clip is not None:
            for optimizer in self.optimizers.values():
                nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], self.clip)

    def probe(self, **how: Any) -> list[Finding]:
        how = {"size": self.samples, "budget_seconds": 600.0, "clock": SystemClock(), **how}
        random_state = torch.get_rng_state()
        batch = self.make_batch()
        torch.set_rng_state(random_state)
        return probe(batch, self.loss, self.models, self.optimizers, split=0, before_step=self.before_step, **how)


def one(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any, make_batch: Any, **more: Any) -> Program:
    return Program({"model": model}, {"optimizer": optimizer}, loss, make_batch, **more)


_TEACHER = torch.randn(6, 4, generator=torch.Generator().manual_seed(5))


def labelled() -> Any:
    x = torch.randn(16, 6)
    return x, (x @ _TEACHER).argmax(dim=1)


def mlp(*middle: nn.Module, width: int = 24) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), *middle, nn.Linear(width, 4))


def classifier(model: nn.Module, optimizer: Any = None, **more: Any) -> Program:
    optimizer = optimizer or torch.optim.Adam(model.parameters(), 3e-3)
    return one(model, optimizer, lambda b: F.cross_entropy(model(b[0]), b[1]), labelled, **more)


# --- healthy ----------------------------------------------------------------------------------------------------


def unscaled_regression() -> Program:
    model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1))

    def make_batch() -> Any:
        x = torch.randn(16, 6)
        return x, 20000 + 3000 * (x @ _TEACHER[:, :1])

    return one(model, torch.optim.Adam(model.parameters(), 1e-2), lambda b: F.mse_loss(model(b[0]), b[1]), make_batch)


class Rounded(torch.autograd.Function):
    """Rounds, and passes the gradient straight through, as quantised networks do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


class Apply(nn.Module):
    """A module of a function."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


HEALTHY: dict[str, tuple[Callable[[], Program], int]] = {
    "classifier": (lambda: classifier(mlp()), 60),
    "classifier, converged": (lambda: classifier(mlp()), 1500),
    "dropout": (lambda: classifier(mlp(nn.Dropout(0.5), width=64)), 60),
    "unscaled regression": (unscaled_regression, 200),
    "straight-through rounding": (lambda: classifier(mlp(Apply(Rounded.apply))), 60),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_program_gives_no_finding(name):
    """Nothing is found in programs that learn, among them such whose losses mean little."""
    torch.manual_seed(3)
    make, steps = HEALTHY[name]
    program = make()
    program.train(steps)
    assert program.probe(in_place=True) == []


# --- faulty -----------------------------------------------------------------------------------------------------


class Reversed(torch.autograd.Function):
    """A square whose hand-written backward has the wrong sign."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return -2 * x * gradient


def wrong_backward_of_the_loss() -> Program:
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    loss = lambda b: Reversed.apply(model(b[0]) - F.one_hot(b[1], 4)).mean()  # noqa: E731
    return one(model, torch.optim.SGD(model.parameters(), 0.01), loss, labelled)


def reversed_hook_on_one_layer() -> Program:
    model = mlp()
    model[0].weight.register_hook(lambda gradient: -gradient)
    return classifier(model)


def climbing_optimizer() -> Program:
    return classifier(model := mlp(), torch.optim.SGD(model.parameters(), 0.01, maximize=True))


def output_ignores_input() -> Program:
    model = mlp()
    return one(
        model,
        torch.optim.Adam(model.parameters(), 3e-3),
        lambda b: F.cross_entropy(model(b["x"].float() * 0), b["y"]),
        lambda: dict(zip(("x", "y"), labelled(), strict=True)),
    )


def rate_too_high_for_sgd() -> Program:
    model = nn.Linear(6, 1)
    make_batch = lambda: (x := torch.randn(16, 6), x @ _TEACHER[:, :1])  # noqa: E731
    return one(model, torch.optim.SGD(model.parameters(), 1.5), lambda b: F.mse_loss(model(b[0]), b[1]), make_batch)


def rate_too_low() -> Program:
    return classifier(model := mlp(), torch.optim.SGD(model.parameters(), 1e-5))


def saturated_output() -> Program:
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1), nn.Sigmoid())
    make_batch = lambda: (x := torch.randn(16, 6), 5 + 2 * x[:, :1])  # noqa: E731
    return one(model, torch.optim.Adam(model.parameters(), 1e-2), lambda b: F.mse_loss(model(b[0]), b[1]), make_batch)


# what is made, steps before the probe, the rule, and the place that it names
FAULTY: dict[str, tuple[Callable[[], Program], int, str, str]] = {
    "wrong backward of the loss": (wrong_backward_of_the_loss, 5, "H831", ""),
    "reversed hook on one layer": (reversed_hook_on_one_layer, 20, "H831", "0.weight"),
    "optimizer that climbs": (climbing_optimizer, 5, "H831", "optimizer"),
    "output ignores input": (output_ignores_input, 20, "H830", "tensor 0 of the batch"),
    "rate too high for SGD": (rate_too_high_for_sgd, 10, "H825", "optimizer"),
    "rate too low": (rate_too_low, 40, "H824", "optimizer"),
    "saturated output": (saturated_output, 30, "H829", ""),
}


@pytest.mark.parametrize("name", FAULTY)
def test_the_cause_of_a_faulty_program_is_named_first(name):
    """Wrong directions, broken paths, wrong rates and unfit code are told apart, with numbers."""
    torch.manual_seed(3)
    make, steps, rule, where = FAULTY[name]
    program = make()
    program.train(steps)
    (found,) = program.probe(in_place=True)
    assert (found.rule, found.kind) == (rule, "cause")
    assert found.where.startswith(where)
    assert found.fix.startswith("Multiply the learning rate by ") == (rule in ("H824", "H825"))


@pytest.mark.parametrize("name", ["reversed hook on one layer", "output ignores input", "rate too high for SGD"])
def test_the_forked_copy_finds_what_the_probe_in_place_finds(name):
    """On the CPU the trials run in a copy of the process, with the same numbers and the same result."""
    torch.manual_seed(3)
    make, steps, *_ = FAULTY[name]
    program = make()
    program.train(steps)
    here = program.probe(in_place=True)
    assert [asdict(finding) for finding in program.probe()] == [asdict(finding) for finding in here]


# --- no trace ---------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Counts its calls in a plain attribute, a list and a buffer that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.history = 0, []
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.history.append(float(x.detach().mean()))
        self.count = self.count + 1
        return x


def everything() -> Program:
    model = mlp(nn.BatchNorm1d(24), nn.Dropout(0.3), Counting())
    optimizer = torch.optim.AdamW([{"params": model[:1].parameters()}, {"params": model[1:].parameters()}], 3e-3)
    program = classifier(model, optimizer, clip=1.0)
    program.optimizers["unused"] = torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1, momentum=0.9)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return program


def state_of(program: Program) -> list[Any]:
    (model,) = program.models.values()
    return [
        copy.deepcopy(dict(model.state_dict())),
        [optimizer.state_dict() for optimizer in copy.deepcopy(program.optimizers).values()],
        [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        [(m.training, getattr(m, "calls", None), list(getattr(m, "history", []))) for m in model.modules()],
        torch.get_rng_state(),
    ]


def objects_of(program: Program) -> list[int]:
    (model,) = program.models.values()
    optimizer = program.optimizers["optimizer"]
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return [id(x) for x in (*model.parameters(), *model.buffers(), *moments, *(p.grad for p in model.parameters()))]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("in_place", [True, None])
@pytest.mark.parametrize("steps", [0, 5])
def test_training_goes_on_bit_for_bit_after_a_probe(in_place, steps):
    """Weights, statistics, gradients, moments, modes, attributes and random state are untouched, on both paths."""
    runs = []
    for probes in (False, True):
        torch.manual_seed(7)
        program = everything()
        program.train(steps)
        program.models["model"][3].eval()
        before, objects = state_of(program), objects_of(program)
        seen: list[str] = []
        optimizer = program.optimizers["optimizer"]
        optimizer.register_step_pre_hook(lambda *_, seen=seen: seen.append("pre"))
        optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append("post"))
        if probes:
            assert program.probe(in_place=in_place) == []
            assert same(state_of(program), before)
            assert objects_of(program) == objects, "others may hold these very tensors"
            assert seen == [], "who watches steps must not see those of a trial"
        program.train(3)
        assert seen == ["pre", "post"] * 3
        runs.append((state_of(program), program.seen))
    assert same(*runs)


def test_a_loss_that_fails_in_the_middle_leaves_no_trace_and_is_said():
    """An exception in a trial ends that trial only: the note names it, and the state is as before."""
    torch.manual_seed(7)
    program = everything()
    program.train(2)
    before, calls, healthy = state_of(program), [0], program.loss

    def loss(batch: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] % 9 == 0:
            raise RuntimeError("no luck")
        return healthy(batch)

    program.loss = loss
    (note,) = program.probe(in_place=True)
    assert (note.rule, note.severity) == ("H828", "note")
    assert "RuntimeError: no luck" in note.what
    assert same(state_of(program), before)


@pytest.mark.parametrize("in_place", [True, None])
def test_the_budget_ends_the_trials_and_what_was_left_out_is_said(in_place):
    """The clock that is passed in decides between evaluations; findings made until then are kept."""
    torch.manual_seed(3)
    clock = FakeClock()
    program = output_ignores_input()
    program.train(5)
    plain, calls = program.loss, [0]

    def loss(batch: Any) -> torch.Tensor:
        clock.advance(1.0)
        calls[0] += 1
        return plain(batch)

    program.loss = loss
    before = state_of(program)
    finding, note = program.probe(clock=clock, budget_seconds=40.0, in_place=in_place)
    assert finding.rule == "H830"
    assert note.rule == "H828"
    assert "not complete: H825 not tried (the time" in note.what
    assert calls[0] <= 40
    assert same(state_of(program), before)
    (note,) = program.probe(clock=clock, budget_seconds=0.0, in_place=in_place)
    assert "not complete: H831, H830, H825, H829 not tried" in note.what
