"""Faulty programs whose loop goes astray: clearing, accumulating, stepping, starting again, turned gradients."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from benchmarks.not_learning.held_out.data import digits, library_text, moons, seasons, table, windows
from benchmarks.not_learning.held_out.entry import error_score, faulty, squared_score
from benchmarks.not_learning.program import Watch


def cleared_between_backward_and_step(watch: Watch, seed: int) -> float:
    """backward, zero_grad, step: in that order there is nothing to step with."""
    torch.manual_seed(seed)
    series = seasons(200, 33)
    lstm, out = nn.LSTM(1, 16, batch_first=True), nn.Linear(16, 1)
    model = nn.ModuleList([lstm, out])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, optimizer):
        for _ in range(200):
            batch = series[torch.randint(150, (16,)), :, None]
            prediction = out(lstm(batch[:, :-1])[0])
            loss = nn.MSELoss()(prediction, batch[:, 1:])
            loss.backward()
            optimizer.zero_grad()
            optimizer.step()
    held = series[150:, :, None]
    return squared_score(out(lstm(held[:, :-1])[0]), held[:, 1:])


def zero_grad_never_called(watch: Watch, seed: int) -> float:
    """`optimizer.zero_grad` without its parentheses: gradients of all steps pile up, in a recurrent text model."""
    torch.manual_seed(seed)
    text, vocab = library_text()
    emb, rnn, out = nn.Embedding(vocab, 16), nn.GRU(16, 32, batch_first=True), nn.Linear(32, vocab)
    model = nn.ModuleList([emb, rnn, out])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    with watch(model, optimizer):
        for _ in range(300):
            x, y = windows(text, 16, 20)
            loss = F.cross_entropy(out(rnn(emb(x))[0]).flatten(0, 1), y.flatten())
            optimizer.zero_grad  # noqa: B018
            loss.backward()
            optimizer.step()
    x, y = windows(text, 100, 20)
    return F.cross_entropy(out(rnn(emb(x))[0]).flatten(0, 1), y.flatten()).item() / math.log(vocab)


def only_one_of_two_cleared(watch: Watch, seed: int) -> float:
    """Encoder and decoder have an optimizer each; the decoder's gradients are cleared, the encoder's are not."""
    torch.manual_seed(seed)
    points = moons(800)[0] @ torch.randn(2, 20) + 0.05 * torch.randn(800, 20)
    enc = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))
    dec = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 20))
    enc_opt, dec_opt = torch.optim.SGD(enc.parameters(), lr=0.1), torch.optim.SGD(dec.parameters(), lr=0.1)
    with watch({"enc": enc, "dec": dec}, {"enc": enc_opt, "dec": dec_opt}):
        for _ in range(900):
            x = points[torch.randint(700, (40,))]
            loss = F.mse_loss(dec(enc(x)), x)
            dec_opt.zero_grad()
            loss.backward()
            enc_opt.step()
            dec_opt.step()
    return squared_score(dec(enc(points[700:])), points[700:])


def accumulation_never_due(watch: Watch, seed: int) -> float:
    """Eight micro-batches per update by a test that is never true."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("digits", seed)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    accumulation_steps = 8
    with watch(model, optimizer):
        for _ in range(10):
            for step, rows in enumerate(torch.randperm(len(x)).split(16)):
                loss = F.cross_entropy(model(x[rows]), y[rows]) / accumulation_steps
                loss.backward()
                if step % accumulation_steps == accumulation_steps:
                    optimizer.step()
                    optimizer.zero_grad()
    return error_score(model(held_x), held_y)


def optimizer_steps_the_average(watch: Watch, seed: int) -> float:
    """The loss is the model's, the optimizer holds the running average's parameters."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    ema = copy.deepcopy(net)
    opt = torch.optim.Adam(ema.parameters(), lr=1e-2)
    with watch(net, opt):
        for _ in range(400):
            x, y = moons(48)
            loss = F.cross_entropy(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            with torch.no_grad():
                for slow, fast in zip(ema.parameters(), net.parameters(), strict=True):
                    slow.lerp_(fast, 0.05)
    x, y = moons(1000)
    return error_score(ema(x), y)


def fresh_model_in_every_fold(watch: Watch, seed: int) -> float:
    """Cross-validation makes a new model for each fold and keeps the first one's optimizer."""
    torch.manual_seed(seed)
    x, y, _, _ = table("breast_cancer", seed)

    def make() -> nn.Sequential:
        return nn.Sequential(nn.Linear(30, 16), nn.Tanh(), nn.Linear(16, 2))

    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scores = []
    for fold in range(3):
        if fold > 0:
            model = make()
        held = torch.arange(len(x)) % 3 == fold
        kept_x, kept_y = x[~held], y[~held]
        if fold < 2:
            continue
        with watch(model, optimizer):
            for _ in range(300):
                i = torch.randint(len(kept_x), (32,))
                optimizer.zero_grad()
                F.cross_entropy(model(kept_x[i]), kept_y[i]).backward()
                optimizer.step()
        scores.append(error_score(model(x[held]), y[held]))
    return scores[-1]


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.kaiming_normal_(module.weight)
        nn.init.zeros_(module.bias)


