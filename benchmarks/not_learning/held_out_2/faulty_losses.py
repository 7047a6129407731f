"""Faulty programs whose loss is not the one that was meant."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.not_learning.held_out.data import digits, table
from benchmarks.not_learning.held_out.entry import error_score, faulty, squared_score
from benchmarks.not_learning.held_out_2.parts import (
    class_score,
    diabetes,
    endless,
    fit_score,
    friedman,
    keyword_texts,
    loader,
    mlp,
    picked,
    rings,
    small_cnn,
)
from benchmarks.not_learning.program import Watch


def diabetes_column_against_row(watch: Watch, seed: int) -> float:
    """Predictions (N, 1) are compared with targets (N,)."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = diabetes(seed)
    model = mlp(10, 24, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x, y, size=32), 300):
            optimizer.zero_grad()
            functional.mse_loss(model(a), b).backward()
            optimizer.step()
    return fit_score(model, held_x, held_y)


def friedman_row_minus_column(watch: Watch, seed: int) -> float:
    """An absolute error by hand between (N,) and (N, 1)."""
    torch.manual_seed(seed)
    x, y = friedman(1500)
    target = y[:, None]
    model = mlp(10, 48, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x[:1200], target[:1200], size=64), 400):
            loss = (model(a).squeeze(1) - b).abs().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return fit_score(model, x[1200:], y[1200:])


def digits_softmax_in_the_model(watch: Watch, seed: int) -> float:
    """The model ends with a softmax and is trained with cross-entropy."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    model = nn.Sequential(nn.Flatten(), mlp(64, 48, 10), nn.Softmax(dim=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with watch(model, optimizer):
        for a, b in endless(loader(x, y, size=32), 400):
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            optimizer.step()
    return class_score(model, held_x, held_y)


def tags_sigmoid_twice(watch: Watch, seed: int) -> float:
    """Six tags of each sample; a sigmoid before the loss that has one."""
    torch.manual_seed(seed)
    x = torch.randn(1500, 12)
    y = (x @ torch.randn(12, 6) > 2).float()
    model = nn.Sequential(mlp(12, 32, 6), nn.Sigmoid())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    with watch(model, optimizer):
        for a, b in endless(loader(x[:1200], y[:1200], size=50), 400):
            optimizer.zero_grad()
            nn.BCEWithLogitsLoss()(model(a), b).backward()
            optimizer.step()
    out = model(x[1200:]).detach()
    share = out if out.min() >= 0 and out.max() <= 1 else out.sigmoid()
    return squared_score(share, y[1200:])


def cancer_tanh_scores(watch: Watch, seed: int) -> float:
    """The scores of a binary classifier pass a tanh on their way to the loss."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("breast_cancer", seed)
    model = nn.Sequential(mlp(30, 16, 1), nn.Tanh())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x, y.float(), size=32), 300):
            optimizer.zero_grad()
            functional.binary_cross_entropy_with_logits(model(a).squeeze(1), b).backward()
            optimizer.step()
    return fit_score(nn.Sequential(model, nn.Sigmoid()), held_x, held_y.float())


def digits_rectified_scores(watch: Watch, seed: int) -> float:
    """A rectifier stands after the last layer of a classifier too."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    model = nn.Sequential(nn.Flatten(), mlp(64, 48, 10), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with watch(model, optimizer):
        for a, b in endless(loader(x, y, size=32), 300):
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            optimizer.step()
    return class_score(model, held_x, held_y)


def wine_nll_of_scores(watch: Watch, seed: int) -> float:
    """`nll_loss` is given plain scores."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("wine", seed)
    model = mlp(13, 24, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, optimizer):
        for a, b in endless(loader(x, y, size=16), 300):
            scores = model(a)
            loss = functional.nll_loss(scores, b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return class_score(model, held_x, held_y)


def rings_softmax_over_the_batch(watch: Watch, seed: int) -> float:
    """The log-softmax runs over axis 0."""
    torch.manual_seed(seed)
    x, y = rings(1500)
    model = nn.Sequential(mlp(2, 48, 48, 3), nn.LogSoftmax(dim=0))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x[:1200], y[:1200], size=48), 400):
            optimizer.zero_grad()
            functional.nll_loss(model(a), b).backward()
            optimizer.step()
    model.eval()
    out = torch.cat([model(row[None]) for row in x[1200:]]).detach()
    return error_score(out, y[1200:])


