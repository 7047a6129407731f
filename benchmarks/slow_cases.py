"""Small training programs that are slow for one planted reason, and programs that are not slow.

``python -m benchmarks.slow_cases NAME FOLDER`` runs one of them; `slow_programs` runs all of them
under ``holdfast run``. Each trains for about `SECONDS`. How much of the planted work a program does
is measured against its own training step before it trains, so that the planted cause takes
three quarters of the time on any machine.
"""

from __future__ import annotations

import copy
import io
import os
import random
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

SECONDS = 12.0
MIN_STEPS = 25
BATCH = 16
CLASSES = 10
# The planted work takes this many times as long as the training step: three quarters of the time.
PLANTED = 3.0
EPOCH = 100_000


# --- what the programs train ----------------------------------------------------------------------


def small_network() -> nn.Module:
    """Return a convolutional network for images of 3 x 32 x 32."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 24, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(24 * 64, CLASSES),
    )


class Training:
    """A model with its optimizer, and a clock that says when to stop."""

    def __init__(self, model: nn.Module | None = None, seconds: float = SECONDS) -> None:
        self.model = small_network() if model is None else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.step_seconds = self._measure_step()
        self.steps = 0
        self._end = time.monotonic() + seconds

    def _measure_step(self) -> float:
        """Return how long a forward and backward pass takes, without changing the model."""
        images = torch.randn(BATCH, 3, 32, 32)
        labels = torch.randint(CLASSES, (BATCH,))
        if not isinstance(self.model, nn.Sequential):
            return 0.0
        return seconds_of(
            lambda: functional.cross_entropy(self.model(images), labels).backward(), 5
        )

    @property
    def goes_on(self) -> bool:
        """Return whether the time is not over yet, or few steps have been made."""
        return time.monotonic() < self._end or self.steps < MIN_STEPS

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Train on one batch and return its loss."""
        self.steps += 1
        loss = functional.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss

    def run(self, loader: Any) -> None:
        """Train on the batches of a loader, epoch after epoch, until the time is over."""
        while self.goes_on:
            for images, labels in loader:
                self.step(images, labels)
                if not self.goes_on:
                    return


def seconds_of(work: Callable[[], Any], seconds: float = 0.3) -> float:
    """Return the mean time of some work, after one call that does not count.

    It is the mean, not the least, because other jobs on the machine slow the training down too.
    """
    work()
    began = time.perf_counter()
    count = 0
    while count < 3 or time.perf_counter() - began < seconds:
        work()
        count += 1
    return (time.perf_counter() - began) / count


def times_to_plant(work: Callable[[], Any], step_seconds: float) -> int:
    """Return how often to do some work at each step so that it takes three quarters of the time."""
    return max(1, round(PLANTED * step_seconds / seconds_of(work)))


def random_batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches that lie ready in memory."""
    images = torch.randn(BATCH, 3, 32, 32)
    labels = torch.randint(CLASSES, (BATCH,))
    while True:
        yield images, labels


# --- data sets ------------------------------------------------------------------------------------


def jpeg(size: int) -> bytes:
    """Return a JPEG file of noise with a smooth part, which decodes as slowly as a photograph."""
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 255, (size // 4, size // 4, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).resize((size, size), Image.Resampling.BILINEAR)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90)
    return file.getvalue()


class Photographs(Dataset[tuple[torch.Tensor, int]]):
    """JPEG files that are decoded, cropped and scaled to 32 x 32.

    Args:
        photos_per_sample: How many files to decode for one sample, as in a video or a stack of views.
        size: Side of the images in pixels.
        length: Number of samples.
    """

    def __init__(self, photos_per_sample: int, size: int = 256, length: int = EPOCH) -> None:
        self.files = [jpeg(size)] * photos_per_sample
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        views = [self._view(file, index) for file in self.files]
        return torch.stack(views).mean(0), index % CLASSES

    @staticmethod
    def _view(file: bytes, index: int) -> torch.Tensor:
        image = Image.open(io.BytesIO(file)).convert("RGB")
        left = index % 16
        image = image.crop((left, left, left + 224, left + 224)).resize((32, 32))
        return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 255


def photographs_to_plant(training: Training, share: float = 1.0) -> int:
    """Return how many photographs per sample take twice as long as a step, times `share`."""
    photographs = Photographs(1)
    count = times_to_plant(
        lambda: [photographs[index] for index in range(BATCH)], training.step_seconds
    )
    return max(1, round(share * count))


class ElasticImages(Dataset[tuple[torch.Tensor, int]]):
    """Images that are distorted by loops over their pixels, in Python.

    Args:
        rows: How many rows of each image are distorted.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        pixels = [[float((x * y + index) % 255) for x in range(32)] for y in range(32)]
        for row in range(self.rows):
            line = pixels[row % 32]
            pixels[row % 32] = [
                0.5 * line[x] + 0.25 * line[max(x - 1, 0)] + 0.25 * line[min(x + 1, 31)]
                for x in range(32)
            ]
        return torch.tensor(pixels).expand(3, 32, 32) / 255, index % CLASSES


