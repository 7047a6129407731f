"""Faulty programs whose loop is wrong: the order of calls, clipping, schedules, and modes."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.not_learning.held_out.data import digits, table
from benchmarks.not_learning.held_out.entry import faulty
from benchmarks.not_learning.held_out_2.parts import (
    class_score,
    endless,
    fit_score,
    friedman,
    loader,
    mlp,
    rings,
    small_cnn,
)
from benchmarks.not_learning.program import Watch


def friedman_gradients_never_zeroed(watch: Watch, seed: int) -> float:
    """`zero_grad` is not called."""
    torch.manual_seed(seed)
    x, y = friedman(1500)
    model = mlp(10, 48, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer):
        for a, b in endless(loader(x[:1200], y[:1200], size=64), 400):
            loss = functional.mse_loss(model(a).squeeze(1), b)
            loss.backward()
            optimizer.step()
    return fit_score(model, x[1200:], y[1200:])


def digits_zeroed_before_the_step(watch: Watch, seed: int) -> float:
    """`zero_grad` stands between backward and step."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    model = nn.Sequential(nn.Flatten(), mlp(64, 48, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x, y, size=64), 300):
            loss = functional.cross_entropy(model(a), b)
            loss.backward()
            optimizer.zero_grad()
            optimizer.step()
    return class_score(model, held_x, held_y)


def wine_accumulation_never_full(watch: Watch, seed: int) -> float:
    """The condition under which accumulated gradients are applied is never true."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("wine", seed)
    model = mlp(13, 24, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    with watch(model, optimizer):
        for step, (a, b) in enumerate(endless(loader(x, y, size=8), 500)):
            (functional.cross_entropy(model(a), b) / 4).backward()
            if (step + 1) % 4 == 4:
                optimizer.step()
                optimizer.zero_grad()
    return class_score(model, held_x, held_y)


def digits_clipped_to_nothing(watch: Watch, seed: int) -> float:
    """The clip limit was set to 0 to turn clipping off."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    model = small_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with watch(model, optimizer):
        for a, b in endless(loader(x, y, size=64), 300):
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0)
            optimizer.step()
    return class_score(model, held_x, held_y)


def friedman_clipped_to_little(watch: Watch, seed: int) -> float:
    """Plain gradient descent with a tiny clip limit."""
    torch.manual_seed(seed)
    x, y = friedman(1500)
    model = mlp(10, 48, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with watch(model, optimizer):
        for a, b in endless(loader(x[:1200], y[:1200], size=64), 400):
            optimizer.zero_grad()
            functional.mse_loss(model(a).squeeze(1), b).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-4)
            optimizer.step()
    return fit_score(model, x[1200:], y[1200:])


def digits_maximised(watch: Watch, seed: int) -> float:
    """The optimizer was made for a reward and still maximises."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    model = nn.Sequential(nn.Flatten(), mlp(64, 48, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, maximize=True)
    with watch(model, optimizer):
        for a, b in endless(loader(x, y, size=64), 300):
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            optimizer.step()
    return class_score(model, held_x, held_y)


def digits_epoch_decay_by_batch(watch: Watch, seed: int) -> float:
    """An exponential decay that was meant for epochs is advanced with every batch."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    model = nn.Sequential(nn.Flatten(), mlp(64, 48, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    with watch(model, optimizer, scheduler=scheduler):
        for step, (a, b) in enumerate(endless(loader(x, y, size=64), 400)):  # noqa: B007
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            optimizer.step()
            scheduler.step()
    return class_score(model, held_x, held_y)


def friedman_step_decay_by_batch(watch: Watch, seed: int) -> float:
    """A decay by ten every ten epochs counts batches."""
    torch.manual_seed(seed)
    x, y = friedman(1500)
    model = mlp(10, 48, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.1)
    with watch(model, optimizer, scheduler=scheduler):
        for step, (a, b) in enumerate(endless(loader(x[:1200], y[:1200], size=64), 500)):  # noqa: B007
            optimizer.zero_grad()
            functional.mse_loss(model(a).squeeze(1), b).backward()
            optimizer.step()
            scheduler.step()
    return fit_score(model, x[1200:], y[1200:])


