"""Faulty programs of the set: stepping, rates."""

# ruff: noqa: N812 - the programs are written as users write theirs

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from evals.not_learning import data, parts
from evals.not_learning.program import Programs, adam, adamw, faulty, follow, sgd, update


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.kaiming_normal_(module.weight)
        nn.init.zeros_(module.bias)


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (-ctx.scale * grad, None)


class _LeakyReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.where(x > 0, x, 0.1 * x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.where(x > 0, -grad, -0.1 * grad)


class FaultyStepping(Programs):
    """Faulty programs whose loop goes astray: clearing, accumulating, stepping, starting again, turned gradients."""

    @faulty("H813 H815", shows="H814 H823 H828 H812")
    def cleared_between_backward_and_step(self) -> None:
        """backward, zero_grad, step: in that order there is nothing to step with."""
        series = data.seasons(200, 33)
        lstm, out = nn.LSTM(1, 16, batch_first=True), nn.Linear(16, 1)
        model = nn.ModuleList([lstm, out])
        optimizer = adam(model, 0.01)
        for _ in self.watched(range(200), model, optimizer):
            batch = series[torch.randint(150, (16,)), :, None]
            prediction = out(lstm(batch[:, :-1])[0])
            loss = nn.MSELoss()(prediction, batch[:, 1:])
            loss.backward()
            optimizer.zero_grad()
            optimizer.step()

    @faulty("H811", shows="H826 H825 H828 H827 H801 H802 H804 H848")
    def zero_grad_never_called(self) -> None:
        """`optimizer.zero_grad` without its parentheses: gradients pile up, in a recurrent text model."""
        text, vocab = data.library_text()
        emb, rnn, out = nn.Embedding(vocab, 16), nn.GRU(16, 32, batch_first=True), nn.Linear(32, vocab)
        model = nn.ModuleList([emb, rnn, out])
        optimizer = sgd(model, 0.3)
        for _ in self.watched(range(300), model, optimizer):
            x, y = data.text_windows(text, 16, 20)
            loss = F.cross_entropy(out(rnn(emb(x))[0]).flatten(0, 1), y.flatten())
            optimizer.zero_grad  # noqa: B018
            loss.backward()
            optimizer.step()

    @faulty("H811", shows="H826 H825 H828 H827 H801 H802 H804 H847 H848")
    def only_one_of_two_cleared(self) -> None:
        """Encoder and decoder have an optimizer each; the decoder's gradients are cleared, the encoder's are not."""
        points = data.moons(800)[0] @ torch.randn(2, 20) + 0.05 * torch.randn(800, 20)
        enc = parts.mlp(20, 32, 2)
        dec = parts.mlp(2, 32, 20)
        enc_opt, dec_opt = sgd(enc, 0.1), sgd(dec, 0.1)
        for _ in self.watched(range(900), {"enc": enc, "dec": dec}, {"enc": enc_opt, "dec": dec_opt}):
            x = points[torch.randint(700, (40,))]
            loss = F.mse_loss(dec(enc(x)), x)
            dec_opt.zero_grad()
            loss.backward()
            enc_opt.step()
            dec_opt.step()

    @faulty("H812", shows="H823 H828 H811")
    def accumulation_never_due(self) -> None:
        """Eight micro-batches per update by a test that is never true."""
        x, y, *_ = data.table("digits", self.seed)
        model = parts.mlp(64, 48, 10)
        optimizer = adamw(model, 0.005)
        accumulation_steps = 8
        for _ in self.watched(range(10), model, optimizer):
            for step, rows in enumerate(torch.randperm(len(x)).split(16)):
                loss = F.cross_entropy(model(x[rows]), y[rows]) / accumulation_steps
                loss.backward()
                if step % accumulation_steps == accumulation_steps:
                    optimizer.step()
                    optimizer.zero_grad()

    @faulty("H809 H808", shows="H812 H813 H814 H823 H828")
    def optimizer_steps_the_average(self) -> None:
        """The loss is the model's, the optimizer holds the running average's parameters."""
        net = parts.mlp(2, 32, 2)
        ema = copy.deepcopy(net)
        for _ in self.watched(range(400), net, adam(ema, 0.01)):
            x, y = data.moons(48)
            self.update(F.cross_entropy(net(x), y))
            follow(ema, net, 0.05)

    @faulty("H809 H808", shows="H812 H813 H814 H823 H828")
    def fresh_model_in_every_fold(self) -> None:
        """Cross-validation makes a new model for each fold and keeps the first one's optimizer."""
        x, y, *_ = data.table("breast_cancer", self.seed)

        def make() -> nn.Sequential:
            return parts.mlp(30, 16, 2, act=nn.Tanh)

        model = make()
        optimizer = adam(model, 0.003)
        for fold in range(3):
            if fold > 0:
                model = make()
            held = torch.arange(len(x)) % 3 == fold
            kept_x, kept_y = x[~held], y[~held]
            if fold < 2:
                continue
            with self.watch(model, optimizer):
                for _ in range(300):
                    i = torch.randint(len(kept_x), (32,))
                    update(optimizer, F.cross_entropy(model(kept_x[i]), kept_y[i]))

    @faulty("H828", shows="H827 H826 H824 H832")
    def initialised_again_each_epoch(self) -> None:
        """train_one_epoch() begins with model.apply(init), so each epoch starts from nothing."""
        x, y, held_x, held_y = data.table("digits", self.seed)
        model = parts.mlp(64, 64, 64, 10)

        def train_one_epoch(epoch: int) -> None:
            if epoch >= 0:
                model.apply(_init)
            for rows in torch.randperm(len(x)).split(64):
                self.update(F.cross_entropy(model(x[rows]), y[rows]))

        for epoch in self.watched(range(25), model, sgd(model, 0.01)):
            train_one_epoch(epoch)
            self.watching.validated(F.cross_entropy(model(held_x), held_y).item())

    @faulty("H831", shows="H826 H828 H825 H847 H801 H802 H804")
    def reversal_on_the_wrong_branch(self) -> None:
        """Domain adaptation: the gradient reversal is put before the label head and not before the domain's."""
        x, y, *_ = data.digit_images(self.seed)
        domain = (torch.arange(len(x)) % 2).long()
        x = torch.where(domain[:, None, None, None] == 1, 1 - x, x)
        feature = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU())
        label, where = nn.Linear(24, 10), nn.Linear(24, 2)
        model = nn.ModuleDict({"feature": feature, "label": label, "where": where})
        optimizer = sgd(model, 0.05, momentum=0.9)
        for a, b, c in self.watched(data.draws((x, y, domain), 48, 400), model, optimizer):
            z = feature(a)
            label_loss = F.cross_entropy(label(_Reverse.apply(z, 1.0)), b)
            domain_loss = F.cross_entropy(where(z), c)
            update(optimizer, label_loss + 0.1 * domain_loss)

    @faulty("H831", shows="H826 H828 H825 H847")
    def backward_with_a_stray_minus(self) -> None:
        """An activation of one's own whose backward has the wrong sign, in a regression with two hidden layers."""
        x = torch.rand(600, 4) * 2 - 1
        y = x[:, :1] * x[:, 1:2] + x[:, 2:3].abs()
        l1, l2, l3 = nn.Linear(4, 32), nn.Linear(32, 32), nn.Linear(32, 1)
        net = nn.ModuleList([l1, l2, l3])

        def forward(batch: Tensor) -> Tensor:
            return l3(F.gelu(l2(_LeakyReLU.apply(l1(batch)))))

        for _ in self.watched(range(500), net, adam(net, 0.003)):
            i = torch.randint(500, (50,))
            self.update((forward(x[i]) - y[i]).abs().mean())

    @faulty("H853 H844", shows="H845 H830")
    def noise_of_no_size(self) -> None:
        """A GAN whose noise is scaled by a division of whole numbers, so by 0: every fake is the same point."""
        spread = 1 // 2
        gen = parts.mlp(8, 64, 64, 2)
        disc = nn.Sequential(
            nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)
        )
        opt_g = adam(gen, 0.001, betas=(0.5, 0.999))
        opt_d = adam(disc, 0.001, betas=(0.5, 0.999))
        bce = F.binary_cross_entropy_with_logits
        one, zero = torch.ones(128, 1), torch.zeros(128, 1)

        def ring(count: int) -> Tensor:
            angle = torch.randint(8, (count,)) * (math.pi / 4)
            return 2 * torch.stack([angle.cos(), angle.sin()], 1) + 0.2 * torch.randn(count, 2)

        def noise() -> Tensor:
            return torch.randn(128, 8) * spread

        for _ in self.watched(range(900), {"G": gen, "D": disc}, {"G": opt_g, "D": opt_d}, objective="adversarial"):
            real = ring(128)
            fake = gen(noise())
            update(opt_d, bce(disc(real), 0.9 * one) + bce(disc(fake.detach()), zero))
            update(opt_g, bce(disc(fake), one))

    @faulty("H811", shows="H853 H826 H828 H847")
    def discriminator_also_climbs(self) -> None:
        """A GAN that never clears the discriminator: the generator's backward is added to its next update."""
        gen = parts.mlp(4, 48, 48, 1)
        disc = nn.Sequential(*parts.mlp(1, 48, 48, 1), nn.Sigmoid())
        g_optim, d_optim = adam(gen, 0.001), adam(disc, 0.001)
        criterion = nn.BCELoss()
        for _ in self.watched(
            range(600), {"gen": gen, "disc": disc}, {"gen": g_optim, "disc": d_optim}, objective="adversarial"
        ):
            real = 4 + 1.25 * torch.randn(64, 1)
            fake = gen(torch.randn(64, 4))
            g_optim.zero_grad()
            loss_d = criterion(disc(real), torch.ones(64, 1)) + criterion(disc(fake.detach()), torch.zeros(64, 1))
            loss_d.backward()
            d_optim.step()
            criterion(disc(fake), torch.ones(64, 1)).backward()
            g_optim.step()


