"""Trains the UNet: ``python -m recipes.diffusion``, on scikit-learn's digits or on images of
yours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset

from holdfast import DataLoader, Policy
from recipes.classifier.images import (
    DIGITS_TO_TRAIN,
    DataError,
    find_source,
    shape_of_all,
    write_digits,
)
from recipes.classifier.samples import Samples, Scale
from recipes.diffusion.model import LEVELS, UNet, drawn, noised
from recipes.gan.quality import Judge
from recipes.gan.train import grid_of
from recipes.options import RunOptions, insist_on_a_batch, insist_on_installed, read_options
from recipes.training import Training, ending_clearly, find_device, making_the_model, open_guard

_JUDGED, _SHOWN = 200, 50  # images that are drawn in the end, and in the report


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionOptions(RunOptions):
    """Train a small UNet to draw digits out of noise."""

    run_dir: Path = Path("runs/diffusion")
    """Directory of the run: checkpoints, records, report.html and result.json."""

    data_dir: Path | None = None
    """Images as the classifier's recipe takes them. None: the digits of scikit-learn, written to
    <run-dir>/data."""

    batch_size: int = 64
    """Images in a step."""

    learning_rate: float = 2e-3
    """Of AdamW."""

    width: int = 32
    """Channels of the largest scale; a multiple of 8."""

    ema: float = 0.99
    """How much of the averaged weights stays at each step; images are drawn with them."""

    eval_steps: int = 250
    """Steps between tests on what is held out."""

    quarantine: float = 0.001
    """Most images that may be quarantined because they cannot be read.

    A share below 1, or a number.
    """

    def check(self) -> None:
        """Look at each option.

        Raises:
            OptionError: One has a value that makes no training.
        """
        RunOptions.check(self)
        self.at_least({"batch_size": 1, "width": 8, "eval_steps": 1, "ema": 0, "quarantine": 0})
        self.above_zero("learning_rate")
        self.insist("ema", self.ema < 1, "less than 1 is needed")
        self.insist("width", self.width % 8 == 0, "a multiple of 8 is needed")


class Noised(Dataset[tuple[torch.Tensor, ...]]):
    """Images, each with noise and a level of it: ``(1, height, width)``, the same, and ``()``.

    Both are drawn where the sample is made, seeded by epoch and index. So a batch that is cut into
    parts has the very numbers of the whole one, which it would not if the loss function drew them.
    """

    def __init__(self, images: Samples) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        image, _ = self._images[index]
        return image, torch.randn(image.shape), torch.randint(LEVELS, ())


def noise_loss(model: torch.nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean square of what is wrong in the noise that the model tells, shape ``()``."""
    images, noise, levels = batch
    return F.mse_loss(model(noised(images, noise, levels), levels), noise)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train, and return what ``result.json`` holds."""
    options, policy = read_options(
        DiffusionOptions, argv, policy_file=Path(__file__).with_name("policy.yaml")
    )
    with ending_clearly(DataError):
        insist_on_installed("torchmetrics")
        sets = _sets(options)
        insist_on_a_batch(options.batch_size, len(sets[0]), "images")
    with ending_clearly(DataError, options.run_dir):
        return _train(options, policy, *sets)


def _sets(options: DiffusionOptions) -> tuple[Samples, Samples]:
    """Return the images to train on and to test with, of mean 0 and variance 1."""
    root = options.data_dir or options.run_dir / "data"
    if options.data_dir is None:
        insist_on_a_batch(options.batch_size, DIGITS_TO_TRAIN, "images")
        write_digits(root)
    sources = [find_source(root, train=train) for train in (True, False)]
    shape = shape_of_all(sources[0], options.quarantine)
    shape_of_all(sources[1], options.quarantine, shape)
    scale, classes = Scale.of(sources[0], shape), max(sources[0].labels) + 1
    training, test = (
        Samples(each, scale, shape=scale.shape, classes=classes, shift=False) for each in sources
    )
    return training, test


def _train(
    options: DiffusionOptions, policy: Policy, images: Samples, held_out: Samples
) -> dict[str, Any]:
    device = find_device(options)
    torch.manual_seed(options.seed)
    on_gpu = device if device.type != "cpu" else None
    loader = DataLoader(
        Noised(images),
        batch_size=options.batch_size,
        shuffle=True,
        drop_last=True,
        seed=options.seed,
        num_workers=options.num_workers,
        quarantine=options.quarantine,
        device=on_gpu,
    )
    alike = {"batch_size": 256, "quarantine": options.quarantine}
    # Once: the same noise at each test
    test = list(DataLoader(Noised(held_out), device=on_gpu, **alike))
    with making_the_model():
        model = UNet(options.width).to(device)
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(options.ema))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    guard = open_guard(
        options, policy, model=model, optimizer=optimizer, loader=loader, state={"ema": averaged}
    )
    training = Training(guard, options)

    def tested() -> float:
        values = [(float(noise_loss(averaged, batch)), len(batch[0])) for batch in test]
        return sum(value * many for value, many in values) / sum(many for _, many in values)

    shape = images[0][0].shape[1:]
    with guard:
        for batch in training.batches():
            result = guard.step(batch, lambda batch: noise_loss(model, batch))
            training.show(loss=float(result.loss))
            if result.skipped:
                continue
            averaged.update_parameters(model)
            if guard.global_step % options.eval_steps == 0:
                with guard.evaluate():
                    found = tested()
                    guard.add_image("drawn", _grid(drawn(averaged, _SHOWN, shape, device)))
                guard.validated(found, keep=1)
    with guard.evaluate():
        figures: dict[str, Any] = {"held_out_loss": tested()}
        made = drawn(averaged, _JUDGED, shape, device).cpu()
    real, labels = (torch.cat(each) for each in zip(*DataLoader(images, **alike), strict=True))
    judge = Judge(real, labels)
    quality, noise = judge.measure(made), judge.measure(torch.randn(made.shape))
    guard.log({"Frechet distance": quality.frechet, "classes drawn": quality.classes})
    figures |= {
        "frechet": quality.frechet,
        "classes": quality.classes,
        "frechet_of_noise": noise.frechet,
    }
    return training.finish(model, figures)


def _grid(images: torch.Tensor) -> torch.Tensor:
    """Return a picture of images of mean 0 and variance 1."""
    return grid_of((images.cpu() / 2).clamp(-1, 1))
