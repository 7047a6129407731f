"""Traps around clipping and mixed precision that other projects have shipped."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.unit.guard.guarded import assert_same, guarded, kinds_of, tensors_of, the_event
from torch import nn

import holdfast

pytestmark = pytest.mark.usefixtures("unchecked_splits")


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_a_finite_gradient_whose_norm_overflows_is_clipped_and_not_zeroed(tmp_path, make):
    """Gradients of 1e20 in fp32 keep their direction; torch's own clipping sets them to zero."""
    model = nn.Linear(4, 1, bias=False)
    before = model.weight.detach().clone()
    direction = torch.tensor([[1.0, -2.0, 3.0, 4.0]])
    guard = guarded(tmp_path, model, make(model.parameters(), lr=0.5), max_grad_norm=1.0)
    result = guard.step(direction, lambda x: (model(x) * 1e20).sum())
    gradient = model.weight.grad
    assert gradient is not None
    torch.testing.assert_close(gradient, direction / direction.norm())
    assert not result.skipped
    assert result.grad_norm["optimizer.0"] == pytest.approx(1e20 * math.sqrt(30), rel=1e-6)
    assert not torch.equal(model.weight, before)
    event = the_event(guard, "norm_overflowed")
    assert event.data["total"] == pytest.approx(1e20 * math.sqrt(30), rel=1e-6)

    naive = nn.Linear(4, 1, bias=False)
    (naive(direction) * 1e20).sum().backward()
    torch.nn.utils.clip_grad_norm_(naive.parameters(), 1.0)
    assert not naive.weight.grad.any(), "the trap is still there in torch"


def two_groups() -> tuple[dict[str, nn.Module], dict[str, torch.optim.Optimizer]]:
    torch.manual_seed(0)
    models = {"a": nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), "b": nn.Linear(3, 1)}
    optimizers: dict[str, torch.optim.Optimizer] = {
        "a": torch.optim.SGD(
            [{"params": models["a"][0].parameters()}, {"params": models["a"][1].parameters()}], 0.1
        ),
        "b": torch.optim.SGD(models["b"].parameters(), 0.1),
    }
    return models, optimizers


@pytest.mark.parametrize(
    ("clip_by", "scopes"),
    [
        ("global", [["a.0", "a.1", "b.0"]]),
        ("optimizer", [["a.0", "a.1"], ["b.0"]]),
        ("group", [["a.0"], ["a.1"], ["b.0"]]),
    ],
)
def test_every_group_of_every_optimizer_is_clipped_over_the_scope_that_was_named(
    tmp_path, clip_by, scopes
):
    """Global, per-optimizer and per-group clipping are three algorithms, and none forgets a
    group after the first.
    """
    models, optimizers = two_groups()
    guard = guarded(tmp_path, models, optimizers, max_grad_norm=0.5, clip_by=clip_by)
    result = guard.step(
        torch.randn(8, 3), lambda x: 50 * (models["a"](x).square() + models["b"](x).square()).mean()
    )
    groups = {
        f"{name}.{index}": [p.grad for p in group["params"]]
        for name, optimizer in optimizers.items()
        for index, group in enumerate(optimizer.param_groups)
    }
    assert set(result.grad_norm) == set(groups)
    for scope in scopes:
        before = math.hypot(*(result.grad_norm[name] for name in scope))
        after = torch.nn.utils.get_total_norm(
            [gradient for name in scope for gradient in groups[name]]
        )
        assert before > 0.5, "the test would show nothing"
        torch.testing.assert_close(after, torch.tensor(0.5), rtol=1e-5, atol=0)


def poisoned(model: nn.Module) -> Any:
    return lambda x: (model(x) * (torch.nan if x[0, 0] > 90 else 1.0)).square().mean()


