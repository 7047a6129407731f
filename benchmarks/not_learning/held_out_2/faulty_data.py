"""Faulty programs whose data are not what they should be."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.not_learning.held_out.data import blobs, digits, table
from benchmarks.not_learning.held_out.entry import error_score, faulty, squared_score
from benchmarks.not_learning.held_out_2.parts import (
    class_score,
    conv_block,
    diabetes,
    endless,
    fit_score,
    friedman,
    keyword_texts,
    loader,
    mlp,
    picked,
)
from benchmarks.not_learning.program import Watch


def friedman_gaps_in_the_features(watch: Watch, seed: int) -> float:
    """Some features are missing, coded as NaN."""
    torch.manual_seed(seed)
    x, y = friedman(1500)
    x[picked(1200, 6), picked(10, 6)] = torch.nan
    model = mlp(10, 48, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x[:1200], y[:1200], size=64), 400):
            optimizer.zero_grad()
            functional.mse_loss(model(a).squeeze(1), b).backward()
            optimizer.step()
    return fit_score(model, x[1200:], y[1200:])


def digits_constant_pixels_standardised(watch: Watch, seed: int) -> float:
    """Pixels that are always empty are divided by their deviation of zero."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    x, held_x = x.flatten(1), held_x.flatten(1)
    mean, deviation = x.mean(0), x.std(0)
    x, held_x = (x - mean) / deviation, (held_x - mean) / (deviation + 1e-3)
    model = mlp(64, 48, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x, y, size=64), 300):
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            optimizer.step()
    return class_score(model, held_x, held_y)


def friedman_missing_targets_coded(watch: Watch, seed: int) -> float:
    """Missing targets are coded as -99999."""
    torch.manual_seed(seed)
    x, y = friedman(1500)
    target = y.clone()
    target[picked(1200, 5)] = -99999.0
    model = mlp(10, 48, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x[:1200], target[:1200], size=64), 400):
            optimizer.zero_grad()
            functional.mse_loss(model(a).squeeze(1), b).backward()
            optimizer.step()
    return fit_score(model, x[1200:], y[1200:])


def digits_sorted_by_label(watch: Watch, seed: int) -> float:
    """The data are sorted by label and not shuffled."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    order = y.argsort(stable=True)
    model = nn.Sequential(nn.Flatten(), mlp(64, 48, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with watch(model, optimizer):
        for a, b in endless(loader(x[order], y[order], size=32, shuffle=False), 420):
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            optimizer.step()
    return class_score(model, held_x, held_y)


def wine_rows_and_labels_apart(watch: Watch, seed: int) -> float:
    """The rows are shuffled, and the labels are not shuffled with them."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("wine", seed)
    shuffled = x[torch.randperm(len(x))]
    model = nn.Linear(13, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(shuffled, y, size=16), 400):
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            optimizer.step()
    return class_score(model, held_x, held_y)


def digits_one_class_left(watch: Watch, seed: int) -> float:
    """Labels are floored after a division: all of them become 0."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    target = torch.div(y, 10, rounding_mode="floor")
    model = nn.Sequential(nn.Flatten(), mlp(64, 48, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x, target, size=64), 300):
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            optimizer.step()
    return class_score(model, held_x, held_y)


def digits_cast_to_whole_numbers(watch: Watch, seed: int) -> float:
    """Features of size one half are cast to whole numbers on their way into the data set."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    stored = (0.9 * x).long().float()
    model = nn.Sequential(nn.Flatten(), mlp(64, 48, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(stored, y, size=64), 300):
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            optimizer.step()
    return class_score(model, held_x, held_y)


def keywords_all_unknown(watch: Watch, seed: int) -> float:
    """No word is found in the vocabulary: each becomes the same token."""
    torch.manual_seed(seed)
    texts, labels = keyword_texts(1500)
    words = {f"w{index}": index for index in range(40)}
    found = torch.tensor([[words.get(f"W{int(word)}", 0) for word in row] for row in texts])
    embed, head = nn.Embedding(40, 24), nn.Linear(24, 3)
    model = nn.ModuleDict({"embed": embed, "head": head})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, optimizer):
        for a, b in endless(loader(found[:1200], labels[:1200], size=40), 350):
            optimizer.zero_grad()
            functional.cross_entropy(head(embed(a).amax(1)), b).backward()
            optimizer.step()
    return error_score(head(embed(found[1200:]).amax(1)), labels[1200:])


def friedman_first_batch_only(watch: Watch, seed: int) -> float:
    """`next(iter(...))` in the loop gives the first batch each time."""
    torch.manual_seed(seed)
    x, y = friedman(1500)
    batches = loader(x[:1200], y[:1200], size=32, shuffle=False)
    model = mlp(10, 48, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer):
        for _ in range(400):
            a, b = next(iter(batches))
            optimizer.zero_grad()
            functional.mse_loss(model(a).squeeze(1), b).backward()
            optimizer.step()
    return fit_score(model, x[1200:], y[1200:])


