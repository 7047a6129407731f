"""Faulty programs of the set: paths, forwards."""

# ruff: noqa: N812 - the programs are written as users write theirs

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from evals.not_learning import data, parts
from evals.not_learning.program import Programs, adam, faulty, sgd, update


class _Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 4), nn.Linear(4, 3)
        self.layers = [nn.Linear(4, 4) for _ in range(3)]

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.last(x)


class _FirstState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.GRU(1, 24, batch_first=True), nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Any:
        start = torch.zeros(1, len(x), 24)
        _, last = self.body(x, start)
        return self.head(start[-1]) if last is not None else None


class FaultyPaths(Programs):
    """Faulty programs in which a path is cut, or the optimizer and the model do not belong
    together.
    """

    @faulty("H813", shows="H814 H828")
    def friedman_loss_wrapped_anew(self) -> None:
        """The loss is made a tensor again before the backward pass."""
        x, y = data.friedman(1500)
        model = parts.mlp(10, 48, 1)
        for a, b in self.watched(
            data.stream((x[:1200], y[:1200]), 64, 400), model, adam(model, 0.003)
        ):
            loss = F.mse_loss(model(a).squeeze(1), b)
            self.update(torch.tensor(loss.item(), requires_grad=True))

    @faulty("H814", shows="H828")
    def rings_features_detached(self) -> None:
        """The features are detached on their way to the head."""
        x, y = data.rings(1500)
        model = parts.Wired(
            lambda self, x: self.head(self.body(x).detach()),
            body=parts.mlp(2, 32, 3, act=nn.Tanh),
            head=nn.Linear(3, 3),
        )
        self.fit(
            model, adam(model, 0.005), data.stream((x[:1200], y[:1200]), 64, 600), F.cross_entropy
        )

    @faulty("H814", shows="H828")
    def friedman_through_numpy(self) -> None:
        """The features pass through numpy in the middle of the network."""
        x, y = data.friedman(1500)
        model = parts.Wired(
            lambda self, x: self.head(torch.from_numpy(self.body(x).detach().numpy())),
            body=parts.mlp(10, 32, 3),
            head=nn.Linear(3, 1),
        )
        optimizer = adam(model, 0.005)
        stream = data.stream((x[:1200], y[:1200]), 64, 500)
        self.descend(model, optimizer, stream, lambda a, b: F.mse_loss(model(a).squeeze(1), b))

    @faulty("H813 H814", shows="H828")
    def digits_loss_of_the_choice(self) -> None:
        """The loss is taken from the chosen class, which was then told to require gradients."""
        model = nn.Sequential(nn.Flatten(), parts.mlp(64, 48, 10))
        for a, b in self.watched(
            data.stream(data.digit_images(self.seed), 64, 300), model, adam(model, 0.002)
        ):
            chosen = model(a).argmax(1).float()
            self.update(F.mse_loss(chosen, b.float()).requires_grad_())

    @faulty("H808", shows="H828")
    def rings_layers_in_a_list(self) -> None:
        """The middle layers are in a plain list, which the model does not know of."""
        x, y = data.rings(1500)
        model = _Listed()
        self.fit(
            model, adam(model, 0.01), data.stream((x[:1200], y[:1200]), 64, 700), F.cross_entropy
        )

    @faulty("H808 H809", shows="H812 H813 H814 H828")
    def digits_head_replaced_late(self) -> None:
        """The head is replaced after the optimizer was made, and the rest is frozen."""
        model = nn.Sequential(nn.Flatten(), *parts.mlp(64, 48, 2))
        model[1].requires_grad_(False)
        optimizer = adam(model[-1], 0.01)
        model[-1] = nn.Linear(48, 10)
        self.fit(
            model, optimizer, data.stream(data.digit_images(self.seed), 64, 300), F.cross_entropy
        )

    @faulty("H808 H809", shows="H812 H813 H814 H828")
    def friedman_copy_is_trained(self) -> None:
        """The model that computes the loss is a copy of the one that the optimizer holds."""
        x, y = data.friedman(1500)
        model = parts.mlp(10, 48, 1)
        optimizer = adam(model, 0.003)
        used = copy.deepcopy(model)
        stream = data.stream((x[:1200], y[:1200]), 64, 400)
        self.descend(used, optimizer, stream, lambda a, b: F.mse_loss(used(a).squeeze(1), b))

    @faulty("H808", shows="H828")
    def digits_only_the_decoder(self) -> None:
        """An autoencoder whose optimizer was given the decoder alone."""
        x = data.digit_images(self.seed)[0].flatten(1)
        encoder, decoder = parts.mlp(64, 64, 12), parts.mlp(12, 64)
        model = nn.Sequential(encoder, decoder)
        stream = data.stream((x,), 64, 600)
        self.descend(model, adam(decoder, 0.005), stream, lambda a: F.mse_loss(model(a), a))

    @faulty("H808 H810", shows="H812 H813 H814 H828")
    def wine_frozen_part_in_the_optimizer(self) -> None:
        """The body is frozen, and it is the body that the optimizer holds."""
        x, y, *_ = data.table("wine", self.seed)
        body, head = parts.mlp(13, 24), nn.Linear(24, 3)
        model = nn.Sequential(body, nn.ReLU(), head)
        body.requires_grad_(False)
        self.fit(model, sgd(body, 0.1, momentum=0.9), data.stream((x, y), 16, 300), F.cross_entropy)

    @faulty("", shows="H814 H828")
    def seasons_first_state_read(self) -> None:
        """The head reads the state before the series, not the one after it."""
        series = data.seasons(800, 25)[:, :, None]
        x, y = series[:, :24], series[:, 24]
        model = _FirstState()
        self.fit(model, adam(model, 0.005), data.stream((x[:600], y[:600]), 32, 300), F.mse_loss)

    @faulty("", shows="H828")
    def levels_batch_first_forgotten(self) -> None:
        """Series (N, T, C) are given to a recurrent layer that reads (T, N, C)."""
        x = torch.randn(1200, 12, 2)
        y = x[:, :, 0].mean(1, keepdim=True) * 3 + x[:, 3, 1:] * 0.5
        model = parts.Wired(
            lambda self, x: self.head(self.body(x)[0][:, -1]),
            body=nn.GRU(2, 24),
            head=nn.Linear(24, 1),
        )
        self.fit(model, adam(model, 0.01), data.stream((x[:1000], y[:1000]), 50, 300), F.mse_loss)

    @faulty("H815", shows="H828")
    def ratings_rounded(self) -> None:
        """Predictions are rounded to stars before the loss."""
        user, film, rating = data.ratings(self.seed)
        model = parts.Wired(
            lambda self, user, film: (
                3.5 + self.net(torch.cat([self.user(user), self.film(film)], 1)).squeeze(1)
            ),
            user=nn.Embedding(120, 8),
            film=nn.Embedding(80, 8),
            net=parts.mlp(16, 48, 1),
        )
        optimizer = adam(model, 0.02)
        for u, f, r in self.watched(
            data.stream((user[:5000], film[:5000], rating[:5000]), 128, 600), model, optimizer
        ):
            told = model(u, f).round()
            update(optimizer, F.mse_loss(told, r))

    @faulty("H813 H814", shows="H853")
    def ring_gan_maker_detached(self) -> None:
        """The samples are detached in the maker's turn too."""
        maker, judge = parts.mlp(4, 32, 32, 2), parts.mlp(2, 32, 32, 1, act=nn.LeakyReLU)
        first = adam(maker, 0.001, betas=(0.5, 0.99))
        second = adam(judge, 0.001, betas=(0.5, 0.99))
        loss = F.binary_cross_entropy_with_logits
        for _ in self.watched(
            range(700),
            {"maker": maker, "judge": judge},
            {"maker": first, "judge": second},
            objective="adversarial",
        ):
            angle, fake = 2 * torch.pi * torch.rand(64, 1), maker(torch.randn(64, 4))
            real = 2 * torch.cat([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(64, 2)
            second.zero_grad()
            told = judge(torch.cat([real, fake.detach()]))
            loss(told, torch.cat([torch.ones(64, 1), torch.zeros(64, 1)])).backward()
            second.step()
            update(first, loss(judge(fake.detach()), torch.ones(64, 1)))

    @faulty("H808", shows="H811 H814 H853")
    def ring_gan_maker_not_in_its_optimizer(self) -> None:
        """Both optimizers were given the judge."""
        maker, judge = parts.mlp(4, 32, 32, 2), parts.mlp(2, 32, 32, 1, act=nn.LeakyReLU)
        first = adam(judge, 0.001, betas=(0.5, 0.99))
        second = adam(judge, 0.001, betas=(0.5, 0.99))
        loss = F.binary_cross_entropy_with_logits
        for _ in self.watched(
            range(700),
            {"maker": maker, "judge": judge},
            {"maker": first, "judge": second},
            objective="adversarial",
        ):
            angle, fake = 2 * torch.pi * torch.rand(64, 1), maker(torch.randn(64, 4))
            real = 2 * torch.cat([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(64, 2)
            second.zero_grad()
            told = judge(torch.cat([real, fake.detach()]))
            loss(told, torch.cat([torch.ones(64, 1), torch.zeros(64, 1)])).backward()
            second.step()
            update(first, loss(judge(fake), torch.ones(64, 1)))


def _drawn(layer: nn.Module) -> None:
    if isinstance(layer, nn.Linear):
        nn.init.kaiming_normal_(layer.weight)


class _Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score, self.value = parts.mlp(4, 16, 1), parts.mlp(4, 16, 1)

    def forward(self, rows: Tensor, gone: Tensor) -> Any:
        weight = self.score(rows).squeeze(2).masked_fill(gone, -torch.inf).softmax(1)
        return (weight * self.value(rows).squeeze(2)).sum(1)


class _Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 24), nn.Linear(24, 3)

    def forward(self, texts: Tensor) -> Any:
        hidden = self.embed(texts)
        return self.head(hidden.mean(0, keepdim=True).expand_as(hidden).mean(1))


class FaultyForwards(Programs):
    """Faulty programs whose network computes something else than what was meant."""

    @faulty("", shows="H828")
    def digits_weights_drawn_again(self) -> None:
        """The weights are initialised inside the loop over epochs."""
        x, y, *_ = data.digit_images(self.seed)
        model = nn.Sequential(nn.Flatten(), parts.mlp(64, 48, 10))

        def begin() -> None:
            model.apply(_drawn)

        for _ in self.watched(range(22), model, adam(model, 0.0002)):
            begin()
            for a, b in data.loader(x, y, size=96):
                self.update(F.cross_entropy(model(a), b))

    @faulty("H801", shows="H802 H804")
    def rows_attention_all_masked(self) -> None:
        """Some sets are empty, and an attention over nothing is not a number."""
        rows = torch.randn(1200, 6, 4)
        gone = (
            torch.arange(6)
            >= torch.multinomial(torch.tensor([0.01, 1, 1, 1, 1, 1, 1]), 1200, True)[:, None]
        )
        y = (rows[:, :, 0] * ~gone).sum(1) / (~gone).sum(1).clamp(min=1) + 0.5
        model = _Rows()
        stream = data.stream((rows[:1000], gone[:1000], y[:1000]), 64, 300)
        self.descend(model, adam(model, 0.005), stream, lambda a, m, b: F.mse_loss(model(a, m), b))

    @faulty("H815", shows="H822 H828")
    def friedman_low_rank_both_zero(self) -> None:
        """Both factors of a low-rank update start at zero."""
        x, y = data.friedman(1500)
        model = parts.Wired(
            lambda self, x: (self.base(x) + x @ self.down @ self.up).squeeze(1),
            base=nn.Linear(10, 1).requires_grad_(False),
            down=nn.Parameter(torch.zeros(10, 4)),
            up=nn.Parameter(torch.zeros(4, 1)),
        )
        optimizer = optim.AdamW([model.down, model.up], lr=0.01)
        stream = data.stream((x[:1200], y[:1200]), 64, 400)
        self.fit(model, optimizer, stream, F.mse_loss, frozen=("base",))

    @faulty("", shows="H828")
    def orders_without_places(self) -> None:
        """Attention without positions is asked which token came first."""
        x = torch.stack([torch.randperm(10)[:6] for _ in range(1400)])
        y = x[:, 0]
        model = parts.Wired(
            lambda self, x: self.head(self.body(self.embed(x)).mean(1)) + 0 * self.place.sum(),
            embed=nn.Embedding(10, 32),
            place=nn.Parameter(torch.randn(6, 32)),
            body=nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True),
            head=nn.Linear(32, 10),
        )
        for _ in self.watched(range(450), model, adam(model, 0.002)):
            at = data.picked(1200, 48)
            self.update(F.cross_entropy(model(x[at]), y[at]))

    @faulty("", shows="H828")
    def keywords_wrong_axis_pooled(self) -> None:
        """Words are averaged over the batch as well."""
        texts, labels = data.keyword_texts(1500)
        model = _Pooled()
        stream = data.stream((texts[:1200], labels[:1200]), 40, 350)
        self.fit(model, adam(model, 0.01), stream, F.cross_entropy)