class Texts(Dataset[tuple[torch.Tensor, int]]):
    """Texts that are split into words and hashed to images of 3 x 32 x 32, in Python."""

    def __init__(self, words: int) -> None:
        source = random.Random(0)
        letters = "abcdefghijklmnopqrstuvwxyz"
        self.text = " ".join(
            "".join(source.choice(letters) for _ in range(source.randrange(3, 9)))
            for _ in range(words)
        )

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        counts = [0.0] * 3072
        for word in self.text.split():
            for end in range(2, len(word) + 1):
                counts[zlib.crc32(word[:end].encode()) % 3072] += 1.0
        return torch.tensor(counts).view(3, 32, 32), index % CLASSES


class Compressed(IterableDataset[tuple[torch.Tensor, int]]):
    """A stream of compressed records, as in a tar of gzipped arrays."""

    def __init__(self, records_per_sample: int) -> None:
        pixels = np.random.default_rng(0).integers(0, 32, (3, 96, 96), dtype=np.uint8)
        self.record = zlib.compress(pixels.tobytes(), 6)
        self.records_per_sample = records_per_sample

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        for index in range(EPOCH):
            for _ in range(self.records_per_sample):
                data = zlib.decompress(self.record)
            pixels = np.frombuffer(data, np.uint8).reshape(3, 96, 96)[:, ::3, ::3]
            yield torch.from_numpy(pixels.copy()).float() / 32, index % CLASSES


class NetworkDisk(Dataset[tuple[torch.Tensor, int]]):
    """Files on a network disk that answers after some time, however little it is asked for.

    Args:
        latency_seconds: How long reading one file takes.
    """

    def __init__(self, latency_seconds: float) -> None:
        self.latency_seconds = latency_seconds

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.latency_seconds)
        return torch.full((3, 32, 32), float(index % 7)), index % CLASSES