def test_a_skipped_step_leaves_no_trace_at_all(tmp_path):
    """NaN moves no weight, moment, statistic, schedule, random number or accumulated gradient.

    The loss stays NaN.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    guard = guarded(tmp_path, model, optimizer, scheduler=scheduler)
    good, bad = torch.randn(8, 3), torch.full((8, 3), 99.0)
    guard.step(good, poisoned(model))
    before, rate = [*tensors_of(model, optimizer), torch.get_rng_state()], scheduler.get_last_lr()
    result = guard.step(bad, poisoned(model))
    assert result.skipped
    assert math.isnan(result.loss), "a NaN is never replaced by something that looks better"
    assert "non-finite" in result.reason
    assert_same([*tensors_of(model, optimizer), torch.get_rng_state()], before)
    assert scheduler.get_last_lr() == rate
    assert all(p.grad is None for p in model.parameters())
    assert guard.global_step == 1
    guard.step(good, poisoned(model))
    assert scheduler.get_last_lr() == [rate[0] / 2]
    assert guard.statistics().skipped_steps == 1


def fp16_pair(
    run_dir: Any, scale: float = 1.0, **how: Any
) -> tuple[holdfast.Guard, dict[str, nn.Module], Any]:
    torch.manual_seed(0)
    models: dict[str, nn.Module] = {"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)}
    optimizers = {
        name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()
    }

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (models["a"](x) + models["b"](x)).float().square().mean() * scale

    return (
        guarded(run_dir, models, optimizers, precision="fp16", max_grad_norm=1.0, **how),
        models,
        loss,
    )


def test_one_scaler_is_unscaled_once_and_updated_once_for_two_optimizers(tmp_path):
    """In fp16 the clipped norm is that of unscaled gradients, and two optimizers move the
    scale's counter by one.
    """
    guard, models, loss = fp16_pair(tmp_path)
    x = torch.randn(8, 3)
    with torch.autocast("cpu", torch.float16):
        expected = torch.autograd.grad(
            loss(x) * 64, [p for m in models.values() for p in m.parameters()]
        )
    norm = float(torch.nn.utils.get_total_norm([gradient / 64 for gradient in expected]))
    result = guard.step(x, loss)
    assert not result.skipped
    assert math.hypot(*result.grad_norm.values()) == pytest.approx(norm, rel=0.02)
    guard.step(x, loss)
    state = guard._engine.loss_scale.state_dict()
    assert state["_growth_tracker"] == 2
    assert guard.statistics().loss_scale == 65536.0


def test_the_first_overflows_of_fp16_lower_the_scale_and_are_no_alarm(tmp_path):
    """fp16 finds its scale by trying.

    Such a skip says so, and does not count towards a rollback.
    """
    guard, _, loss = fp16_pair(tmp_path, scale=100.0)
    reasons = []
    while len(reasons) < 30 and guard.global_step < 3:
        reasons.append(guard.step(torch.randn(8, 3), loss).reason)
    assert reasons[0] is not None
    assert "loss scale lowered to 32768" in reasons[0]
    assert guard.global_step == 3
    kinds = set(kinds_of(guard))
    assert "loss_scale_lowered" in kinds
    assert not kinds & {"roll_back", "loss_scale_collapsed", "skip_step"}


def test_a_scale_that_collapses_raises_an_alarm_and_ends_the_run(tmp_path):
    """Gradients that overflow at every scale end in an error that names them, instead of a scale
    of zero.
    """
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    guard = guarded(tmp_path, model, torch.optim.SGD(model.parameters(), 0.1), precision="fp16")

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (model(x).float() * 1e30).sum()  # finite, and its gradient is not in fp16

    with pytest.raises(holdfast.NonFiniteError, match="weight"):
        for _ in range(40):
            guard.step(torch.randn(8, 3), loss)
    assert "loss_scale_collapsed" in kinds_of(guard)


def test_the_scale_survives_a_restart(tmp_path):
    """The loss scale and its growth counter are part of a checkpoint."""
    guard, _, loss = fp16_pair(tmp_path, save_interval_steps=100)
    for _ in range(3):
        guard.step(torch.randn(8, 3), loss)
    guard.close()
    expected = guard._engine.loss_scale.state_dict()
    again, _, _ = fp16_pair(tmp_path, save_interval_steps=100)
    assert again._engine.loss_scale.state_dict() == expected
    assert again.global_step == guard.global_step > 0