def digits_warm_up_floored(watch: Watch, seed: int) -> float:
    """The factor of a warm-up is an integer division and stays 0."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    model = nn.Sequential(nn.Flatten(), mlp(64, 48, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step // 1000)
    with watch(model, optimizer, scheduler=scheduler):
        for a, b in endless(loader(x, y, size=64), 300):
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            optimizer.step()
            scheduler.step()
    return class_score(model, held_x, held_y)


def wine_decay_ends_early(watch: Watch, seed: int) -> float:
    """A linear decay to zero spans a small part of the run."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("wine", seed)
    model = mlp(13, 24, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=30)
    with watch(model, optimizer, scheduler=scheduler, total_steps=400):
        for a, b in endless(loader(x, y, size=16), 400):
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            optimizer.step()
            scheduler.step()
    return class_score(model, held_x, held_y)


def friedman_plateau_by_batch(watch: Watch, seed: int) -> float:
    """A plateau scheduler is fed with the loss of each batch."""
    torch.manual_seed(seed)
    x, y = friedman(1500)
    model = mlp(10, 48, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3, factor=0.5)
    with watch(model, optimizer, scheduler=scheduler):
        for a, b in endless(loader(x[:1200], y[:1200], size=16), 700):
            loss = functional.mse_loss(model(a).squeeze(1), b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step(loss.item())
    return fit_score(model, x[1200:], y[1200:])


def digits_body_without_rate(watch: Watch, seed: int) -> float:
    """The group of the body has a learning rate of 0."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    body, head = mlp(64, 48, 3), nn.Linear(3, 10)
    model = nn.Sequential(nn.Flatten(), body, nn.ReLU(), head)
    groups: list[dict[str, Any]] = [{"params": body.parameters(), "lr": 0.0}, {"params": head.parameters()}]
    optimizer = torch.optim.Adam(groups, lr=3e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x, y, size=64), 600):
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            optimizer.step()
    return class_score(model, held_x, held_y)


def friedman_losses_summed_up(watch: Watch, seed: int) -> float:
    """The sum of all losses so far is differentiated in every step."""
    torch.manual_seed(seed)
    x, y = friedman(1500)
    model = nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total = torch.zeros(())
    with watch(model, optimizer):
        for a, b in endless(loader(x[:1200], y[:1200], size=32), 250):
            loss = functional.mse_loss(model(a).squeeze(1), b)
            total = total + loss
            optimizer.zero_grad()
            total.backward(retain_graph=True)
            optimizer.step()
    return fit_score(model, x[1200:], y[1200:])


def friedman_schedule_by_micro_batch(watch: Watch, seed: int) -> float:
    """With accumulation over eight, the scheduler is advanced for each micro-batch."""
    torch.manual_seed(seed)
    x, y = friedman(1500)
    model = mlp(10, 48, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=250, power=2)
    with watch(model, optimizer, scheduler=scheduler, total_steps=250):
        for step, (a, b) in enumerate(endless(loader(x[:1200], y[:1200], size=8), 2000)):
            (functional.mse_loss(model(a).squeeze(1), b) / 8).backward()
            scheduler.step()
            if step % 8 == 7:
                optimizer.step()
                optimizer.zero_grad()
    return fit_score(model, x[1200:], y[1200:])


def bandit_sign_forgotten(watch: Watch, seed: int) -> float:
    """REINFORCE without its minus."""
    torch.manual_seed(seed)
    best = torch.randn(6, 4)
    policy = mlp(6, 32, 4)
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    with watch(policy, optimizer, objective="reinforcement"):
        for _ in range(400):
            context = torch.randn(32, 6)
            chances = policy(context).log_softmax(1)
            act = chances.detach().exp().multinomial(1)
            reward = (act.squeeze(1) == (context @ best).argmax(1)).float()
            chance = chances.gather(1, act).squeeze(1)
            loss = (chance * (reward - 0.25)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    context = torch.randn(1000, 6)
    return float((policy(context).argmax(1) != (context @ best).argmax(1)).double().mean() / 0.75)


def digits_evaluation_mode_stays(watch: Watch, seed: int) -> float:
    """After the first evaluation the model is never put back into training mode."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    few, few_y = x[:300], torch.where(torch.rand(300) < 0.4, torch.randint(10, (300,)), y[:300])
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.5))
    model.append(nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer) as watching:
        for step, (a, b) in enumerate(endless(loader(few, few_y, size=25), 600)):
            if step % 60 == 0:
                model.eval()
                with torch.no_grad():
                    loss = functional.cross_entropy(model(held_x), held_y).item()
                    watching.validated(loss)
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            optimizer.step()
    return class_score(model, held_x, held_y)


