"""Faulty programs of the set: losses, data."""

# ruff: noqa: N812 - the programs are written as users write theirs

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evals.not_learning import data, parts
from evals.not_learning.program import Programs, adam, faulty, sgd, update


class _Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = parts.mlp(64, 48, 16), parts.mlp(8, 48, 64)

    def forward(self, x: Tensor) -> Any:
        mean, log_var = self.encoder(x).chunk(2, 1)
        return (self.decoder(mean + (0.5 * log_var).exp() * torch.randn_like(mean)), mean, log_var)


class _Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(12, 16), nn.GRU(16, 24, batch_first=True)
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(self.embed(x))[0])


class FaultyLosses(Programs):
    """Faulty programs whose loss is not the one that was meant."""

    @faulty("H841", shows="H828")
    def diabetes_column_against_row(self) -> None:
        """Predictions (N, 1) are compared with targets (N,)."""
        model = parts.mlp(10, 24, 1)
        self.fit(
            model,
            adam(model, 0.003),
            data.stream(data.scaled_diabetes(self.seed), 32, 300),
            F.mse_loss,
        )

    @faulty("H841", shows="H828")
    def friedman_row_minus_column(self) -> None:
        """An absolute error by hand between (N,) and (N, 1)."""
        x, y = data.friedman(1500)
        target = y[:, None]
        model = parts.mlp(10, 48, 1)
        optimizer = adam(model, 0.003)
        stream = data.stream((x[:1200], target[:1200]), 64, 400)
        self.descend(model, optimizer, stream, lambda a, b: (model(a).squeeze(1) - b).abs().mean())

    @faulty("H836", shows="H828 H848 H824")
    def digits_softmax_in_the_model(self) -> None:
        """The model ends with a softmax and is trained with cross-entropy."""
        model = nn.Sequential(nn.Flatten(), parts.mlp(64, 48, 10), nn.Softmax(dim=1))
        self.fit(
            model,
            sgd(model, 0.05),
            data.stream(data.digit_images(self.seed), 32, 400),
            F.cross_entropy,
        )

    @faulty("H838", shows="H828 H848")
    def tags_sigmoid_twice(self) -> None:
        """Six tags of each sample; a sigmoid before the loss that has one."""
        x = torch.randn(1500, 12)
        y = (x @ torch.randn(12, 6) > 2).float()
        model = nn.Sequential(parts.mlp(12, 32, 6), nn.Sigmoid())
        stream = data.stream((x[:1200], y[:1200]), 50, 400)
        self.fit(model, sgd(model, 0.3), stream, nn.BCEWithLogitsLoss())

    @faulty("H838", shows="H828 H848")
    def cancer_tanh_scores(self) -> None:
        """The scores of a binary classifier pass a tanh on their way to the loss."""
        x, y, *_ = data.table("breast_cancer", self.seed)
        model = nn.Sequential(parts.mlp(30, 16, 1), nn.Tanh())
        for a, b in self.watched(data.stream((x, y.float()), 32, 300), model, adam(model, 0.003)):
            self.update(F.binary_cross_entropy_with_logits(model(a).squeeze(1), b))

    @faulty("H837", shows="H828 H815 H848")
    def digits_rectified_scores(self) -> None:
        """A rectifier stands after the last layer of a classifier too."""
        x, y, *_ = data.digit_images(self.seed)
        model = nn.Sequential(nn.Flatten(), parts.mlp(64, 48, 10), nn.ReLU())
        self.fit(
            model, sgd(model, 0.1, momentum=0.9), data.stream((x, y), 32, 300), F.cross_entropy
        )

    @faulty("H839", shows="H801 H802 H804 H826 H828 H848 H855")
    def wine_nll_of_scores(self) -> None:
        """`nll_loss` is given plain scores."""
        model = parts.mlp(13, 24, 3)
        for a, b in self.watched(
            data.stream(data.table("wine", self.seed), 16, 300), model, adam(model, 0.01)
        ):
            scores = model(a)
            self.update(F.nll_loss(scores, b))

    @faulty("H842", shows="H839 H828")
    def rings_softmax_over_the_batch(self) -> None:
        """The log-softmax runs over axis 0."""
        x, y = data.rings(1500)
        model = nn.Sequential(parts.mlp(2, 48, 48, 3), nn.LogSoftmax(dim=0))
        self.fit(model, adam(model, 0.003), data.stream((x[:1200], y[:1200]), 48, 400), F.nll_loss)

    @faulty("H855", shows="H828 H839")
    def digits_distilled_from_probabilities(self) -> None:
        """A student's probabilities, not their logarithms, are given to `kl_div`."""
        x, y, *_ = data.digit_images(self.seed)
        teacher, student = parts.small_cnn(), nn.Sequential(nn.Flatten(), parts.mlp(64, 32, 10))
        first = adam(teacher, 0.003)
        for a, b in data.stream((x, y), 64, 120):
            update(first, F.cross_entropy(teacher(a), b))
        teacher.eval().requires_grad_(False)
        for a, _ in self.watched(data.stream((x, y), 64, 350), student, sgd(student, 0.1)):
            self.update(
                F.kl_div(student(a).softmax(1), teacher(a).softmax(1), reduction="batchmean")
            )

    @faulty("H855", shows="H828 H826 H848")
    def cancer_labels_one_and_two(self) -> None:
        """Labels are coded 1 and 2, as in the original file, for a binary cross-entropy."""
        x, y, *_ = data.table("breast_cancer", self.seed)
        target = (y + 1).float()
        model = parts.mlp(30, 16, 1)
        for a, b in self.watched(data.stream((x, target), 32, 300), model, adam(model, 0.003)):
            self.update(F.binary_cross_entropy_with_logits(model(a).squeeze(1), b))

    @faulty("H855", shows="H828 H815 H848")
    def cancer_clamped_to_probabilities(self) -> None:
        """Scores are clamped to 0 to 1 to be probabilities."""
        x, y, *_ = data.table("breast_cancer", self.seed)
        model = parts.mlp(30, 64, 64, 1)
        for a, b in self.watched(data.stream((x, y.float()), 32, 300), model, sgd(model, 0.05)):
            share = model(a).squeeze(1).clamp(0, 1)
            self.update(F.binary_cross_entropy(share, b))

    @faulty("H840", shows="H801 H802 H804 H825 H826 H828 H831 H848")
    def digits_variational_prior_sign(self) -> None:
        """The divergence from the prior is subtracted."""
        x = data.digit_images(self.seed)[0].flatten(1)
        model = _Variational()
        for (a,) in self.watched(data.stream((x,), 64, 350), model, adam(model, 0.002)):
            scores, mean, log_var = model(a)
            fit = F.binary_cross_entropy_with_logits(scores, a, reduction="sum") / len(a)
            prior = -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(1).mean()
            self.update(fit - prior)

    @faulty("", shows="H828 H848")
    def digits_variational_collapsed(self) -> None:
        """The fit is a mean over pixels, the divergence a sum over batch and code."""
        x = data.digit_images(self.seed)[0].flatten(1)
        model = _Variational()
        for (a,) in self.watched(data.stream((x,), 64, 400), model, adam(model, 0.002)):
            scores, mean, log_var = model(a)
            fit = F.mse_loss(scores.sigmoid(), a)
            prior = -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum()
            self.update(fit + prior)

    @faulty("H831 H840", shows="H801 H802 H804 H825 H826 H828 H848")
    def friedman_log_likelihood_unsigned(self) -> None:
        """The log-likelihood itself is minimised."""
        x, y = data.friedman(1500)
        model = parts.mlp(10, 48, 1)
        for a, b in self.watched(
            data.stream((x[:1200], y[:1200]), 64, 300), model, adam(model, 0.005)
        ):
            likelihood = torch.distributions.Normal(model(a).squeeze(1), 1.0).log_prob(b)
            self.update(likelihood.mean())

    @faulty("", shows="H828")
    def tags_axes_reshaped_not_moved(self) -> None:
        """Scores (N, T, C) are reshaped to (N, C, T) for the loss."""
        x = torch.randint(12, (1200, 10))
        y = (x + x.roll(1, 1)) % 4
        y[:, 0] = x[:, 0] % 4
        model = _Tagger()
        for a, b in self.watched(
            data.stream((x[:1000], y[:1000]), 32, 350), model, adam(model, 0.005)
        ):
            scores = model(a).reshape(-1, 4, 10)
            self.update(F.cross_entropy(scores, b))

    @faulty("", shows="H828")
    def tags_mask_turned_round(self) -> None:
        """The loss counts the padding and nothing else."""
        x = data.keyword_texts(1200, words=12)[0]
        y = x % 4
        model = _Tagger()
        for a, b in self.watched(
            data.stream((x[:1000], y[:1000]), 32, 300), model, adam(model, 0.005)
        ):
            counted = (a == 0).float()
            losses = F.cross_entropy(model(a).flatten(0, 1), b.flatten(), reduction="none")
            self.update((losses * counted.flatten()).sum() / counted.sum())

    @faulty("", shows="H815 H828 H831 H848")
    def digits_focal_weight_turned_round(self) -> None:
        """The focal weight is the chance of the right class, not of the wrong ones."""
        model = nn.Sequential(nn.Flatten(), parts.mlp(64, 48, 10))
        for a, b in self.watched(
            data.stream(data.digit_images(self.seed), 64, 300), model, adam(model, 0.002)
        ):
            chance = model(a).softmax(1).gather(1, b[:, None]).squeeze(1)
            self.update(-(chance**2 * (chance + 1e-08).log()).mean())

    @faulty("", shows="H824 H828")
    def pairs_temperature_multiplied(self) -> None:
        """Cosines are multiplied by the temperature of a contrastive loss."""
        hidden = torch.randn(1300, 5)
        a, b = hidden @ torch.randn(5, 12), (hidden @ torch.randn(5, 20)).tanh()
        left, right = parts.mlp(12, 32, 16), parts.mlp(20, 32, 16)
        model = nn.ModuleDict({"left": left, "right": right})
        for _ in self.watched(range(400), model, sgd(model, 0.1)):
            at = data.picked(1200, 64)
            alike = F.normalize(left(a[at])) @ F.normalize(right(b[at])).T
            self.update(F.cross_entropy(alike * 0.07, torch.arange(64)))