class Ready(Dataset[tuple[torch.Tensor, int]]):
    """Samples that cost next to nothing."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 32, 32), float(index % 7)), index % CLASSES


# --- slow: data -----------------------------------------------------------------------------------


def decodes_in_the_training_process(_: Path) -> None:
    training = Training()
    training.run(DataLoader(Photographs(photographs_to_plant(training)), BATCH))


def decodes_in_one_worker(_: Path) -> None:
    training = Training()
    data = Photographs(photographs_to_plant(training, 1.5))
    training.run(DataLoader(data, BATCH, num_workers=1))


def decodes_on_all_processors(_: Path) -> None:
    training = Training()
    workers = len(os.sched_getaffinity(0))
    data = Photographs(photographs_to_plant(training, workers))
    training.run(DataLoader(data, BATCH, num_workers=workers))


def distorts_images_in_python(_: Path) -> None:
    training = Training()
    one_row = ElasticImages(64)
    count = times_to_plant(
        lambda: [one_row[index] for index in range(BATCH)], training.step_seconds
    )
    training.run(DataLoader(ElasticImages(96 * count), BATCH, num_workers=1))


def tokenizes_in_the_training_process(_: Path) -> None:
    training = Training()
    few = Texts(50)
    count = times_to_plant(lambda: [few[index] for index in range(BATCH)], training.step_seconds)
    training.run(DataLoader(Texts(50 * count), BATCH))


def decompresses_in_the_training_process(_: Path) -> None:
    training = Training()
    one = iter(Compressed(1))
    count = times_to_plant(lambda: [next(one) for _ in range(BATCH)], training.step_seconds)
    training.run(DataLoader(Compressed(count), BATCH))


def reads_from_a_network_disk(_: Path) -> None:
    training = Training()
    latency_seconds = 2 * (1 + PLANTED) * training.step_seconds / BATCH
    training.run(DataLoader(NetworkDisk(latency_seconds), BATCH, num_workers=2))


def reads_from_a_network_disk_itself(_: Path) -> None:
    training = Training()
    latency_seconds = PLANTED * training.step_seconds / BATCH
    training.run(DataLoader(NetworkDisk(latency_seconds), BATCH))


def starts_workers_in_every_epoch(_: Path) -> None:
    training = Training()
    data = Ready(4 * BATCH)
    training.run(DataLoader(data, BATCH, num_workers=4))


# --- slow: the loop -------------------------------------------------------------------------------


def edit_distance(first: list[int], second: list[int]) -> int:
    """Return the edit distance of two sequences, as metrics for speech and text need it."""
    row = list(range(len(second) + 1))
    for index, left in enumerate(first, start=1):
        diagonal = row[0]
        row[0] = index
        for place, right in enumerate(second, start=1):
            substituted = diagonal + (left != right)
            diagonal = row[place]
            row[place] = min(substituted, row[place] + 1, row[place - 1] + 1)
    return row[-1]


def computes_a_metric_in_python(_: Path) -> None:
    training = Training()
    source = random.Random(0)
    reference = [source.randrange(30) for _ in range(40)]
    guess = [source.randrange(30) for _ in range(40)]
    count = times_to_plant(lambda: edit_distance(reference, guess), training.step_seconds)
    for images, labels in random_batches():
        training.step(images, labels)
        for _ in range(count):
            edit_distance(reference, guess)
        if not training.goes_on:
            return


def prepares_batches_in_the_loop(_: Path) -> None:
    training = Training()
    texts = Texts(40)
    count = times_to_plant(lambda: texts[0], training.step_seconds)
    samples = max(BATCH, count)
    for _, labels in random_batches():
        images = torch.stack([texts[index][0] for index in range(samples)])[:BATCH]
        training.step(images, labels)
        if not training.goes_on:
            return


def reads_every_value_with_item(_: Path) -> None:
    training = Training()
    values = torch.rand(256)

    def log_values() -> dict[str, float]:
        return {f"value/{index:04d}": round(values[index].item(), 4) for index in range(256)}

    count = times_to_plant(log_values, training.step_seconds)
    for images, labels in random_batches():
        loss = training.step(images, labels)
        loss.item()
        for _ in range(count):
            log_values()
        if not training.goes_on:
            return


def fills_a_replay_buffer(_: Path) -> None:
    training = Training()
    buffer = [[random.random() for _ in range(3072)] for _ in range(256)]

    def sample_batch() -> torch.Tensor:
        rows = [[0.99 * value for value in row] for row in random.sample(buffer, BATCH)]
        return torch.tensor(rows).view(BATCH, 3, 32, 32)

    count = times_to_plant(sample_batch, training.step_seconds)
    for _, labels in random_batches():
        for _ in range(count):
            images = sample_batch()
        training.step(images, labels)
        if not training.goes_on:
            return


# --- slow: one rank -------------------------------------------------------------------------------


class Ranks:
    """Two ranks that train the same network with gloo."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self.network = small_network()
        seconds = torch.tensor([Training(self.network).step_seconds])
        # All ranks plant the same amount, or they would differ in what they do.
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        self.step_seconds = float(seconds)
        self.model = nn.parallel.DistributedDataParallel(self.network)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.steps = max(MIN_STEPS, int(SECONDS / ((1 + PLANTED) * self.step_seconds)))

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Train on one batch."""
        loss = functional.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def close(self) -> None:
        """End the group once all ranks have finished."""
        dist.barrier()
        dist.destroy_process_group()


def one_rank_decodes(_: Path) -> None:
    ranks = Ranks()
    photographs = Photographs(1)
    count = times_to_plant(lambda: [photographs[i] for i in range(BATCH)], ranks.step_seconds)
    data: Dataset[Any] = Photographs(count) if ranks.rank == 1 else Ready(EPOCH)
    loader = iter(DataLoader(data, BATCH))
    for _ in range(ranks.steps):
        ranks.step(*next(loader))
    ranks.close()


def one_rank_logs(_: Path) -> None:
    ranks = Ranks()
    reference = list(range(40))
    count = times_to_plant(lambda: edit_distance(reference, reference), ranks.step_seconds)
    batches = random_batches()
    for _ in range(ranks.steps):
        ranks.step(*next(batches))
        if ranks.rank == 0:
            for _ in range(count):
                edit_distance(reference, reference)
    ranks.close()


def one_rank_has_large_batches(_: Path) -> None:
    ranks = Ranks()
    factor = 8 if ranks.rank == 1 else 1
    images = torch.randn(factor * BATCH, 3, 32, 32)
    labels = torch.randint(CLASSES, (factor * BATCH,))
    for _ in range(max(MIN_STEPS, ranks.steps // 3)):
        ranks.step(images, labels)
    ranks.close()


# --- slow: saving and evaluation ------------------------------------------------------------------


def large_network() -> nn.Module:
    """Return the small network with an embedding of 64 MiB that is saved with it."""
    network = small_network()
    network.register_buffer("embedding", torch.randn(16 << 20))
    return network


def interval(planted_seconds: float, step_seconds: float, share: float) -> int:
    """Return after how many steps to do something so that it takes a share of the time."""
    return max(1, round(planted_seconds * (1 - share) / share / step_seconds))


def saves_every_few_steps(folder: Path) -> None:
    training = Training(large_network())
    path = folder / "model.pt"
    seconds = seconds_of(lambda: torch.save(training.model.state_dict(), path))
    every = interval(seconds, training.step_seconds, 0.7)
    for step, (images, labels) in enumerate(random_batches()):
        training.step(images, labels)
        if step % every == 0:
            torch.save(training.model.state_dict(), path)
        if not training.goes_on:
            return


def saves_the_best_with_everything(folder: Path) -> None:
    """Save weights, optimizer and a copy for every epoch, and epochs are short."""
    training = Training(large_network())

    def save(epoch: int) -> None:
        state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
        torch.save(state, folder / f"epoch-{epoch % 2}.pt")
        torch.save(state, folder / "last.pt")

    every = interval(seconds_of(lambda: save(0)), training.step_seconds, 0.7)
    data = TensorDataset(torch.randn(every * BATCH, 3, 32, 32), torch.zeros(every * BATCH).long())
    epoch = 0
    while training.goes_on:
        for images, labels in DataLoader(data, BATCH, shuffle=True):
            training.step(images, labels)
        save(epoch)
        epoch += 1


def evaluate(model: nn.Module, batches: Any) -> float:
    """Return the accuracy of a model, the way most scripts do it."""
    right = 0
    model.eval()
    with torch.no_grad():
        for images, labels in batches:
            right += int((model(images).argmax(1) == labels).sum())
    model.train()
    return right


def evaluates_every_few_steps(_: Path) -> None:
    training = Training()
    held_out = TensorDataset(torch.randn(256, 3, 32, 32), torch.zeros(256).long())
    loader = DataLoader(held_out, 64)
    every = interval(
        seconds_of(lambda: evaluate(training.model, loader)), training.step_seconds, 0.7
    )
    for step, (images, labels) in enumerate(random_batches()):
        training.step(images, labels)
        if step % every == 0:
            evaluate(training.model, loader)
        if not training.goes_on:
            return


def evaluates_on_decoded_images(_: Path) -> None:
    """Evaluate after short epochs on images that are decoded, without ``torch.no_grad``."""
    training = Training()
    held_out = DataLoader(Photographs(1, length=64), BATCH)

    def validate() -> float:
        training.model.eval()
        total = 0.0
        for images, labels in held_out:
            with torch.no_grad():
                total += functional.cross_entropy(training.model(images), labels).item()
        training.model.train()
        return total

    every = interval(seconds_of(validate), training.step_seconds, 0.7)
    data = TensorDataset(torch.randn(every * BATCH, 3, 32, 32), torch.zeros(every * BATCH).long())
    while training.goes_on:
        for images, labels in DataLoader(data, BATCH):
            training.step(images, labels)
        validate()


# --- not slow -------------------------------------------------------------------------------------


def trains_on_tensors(_: Path) -> None:
    data = TensorDataset(torch.randn(2000, 3, 32, 32), torch.randint(CLASSES, (2000,)))
    Training().run(DataLoader(data, BATCH, shuffle=True))


def loads_in_a_worker_that_keeps_up(_: Path) -> None:
    Training(nn.Sequential(*small_network(), nn.ReLU(), nn.Linear(CLASSES, CLASSES))).run(
        DataLoader(Photographs(1, size=64), BATCH, num_workers=1, persistent_workers=True)
    )


class FrozenBackbone(nn.Module):
    """A frozen feature extractor with a small head: much forward, hardly any backward."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(*list(small_network())[:-1]).requires_grad_(False)
        self.head = nn.Linear(24 * 64, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of images."""
        with torch.no_grad():
            features = self.backbone(images)
        output: torch.Tensor = self.head(features)
        return output


def fine_tunes_a_head(_: Path) -> None:
    training = Training(FrozenBackbone())
    for images, labels in random_batches():
        training.step(images, labels)
        if not training.goes_on:
            return


def distils_a_teacher(_: Path) -> None:
    training = Training()
    teacher = copy.deepcopy(training.model)
    for images, _labels in random_batches():
        teacher.eval()
        with torch.no_grad():
            targets = teacher(images).softmax(1)
        training.step(images, targets)
        if not training.goes_on:
            return


def evaluates_now_and_then(_: Path) -> None:
    training = Training()
    loader = DataLoader(TensorDataset(torch.randn(64, 3, 32, 32), torch.zeros(64).long()), 32)
    every = interval(
        seconds_of(lambda: evaluate(training.model, loader)), training.step_seconds, 0.07
    )
    for step, (images, labels) in enumerate(random_batches(), start=1):
        training.step(images, labels)
        if step % every == 0:
            evaluate(training.model, loader)
        if not training.goes_on:
            return


def saves_now_and_then(folder: Path) -> None:
    training = Training()
    path = folder / "model.pt"
    seconds = seconds_of(lambda: torch.save(training.model.state_dict(), path))
    every = interval(seconds, training.step_seconds, 0.05)
    for step, (images, labels) in enumerate(random_batches(), start=1):
        training.step(images, labels)
        if step % every == 0:
            torch.save(training.model.state_dict(), path)
        if not training.goes_on:
            return


def trains_on_two_ranks(_: Path) -> None:
    ranks = Ranks()
    batches = random_batches()
    for _ in range(2 * ranks.steps):
        ranks.step(*next(batches))
    ranks.close()


class Sequences(nn.Module):
    """An LSTM over sequences of 64 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(64, 192, num_layers=2, batch_first=True)
        self.head = nn.Linear(192, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits of sequences."""
        output: torch.Tensor = self.head(self.rnn(inputs)[0][:, -1])
        return output


def trains_an_lstm(_: Path) -> None:
    training = Training(Sequences())
    inputs = torch.randn(32, 64, 64)
    labels = torch.randint(CLASSES, (32,))
    while training.goes_on:
        training.step(inputs, labels)


def trains_a_gan(_: Path) -> None:
    generator = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 3072), nn.Tanh())
    discriminator = nn.Sequential(small_network(), nn.Linear(CLASSES, 1))
    optimizers = [
        torch.optim.Adam(model.parameters(), lr=2e-4) for model in (generator, discriminator)
    ]
    end = time.monotonic() + SECONDS
    for images, _labels in random_batches():
        fakes = generator(torch.randn(BATCH, 64)).view(BATCH, 3, 32, 32)
        optimizers[1].zero_grad()
        real_loss = functional.softplus(-discriminator(images)).mean()
        (real_loss + functional.softplus(discriminator(fakes.detach())).mean()).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        functional.softplus(-discriminator(fakes)).mean().backward()
        optimizers[0].step()
        if time.monotonic() > end:
            return


def accumulates_gradients_and_averages(_: Path) -> None:
    training = Training()
    average = copy.deepcopy(training.model)
    for step, (images, labels) in enumerate(random_batches(), start=1):
        (functional.cross_entropy(training.model(images), labels) / 4).backward()
        if step % 4:
            continue
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.steps += 1
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), training.model.parameters(), strict=True):
                mean.lerp_(weight, 0.01)
        if not training.goes_on:
            return


# The cause that each slow program must be told first: its rule, and its cause in words.
SLOW: dict[Callable[[Path], None], tuple[str, str]] = {
    decodes_in_the_training_process: ("H1627", "too few workers"),
    decodes_in_one_worker: ("H1627", "too few workers"),
    decodes_on_all_processors: ("H1627", "decoding"),
    distorts_images_in_python: ("H1627", "too few workers"),
    tokenizes_in_the_training_process: ("H1627", "too few workers"),
    decompresses_in_the_training_process: ("H1627", "too few workers"),
    reads_from_a_network_disk: ("H1627", "disk or network"),
    reads_from_a_network_disk_itself: ("H1627", "disk or network"),
    starts_workers_in_every_epoch: ("H1627", "workers restart"),
    computes_a_metric_in_python: ("H1629", "host-bound"),
    prepares_batches_in_the_loop: ("H1629", "host-bound"),
    reads_every_value_with_item: ("H1629", "host-bound"),
    fills_a_replay_buffer: ("H1629", "host-bound"),
    one_rank_decodes: ("H1630", "slow rank"),
    one_rank_logs: ("H1630", "slow rank"),
    one_rank_has_large_batches: ("H1630", "slow rank"),
    saves_every_few_steps: ("H1631", "saving"),
    saves_the_best_with_everything: ("H1631", "saving"),
    evaluates_every_few_steps: ("H1632", "evaluation"),
    evaluates_on_decoded_images: ("H1632", "evaluation"),
}
NOT_SLOW: tuple[Callable[[Path], None], ...] = (
    trains_on_tensors,
    loads_in_a_worker_that_keeps_up,
    fine_tunes_a_head,
    distils_a_teacher,
    evaluates_now_and_then,
    saves_now_and_then,
    trains_on_two_ranks,
    trains_an_lstm,
    trains_a_gan,
    accumulates_gradients_and_averages,
)
ON_TWO_RANKS = (
    one_rank_decodes,
    one_rank_logs,
    one_rank_has_large_batches,
    trains_on_two_ranks,
)


def main() -> None:
    """Run the program whose name is the first argument, with a folder for its files."""
    programs = {program.__name__: program for program in (*SLOW, *NOT_SLOW)}
    torch.manual_seed(0)
    torch.set_num_threads(1)
    programs[sys.argv[1]](Path(sys.argv[2]))


if __name__ == "__main__":
    main()