def initialised_again_each_epoch(watch: Watch, seed: int) -> float:
    """train_one_epoch() begins with model.apply(init), so each epoch starts from nothing."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("digits", seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train_one_epoch(epoch: int) -> None:
        if epoch >= 0:
            model.apply(_init)
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()

    with watch(model, optimizer) as watching:
        for epoch in range(25):
            train_one_epoch(epoch)
            watching.validated(F.cross_entropy(model(held_x), held_y).item())
    return error_score(model(held_x), held_y)


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return -ctx.scale * grad, None


def reversal_on_the_wrong_branch(watch: Watch, seed: int) -> float:
    """Domain adaptation: the gradient reversal is put before the label head and not before the domain's."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    domain = (torch.arange(len(x)) % 2).long()
    x = torch.where(domain[:, None, None, None] == 1, 1 - x, x)
    feature = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU())
    label, where = nn.Linear(24, 10), nn.Linear(24, 2)
    model = nn.ModuleDict({"feature": feature, "label": label, "where": where})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with watch(model, optimizer):
        for _ in range(400):
            i = torch.randint(len(x), (48,))
            z = feature(x[i])
            label_loss = F.cross_entropy(label(_Reverse.apply(z, 1.0)), y[i])
            domain_loss = F.cross_entropy(where(z), domain[i])
            optimizer.zero_grad()
            (label_loss + 0.1 * domain_loss).backward()
            optimizer.step()
    return error_score(label(feature(held_x)), held_y)


class _LeakyReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.where(x > 0, x, 0.1 * x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return torch.where(x > 0, -grad, -0.1 * grad)


def backward_with_a_stray_minus(watch: Watch, seed: int) -> float:
    """An activation of one's own whose backward has the wrong sign, in a regression with two hidden layers."""
    torch.manual_seed(seed)
    x = torch.rand(600, 4) * 2 - 1
    y = (x[:, :1] * x[:, 1:2]) + x[:, 2:3].abs()
    l1, l2, l3 = nn.Linear(4, 32), nn.Linear(32, 32), nn.Linear(32, 1)
    net = nn.ModuleList([l1, l2, l3])
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)

    def forward(batch: torch.Tensor) -> torch.Tensor:
        return l3(F.gelu(l2(_LeakyReLU.apply(l1(batch)))))

    with watch(net, opt):
        for _ in range(500):
            i = torch.randint(500, (50,))
            loss = (forward(x[i]) - y[i]).abs().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
    return squared_score(forward(x[500:]), y[500:])


def noise_of_no_size(watch: Watch, seed: int) -> float:
    """A GAN whose noise is scaled by a division of whole numbers, so by 0: every fake is the same point."""
    torch.manual_seed(seed)
    spread = 1 // 2
    gen = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    disc = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(disc.parameters(), lr=1e-3, betas=(0.5, 0.999))
    bce = F.binary_cross_entropy_with_logits
    one, zero = torch.ones(128, 1), torch.zeros(128, 1)

    def ring(count: int) -> torch.Tensor:
        angle = torch.randint(8, (count,)) * (math.pi / 4)
        return 2 * torch.stack([angle.cos(), angle.sin()], 1) + 0.2 * torch.randn(count, 2)

    def noise() -> torch.Tensor:
        return torch.randn(128, 8) * spread

    with watch({"G": gen, "D": disc}, {"G": opt_g, "D": opt_d}, objective="adversarial"):
        for _ in range(900):
            real = ring(128)
            fake = gen(noise())
            opt_d.zero_grad()
            (bce(disc(real), 0.9 * one) + bce(disc(fake.detach()), zero)).backward()
            opt_d.step()
            opt_g.zero_grad()
            bce(disc(fake), one).backward()
            opt_g.step()
    fake = torch.cat([gen(noise()) for _ in range(5)]).detach()
    real = ring(640)
    return float(torch.cdist(real, fake).min(1).values.mean() / real.norm(dim=1).mean())


def discriminator_also_climbs(watch: Watch, seed: int) -> float:
    """A GAN that never clears the discriminator: the generator's backward is added to its next update."""
    torch.manual_seed(seed)
    gen = nn.Sequential(nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1))
    disc = nn.Sequential(nn.Linear(1, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1), nn.Sigmoid())
    g_optim, d_optim = torch.optim.Adam(gen.parameters(), lr=1e-3), torch.optim.Adam(disc.parameters(), lr=1e-3)
    criterion = nn.BCELoss()
    with watch({"gen": gen, "disc": disc}, {"gen": g_optim, "disc": d_optim}, objective="adversarial"):
        for _ in range(600):
            real = 4 + 1.25 * torch.randn(64, 1)
            fake = gen(torch.randn(64, 4))
            g_optim.zero_grad()
            loss_d = criterion(disc(real), torch.ones(64, 1)) + criterion(disc(fake.detach()), torch.zeros(64, 1))
            loss_d.backward()
            d_optim.step()
            criterion(disc(fake), torch.ones(64, 1)).backward()
            g_optim.step()
    fake = gen(torch.randn(2000, 4))[:, 0].detach().sort().values
    real = (4 + 1.25 * torch.randn(2000)).sort().values
    return float((fake - real).abs().mean() / 4)


PROGRAMS = [
    faulty(cleared_between_backward_and_step, causes="813 815", also="814 823 828 812"),
    faulty(zero_grad_never_called, causes="811", also="826 825 828 827 801 802 804 848"),
    faulty(only_one_of_two_cleared, causes="811", also="826 825 828 827 801 802 804 847 848"),
    faulty(accumulation_never_due, causes="812", also="823 828 811"),
    faulty(optimizer_steps_the_average, causes="809 808", also="812 813 814 823 828"),
    faulty(fresh_model_in_every_fold, causes="809 808", also="812 813 814 823 828"),
    faulty(initialised_again_each_epoch, causes="828", also="827 826 824 832"),
    faulty(reversal_on_the_wrong_branch, causes="831", also="826 828 825 847 801 802 804"),
    faulty(backward_with_a_stray_minus, causes="831", also="826 828 825 847"),
    faulty(noise_of_no_size, causes="853 844", also="845 830"),
    faulty(discriminator_also_climbs, causes="811", also="853 826 828 847"),
]
