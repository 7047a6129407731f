"""What a loss function may not do, which ones count as the same, and what one leaves behind."""

from __future__ import annotations

import functools
import pickle
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.guard.guarded import events, guarded, square_of, the_event
from torch import nn
from torch.nn import functional as F

import holdfast
from holdfast.guard.splitting.loss_identity import description_of
from holdfast.guard.splitting.split_safety import SECONDS_BEFORE_SEARCH
from holdfast.guard.splitting.two_pass import TwoPass
from holdfast.testing import FakeClock

# --- what it may not do


def parts() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
    }


def loss_of(given: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = given["model"](x).square().mean()
    return loss


def backward(given: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    loss = loss_of(given, x)
    loss.backward()
    return loss


def backward_of_a_copy(given: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    (0.5 * loss_of(given, x)).backward()
    return loss_of(given, x)


def whole_loop(given: dict[str, Any], x: torch.Tensor) -> float:
    given["optimizer"].zero_grad()
    loss = loss_of(given, x)
    loss.backward()
    given["optimizer"].step()
    return loss.item()


def step(given: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    given["optimizer"].step()
    return loss_of(given, x)


CASES = {
    "backward": backward,
    "backward ran": backward_of_a_copy,
    "step of a whole loop": whole_loop,
    "step": step,
}


@pytest.mark.parametrize("micro_batch_size", [None, "auto", 2])
@pytest.mark.parametrize("case", CASES)
def test_a_loop_that_was_moved_into_the_loss_function_is_named(tmp_path, case, micro_batch_size):
    """Backward and step inside the loss function are H209, and no weight or moment has moved."""
    given = parts()
    guard = guarded(tmp_path, micro_batch_size=micro_batch_size, **given)
    before = {name: value.clone() for name, value in given["model"].state_dict().items()}
    with pytest.raises(holdfast.BatchError, match=case.split()[0]) as caught:
        guard.step(torch.randn(8, 3), lambda x: CASES[case](given, x))
    assert caught.value.rule == "H209"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert all(
        torch.equal(value, before[name]) for name, value in given["model"].state_dict().items()
    )
    assert all(not state.get("step", 0) for state in given["optimizer"].state.values())
    assert all(p.grad is None for p in given["model"].parameters())
    assert not guard.step(torch.randn(8, 3), lambda x: loss_of(given, x)).skipped
    guard.close()
    given["optimizer"].step()
    given["optimizer"].zero_grad()


def test_gradients_with_respect_to_inputs_are_free(tmp_path):
    """An adversarial step or a penalty inside the loss function, which reaches no parameter, is
    no error.
    """
    given = parts()
    guard = guarded(tmp_path, **given)

    def loss(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        loss_of(given, x).backward(inputs=[x])
        (slope,) = torch.autograd.grad(loss_of(given, x), x, create_graph=True)
        return loss_of(given, x + 0.1 * x.grad.sign()) + slope.square().sum()

    assert not any(guard.step(torch.randn(8, 3), loss).skipped for _ in range(3))


def test_gradients_that_were_filled_before_the_first_step_are_not_lost_in_silence(tmp_path):
    """A backward outside before the first step is H210.

    What an earlier run has left is no error.
    """
    given = parts()
    guard = guarded(tmp_path / "a", **given)
    loss_of(given, torch.randn(8, 3)).backward()
    with pytest.raises(holdfast.BatchError, match="loss_a \\+ loss_b") as caught:
        guard.step(torch.randn(8, 3), lambda x: loss_of(given, x))
    assert caught.value.rule == "H210"
    guard.step(torch.randn(8, 3), lambda x: loss_of(given, x))
    guarded(tmp_path / "b", **given).step(torch.randn(8, 3), lambda x: loss_of(given, x))


@pytest.mark.parametrize("fused", [False, True])
def test_hooks_that_step_in_backward_are_named_and_others_are_free(tmp_path, fused):
    """An optimizer that a hook steps cannot be taken back: H211 in the first step.

    A hook that only looks is free.
    """
    given, seen = parts(), []
    for parameter in given["model"].parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.norm())))
    assert (
        not guarded(tmp_path / "a", **given)
        .step(torch.randn(8, 3), lambda x: loss_of(given, x))
        .skipped
    )
    assert seen
    weight = next(given["model"].parameters())
    of_hook = torch.optim.SGD([weight], lr=0.1, fused=fused)
    weight.register_post_accumulate_grad_hook(lambda _: of_hook.step())
    with pytest.raises(holdfast.BatchError, match="changed 1 parameter") as caught:
        guarded(tmp_path / "b", **given).step(torch.randn(8, 3), lambda x: loss_of(given, x))
    assert caught.value.rule == "H211"


# --- which ones are the same


def reduced(batch: Any, model: nn.Module, reduction: str) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1], reduction=reduction)


