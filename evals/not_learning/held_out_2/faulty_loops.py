"""Faulty programs of the set: steps, scales."""

# ruff: noqa: N812 - the programs are written as users write theirs

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from evals.not_learning import data, parts
from evals.not_learning.program import Programs, adam, adamw, faulty, sgd, update


class FaultySteps(Programs):
    """Faulty programs whose loop is wrong: the order of calls, clipping, schedules, and modes."""

    @faulty("H811", shows="H801 H802 H804 H825 H826 H828 H848")
    def friedman_gradients_never_zeroed(self) -> None:
        """`zero_grad` is not called."""
        x, y = data.friedman(1500)
        model = parts.mlp(10, 48, 1)
        optimizer = sgd(model, 0.1)
        for a, b in self.watched(data.stream((x[:1200], y[:1200]), 64, 400), model, optimizer):
            loss = F.mse_loss(model(a).squeeze(1), b)
            loss.backward()
            optimizer.step()

    @faulty("H813 H817", shows="H814 H828")
    def digits_zeroed_before_the_step(self) -> None:
        """`zero_grad` stands between backward and step."""
        model = nn.Sequential(nn.Flatten(), parts.mlp(64, 48, 10))
        optimizer = adam(model, 0.002)
        for a, b in self.watched(
            data.stream(data.digit_images(self.seed), 64, 300), model, optimizer
        ):
            loss = F.cross_entropy(model(a), b)
            loss.backward()
            optimizer.zero_grad()
            optimizer.step()

    @faulty("H812", shows="H811 H828")
    def wine_accumulation_never_full(self) -> None:
        """The condition under which accumulated gradients are applied is never true."""
        x, y, *_ = data.table("wine", self.seed)
        model = parts.mlp(13, 24, 3)
        optimizer = adam(model, 0.005)
        for step, (a, b) in self.watched(enumerate(data.stream((x, y), 8, 500)), model, optimizer):
            (F.cross_entropy(model(a), b) / 4).backward()
            if (step + 1) % 4 == 4:
                optimizer.step()
                optimizer.zero_grad()

    @faulty("H817", shows="H815 H824 H828")
    def digits_clipped_to_nothing(self) -> None:
        """The clip limit was set to 0 to turn clipping off."""
        model = parts.small_cnn()
        optimizer = sgd(model, 0.05, momentum=0.9)
        self.fit(
            model,
            optimizer,
            data.stream(data.digit_images(self.seed), 64, 300),
            F.cross_entropy,
            clip=0,
        )

    @faulty("", shows="H824 H828")
    def friedman_clipped_to_little(self) -> None:
        """Plain gradient descent with a tiny clip limit."""
        x, y = data.friedman(1500)
        model = parts.mlp(10, 48, 1)
        for a, b in self.watched(
            data.stream((x[:1200], y[:1200]), 64, 400), model, sgd(model, 0.05)
        ):
            self.update(F.mse_loss(model(a).squeeze(1), b), clip=0.0001)

    @faulty("H831", shows="H801 H802 H804 H825 H826 H828 H848")
    def digits_maximised(self) -> None:
        """The optimizer was made for a reward and still maximises."""
        x, y, *_ = data.digit_images(self.seed)
        model = nn.Sequential(nn.Flatten(), parts.mlp(64, 48, 10))
        self.fit(
            model, adam(model, 0.001, maximize=True), data.stream((x, y), 64, 300), F.cross_entropy
        )

    @faulty("H819 H820", shows="H824 H828")
    def digits_epoch_decay_by_batch(self) -> None:
        """An exponential decay that was meant for epochs is advanced with every batch."""
        x, y, *_ = data.digit_images(self.seed)
        model = nn.Sequential(nn.Flatten(), parts.mlp(64, 48, 10))
        optimizer = sgd(model, 0.05)
        scheduler = optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
        stream = data.stream((x, y), 64, 400)
        self.fit(model, optimizer, stream, F.cross_entropy, scheduler=scheduler)

    @faulty("H819 H820", shows="H824 H828")
    def friedman_step_decay_by_batch(self) -> None:
        """A decay by ten every ten epochs counts batches."""
        x, y = data.friedman(1500)
        model = parts.mlp(10, 48, 1)
        optimizer = adam(model, 0.005)
        scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.1)
        for a, b in self.watched(
            data.stream((x[:1200], y[:1200]), 64, 500), model, optimizer, scheduler=scheduler
        ):
            update(optimizer, F.mse_loss(model(a).squeeze(1), b))
            scheduler.step()

    @faulty("H819", shows="H820 H824 H828")
    def digits_warm_up_floored(self) -> None:
        """The factor of a warm-up is an integer division and stays 0."""
        x, y, *_ = data.digit_images(self.seed)
        model = nn.Sequential(nn.Flatten(), parts.mlp(64, 48, 10))
        optimizer = adamw(model, 0.002)
        scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: step // 1000)
        stream = data.stream((x, y), 64, 300)
        self.fit(model, optimizer, stream, F.cross_entropy, scheduler=scheduler)

    @faulty("H819", shows="H820 H824 H828")
    def wine_decay_ends_early(self) -> None:
        """A linear decay to zero spans a small part of the run."""
        x, y, *_ = data.table("wine", self.seed)
        model = parts.mlp(13, 24, 3)
        optimizer = sgd(model, 0.01)
        scheduler = optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=30)
        stream = data.stream((x, y), 16, 400)
        self.fit(model, optimizer, stream, F.cross_entropy, scheduler=scheduler, total_steps=400)

    @faulty("H854", shows="H819 H820 H824 H828")
    def friedman_plateau_by_batch(self) -> None:
        """A plateau scheduler is fed with the loss of each batch."""
        x, y = data.friedman(1500)
        model = parts.mlp(10, 48, 1)
        optimizer = adam(model, 0.001)
        scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3, factor=0.5)
        for a, b in self.watched(
            data.stream((x[:1200], y[:1200]), 16, 700), model, optimizer, scheduler=scheduler
        ):
            loss = update(optimizer, F.mse_loss(model(a).squeeze(1), b))
            scheduler.step(loss.item())

    @faulty("", shows="H824 H828")
    def digits_body_without_rate(self) -> None:
        """The group of the body has a learning rate of 0."""
        body, head = parts.mlp(64, 48, 3), nn.Linear(3, 10)
        model = nn.Sequential(nn.Flatten(), body, nn.ReLU(), head)
        groups: list[dict[str, Any]] = [
            {"params": body.parameters(), "lr": 0.0},
            {"params": head.parameters()},
        ]
        optimizer = optim.Adam(groups, lr=0.003)
        self.fit(
            model, optimizer, data.stream(data.digit_images(self.seed), 64, 600), F.cross_entropy
        )

    @faulty("", shows="H801 H802 H804 H811 H825 H826 H828")
    def friedman_losses_summed_up(self) -> None:
        """The sum of all losses so far is differentiated in every step."""
        x, y = data.friedman(1500)
        model = nn.Linear(10, 1)
        optimizer = sgd(model, 0.1)
        total = torch.zeros(())
        for a, b in self.watched(data.stream((x[:1200], y[:1200]), 32, 250), model, optimizer):
            loss = F.mse_loss(model(a).squeeze(1), b)
            total = total + loss
            optimizer.zero_grad()
            total.backward(retain_graph=True)
            optimizer.step()

    @faulty("H819 H820", shows="H824 H828")
    def friedman_schedule_by_micro_batch(self) -> None:
        """With accumulation over eight, the scheduler is advanced for each micro-batch."""
        x, y = data.friedman(1500)
        model = parts.mlp(10, 48, 1)
        optimizer = sgd(model, 0.05)
        scheduler = optim.lr_scheduler.PolynomialLR(optimizer, total_iters=250, power=2)
        for step, (a, b) in self.watched(
            enumerate(data.stream((x[:1200], y[:1200]), 8, 2000)),
            model,
            optimizer,
            scheduler=scheduler,
            total_steps=250,
        ):
            (F.mse_loss(model(a).squeeze(1), b) / 8).backward()
            scheduler.step()
            if step % 8 == 7:
                optimizer.step()
                optimizer.zero_grad()

    @faulty("H831 H840", shows="H826 H828")
    def bandit_sign_forgotten(self) -> None:
        """REINFORCE without its minus."""
        best = torch.randn(6, 4)
        policy = parts.mlp(6, 32, 4)
        for _ in self.watched(range(400), policy, adam(policy, 0.005), objective="reinforcement"):
            context = torch.randn(32, 6)
            chances = policy(context).log_softmax(1)
            act = chances.detach().exp().multinomial(1)
            reward = (act.squeeze(1) == (context @ best).argmax(1)).float()
            chance = chances.gather(1, act).squeeze(1)
            self.update((chance * (reward - 0.25)).mean())

    @faulty("H834", shows="H833")
    def digits_evaluation_mode_stays(self) -> None:
        """After the first evaluation the model is never put back into training mode."""
        x, y, held_x, held_y = data.digit_images(self.seed)
        few, few_y = x[:300], torch.where(torch.rand(300) < 0.4, torch.randint(10, (300,)), y[:300])
        model = nn.Sequential(
            nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.5)
        )
        model.append(nn.Linear(256, 10))
        optimizer = adam(model, 0.003)
        for step, (a, b) in self.watched(
            enumerate(data.stream((few, few_y), 25, 600)), model, optimizer
        ):
            if step % 60 == 0:
                model.eval()
                with torch.no_grad():
                    loss = F.cross_entropy(model(held_x), held_y).item()
                    self.watching.validated(loss)
            update(optimizer, F.cross_entropy(model(a), b))

    @faulty("H834", shows="H833")
    def digits_validated_in_training_mode(self) -> None:
        """Evaluations, by which the best weights are chosen, run with dropout on."""
        x, y, held_x, held_y = data.digit_images(self.seed)
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Dropout(0.8), nn.Linear(96, 10)
        )
        loss = 0.0
        for step, (a, b) in self.watched(
            enumerate(data.stream((x, y), 64, 450)), model, adam(model, 0.002)
        ):
            if step % 50 == 49:
                with torch.no_grad():
                    loss = F.cross_entropy(model(held_x), held_y).item()
                    self.watching.validated(loss)
                model.train()
            self.update(F.cross_entropy(model(a), b))

    @faulty("", shows="H828")
    def digits_pairs_in_batch_norm(self) -> None:
        """Batches of two samples through batch norm."""
        x, y, *_ = data.digit_images(self.seed)
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 48)
        )
        model.extend([nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 10)])
        self.fit(
            model, adam(model, 0.003), data.stream((x, y), 2, 700, drop_last=True), F.cross_entropy
        )

    @faulty("H853", shows="H815 H824 H825 H848")
    def ring_gan_judge_too_strong(self) -> None:
        """The judge learns much faster than the maker."""
        maker, judge = parts.mlp(4, 32, 32, 2), parts.mlp(2, 64, 64, 1)
        first = adam(maker, 1e-05)
        second = adam(judge, 0.02)
        loss = F.binary_cross_entropy_with_logits
        for _ in self.watched(
            range(500),
            {"maker": maker, "judge": judge},
            {"maker": first, "judge": second},
            objective="adversarial",
        ):
            angle, fake = 2 * torch.pi * torch.rand(64, 1), maker(torch.randn(64, 4))
            real = 3 * torch.cat([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(64, 2)
            second.zero_grad()
            told = judge(torch.cat([real, fake.detach()]))
            loss(told, torch.cat([torch.ones(64, 1), torch.zeros(64, 1)])).backward()
            second.step()
            update(first, -loss(judge(fake), torch.zeros(64, 1)))

    @faulty("", shows="H828")
    def rings_too_much_dropped(self) -> None:
        """0.95 was meant to be what dropout keeps."""
        x, y = data.rings(1500)
        model = nn.Sequential(
            nn.Linear(2, 48), nn.ReLU(), nn.Dropout(0.95), nn.Linear(48, 48), nn.ReLU()
        )
        model.append(nn.Linear(48, 3))
        self.fit(
            model, adam(model, 0.005), data.stream((x[:1200], y[:1200]), 64, 400), F.cross_entropy
        )


class _Recurrent(nn.Module):
    """A linear recurrence by hand."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.inner, self.outer, self.head = nn.Linear(24, 24), nn.Linear(1, 24), nn.Linear(24, 1)
        nn.init.orthogonal_(self.inner.weight, gain=gain)

    def forward(self, x: Tensor) -> Any:
        state = torch.zeros(len(x), 24)
        for at in range(x.shape[1]):
            state = F.relu(self.inner(state) + self.outer(x[:, at]))
        return self.head(state)


_BLOWN_UP = "801 802 804 805 825 826 827 828 832 848"


class FaultyScales(Programs):
    """Faulty programs of wrong sizes.

    Learning rates, decay, initial weights, activations, and precision.
    """

    def _classify(self, model: nn.Module, optimizer: optim.Optimizer) -> None:
        x, y, *_ = data.digit_images(self.seed)
        self.fit(model, optimizer, data.stream((x.flatten(1), y), 64, 300), F.cross_entropy)

    def _regress(self, model: nn.Module, optimizer: optim.Optimizer) -> None:
        torch.manual_seed(self.seed)
        x, y = data.friedman(1500)
        stream = data.stream((x[:1200], y[:1200]), 64, 400)
        self.descend(model, optimizer, stream, lambda a, b: F.mse_loss(model(a).squeeze(1), b))

    @faulty("H825", shows="H826 H828 H848")
    def digits_adam_rate_of_one(self) -> None:
        """Adam with the rate of plain gradient descent."""
        model = parts.mlp(64, 64, 64, 10)
        self._classify(model, adam(model, 1.0))

    @faulty("H824", shows="H828")
    def digits_rate_tiny(self) -> None:
        """Plain gradient descent with a rate of 1e-6."""
        model = parts.mlp(64, 64, 10)
        self._classify(model, sgd(model, 1e-06, momentum=0.9))

    @faulty("H825", shows="H801 H802 H804 H826 H828 H848")
    def friedman_rate_diverges(self) -> None:
        """Plain gradient descent with a rate that makes the weights oscillate without bound."""
        model = parts.mlp(10, 64, 64, 1)
        self._regress(model, sgd(model, 5.0))

    @faulty("H825", shows="H801 H802 H804 H826 H828 H848")
    def digits_momentum_near_one(self) -> None:
        """Momentum of 0.999 at a rate that suits 0.9."""
        model = parts.mlp(64, 64, 64, 10)
        self._classify(model, sgd(model, 0.2, momentum=0.999))

    @faulty("H858", shows="H828 H848")
    def friedman_decay_of_ten(self) -> None:
        """A weight decay of ten, decoupled, at a rate of 1e-2."""
        model = parts.mlp(10, 48, 1)
        self._regress(model, adamw(model, 0.01, weight_decay=10.0))

    @faulty("H858", shows="H828 H848")
    def digits_penalty_in_the_gradient(self) -> None:
        """A weight decay of one with plain gradient descent."""
        model = parts.mlp(64, 48, 10)
        self._classify(model, sgd(model, 0.05, weight_decay=1.0))

    @faulty("H825", shows="H801 H802 H804 H826 H828 H848")
    def friedman_loss_summed_over_batch(self) -> None:
        """The loss is a sum over 400 samples, at a rate for means."""
        x, y = data.friedman(1500)
        model = parts.mlp(10, 48, 1)
        for _ in self.watched(range(300), model, sgd(model, 0.05)):
            at = data.picked(1200, 400)
            self.update(F.mse_loss(model(x[at]).squeeze(1), y[at], reduction="sum"))

    @faulty("H824", shows="H828")
    def friedman_divided_twice(self) -> None:
        """A mean loss is divided by the number of samples once more."""
        x, y = data.friedman(1500)
        model = parts.mlp(10, 48, 1)
        optimizer = sgd(model, 0.05)
        stream = data.stream((x[:1200], y[:1200]), 64, 400)
        self.descend(
            model, optimizer, stream, lambda a, b: F.mse_loss(model(a).squeeze(1), b) / len(x)
        )

    @faulty("", shows="H824 H828")
    def friedman_bfloat16_weights(self) -> None:
        """All weights are bfloat16, and the steps are below its resolution."""
        x, y = data.friedman(1500)
        x, y = x.bfloat16(), y.bfloat16()
        model = parts.mlp(10, 48, 1).to(x.dtype)
        optimizer = adam(model, 0.0002)
        stream = data.stream((x[:1200], y[:1200]), 64, 800)
        self.descend(model, optimizer, stream, lambda a, b: F.mse_loss(model(a).squeeze(1), b))

    @faulty("H804", shows="H801 H802 H825 H828")
    def rings_half_adam(self) -> None:
        """A model in half precision under Adam, whose epsilon is zero there."""
        x, y = data.rings(1500)
        kind = torch.float16
        model = parts.mlp(2, 48, 48, 3).to(kind)
        optimizer = adam(model, 0.003)
        stream = data.stream((x[:1200].to(kind), y[:1200]), 64, 300)
        self.descend(model, optimizer, stream, lambda a, b: F.cross_entropy(model(a).float(), b))

    @faulty("H822", shows="H828 H848")
    def digits_all_weights_equal(self) -> None:
        """All weights start at 0.01."""
        model = parts.mlp(64, 48, 48, 10)
        for weight in model.parameters():
            nn.init.constant_(weight, 0.01)
        self._classify(model, adam(model, 0.002))

    @faulty("H822", shows="H815 H828 H848")
    def digits_all_weights_zero(self) -> None:
        """All weights and biases start at zero."""
        model = parts.mlp(64, 48, 48, 10)
        for weight in model.parameters():
            nn.init.zeros_(weight)
        self._classify(model, sgd(model, 0.1, momentum=0.9))

    @faulty("", shows="H815 H828 H848")
    def digits_units_dead(self) -> None:
        """Biases start far below zero, so that rectifiers are never active."""
        model = parts.mlp(64, 48, 48, 10)
        for at in (0, 2):
            nn.init.constant_(model[at].bias, -5.0)
        self._classify(model, sgd(model, 0.1, momentum=0.9))

    @faulty("H848", shows="H828")
    def digits_deep_sigmoids(self) -> None:
        """Eight layers of sigmoids."""
        model = parts.mlp(64, *[32] * 8, 10, act=nn.Sigmoid)
        self._classify(model, sgd(model, 0.1, momentum=0.9))

    @faulty("H848", shows="H824 H825 H826 H828")
    def digits_tanh_saturated(self) -> None:
        """Weights of a tanh network are drawn with a deviation of five."""
        model = parts.mlp(64, 48, 48, 48, 10, act=nn.Tanh)
        for weight in model.parameters():
            nn.init.normal_(weight, std=5.0)
        self._classify(model, sgd(model, 0.05))

    @faulty("H848", shows="H828")
    def digits_deep_plain_small(self) -> None:
        """Twelve layers whose weights are drawn with a deviation of 0.02."""
        model = parts.mlp(64, *[48] * 11, 10)
        for weight in model.parameters():
            nn.init.normal_(weight, std=0.02)
        self._classify(model, sgd(model, 0.02, momentum=0.9))

    @faulty("H848", shows="H801 H802 H804 H825 H826 H828")
    def seasons_recurrence_explodes(self) -> None:
        """A rectified recurrence with a gain of three over forty steps."""
        series = data.seasons(700, 41)[:, :, None]
        x, y = series[:, :40], series[:, 40]
        model = _Recurrent(gain=3.0)
        self.fit(model, adam(model, 0.003), data.stream((x[:500], y[:500]), 32, 300), F.mse_loss)

    @faulty("H848", shows="H824 H828")
    def first_of_long_series_forgotten(self) -> None:
        """A plain tanh recurrence shall remember the first of thirty inputs."""
        x = 0.3 * torch.randn(600, 30, 1)
        y = torch.sign(torch.randn(600, 1))
        x[:, 0] = y
        body, head = nn.RNN(1, 24, batch_first=True), nn.Linear(24, 1)
        model = nn.ModuleDict({"body": body, "head": head})
        optimizer = sgd(model, 0.02)
        stream = data.stream((x[:500], y[:500]), 25, 300)
        self.descend(model, optimizer, stream, lambda a, b: F.mse_loss(head(body(a)[0][:, -1]), b))

    @faulty("H848", shows="H815 H828")
    def diabetes_tanh_cannot_reach(self) -> None:
        """The last layer is a tanh, and the targets are in the hundreds."""
        x, y, *_ = data.table("diabetes", self.seed)
        model = nn.Sequential(parts.mlp(10, 32, 1), nn.Tanh())
        optimizer = adam(model, 0.01)
        stream = data.stream((x, y), 32, 600)
        self.descend(model, optimizer, stream, lambda a, b: F.mse_loss(model(a).squeeze(1), b))

    @faulty("H848", shows="H824 H828")
    def houses_in_dollars(self) -> None:
        """Prices of hundreds of thousands are regressed as they are."""
        x, y = data.friedman(1500)
        price = 200000 + 60000 * y
        model = parts.mlp(10, 48, 1)
        optimizer = adam(model, 0.003)
        stream = data.stream((x[:1200], price[:1200]), 64, 400)
        self.descend(model, optimizer, stream, lambda a, b: F.mse_loss(model(a).squeeze(1), b))

    @faulty("H802", shows="H801 H804")
    def twins_root_of_zero(self) -> None:
        """The distance of two embeddings is the root of a sum that is zero for equal inputs."""
        points, labels = data.moons(600)
        model = parts.mlp(2, 32, 8)
        for step in self.watched(range(300), model, adam(model, 0.003)):
            one, other = data.picked(600, 32), data.picked(600, 32)
            if step % 50 == 49:
                other[0] = one[0]
            same = (labels[one] == labels[other]).float()
            far = (model(points[one]) - model(points[other])).square().sum(1).sqrt()
            self.update((same * far + (1 - same) * F.relu(2 - far)).mean())

    @faulty("H801", shows="H802 H804 H825 H848")
    def cancer_logarithm_of_zero(self) -> None:
        """A cross-entropy by hand takes the logarithm of sigmoids that reach 0 and 1."""
        x, y, *_ = data.table("breast_cancer", self.seed)
        model = parts.mlp(30, 64, 1)
        for a, b in self.watched(data.stream((x, y.float()), 32, 400), model, adam(model, 0.05)):
            share = model(a).squeeze(1).sigmoid()
            self.update(-(b * share.log() + (1 - b) * (1 - share).log()).mean())