class FaultyRates(Programs):
    """Faulty programs whose steps have the wrong size: rates, schedules, clipping, decay."""

    @faulty("H824", shows="H828 H823")
    def rate_given_as_weight_decay(self) -> None:
        """SGD with the tuned rate in the place of weight_decay and the tiny decay in the place of the rate."""
        images, masks = data.discs(120)
        model = nn.Sequential(
            nn.Conv2d(1, 12, 5, padding=2), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 1, 1)
        )
        lr, decay = 1e-06, 0.05
        optimizer = sgd(model, lr, momentum=0.9, weight_decay=decay)
        for _ in self.watched(range(300), model, optimizer, total_steps=300):
            i = torch.randint(100, (8,))
            update(optimizer, F.binary_cross_entropy_with_logits(model(images[i]), masks[i]))

    @faulty("H824", shows="H828 H823 H819")
    def lambda_returns_the_rate_itself(self) -> None:
        """LambdaLR multiplies: a function that returns the wanted rate of 1e-3 makes it 1e-6."""
        text, vocab = data.library_text()
        emb, lstm, out = nn.Embedding(vocab, 24), nn.LSTM(24, 48, batch_first=True), nn.Linear(48, vocab)
        model = nn.ModuleList([emb, lstm, out])
        base, steps = 0.004, 250
        optimizer = adam(model, base)

        def schedule(step: int) -> float:
            return base * (1 - 0.9 * step / steps)

        scheduler = optim.lr_scheduler.LambdaLR(optimizer, lr_lambda=schedule)
        for _ in self.watched(range(steps), model, optimizer, scheduler=scheduler, total_steps=steps):
            x, y = data.text_windows(text, 16, 24)
            update(optimizer, F.cross_entropy(out(lstm(emb(x))[0]).flatten(0, 1), y.flatten()))
            scheduler.step()

    @faulty("H819 H820", shows="H824 H828 H823 H832")
    def epochs_schedule_stepped_per_batch(self) -> None:
        """StepLR with a step size of four epochs is stepped after every batch."""
        x, y, held_x, held_y = data.digit_images(self.seed)
        net = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10))
        opt = sgd(net, 0.02, momentum=0.9)
        scheduler = optim.lr_scheduler.StepLR(opt, step_size=4, gamma=0.5)
        for _ in self.watched(range(12), net, opt, scheduler=scheduler, total_steps=12 * 43):
            for i in torch.randperm(len(x)).split(32):
                update(opt, F.cross_entropy(net(x[i]), y[i]))
                scheduler.step()
            self.watching.validated(F.cross_entropy(net(held_x), held_y).item())

    @faulty("H819 H820", shows="H824 H828 H823 H832")
    def decay_of_a_tenth_each_batch(self) -> None:
        """ExponentialLR(0.9) meant for epochs; a forecaster that stops within a hundred batches."""
        series = data.seasons(250, 41)
        gru, head = nn.GRU(1, 24, batch_first=True), nn.Linear(24, 1)
        model = nn.ModuleDict({"gru": gru, "head": head})
        optimizer = adamw(model, 0.003)
        scheduler = optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
        done = 0
        with self.watch(model, optimizer, scheduler=scheduler, total_steps=280):
            while done < 280:
                for rows in torch.randperm(200).split(20):
                    batch = series[rows, :, None]
                    update(optimizer, F.smooth_l1_loss(head(gru(batch[:, :-1])[0]), batch[:, 1:]))
                    done += 1
                    if done % 1 == 0:
                        scheduler.step()

    @faulty("H819", shows="H820 H823 H824 H828")
    def warmup_by_whole_division(self) -> None:
        """The warm-up divides whole numbers, so the factor is 0 until it is over, and it is longer than the run."""
        x, y, *_ = data.table("breast_cancer", self.seed)
        model = nn.Sequential(nn.Linear(30, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 2))
        optimizer = adamw(model, 0.002)
        warmup = 1000
        scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step // warmup))
        for a, b in self.watched(data.draws((x, y), 32, 400), model, optimizer, scheduler=scheduler, total_steps=400):
            loss = F.cross_entropy(model(a), b)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    @faulty("H854", shows="H820 H819 H824 H832")
    def plateau_fed_with_each_batch(self) -> None:
        """ReduceLROnPlateau is stepped with the loss of every batch, whose noise it takes for a plateau."""
        x = torch.rand(2000, 2) * 4 - 2
        y = ((2 * x[:, 0]).sin() * (2 * x[:, 1]).cos())[:, None] + 0.1 * torch.randn(2000, 1)
        net = parts.mlp(2, 64, 64, 1)
        opt = adam(net, 0.003)
        scheduler = optim.lr_scheduler.ReduceLROnPlateau(opt, patience=4, factor=0.3)
        for _ in self.watched(range(25), net, opt, scheduler=scheduler):
            for i in torch.randperm(1500).split(50):
                loss = update(opt, F.mse_loss(net(x[i]), y[i]))
                scheduler.step(loss.item())

    @faulty("H819", shows="H823 H824 H828")
    def resumed_at_a_finished_schedule(self) -> None:
        """The optimizer's state of an earlier, finished run is loaded: with the moments comes its last rate, 0."""
        x, y, *_ = data.table("digits", self.seed)

        def build() -> tuple[nn.Module, optim.Optimizer]:
            torch.manual_seed(self.seed)
            net = parts.mlp(64, 32, 10)
            return (net, adam(net, 0.005))

        def train(net: nn.Module, opt: optim.Optimizer, goal: Tensor, steps: int) -> None:
            for _ in range(steps):
                i = torch.randint(len(x), (32,))
                update(opt, F.cross_entropy(net(x[i]), goal[i]))

        first, first_opt = build()
        old = optim.lr_scheduler.CosineAnnealingLR(first_opt, T_max=40)
        for _ in range(40):
            train(first, first_opt, y % 2, 1)
            old.step()
        model, optimizer = build()
        optimizer.load_state_dict(first_opt.state_dict())
        with self.watch(model, optimizer):
            train(model, optimizer, y, 300)

    @faulty("H825", shows="H826 H818 H847 H848 H828 H827")
    def adam_with_a_rate_of_one(self) -> None:
        """The rate of a tutorial for SGD is given to Adam, under a recurrent text model."""
        text, vocab = data.library_text()
        emb, rnn, out = nn.Embedding(vocab, 16), nn.RNN(16, 48, batch_first=True), nn.Linear(48, vocab)
        model = nn.ModuleList([emb, rnn, out])
        for _ in self.watched(range(250), model, adam(model, 1.0)):
            x, y = data.text_windows(text, 16, 20)
            self.update(F.cross_entropy(out(rnn(emb(x))[0]).flatten(0, 1), y.flatten()), clip=1.0)

    @faulty("H825", shows="H826 H801 H802 H804 H827 H828 H847 H848")
    def summed_loss_at_a_mean_rate(self) -> None:
        """The loss is summed over pixels and batch, the rate is that of a mean: the autoencoder diverges."""
        x, *_ = data.digit_images(self.seed)
        net = nn.Sequential(nn.Flatten(), *parts.mlp(64, 24, 64, act=nn.Tanh))
        loss_fn = nn.MSELoss(reduction="sum")
        for _ in self.watched(range(400), net, sgd(net, 0.2, momentum=0.9)):
            batch = x[torch.randint(len(x), (32,))]
            self.update(loss_fn(net(batch), batch.flatten(1)))

    @faulty("H824", shows="H828 H823")
    def loss_divided_three_times(self) -> None:
        """A mean loss is divided by the batch and by the number of batches once more, under plain SGD."""
        x, y, *_ = data.table("wine", self.seed)
        net = parts.mlp(13, 32, 3, act=nn.Tanh)
        for _ in self.watched(range(50), net, sgd(net, 0.1), total_steps=400):
            batches = torch.randperm(len(x)).split(17)
            for rows in batches:
                self.update(F.cross_entropy(net(x[rows]), y[rows]) / len(rows) / len(batches) / 10)

    @faulty("H816 H815 H817", shows="H818 H823 H828")
    def clipped_to_a_norm_of_zero(self) -> None:
        """A configuration's `grad_clip: 0` was meant to turn clipping off, and clips everything to 0."""
        config = {"grad_clip": 0.0, "lr": 0.1}
        net = parts.mlp(2, 24, 2, act=nn.Tanh)
        opt = sgd(net, config["lr"], momentum=0.9)
        for _ in self.watched(range(300), net, opt):
            x, y = data.moons(32)
            opt.zero_grad()
            F.cross_entropy(net(x), y).backward()
            if config["grad_clip"] is not None:
                nn.utils.clip_grad_norm_(net.parameters(), config["grad_clip"])
            opt.step()

    @faulty("H816 H817", shows="H818 H831 H826 H825 H828 H801 H802")
    def clipped_to_minus_one(self) -> None:
        """A limit of -1 for "none" turns each gradient round."""
        series = data.seasons(200, 25)
        net = parts.mlp(24, 32, 1)
        opt = sgd(net, 0.05)
        max_norm: float | None = -1.0
        for _ in self.watched(range(300), net, opt):
            rows = series[torch.randint(150, (20,))]
            loss = F.mse_loss(net(rows[:, :24]), rows[:, 24:])
            opt.zero_grad()
            loss.backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(net.parameters(), max_norm)
            opt.step()

    @faulty("H818", shows="H824 H823 H828")
    def clipped_to_almost_nothing(self) -> None:
        """SGD with a limit of 1e-3 on the norm: every step is a thousandth of what the rate promises."""
        x, y, *_ = data.digit_images(self.seed)
        net = nn.Sequential(nn.Flatten(), *parts.mlp(64, 48, 10))
        opt = sgd(net, 0.1, momentum=0.9)
        self.fit(net, opt, data.draws((x, y), 32, 400), F.cross_entropy, total_steps=400, clip=0.001)

    @faulty("H828 H830", shows="H823 H824 H847 H848")
    def decay_that_eats_the_weights(self) -> None:
        """weight_decay=5 in Adam, where 5e-4 was meant: all weights are pulled to 0 and stay there."""
        x = torch.rand(700, 3) * 4 - 2
        y = (x[:, :1] * 2).sin() * x[:, 1:2] + 0.05 * torch.randn(700, 1)
        model = parts.mlp(3, 48, 48, 1)
        for _ in self.watched(range(500), model, adam(model, 0.004, weight_decay=5.0)):
            i = torch.randint(600, (64,))
            self.update(F.huber_loss(model(x[i]), y[i]))
