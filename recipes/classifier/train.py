"""A classifier of digits under a guard.

Warm-up, validation that drives the learning rate, and faults on request.

    python -m recipes.classifier
    python -m recipes.classifier --fault lr-too-high --run-dir runs/stuck
    holdfast explain runs/stuck

Does not: read images (see ``images``) or make them samples (see ``samples``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.optim.lr_scheduler import LinearLR, ReduceLROnPlateau

from holdfast import DataLoader, Policy
from recipes.classifier.faults import FAULTS, Altered, FaultName, Hurting
from recipes.classifier.images import (
    DIGITS_TO_TRAIN,
    DataError,
    check_classes,
    find_source,
    shape_of_all,
    write_digits,
)
from recipes.classifier.model import Classifier
from recipes.classifier.samples import Samples, Scale
from recipes.options import Given, RunOptions, insist_on_a_batch, read_options
from recipes.training import (
    Training,
    ending_clearly,
    find_device,
    found,
    fused_on,
    making_the_model,
    open_guard,
)

POLICY = Path(__file__).parent / "policy.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierOptions(RunOptions):
    """Train a classifier of digits, or watch one of its many ways to get stuck being named."""

    run_dir: Path = Path("runs/classifier")
    """Directory of the run: checkpoints, records, report.html and result.json."""

    data_dir: Path | None = None
    """Images of one size: train/<class>/*.png and test/<class>/*.png, or the IDX files of MNIST.

    None: the digits of
    scikit-learn are written as PNG files to <run-dir>/data.
    """

    fault: FaultName | None = None
    """What shall be wrong with this training. The table in the README says how it is named."""

    batch_size: int = 32
    """Images in a step."""

    lr: float = 0.05
    """Learning rate of SGD after the warm-up."""

    momentum: float = 0.9
    """Of SGD."""

    weight_decay: float = 1e-4
    """Of SGD."""

    warmup_steps: int = 50
    """Optimizer steps over which the learning rate rises from a tenth; skipped steps do not count.
    """

    patience: int = 3
    """Validations without a better loss after which the learning rate is multiplied by 0.3."""

    validate_steps: int = 100
    """Optimizer steps between validations."""

    width: int = 24
    """Channels of the convolutions."""

    depth: int = 2
    """Convolutions after the first."""

    activation: Literal["relu", "sigmoid"] = "relu"
    """What follows each convolution."""

    init_scale: float = 1.0
    """Standard deviation of the first weights, relative to He's initialisation."""

    scale_inputs: bool = True
    """Whether images are brought to mean 0 and variance 1; else they reach 255."""

    shuffle: bool = True
    """Whether each epoch has an order of its own."""

    quarantine: float = 0.001
    """Most images that may be quarantined because they cannot be read.

    A share below 1, or a number.
    """

    def settle(self, given: Given) -> tuple[Self, Policy]:
        """Return options and policy with what the fault sets.

        What the command line or a variable says stays.
        """
        options, policy = RunOptions.settle(self, given)
        if self.fault is None:
            return options, policy
        fault = FAULTS[self.fault]
        wrong = {name: value for name, value in fault.options.items() if name not in given.options}
        fields = {
            name: value for name, value in fault.policy.items() if name not in given.stronger()
        }
        return dataclasses.replace(options, **wrong), policy.replace(**fields)

    def check(self) -> None:
        """Look at each option.

        Raises:
            OptionError: One has a value that makes no training.
        """
        RunOptions.check(self)
        self.at_least({"batch_size": 1, "validate_steps": 1, "width": 1, "quarantine": 0})
        self.at_least(
            {
                "depth": 0,
                "patience": 0,
                "warmup_steps": 0,
                "weight_decay": 0,
                "momentum": 0,
                "init_scale": 0,
            }
        )
        self.above_zero("lr")
        self.insist("momentum", self.momentum < 1, "less than 1 is needed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that is trained, and with what."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedulers: dict[str, Any]
    training: DataLoader
    test: DataLoader
    device: torch.device

    def loss(self, batch: Any) -> torch.Tensor:
        """Return the mean cross-entropy of a batch, shape ``()``."""
        images, labels = (part.to(self.device) for part in batch)
        return F.cross_entropy(self.model(images), labels)

    def test_loss(self) -> tuple[float, float]:
        """Return mean loss and accuracy over the test images; the model must be in evaluation."""
        total = right = count = 0.0
        for batch in self.test:
            images, labels = (part.to(self.device) for part in batch)
            scores = self.model(images)
            total += float(F.cross_entropy(scores, labels, reduction="sum"))
            right += float((scores.argmax(dim=1) == labels).sum())
            count += len(labels)
        return total / count, right / count


def make_job(options: ClassifierOptions) -> Job:
    """Return the job of a run, the same at every start.

    Raises:
        DataError: The data cannot be used.
        OptionError: A batch is larger than the data.
        HoldfastError: The loader cannot be made.
        OSError: The run directory cannot be written.
    """
    torch.manual_seed(options.seed)
    device = find_device(options)
    root = options.data_dir or options.run_dir / "data"
    if options.data_dir is None:
        insist_on_a_batch(options.batch_size, DIGITS_TO_TRAIN, "images")
        write_digits(root)
    sources = {train: find_source(root, train=train) for train in (True, False)}
    classes = max(sources[True].labels) + 1
    check_classes(sources[False], classes)
    shape = shape_of_all(sources[True], options.quarantine)
    shape_of_all(sources[False], options.quarantine, shape)
    insist_on_a_batch(options.batch_size, len(sources[True].labels), "images")
    measured = Scale.of(sources[True], shape)
    scale = measured if options.scale_inputs else None
    altered = Altered(sources[True], options.fault, options.seed)
    samples = Samples(altered, scale, shape=measured.shape, classes=classes, shift=True)
    loading = {} if options.fault is None else FAULTS[options.fault].loading
    with making_the_model():
        model = Classifier(
            classes,
            width=options.width,
            depth=options.depth,
            activation=options.activation,
            init_scale=options.init_scale,
            detached=options.fault == "frozen-layer",
        ).to(device)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=options.lr,
        momentum=options.momentum,
        weight_decay=options.weight_decay,
        fused=fused_on(device),
    )
    first = 0.1 if options.warmup_steps else 1.0  # else it would stay at a tenth
    warm_up = LinearLR(optimizer, start_factor=first, total_iters=options.warmup_steps)
    return Job(
        model=model,
        optimizer=optimizer,
        schedulers={
            "warm-up": warm_up,  # by steps that were really made
            # By guard.validated
            "plateau": ReduceLROnPlateau(optimizer, factor=0.3, patience=options.patience),
        },
        training=DataLoader(
            (
                Hurting(samples, options.fault, options.run_dir / "faults")
                if options.fault
                else samples
            ),
            batch_size=options.batch_size,
            shuffle=options.shuffle,
            drop_last=True,
            num_workers=options.num_workers,
            seed=options.seed,
            quarantine=options.quarantine,
            **loading,
        ),
        test=DataLoader(
            Samples(sources[False], scale, shape=measured.shape, classes=classes, shift=False),
            batch_size=256,
            quarantine=options.quarantine,
        ),
        device=device,
    )


def train(job: Job, options: ClassifierOptions, policy: Policy) -> dict[str, Any]:
    """Train to the end, and return what result.json holds."""
    guard = open_guard(
        options,
        policy,
        model=job.model,
        optimizer=job.optimizer,
        scheduler=job.schedulers,
        loader=job.training,
    )
    training = Training(guard, options)
    with guard:
        for batch in training.batches():
            result = guard.step(batch, job.loss)
            if options.fault == "scheduler-every-batch":
                guard.validated(result.loss)
            elif guard.global_step % options.validate_steps == 0 and not result.skipped:
                with guard.evaluate():
                    loss, accuracy = job.test_loss()
                guard.validated(loss)
                guard.log(loss=loss, accuracy=accuracy, split="test")
                training.show(loss=loss, accuracy=accuracy)
    with guard.evaluate():
        loss, accuracy = job.test_loss()
    figures = {
        "test_loss": loss,
        "test_accuracy": accuracy,
        "learning_rate": job.optimizer.param_groups[0]["lr"],
    }
    return training.finish(job.model, {**figures, "found": found(guard)})


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train as the command line says, and return what result.json holds."""
    options, policy = read_options(ClassifierOptions, argv, policy_file=POLICY)
    with ending_clearly(DataError):
        job = make_job(options)
    with ending_clearly(DataError, options.run_dir):
        return train(job, options, policy)