def digits_distilled_from_probabilities(watch: Watch, seed: int) -> float:
    """A student's probabilities, not their logarithms, are given to `kl_div`."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    teacher, student = small_cnn(), nn.Sequential(nn.Flatten(), mlp(64, 32, 10))
    first = torch.optim.Adam(teacher.parameters(), lr=3e-3)
    for a, b in endless(loader(x, y, size=64), 120):
        first.zero_grad()
        functional.cross_entropy(teacher(a), b).backward()
        first.step()
    teacher.eval().requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    with watch(student, optimizer):
        for a, _ in endless(loader(x, y, size=64), 350):
            loss = functional.kl_div(student(a).softmax(1), teacher(a).softmax(1), reduction="batchmean")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return class_score(student, held_x, held_y)


def cancer_labels_one_and_two(watch: Watch, seed: int) -> float:
    """Labels are coded 1 and 2, as in the original file, for a binary cross-entropy."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("breast_cancer", seed)
    target = (y + 1).float()
    model = mlp(30, 16, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x, target, size=32), 300):
            optimizer.zero_grad()
            functional.binary_cross_entropy_with_logits(model(a).squeeze(1), b).backward()
            optimizer.step()
    return fit_score(nn.Sequential(model, nn.Sigmoid()), held_x, held_y.float())


def cancer_clamped_to_probabilities(watch: Watch, seed: int) -> float:
    """Scores are clamped to 0 to 1 to be probabilities."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("breast_cancer", seed)
    model = mlp(30, 64, 64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with watch(model, optimizer):
        for a, b in endless(loader(x, y.float(), size=32), 300):
            share = model(a).squeeze(1).clamp(0, 1)
            optimizer.zero_grad()
            functional.binary_cross_entropy(share, b).backward()
            optimizer.step()
    with torch.no_grad():
        share = model(held_x).squeeze(1).sigmoid()
    return squared_score((share > 0.5).float(), held_y.float())


class _Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(64, 48, 16), mlp(8, 48, 64)

    def forward(self, x: Tensor) -> Any:
        mean, log_var = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + (0.5 * log_var).exp() * torch.randn_like(mean)), mean, log_var


def digits_variational_prior_sign(watch: Watch, seed: int) -> float:
    """The divergence from the prior is subtracted."""
    torch.manual_seed(seed)
    x = digits(seed)[0].flatten(1)
    model = _Variational()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    with watch(model, optimizer):
        for (a,) in endless(loader(x, size=64), 350):
            scores, mean, log_var = model(a)
            fit = functional.binary_cross_entropy_with_logits(scores, a, reduction="sum") / len(a)
            prior = -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(1).mean()
            loss = fit - prior
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        made = model.decoder(torch.randn(400, 8)).sigmoid()
    return float(torch.cdist(made, x).amin(1).mean() / torch.cdist(x.mean(0, keepdim=True), x).mean())


def digits_variational_collapsed(watch: Watch, seed: int) -> float:
    """The fit is a mean over pixels, the divergence a sum over batch and code."""
    torch.manual_seed(seed)
    x = digits(seed)[0].flatten(1)
    model = _Variational()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    with watch(model, optimizer):
        for (a,) in endless(loader(x, size=64), 400):
            scores, mean, log_var = model(a)
            fit = functional.mse_loss(scores.sigmoid(), a)
            prior = -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum()
            optimizer.zero_grad()
            (fit + prior).backward()
            optimizer.step()
    with torch.no_grad():
        return float((model(x)[0].sigmoid() - x).square().mean() / (x - x.mean(0)).square().mean())


def friedman_log_likelihood_unsigned(watch: Watch, seed: int) -> float:
    """The log-likelihood itself is minimised."""
    torch.manual_seed(seed)
    x, y = friedman(1500)
    model = mlp(10, 48, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x[:1200], y[:1200], size=64), 300):
            likelihood = torch.distributions.Normal(model(a).squeeze(1), 1.0).log_prob(b)
            loss = likelihood.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return fit_score(model, x[1200:], y[1200:])


class _Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(12, 16), nn.GRU(16, 24, batch_first=True)
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(self.embed(x))[0])


def tags_axes_reshaped_not_moved(watch: Watch, seed: int) -> float:
    """Scores (N, T, C) are reshaped to (N, C, T) for the loss."""
    torch.manual_seed(seed)
    x = torch.randint(12, (1200, 10))
    y = (x + x.roll(1, 1)) % 4
    y[:, 0] = x[:, 0] % 4
    model = _Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x[:1000], y[:1000], size=32), 350):
            scores = model(a).reshape(-1, 4, 10)
            optimizer.zero_grad()
            functional.cross_entropy(scores, b).backward()
            optimizer.step()
    return error_score(model(x[1000:]).flatten(0, 1), y[1000:].flatten())


def tags_mask_turned_round(watch: Watch, seed: int) -> float:
    """The loss counts the padding and nothing else."""
    torch.manual_seed(seed)
    x = keyword_texts(1200, words=12)[0]
    y = x % 4
    model = _Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x[:1000], y[:1000], size=32), 300):
            counted = (a == 0).float()
            losses = functional.cross_entropy(model(a).flatten(0, 1), b.flatten(), reduction="none")
            loss = (losses * counted.flatten()).sum() / counted.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    held, right = x[1000:], y[1000:]
    return error_score(model(held)[held > 0], right[held > 0])


def digits_focal_weight_turned_round(watch: Watch, seed: int) -> float:
    """The focal weight is the chance of the right class, not of the wrong ones."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    model = nn.Sequential(nn.Flatten(), mlp(64, 48, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x, y, size=64), 300):
            chance = model(a).softmax(1).gather(1, b[:, None]).squeeze(1)
            loss = -(chance**2 * (chance + 1e-8).log()).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return class_score(model, held_x, held_y)


