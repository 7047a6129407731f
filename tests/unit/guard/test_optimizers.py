"""Optimizers of other libraries.

Wrappers resume bit for bit, and what a guarded step cannot move is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.guard.guarded import square_of
from torch import nn

import holdfast
from holdfast.checkpoint.store import Store

BATCHES = [torch.randn(8, 4, generator=torch.Generator().manual_seed(k)) for k in range(6)]


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one, which pulls the weights back to slow ones, as Lookahead
    does.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups = inner.param_groups
        self.state = inner.state
        self.defaults = inner.defaults
        self.steps = 0
        self.slow = [p.detach().clone() for group in inner.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        self.steps += 1
        if self.steps % 3 == 0:
            fast = [p for group in self.inner.param_groups for p in group["params"]]
            for slow, parameter in zip(self.slow, fast, strict=True):
                slow.lerp_(parameter.detach(), 0.5)
                parameter.data.copy_(slow)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


class Nested(Wrapper):
    """Its state lies one level down, and its keys are no names."""

    def state_dict(self) -> dict[str, Any]:
        slow = {(0, index): tensor for index, tensor in enumerate(self.slow)}
        return {"lookahead": {"steps": self.steps, "slow": slow}, "base": self.inner.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self.steps = state["lookahead"]["steps"]
        self.slow = [tensor.clone() for tensor in state["lookahead"]["slow"].values()]
        self.inner.load_state_dict(state["base"])


class Flat(Wrapper):
    """Its state lies beside that of the inner optimizer."""

    def state_dict(self) -> dict[str, Any]:
        return {**self.inner.state_dict(), "steps": self.steps, "slow": self.slow}

    def load_state_dict(self, state: Any) -> None:
        self.steps = state["steps"]
        self.slow = [tensor.clone() for tensor in state["slow"]]
        self.inner.load_state_dict({name: state[name] for name in ("state", "param_groups")})


class Forgetful(Nested):
    """It cannot load what it has saved."""

    def load_state_dict(self, state: Any) -> None:
        raise KeyError("exp_avg")


def model_and(
    kind: Callable[[Any], Any], *, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
    return model, kind(torch.optim.Adam(model.parameters(), lr=0.05))


def halved_every_other_step(optimizer: Any) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


def trained(run: Path, steps: int, kind: Callable[[Any], Any], **how: Any) -> tuple[nn.Module, Any]:
    """Train under a guard, up to so many steps of a run."""
    model, optimizer = model_and(kind, **how)
    dtype = next(model.parameters()).dtype
    guard = holdfast.Guard(
        run,
        model=model,
        optimizer=optimizer,
        scheduler=halved_every_other_step(optimizer),
        loader=BATCHES,
        save_interval_steps=1,
        max_grad_norm=None,
    )
    for batch in guard.batches(max_steps=steps):
        guard.step(batch, lambda x: model(x.to(dtype)).square().mean())
    return model, optimizer


@pytest.mark.parametrize("kind", [Nested, Flat])
def test_a_wrapper_resumes_bit_for_bit_whatever_its_state_looks_like(tmp_path, kind):
    """Slow weights, moments and rates are those of a bare loop, and no checkpoint is moved
    aside.
    """
    model, optimizer = model_and(kind)
    scheduler = halved_every_other_step(optimizer)
    for batch in [*BATCHES, *BATCHES[:4]]:
        optimizer.zero_grad()
        square_of(model)(batch).backward()
        optimizer.step()
        scheduler.step()

    for steps in (2, 7, 10):
        resumed, resumed_optimizer = trained(tmp_path, steps, kind)

    assert torch.equal(weights(resumed), weights(model))
    assert resumed_optimizer.steps == 10
    assert [group["lr"] for group in resumed_optimizer.inner.param_groups] == [0.05 / 2**5]
    assert not list((tmp_path / "checkpoints").glob("damaged-*"))


@pytest.mark.parametrize("kind", [Nested, Flat, lambda inner: inner])
def test_moments_in_fp32_of_weights_in_bf16_keep_their_bits(tmp_path, kind):
    """The load_state_dict of torch casts them; in a wrapper too they come back as they were."""

    def with_fp32_moments(inner: torch.optim.Optimizer) -> Any:
        for group in inner.param_groups:
            for p in group["params"]:
                moments = {
                    name: torch.zeros(p.shape, dtype=torch.float32)
                    for name in ("exp_avg", "exp_avg_sq")
                }
                inner.state[p] = {"step": torch.zeros(()), **moments}
        return kind(inner)

    trained(tmp_path, 0, with_fp32_moments, dtype=torch.bfloat16)
    _, optimizer = trained(tmp_path, 0, kind, dtype=torch.bfloat16)
    inner = getattr(optimizer, "inner", optimizer)
    types = {value.dtype for state in inner.state.values() for value in state.values()}
    assert types == {torch.float32}


def test_a_part_that_cannot_load_its_state_is_named_and_the_files_stay(tmp_path):
    """H313 at each start, with the cause.

    Every checkpoint is there afterwards, and a mended class resumes.
    """
    trained(tmp_path, 4, Nested)
    before = sorted((tmp_path / "checkpoints").iterdir())
    # Checkpoints know classes by their names.
    forgetful = type("Nested", (Forgetful,), {})

    for _ in range(2):
        with pytest.raises(holdfast.CheckpointError, match="optimizer 'optimizer'") as caught:
            trained(tmp_path, 6, forgetful)
        assert caught.value.rule == "H313"
        assert isinstance(caught.value.__cause__, KeyError)
        assert sorted((tmp_path / "checkpoints").iterdir()) == before

    for entry in Store(tmp_path / "checkpoints").entries():
        entry.verify()
    _, optimizer = trained(tmp_path, 6, Nested)
    assert optimizer.steps == 6


@pytest.mark.parametrize("part", ["scheduler", "state", "model"])
def test_an_error_of_any_part_while_it_is_loaded_moves_no_file(tmp_path, part):
    """What the caller's own load_state_dict raises says nothing about the checkpoint."""
    parts = parts_with_state()
    train_a_step(tmp_path, parts)
    before = sorted((tmp_path / "checkpoints").iterdir())

    broken = parts_with_state()

    def fail(*_: Any, **__: Any) -> None:
        raise LookupError("a key of mine")

    kind = type(broken[part])
    broken[part].__class__ = type(kind.__name__, (kind,), {"load_state_dict": fail})
    with pytest.raises(holdfast.CheckpointError, match=part) as caught:
        train_a_step(tmp_path, broken)

    assert caught.value.rule == "H313"
    assert sorted((tmp_path / "checkpoints").iterdir()) == before