class Criterion(nn.Module):
    def __init__(self, model: nn.Module, reduction: str) -> None:
        super().__init__()
        self.model, self.reduction = [model], reduction

    def forward(self, batch: Any) -> torch.Tensor:
        return reduced(batch, self.model[0], self.reduction)


def made(model: nn.Module, reduction: str) -> Callable[[Any], torch.Tensor]:
    return lambda batch: reduced(batch, model, reduction)


PAIRS: list[Callable[[nn.Module, str], Any]] = [
    lambda model, reduction: functools.partial(reduced, model=model, reduction=reduction),
    Criterion,
    made,
    lambda model, reduction: Criterion(model, reduction).forward,
]


@pytest.mark.parametrize("kind", PAIRS)
def test_two_losses_of_one_code_are_weighted_each_by_its_own(tmp_path, kind):
    """A mean and a sum made by the same code.

    Split into parts, both steps have the gradient of the whole batch.
    """
    model = nn.Linear(10, 1)
    losses = [kind(model, reduction) for reduction in ("mean", "sum")]
    guard = guarded(
        tmp_path, model, torch.optim.SGD(model.parameters(), lr=1e-4), micro_batch_size=4
    )
    for number in range(8):
        batch = torch.randn(16, 10), torch.randn(16, 1)
        fn = losses[number // 2 % 2]
        (expected,) = torch.autograd.grad(fn(batch), [model.weight])
        before = model.weight.detach().clone()
        guard.step(batch, fn)
        torch.testing.assert_close(
            (before - model.weight.detach()) / 1e-4, expected, rtol=1e-2, atol=1e-3
        )


def test_what_makes_a_new_function_and_what_does_not():
    """Other code does, also in one line.

    A new object, a number, a tensor or the next process does not.
    """
    assert len({description_of(lambda batch, n=number: batch * n) for number in range(50)}) == 1
    assert (
        len(
            {
                description_of(functools.partial(torch.add, other=torch.tensor(n)))
                for n in (1.0, 2.0)
            }
        )
        == 1
    )
    first, second = (lambda batch: batch.sum()), (lambda batch: batch.mean())
    assert description_of(first) != description_of(second)
    assert description_of(TwoPass(first, second)) != description_of(TwoPass(second, first))
    for kind in PAIRS:
        found = description_of(kind(nn.Linear(2, 2), "mean"))
        assert (
            found
            == description_of(kind(nn.Linear(2, 2), "mean"))
            != description_of(kind(nn.Linear(2, 2), "sum"))
        )
        assert "0x" not in found


@pytest.mark.parametrize("where", ["closure", "module", "attribute"])
def test_a_flag_that_changes_makes_the_same_object_another_function(tmp_path, monkeypatch, where):
    """Spikes and splits of a second phase are not judged by what the first phase was like."""
    model, second = nn.Linear(2, 1), False
    monkeypatch.setitem(globals(), "SECOND_PHASE", False)

    class OfAnObject:
        second = False

        def __call__(self, batch):
            return (model(batch) + 10 * self.second).square().mean()

    loss_fn = {
        "closure": lambda batch: (model(batch) + 10 * second).square().mean(),
        "module": lambda batch: (model(batch) + 10 * SECOND_PHASE).square().mean(),  # noqa: F821
        "attribute": OfAnObject(),
    }[where]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with holdfast.Guard(tmp_path, model=model, optimizer=optimizer, micro_batch_size=2) as guard:
        for step in range(4):
            second = step >= 2
            monkeypatch.setitem(globals(), "SECOND_PHASE", second)
            if where == "attribute":
                loss_fn.second = second
            guard.step(torch.ones(4, 2), loss_fn)
        assert len(guard._session.spikes.state_dict()["tracks"]) == 2
        assert len(guard._engine.attempts.safety._histories) == 2


# --- what one leaves behind


class Counting(nn.Module):
    """Keeps everything that a module should not, and some things that it may."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.calls = 0
        self.history: list[float] = []
        self.recent: deque[int] = deque(maxlen=3)
        self.seen: dict[str, int] = {"batches": 0}
        self.state = torch.zeros(4)
        self.last: torch.Tensor | None = None
        self.table: torch.Tensor | None = None
        self.name = "constant"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.history.append(float(x.sum()))
        self.recent.append(self.calls)
        self.seen["batches"] += 1
        self.state = 0.5 * self.state + x.detach().mean(0)
        if self.table is None:
            self.table = torch.arange(4.0)
        self.last = self.inner(x)
        return self.last + self.table


def test_what_each_forward_pass_changes_is_named_and_what_it_only_overwrites_is_not(
    tmp_path, caplog
):
    """Counters, lists and carried state are one loud event after a second of training.

    Caches and last values are none.
    """
    model = nn.ModuleDict({"a": Counting(), "b": nn.Linear(4, 1)})
    clock = FakeClock()
    guard = guarded(tmp_path, model, clock=clock)
    for _ in range(2):
        assert not events(guard, "side_effects")
        clock.advance(SECONDS_BEFORE_SEARCH)
        guard.step(torch.randn(8, 4), lambda x: model["b"](model["a"](x)).square().mean())
    said = the_event(guard, "side_effects").data["attributes"]
    assert said == ["a.calls", "a.history", "a.recent", "a.seen", "a.state"]
    assert "a.calls" in caplog.text
    assert (model["a"].calls, len(model["a"].history)) == (2, 2)


class Centered(nn.Module):
    """A center that training passes alone move, as in DINO: it stays under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 1)
        self.center = torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        if torch.is_grad_enabled():
            self.center = 0.9 * self.center + 0.1 * out.detach().mean(0)
        return out - self.center