def stream_workers_of_one_seed(watch: Watch, seed: int) -> float:
    """Four workers make samples with numpy, from one seed."""
    torch.manual_seed(seed)
    truth = np.random.default_rng(1000 + seed).normal(size=(120, 1))
    workers = [np.random.default_rng([seed, number * 0]) for number in range(4)]
    model = nn.Linear(120, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    with watch(model, optimizer):
        for step in range(300):
            rows, noise = workers[step % 4].normal(size=(4, 120)), workers[step % 4].normal(size=(4, 1))
            a, b = (torch.tensor(part, dtype=torch.float32) for part in (rows, rows @ truth / 11 + noise))
            optimizer.zero_grad()
            functional.mse_loss(model(a), b).backward()
            optimizer.step()
    x = torch.randn(500, 120)
    return squared_score(model(x), x @ torch.tensor(truth / 11, dtype=torch.float32))


def wine_raw_features(watch: Watch, seed: int) -> float:
    """Features from 0.1 to 1700 go in as they are."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("wine", seed, raw=True)
    model = mlp(13, 24, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with watch(model, optimizer):
        for a, b in endless(loader(x, y, size=16), 350):
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            optimizer.step()
    return class_score(model, held_x, held_y)


def digits_bytes_into_tanh(watch: Watch, seed: int) -> float:
    """Pixels from 0 to 255 go into a tanh network."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    scale = 255.0
    model = nn.Sequential(nn.Flatten(), mlp(64, 32, 32, 10, act=nn.Tanh))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with watch(model, optimizer):
        for a, b in endless(loader(scale * x, y, size=64), 300):
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            optimizer.step()
    return class_score(model, scale * held_x, held_y)


def digits_scaled_down_twice(watch: Watch, seed: int) -> float:
    """Pixels are divided by 255 twice."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    scale = 255.0**2
    model = nn.Sequential(nn.Flatten(), mlp(64, 48, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with watch(model, optimizer):
        for a, b in endless(loader(x / scale, y, size=64), 300):
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            optimizer.step()
    return class_score(model, held_x / scale, held_y)


def years_not_centred(watch: Watch, seed: int) -> float:
    """A year around 2000 is the only feature; the trend within a decade is the target."""
    torch.manual_seed(seed)
    year = 1995 + 12 * torch.rand(1200, 1)
    y = (0.9 * (year - 2001)).sin()
    shift, scale = 0.0, 1.0
    x = (year - shift) / scale
    model = mlp(1, 48, 48, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x[:1000], y[:1000], size=50), 500):
            optimizer.zero_grad()
            functional.mse_loss(model(a), b).backward()
            optimizer.step()
    return fit_score(model, x[1000:], y[1000:])


def discs_masks_shifted(watch: Watch, seed: int) -> float:
    """Image and mask are cropped at different random places."""
    torch.manual_seed(seed)
    x, mask = blobs(400, side=24)
    model = nn.Sequential(conv_block(1, 8), conv_block(8, 8), nn.Conv2d(8, 1, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x[:320], mask[:320], size=16), 250):
            (top, left), (low, right) = picked(13, 2), picked(13, 2)
            seen, wanted = a[..., top : top + 12, left : left + 12], b[..., low : low + 12, right : right + 12]
            optimizer.zero_grad()
            functional.binary_cross_entropy_with_logits(model(seen), wanted).backward()
            optimizer.step()
    model.eval()
    return squared_score(model(x[320:]).sigmoid(), mask[320:])


def diabetes_learnt_by_heart(watch: Watch, seed: int) -> float:
    """A wide network on sixty noisy rows, for far too long."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = diabetes(seed)
    few, steps = 60, 800
    model = mlp(10, 128, 128, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with watch(model, optimizer) as watching:
        for step, (a, b) in enumerate(endless(loader(x[:few], y[:few], size=20), steps)):
            optimizer.zero_grad()
            functional.mse_loss(model(a).squeeze(1), b).backward()
            optimizer.step()
            if step % 40 == 39:
                model.eval()
                with torch.no_grad():
                    watching.validated(functional.mse_loss(model(held_x).squeeze(1), held_y).item())
                model.train()
    return fit_score(model, held_x, held_y)


def wine_validation_not_scaled(watch: Watch, seed: int) -> float:
    """Training features are standardised; those of the evaluations are raw."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("wine", seed)
    held_x = table("wine", seed, raw=True)[2]
    model = mlp(13, 24, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    with watch(model, optimizer) as watching:
        for step, (a, b) in enumerate(endless(loader(x, y, size=16), 300)):
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            optimizer.step()
            if step % 30 == 29:
                with torch.no_grad():
                    watching.validated(functional.cross_entropy(model(held_x), held_y).item())
    return class_score(model, held_x, held_y)


PROGRAMS = [
    faulty(friedman_gaps_in_the_features, causes="806", also="801 802 804 805"),
    faulty(digits_constant_pixels_standardised, causes="806", also="801 802 804 805 856"),
    faulty(friedman_missing_targets_coded, causes="807", also="825 826 827 828 832 848"),
    faulty(digits_sorted_by_label, causes="843", also="826 827 828 832"),
    faulty(wine_rows_and_labels_apart, causes="", also="828 832"),
    faulty(digits_one_class_left, causes="844", also="815 828 830 832"),
    faulty(digits_cast_to_whole_numbers, causes="844", also="814 815 823 828 829 830 832 845 856"),
    faulty(keywords_all_unknown, causes="844", also="828 829 830 832 845"),
    faulty(friedman_first_batch_only, causes="845", also="833 846"),
    faulty(stream_workers_of_one_seed, causes="846", also="828 832"),
    faulty(wine_raw_features, causes="856", also="825 826 827 828 830 832 847 848"),
    faulty(digits_bytes_into_tanh, causes="856", also="825 826 827 828 832 848"),
    faulty(digits_scaled_down_twice, causes="856", also="824 828 830 832"),
    faulty(years_not_centred, causes="856", also="825 827 828 830 832 847 848"),
    faulty(discs_masks_shifted, causes="", also="828 832"),
    faulty(diabetes_learnt_by_heart, causes="833"),
    faulty(wine_validation_not_scaled, causes="", also="833 856"),
]
