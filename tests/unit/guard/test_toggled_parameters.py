"""Loss functions that freeze, unfreeze or move parameters.

A guarded loop makes of them what a bare one makes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.unit.guard.guarded import guarded, square_of
from torch import nn

import holdfast


def set_requires_grad(model: nn.Module, wanted: bool) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(wanted)


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def train_gan(
    run_dir: Path | None, steps: int = 3, micro_batch_size: int | None = None
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    models = {"g": nn.Linear(4, 4), "d": nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))}
    optimizers = {
        name: torch.optim.Adam(model.parameters(), lr=0.01) for name, model in models.items()
    }
    generator, discriminator = models.values()

    def loss_d(x: torch.Tensor) -> torch.Tensor:
        set_requires_grad(discriminator, True)
        return (discriminator(x) - 1).square().mean() + discriminator(
            generator(x).detach()
        ).square().mean()

    def loss_g(x: torch.Tensor) -> torch.Tensor:
        set_requires_grad(discriminator, False)
        return (discriminator(generator(x)) - 1).square().mean()

    guard = None
    if run_dir is not None:
        guard = guarded(run_dir, models, optimizers, micro_batch_size=micro_batch_size)
    for step in range(steps):
        for name, loss in (("d", loss_d), ("g", loss_g)):
            if guard is not None:
                guard.step(batch(step), loss, optimizer=name)
                continue
            optimizers[name].zero_grad()
            loss(batch(step)).backward()
            optimizers[name].step()
    if guard is not None:
        guard.close()
    return [p.detach().clone() for model in models.values() for p in model.parameters()]


@pytest.mark.parametrize("micro_batch_size", [None, 4])
def test_parameters_unfrozen_in_the_loss_function_are_trained(tmp_path, micro_batch_size):
    """The set_requires_grad of CycleGAN and pix2pix, inside the loss functions of two
    optimizers.
    """
    expected = train_gan(None)
    found = train_gan(tmp_path, micro_batch_size=micro_batch_size)
    if micro_batch_size is None:
        assert all(map(torch.equal, found, expected))
    torch.testing.assert_close(found, expected)


def test_weights_that_a_forward_pass_moves_are_not_called_hooks_that_step(tmp_path):
    """Embedding(max_norm=) renormalises its weight in forward, and hooks of the guard itself are
    on it.
    """

    def train(run_dir: Path | None) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(8, 4, max_norm=0.5), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if run_dir is None:
            model(torch.arange(8)).square().mean().backward()
            optimizer.step()
        else:
            with guarded(run_dir, model, optimizer) as guard:
                guard.step(torch.arange(8), square_of(model))
        return model[0].weight.detach().clone()

    assert torch.equal(train(tmp_path), train(None))


@pytest.mark.parametrize("case", ["split", "clip"])
def test_a_parameter_of_two_optimizers_counts_once(tmp_path, case):
    """Its gradient is corrected once after a split of uneven parts, and clipped once."""

    def train(run_dir: Path | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name in ("a", "b")}
        x = torch.arange(32.0).reshape(8, 4) / 32
        x[0, 0] = -1.0

        def loss(x: torch.Tensor) -> holdfast.Loss:
            mine = x[x[:, 0] > 0]
            return holdfast.Loss((model(mine) - 1).square().mean(), len(mine))

        if run_dir is None:
            loss(x).mean.backward()
            if case == "clip":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            for optimizer in optimizers.values():
                optimizer.step()
        else:
            policy = {"micro_batch_size": 4} if case == "split" else {"max_grad_norm": 0.1}
            with guarded(run_dir, model, optimizers, **policy) as guard:
                guard.step(x, loss, optimizer=["a", "b"])
        return [p.detach().clone() for p in model.parameters()]

    torch.testing.assert_close(train(tmp_path), train(None))