class First(nn.Module):
    def forward(self, x: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return x[0]


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (Centered, ["center"]),
        (
            lambda: nn.Sequential(
                nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.GRU(4, 2), First()
            ),
            [],
        ),
    ],
)
def test_what_changes_only_while_gradients_are_on_is_named_and_a_clean_model_says_nothing(
    tmp_path, make, found
):
    """Dropout, batch normalisation and recurrent layers have no side effect of this kind."""
    model = make()
    clock = FakeClock()
    guard = guarded(tmp_path, model, clock=clock)
    for _ in range(2):
        guard.step(torch.randn(8, 4), square_of(model))
        clock.advance(SECONDS_BEFORE_SEARCH)
    attributes = [event.data["attributes"] for event in events(guard, "side_effects")]
    assert attributes == ([found] if found else [])


def test_the_trial_of_a_split_names_side_effects_too(tmp_path):
    """A split by number is tried before the first step, and its event names what a pass changes."""
    model = nn.Sequential(Counting(), nn.Linear(4, 1))
    guard = guarded(tmp_path, model, micro_batch_size=4)
    guard.step(torch.randn(8, 4), square_of(model))
    attributes = the_event(guard, "side_effects").data["attributes"]
    assert "0.calls" in attributes
    assert the_event(guard, "promises").data["side_effects"] == attributes
