"""A GAN of the DCGAN kind under a guard: two players, two optimizers, alternating steps.

    python -m recipes.gan
    python -m recipes.gan --precision bf16 --regularizer spectral --norm batch --batch-size 32

Does not: define networks (``model``), losses (``players``) or figures (``quality``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - its usual name

from holdfast import DataLoader, Guard, Policy
from holdfast.guard.images import MOST_PIXEL_BYTES
from recipes.classifier.images import (
    DIGITS_TO_TRAIN,
    DataError,
    find_source,
    shape_of_all,
    write_digits,
)
from recipes.gan.data import Images
from recipes.gan.model import Norm
from recipes.gan.players import Players, Regularizer, play, rescale
from recipes.gan.quality import Judge
from recipes.options import RunOptions, insist_on_a_batch, insist_on_installed, read_options
from recipes.training import Training, ending_clearly, find_device, making_the_model, open_guard

POLICY = Path(__file__).parent / "policy.yaml"
_COLUMNS = 10
_FRAME = -0.4  # grey, between images that are black at their edges
_MOST_REAL, _MOST_TEST = 2000, 1000  # images that figures are made from


@dataclass(frozen=True, slots=True, kw_only=True)
class GanOptions(RunOptions):
    """Train a generator and a discriminator on images."""

    run_dir: Path = Path("runs/gan")
    """Directory of the run: checkpoints, records, images, report.html and result.json."""

    max_steps: int = 4000
    """Optimizer steps, counted over all restarts of the run; each batch makes two, one of each
    player."""

    data_dir: Path | None = None
    """Images in grey, of one size.

    Train/<class>/*.png and test/<class>/*.png, or the IDX files of MNIST. None: the
    digits of scikit-learn are written as PNG files to <run-dir>/data.
    """

    batch_size: int = 64
    """Images in a step."""

    base_batch_size: int = 64
    """The batch that --lr is meant for. With another --batch-size rate, decay rates and eps follow
    by the rule that holdfast.advise_learning_rate names."""

    lr: float = 1e-3
    """Learning rate of both players."""

    latent: int = 32
    """Numbers that an image is made from."""

    width: int = 32
    """Channels at full size."""

    norm: Norm = "group"
    """What follows a convolution of the generator. With "batch" a batch is not split, since that
    would change training."""

    regularizer: Regularizer = "r1"
    """What keeps the discriminator smooth.

    A penalty on its gradient at real images, spectral normalisation, or
    nothing.
    """

    r1_weight: float = 1.0
    """Of the penalty."""

    ema_decay: float = 0.99
    """Of the average of the generator's weights that images are drawn with."""

    sample_steps: int = 500
    """Optimizer steps between grids of drawn images."""

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
        self.at_least(
            {"batch_size": 1, "base_batch_size": 1, "latent": 1, "width": 1, "sample_steps": 1}
        )
        self.at_least({"r1_weight": 0, "ema_decay": 0, "quarantine": 0})
        self.above_zero("lr")
        self.insist("ema_decay", self.ema_decay < 1, "less than 1 is needed: an average that moves")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that is trained, and with what."""

    players: Players
    training: DataLoader
    images: Images
    test: Images
    facts: Mapping[str, Any]


def make_players(options: GanOptions, size: int, device: torch.device) -> Players:
    """Return the players of a run as they begin, the same at every start."""
    torch.manual_seed(options.seed)
    return Players(
        size=size,
        device=device,
        latent=options.latent,
        width=options.width,
        norm=options.norm,
        regularizer=options.regularizer,
        r1_weight=options.r1_weight,
        lr=options.lr,
        ema_decay=options.ema_decay,
    )


def make_job(options: GanOptions) -> Job:
    """Return the job of a run, the same at every start.

    Raises:
        DataError: The data cannot be used.
        OptionError: A batch is larger than the data.
        HoldfastError: The loader cannot be made.
        OSError: The run directory cannot be written.
    """
    root = options.data_dir or options.run_dir / "data"
    if options.data_dir is None:
        insist_on_a_batch(options.batch_size, DIGITS_TO_TRAIN, "images")
        write_digits(root)
    sources = {train: find_source(root, train=train) for train in (True, False)}
    shape = shape_of_all(sources[True], options.quarantine)
    shape_of_all(sources[False], options.quarantine, shape)
    images, test = (Images(sources[train], options.latent, shape) for train in (True, False))
    test.some(_MOST_TEST)  # what is needed at the end is looked at before the training
    insist_on_a_batch(options.batch_size, len(images), "images")
    device = find_device(options)
    with making_the_model():
        players = make_players(options, images.size, device)
    _, advice = (
        rescale(each, options.base_batch_size, options.batch_size)
        for each in players.optimizers.values()
    )
    return Job(
        players=players,
        training=DataLoader(
            images,
            batch_size=options.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=options.num_workers,
            seed=options.seed,
            quarantine=options.quarantine,
        ),
        images=images,
        test=test,
        facts={
            "learning_rate": players.optimizers["generator"].param_groups[0]["lr"],
            "learning_rate_rule": advice.rule,
            "learning_rate_source": advice.source,
        },
    )


def grid_of(images: torch.Tensor) -> torch.Tensor:
    """Return images, shape ``(n, 1, s, s)`` from -1 to 1, side by side.

    Shape ``(height, width)`` from 0 to 1.

    Rows are full, and there are as many images as the report takes.
    """
    fitting = max(1, MOST_PIXEL_BYTES // (images.shape[-1] + 1) ** 2)
    columns = min(_COLUMNS, len(images), fitting)
    rows = min(len(images), fitting) // columns
    framed = F.pad(images[: rows * columns, 0], (0, 1, 0, 1), value=_FRAME)
    return torch.cat([torch.cat(list(row), dim=1) for row in framed.split(columns)]) / 2 + 0.5


def train(job: Job, options: GanOptions, policy: Policy) -> dict[str, Any]:
    """Train to the end, and return what result.json holds."""
    players = job.players
    guard = open_guard(
        options,
        policy,
        model=players.models,
        optimizer=players.optimizers,
        loader=job.training,
        state={"average": players.average},
    )
    training = Training(guard, options)
    with guard:
        for batch in training.batches():
            before = guard.global_step
            told, fooled = play(guard, players, batch)
            if guard.global_step // options.sample_steps > before // options.sample_steps:
                guard.add_image("drawn", grid_of(players.draw(5 * _COLUMNS)))
                training.show(discriminator=float(told.loss), generator=float(fooled.loss))
    return training.finish(players.all(), figures_of(job, options, guard))


def figures_of(job: Job, options: GanOptions, guard: Guard) -> dict[str, Any]:
    """Return what came of a run, and keep the last images beside real ones."""
    real, labels = job.images.some(_MOST_REAL)
    test, _ = job.test.some(_MOST_TEST)
    judge = Judge(real, labels)
    drawn = judge.measure(job.players.draw(len(test)))
    guard.log({"Frechet distance": drawn.frechet, "classes drawn": drawn.classes})
    untrained = make_players(options, job.images.size, torch.device("cpu"))
    guard.add_image("drawn", grid_of(job.players.draw(5 * _COLUMNS)))
    guard.add_image("real", grid_of(test[:: max(1, len(test) // (5 * _COLUMNS))][: 5 * _COLUMNS]))
    return {
        "frechet": drawn.frechet,
        "frechet_untrained": judge.measure(untrained.draw(len(test))).frechet,
        "frechet_real": judge.measure(test).frechet,
        "classes_drawn": drawn.classes,
        "classes": int(labels.max()) + 1,
        **job.facts,
    }


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train as the command line says, and return what result.json holds."""
    options, policy = read_options(GanOptions, argv, policy_file=POLICY)
    with ending_clearly(DataError):
        insist_on_installed("torchmetrics")
        job = make_job(options)
    with ending_clearly(DataError, options.run_dir):
        return train(job, options, policy)