def digits_validated_in_training_mode(watch: Watch, seed: int) -> float:
    """Evaluations, by which the best weights are chosen, run with dropout on."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Dropout(0.8), nn.Linear(96, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loss = 0.0
    with watch(model, optimizer) as watching:
        for step, (a, b) in enumerate(endless(loader(x, y, size=64), 450)):
            if step % 50 == 49:
                with torch.no_grad():
                    loss = functional.cross_entropy(model(held_x), held_y).item()
                    watching.validated(loss)
                model.train()
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            optimizer.step()
    return loss / 2.303


def digits_pairs_in_batch_norm(watch: Watch, seed: int) -> float:
    """Batches of two samples through batch norm."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 48))
    model.extend([nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 10)])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x, y, size=2, drop_last=True), 700):
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            optimizer.step()
    return class_score(model, held_x, held_y)


def ring_gan_judge_too_strong(watch: Watch, seed: int) -> float:
    """The judge learns much faster than the maker."""
    torch.manual_seed(seed)
    maker, judge = mlp(4, 32, 32, 2), mlp(2, 64, 64, 1)
    first = torch.optim.Adam(maker.parameters(), lr=1e-5)
    second = torch.optim.Adam(judge.parameters(), lr=2e-2)
    loss = functional.binary_cross_entropy_with_logits
    with watch({"maker": maker, "judge": judge}, {"maker": first, "judge": second}, objective="adversarial"):
        for _ in range(500):
            angle, fake = 2 * torch.pi * torch.rand(64, 1), maker(torch.randn(64, 4))
            real = 3 * torch.cat([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(64, 2)
            second.zero_grad()
            told = judge(torch.cat([real, fake.detach()]))
            loss(told, torch.cat([torch.ones(64, 1), torch.zeros(64, 1)])).backward()
            second.step()
            first.zero_grad()
            (-loss(judge(fake), torch.zeros(64, 1))).backward()
            first.step()
    return float((maker(torch.randn(500, 4)).norm(dim=1) - 3).abs().mean() / 2.8)


def rings_too_much_dropped(watch: Watch, seed: int) -> float:
    """0.95 was meant to be what dropout keeps."""
    torch.manual_seed(seed)
    x, y = rings(1500)
    model = nn.Sequential(nn.Linear(2, 48), nn.ReLU(), nn.Dropout(0.95), nn.Linear(48, 48), nn.ReLU())
    model.append(nn.Linear(48, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x[:1200], y[:1200], size=64), 400):
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            optimizer.step()
    return class_score(model, x[1200:], y[1200:])


PROGRAMS = [
    faulty(friedman_gradients_never_zeroed, causes="811", also="801 802 804 825 826 827 828 832 847 848"),
    faulty(digits_zeroed_before_the_step, causes="813 817", also="814 823 828 832"),
    faulty(wine_accumulation_never_full, causes="812", also="811 823 828 832"),
    faulty(digits_clipped_to_nothing, causes="817", also="815 818 823 824 828 832"),
    faulty(friedman_clipped_to_little, causes="818", also="823 824 828 832"),
    faulty(digits_maximised, causes="831", also="801 802 804 805 825 826 827 828 832 848"),
    faulty(digits_epoch_decay_by_batch, causes="819 820", also="823 824 828 832"),
    faulty(friedman_step_decay_by_batch, causes="819 820", also="823 824 828 832"),
    faulty(digits_warm_up_floored, causes="819 823", also="820 824 828 832"),
    faulty(wine_decay_ends_early, causes="819", also="820 823 824 828 832"),
    faulty(friedman_plateau_by_batch, causes="854", also="819 820 823 824 828 832"),
    faulty(digits_body_without_rate, causes="823", also="824 828 832"),
    faulty(friedman_losses_summed_up, causes="", also="801 802 804 811 825 826 827 828 832"),
    faulty(friedman_schedule_by_micro_batch, causes="819 820", also="821 823 824 828 832"),
    faulty(bandit_sign_forgotten, causes="831 840", also="826 828 832"),
    faulty(digits_evaluation_mode_stays, causes="834", also="833"),
    faulty(digits_validated_in_training_mode, causes="834", also="833"),
    faulty(digits_pairs_in_batch_norm, causes="835", also="827 828 832"),
    faulty(ring_gan_judge_too_strong, causes="853", also="815 823 824 825 847 848"),
    faulty(rings_too_much_dropped, causes="857", also="828 832"),
]