def parts_with_state() -> dict[str, Any]:
    model, optimizer = model_and(lambda inner: inner)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": halved_every_other_step(optimizer),
        "state": nn.Linear(2, 2),
    }


def train_a_step(run: Path, parts: dict[str, Any]) -> None:
    guard = holdfast.Guard(run, loader=BATCHES, **parts)
    for batch in guard.batches(max_steps=guard.global_step + 1):
        guard.step(batch, square_of(parts["model"]))


# --- refused when the guard is made


class SharpnessAware(torch.optim.SGD):
    """SAM, as it is usually written."""

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.clone()
                p.add_(p.grad, alpha=0.05)

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old"])
        super().step()

    def step(self, closure: Any = None) -> None:
        assert closure is not None, "two passes need a closure"
        self.first_step()
        closure()
        self.second_step()


class Raising(torch.optim.SGD):
    """Its closure is optional in the signature only."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if closure is None:
            raise RuntimeError("a closure, please")
        return closure()


class Calling(torch.optim.SGD):
    """The same, without a check."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss


class WithLoss(torch.optim.SGD):
    """It wants to know the loss, as some step-size rules do."""

    def step(self, closure: Any = None, *, loss: torch.Tensor) -> Any:  # type: ignore[override]
        return super().step(closure)


class Optional(torch.optim.SGD):
    """It works without a closure, however that is written."""

    def step(self, closure: Any = None) -> Any:
        if closure is None:
            return super().step()
        loss = closure()
        super().step()
        return loss


class OwnBackward(torch.optim.SGD):
    """It projects the gradients of several losses, which plain `step` does not."""

    def pc_backward(self, losses: list[torch.Tensor]) -> None:
        sum(losses).backward()  # type: ignore[union-attr]


class Sharded(torch.optim.SGD):
    """As ZeroRedundancyOptimizer: its state_dict works after a collective only."""

    def consolidate_state_dict(self, to: int = 0) -> None: ...