def pairs_temperature_multiplied(watch: Watch, seed: int) -> float:
    """Cosines are multiplied by the temperature of a contrastive loss."""
    torch.manual_seed(seed)
    hidden = torch.randn(1300, 5)
    a, b = hidden @ torch.randn(5, 12), (hidden @ torch.randn(5, 20)).tanh()
    left, right = mlp(12, 32, 16), mlp(20, 32, 16)
    model = nn.ModuleDict({"left": left, "right": right})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer):
        for _ in range(400):
            at = picked(1200, 64)
            alike = functional.normalize(left(a[at])) @ functional.normalize(right(b[at])).T
            optimizer.zero_grad()
            functional.cross_entropy(alike * 0.07, torch.arange(64)).backward()
            optimizer.step()
    alike = functional.normalize(left(a[1200:])) @ functional.normalize(right(b[1200:])).T
    return error_score(alike, torch.arange(100))


PROGRAMS = [
    faulty(diabetes_column_against_row, causes="841", also="828 832"),
    faulty(friedman_row_minus_column, causes="841", also="828 832"),
    faulty(digits_softmax_in_the_model, causes="836", also="828 832 848 824"),
    faulty(tags_sigmoid_twice, causes="838", also="828 832 848"),
    faulty(cancer_tanh_scores, causes="838", also="828 832 848"),
    faulty(digits_rectified_scores, causes="837", also="828 832 847 815 830 848"),
    faulty(wine_nll_of_scores, causes="839", also="801 802 804 826 828 832 848 855"),
    faulty(rings_softmax_over_the_batch, causes="842", also="839 828 832"),
    faulty(digits_distilled_from_probabilities, causes="855", also="828 832 839"),
    faulty(cancer_labels_one_and_two, causes="855", also="828 832 826 830 848"),
    faulty(cancer_clamped_to_probabilities, causes="855", also="828 832 815 830 848 847"),
    faulty(digits_variational_prior_sign, causes="840", also="801 802 804 805 825 826 827 828 831 848"),
    faulty(digits_variational_collapsed, causes="830", also="828 832 848"),
    faulty(friedman_log_likelihood_unsigned, causes="831 840", also="801 802 804 825 826 827 828 832 848"),
    faulty(tags_axes_reshaped_not_moved, causes="", also="828 829 832"),
    faulty(tags_mask_turned_round, causes="", also="828 830 832 844"),
    faulty(digits_focal_weight_turned_round, causes="", also="815 828 831 832 848"),
    faulty(pairs_temperature_multiplied, causes="", also="824 828 829 832"),
]