class FaultyData(Programs):
    """Faulty programs whose data are not what they should be."""

    @faulty("H806", shows="H801 H802 H804")
    def friedman_gaps_in_the_features(self) -> None:
        """Some features are missing, coded as NaN."""
        x, y = data.friedman(1500)
        x[data.picked(1200, 6), data.picked(10, 6)] = torch.nan
        model = parts.mlp(10, 48, 1)
        optimizer = adam(model, 0.003)
        stream = data.stream((x[:1200], y[:1200]), 64, 400)
        self.descend(model, optimizer, stream, lambda a, b: F.mse_loss(model(a).squeeze(1), b))

    @faulty("H806", shows="H801 H802 H804 H856")
    def digits_constant_pixels_standardised(self) -> None:
        """Pixels that are always empty are divided by their deviation of zero."""
        x, y, held_x, _ = data.digit_images(self.seed)
        x, held_x = x.flatten(1), held_x.flatten(1)
        mean, deviation = x.mean(0), x.std(0)
        x, held_x = (x - mean) / deviation, (held_x - mean) / (deviation + 0.001)
        model = parts.mlp(64, 48, 10)
        self.fit(model, adam(model, 0.002), data.stream((x, y), 64, 300), F.cross_entropy)

    @faulty("", shows="H825 H826 H828 H848")
    def friedman_missing_targets_coded(self) -> None:
        """Missing targets are coded as -99999."""
        x, y = data.friedman(1500)
        target = y.clone()
        target[data.picked(1200, 5)] = -99999.0
        model = parts.mlp(10, 48, 1)
        optimizer = adam(model, 0.003)
        stream = data.stream((x[:1200], target[:1200]), 64, 400)
        self.descend(model, optimizer, stream, lambda a, b: F.mse_loss(model(a).squeeze(1), b))

    @faulty("H843", shows="H826 H828")
    def digits_sorted_by_label(self) -> None:
        """The data are sorted by label and not shuffled."""
        x, y, *_ = data.digit_images(self.seed)
        order = y.argsort(stable=True)
        model = nn.Sequential(nn.Flatten(), parts.mlp(64, 48, 10))
        stream = data.stream((x[order], y[order]), 32, 420, shuffle=False)
        self.fit(model, sgd(model, 0.05, momentum=0.9), stream, F.cross_entropy)

    @faulty("", shows="H828")
    def wine_rows_and_labels_apart(self) -> None:
        """The rows are shuffled, and the labels are not shuffled with them."""
        x, y, *_ = data.table("wine", self.seed)
        shuffled = x[torch.randperm(len(x))]
        model = nn.Linear(13, 3)
        self.fit(model, adam(model, 0.005), data.stream((shuffled, y), 16, 400), F.cross_entropy)

    @faulty("", shows="H815 H828")
    def digits_one_class_left(self) -> None:
        """Labels are floored after a division: all of them become 0."""
        x, y, *_ = data.digit_images(self.seed)
        target = torch.div(y, 10, rounding_mode="floor")
        model = nn.Sequential(nn.Flatten(), parts.mlp(64, 48, 10))
        self.fit(model, adam(model, 0.002), data.stream((x, target), 64, 300), F.cross_entropy)

    @faulty("", shows="H814 H815 H828 H856")
    def digits_cast_to_whole_numbers(self) -> None:
        """Features of size one half are cast to whole numbers on their way into the data set."""
        x, y, *_ = data.digit_images(self.seed)
        stored = (0.9 * x).long().float()
        model = nn.Sequential(nn.Flatten(), parts.mlp(64, 48, 10))
        self.fit(model, adam(model, 0.002), data.stream((stored, y), 64, 300), F.cross_entropy)

    @faulty("", shows="H828")
    def keywords_all_unknown(self) -> None:
        """No word is found in the vocabulary: each becomes the same token."""
        texts, labels = data.keyword_texts(1500)
        words = {f"w{index}": index for index in range(40)}
        found = torch.tensor([[words.get(f"W{int(word)}", 0) for word in row] for row in texts])
        embed, head = nn.Embedding(40, 24), nn.Linear(24, 3)
        model = nn.ModuleDict({"embed": embed, "head": head})
        optimizer = adam(model, 0.01)
        stream = data.stream((found[:1200], labels[:1200]), 40, 350)
        self.descend(
            model, optimizer, stream, lambda a, b: F.cross_entropy(head(embed(a).amax(1)), b)
        )

    @faulty("", shows="H833")
    def friedman_first_batch_only(self) -> None:
        """`next(iter(...))` in the loop gives the first batch each time."""
        x, y = data.friedman(1500)
        batches = data.loader(x[:1200], y[:1200], size=32, shuffle=False)
        model = parts.mlp(10, 48, 1)
        for _ in self.watched(range(400), model, adam(model, 0.003)):
            a, b = next(iter(batches))
            self.update(F.mse_loss(model(a).squeeze(1), b))

    @faulty("", shows="H828")
    def stream_workers_of_one_seed(self) -> None:
        """Four workers make samples with numpy, from one seed."""
        truth = np.random.default_rng(1000 + self.seed).normal(size=(120, 1))
        workers = [np.random.default_rng([self.seed, number * 0]) for number in range(4)]
        model = nn.Linear(120, 1)
        for step in self.watched(range(300), model, sgd(model, 0.005)):
            rows, noise = (
                workers[step % 4].normal(size=(4, 120)),
                workers[step % 4].normal(size=(4, 1)),
            )
            a, b = (
                torch.tensor(part, dtype=torch.float32)
                for part in (rows, rows @ truth / 11 + noise)
            )
            self.update(F.mse_loss(model(a), b))

    @faulty("H856", shows="H825 H826 H828 H848")
    def wine_raw_features(self) -> None:
        """Features from 0.1 to 1700 go in as they are."""
        x, y, *_ = data.table("wine", self.seed, raw=True)
        model = parts.mlp(13, 24, 3)
        self.fit(
            model, sgd(model, 0.01, momentum=0.9), data.stream((x, y), 16, 350), F.cross_entropy
        )

    @faulty("H856", shows="H825 H826 H828 H848")
    def digits_bytes_into_tanh(self) -> None:
        """Pixels from 0 to 255 go into a tanh network."""
        x, y, *_ = data.digit_images(self.seed)
        scale = 255.0
        model = nn.Sequential(nn.Flatten(), parts.mlp(64, 32, 32, 10, act=nn.Tanh))
        optimizer = sgd(model, 0.05, momentum=0.9)
        self.fit(model, optimizer, data.stream((scale * x, y), 64, 300), F.cross_entropy)

    @faulty("H856", shows="H824 H828")
    def digits_scaled_down_twice(self) -> None:
        """Pixels are divided by 255 twice."""
        x, y, *_ = data.digit_images(self.seed)
        scale = 255.0**2
        model = nn.Sequential(nn.Flatten(), parts.mlp(64, 48, 10))
        optimizer = sgd(model, 0.1, momentum=0.9)
        self.fit(model, optimizer, data.stream((x / scale, y), 64, 300), F.cross_entropy)

    @faulty("H856", shows="H825 H828 H848")
    def years_not_centred(self) -> None:
        """A year around 2000 is the only feature; the trend within a decade is the target."""
        year = 1995 + 12 * torch.rand(1200, 1)
        y = (0.9 * (year - 2001)).sin()
        shift, scale = 0.0, 1.0
        x = (year - shift) / scale
        model = parts.mlp(1, 48, 48, 1)
        self.fit(model, adam(model, 0.005), data.stream((x[:1000], y[:1000]), 50, 500), F.mse_loss)

    @faulty("", shows="H828")
    def discs_masks_shifted(self) -> None:
        """Image and mask are cropped at different random places."""
        x, mask = data.discs(400, side=24)
        model = nn.Sequential(parts.conv_block(1, 8), parts.conv_block(8, 8), nn.Conv2d(8, 1, 1))
        for a, b in self.watched(
            data.stream((x[:320], mask[:320]), 16, 250), model, adam(model, 0.005)
        ):
            (top, left), (low, right) = (data.picked(13, 2), data.picked(13, 2))
            seen, wanted = (
                a[..., top : top + 12, left : left + 12],
                b[..., low : low + 12, right : right + 12],
            )
            self.update(F.binary_cross_entropy_with_logits(model(seen), wanted))

    @faulty("H833")
    def diabetes_learnt_by_heart(self) -> None:
        """A wide network on sixty noisy rows, for far too long."""
        x, y, held_x, held_y = data.scaled_diabetes(self.seed)
        few, steps = 60, 800
        model = parts.mlp(10, 128, 128, 1)
        optimizer = adam(model, 0.001)
        for step, (a, b) in self.watched(
            enumerate(data.stream((x[:few], y[:few]), 20, steps)), model, optimizer
        ):
            update(optimizer, F.mse_loss(model(a).squeeze(1), b))
            if step % 40 == 39:
                model.eval()
                with torch.no_grad():
                    self.watching.validated(F.mse_loss(model(held_x).squeeze(1), held_y).item())
                model.train()

    @faulty("", shows="H833 H856")
    def wine_validation_not_scaled(self) -> None:
        """Training features are standardised; those of the evaluations are raw."""
        x, y, held_x, held_y = data.table("wine", self.seed)
        held_x = data.table("wine", self.seed, raw=True)[2]
        model = parts.mlp(13, 24, 3)
        for step, (a, b) in self.watched(
            enumerate(data.stream((x, y), 16, 300)), model, adam(model, 0.005)
        ):
            self.update(F.cross_entropy(model(a), b))
            if step % 30 == 29:
                with torch.no_grad():
                    self.watching.validated(F.cross_entropy(model(held_x), held_y).item())