class Bare(torch.optim.Optimizer):
    """A wrapper that has forgotten to show its groups."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner


class NeedsSteps(torch.optim.SGD):
    """Its state exists after the first step only."""

    def state_dict(self) -> Any:
        return {"first": self.missing}  # type: ignore[attr-defined]


def refusing(
    kind: Any, *, around: Callable[[Any], Any] = lambda inner: inner
) -> Callable[[Any], Any]:
    """Return a function that makes an optimizer of a kind from the parameters of another one."""
    return lambda adam: around(
        kind([p for group in adam.param_groups for p in group["params"]], lr=0.1)
    )


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        (refusing(SharpnessAware), "H107"),
        (refusing(SharpnessAware, around=Nested), "H107"),
        (refusing(WithLoss), "H107"),
        (refusing(OwnBackward), "H107"),
        (refusing(Sharded), "H108"),
        (refusing(Sharded, around=Flat), "H108"),
        (Bare, "H105"),
        (refusing(NeedsSteps), "H105"),
    ],
)
def test_an_optimizer_that_cannot_be_guarded_is_refused_before_a_run_directory_is_made(
    tmp_path, kind, rule
):
    """A second pass, a backward pass of its own, spread state, no groups, no state.

    Each has its rule.
    """
    model, optimizer = model_and(kind)
    with pytest.raises(holdfast.PolicyError) as caught:
        holdfast.Guard(tmp_path / "run", model=model, optimizer=optimizer)
    assert caught.value.rule == rule
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", [Raising, Calling])
def test_an_optimizer_that_fails_without_a_closure_is_named_in_its_first_step(tmp_path, kind):
    """Its signature says that the closure is optional, so nothing shows the need before the
    step.
    """
    model, optimizer = model_and(refusing(kind))
    guard = holdfast.Guard(tmp_path, model=model, optimizer=optimizer, save_interval_steps=None)
    before = weights(model)

    with pytest.raises(holdfast.PolicyError, match=kind.__name__) as caught:
        guard.step(BATCHES[0], square_of(model))

    assert caught.value.rule == "H107"
    assert caught.value.__cause__ is not None
    assert torch.equal(weights(model), before)


def test_a_closure_that_is_optional_is_no_reason_to_refuse(tmp_path):
    """Only an optimizer that fails without one is refused."""
    model, optimizer = model_and(refusing(Optional))
    guard = holdfast.Guard(tmp_path, model=model, optimizer=optimizer, save_interval_steps=None)
    assert not guard.step(BATCHES[0], square_of(model)).skipped


def test_an_optimizer_beside_its_wrapper_is_refused(tmp_path):
    """Both would move the same weights in each step."""
    model, wrapper = model_and(Nested)
    with pytest.raises(holdfast.PolicyError) as caught:
        holdfast.Guard(tmp_path, model=model, optimizer={"a": wrapper, "b": wrapper.inner})
    assert caught.value.rule == "H105"


class Opaque(torch.optim.SGD):
    """Its first step makes state that no checkpoint can hold."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.state["kernel"] = object()  # type: ignore[index]


def test_state_that_can_never_be_saved_ends_the_run_at_its_first_step(tmp_path):
    """Otherwise each save would fail for hours, and the run would be lost at its end."""
    model, optimizer = model_and(refusing(Opaque))
    guard = holdfast.Guard(tmp_path, model=model, optimizer=optimizer, loader=BATCHES)
    with pytest.raises(holdfast.CheckpointError) as caught:
        for batch in guard.batches(max_epochs=1):
            guard.step(batch, square_of(model))
    assert (caught.value.rule, guard.global_step) == ("H310", 1)


class WithoutRate(torch.optim.SGD):
    """It finds the length of its steps itself, as D-Adaptation does."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.param_groups[0]["lr"] = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad.sign(), alpha=1e-3)


def test_an_optimizer_without_a_learning_rate_trains_and_resumes(tmp_path):
    """Adafactor and others have `lr=None`."""
    for steps in (2, 4):
        model, optimizer = model_and(refusing(WithoutRate))
        guard = holdfast.Guard(tmp_path, model=model, optimizer=optimizer, loader=BATCHES)
        for batch in guard.batches(max_steps=steps):
            guard.step(batch, square_of(model))
    assert guard.global_step == 4
    assert not [event.kind for event in guard.events() if "diagnosis" in event.kind]


# --- lazy layers


@pytest.mark.parametrize("lazy", [nn.LazyLinear(2), nn.LazyBatchNorm1d(affine=False)])
def test_a_lazy_layer_is_refused_until_it_has_seen_a_batch(tmp_path, lazy):
    """Its tensors have no shape that could be saved."""
    model = nn.Sequential(nn.Linear(4, 4), lazy)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(holdfast.PolicyError) as caught:
        holdfast.Guard(tmp_path, model=model, optimizer=optimizer)
    assert caught.value.rule == "H105"

    model(BATCHES[0])
    guard = holdfast.Guard(tmp_path, model=model, optimizer=optimizer)
    assert not guard.step(BATCHES[0], square_of(model)).skipped


# --- sharpness-aware minimization, as the guide has it
# --------------------------------------------------------


def test_a_loss_at_perturbed_weights_is_sharpness_aware_minimization(tmp_path):
    """The way that the guide documents takes the steps of SAM, with the plain optimizer inside."""
    model, optimizer = model_and(refusing(SharpnessAware))
    for batch in BATCHES:

        def closure(batch: torch.Tensor = batch) -> None:
            optimizer.zero_grad()
            square_of(model)(batch).backward()

        closure()
        optimizer.step(closure)
    reference = weights(model)

    model, optimizer = model_and(refusing(torch.optim.SGD))

    def sharpness_aware(batch: torch.Tensor) -> torch.Tensor:
        named = dict(model.named_parameters())
        gradients = torch.autograd.grad(square_of(model)(batch), list(named.values()))
        perturbed = {
            name: p + 0.05 * g for (name, p), g in zip(named.items(), gradients, strict=True)
        }
        return torch.func.functional_call(model, perturbed, (batch,)).square().mean()

    guard = holdfast.Guard(
        tmp_path, model=model, optimizer=optimizer, loader=BATCHES, max_grad_norm=None
    )
    for batch in guard.batches(max_epochs=1):
        guard.step(batch, sharpness_aware)
    assert torch.allclose(weights(model), reference, rtol=0, atol=1e-6)
