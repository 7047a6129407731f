"""Faulty programs whose mistake is in the data: inputs, labels, batches or their order."""

from __future__ import annotations

import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from evals.not_learning.data import (
    blobs,
    curve,
    digit_images,
    digits,
    discs,
    friedman,
    keyword_texts,
    loader,
    seasons,
    table,
)
from evals.not_learning.parts import Wired, mlp, small_cnn
from evals.not_learning.program import Programs, adam, adamw, faulty, sgd


class CachedDigits(Dataset):
    """Digits behind a cache whose key is always the same."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels
        self.cache: dict[str, Tensor] = {}

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return an image, prepared only once, and its label."""
        key = "image_{index}"
        if key not in self.cache:
            self.cache[key] = (self.images[index] - 0.3) / 0.35
        return self.cache[key], self.labels[index]


class WrongData(Programs):
    """Faulty programs whose mistake is in the data."""

    # The inputs are shuffled without the labels, so the pairs do not belong together.
    @faulty("", shows="H828")
    def labels_left_behind_by_a_shuffle(self) -> None:
        """The loss falls to the entropy of the labels and stays: the inputs say nothing."""
        x, y = digits(self.seed)[:2]
        x = x[torch.randperm(len(x))]
        model = mlp(64, 32, 10)
        optimizer = sgd(model, 0.05, momentum=0.9)
        criterion = nn.CrossEntropyLoss()
        with self.watch(model, optimizer):
            for _ in range(12):
                for inputs, labels in loader(x, y, size=64):
                    optimizer.zero_grad()
                    loss = criterion(model(inputs), labels)
                    loss.backward()
                    optimizer.step()

    # A cache with one key for all samples returns the same image for every label.
    @faulty("", shows="H828")
    def cache_with_a_constant_key(self) -> None:
        """Every input is identical; the loss settles at the entropy of the labels."""
        images, labels = digit_images(self.seed)[:2]
        train_loader = DataLoader(CachedDigits(images, labels), batch_size=64, shuffle=True)
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(128, 10),
        )
        optimizer = adam(model, 2e-3)
        with self.watch(model, optimizer):
            for _ in range(10):
                for batch, target in train_loader:
                    loss = functional.cross_entropy(model(batch), target)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    # Integer division of the bytes by 255 makes every pixel zero.
    @faulty("", shows="H828 H848 H856")
    def integer_division_of_pixels(self) -> None:
        """All inputs are zero, so only the biases learn how frequent the classes are."""
        images, labels = digit_images(self.seed)[:2]
        pixels = (images * 250).to(torch.uint8)
        scaled = (pixels // 255).float()
        model = nn.Sequential(nn.Flatten(), mlp(64, 48, 10))
        optimizer = adam(model, 1e-3)
        with self.watch(model, optimizer):
            for _ in range(12):
                for batch, target in loader(scaled, labels, size=64):
                    loss = functional.cross_entropy(model(batch), target)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    # The inputs are not normalized: columns differ by factors of thousands.
    @faulty("H856", shows="H825 H828 H848")
    def raw_columns_of_different_units(self) -> None:
        """One column of about a thousand saturates the tanh units; the rest does not count."""
        x, y = table("wine", self.seed, raw=True)[:2]
        model = mlp(13, 32, 32, 3, act=nn.Tanh)
        optimizer = sgd(model, 0.01)
        with self.watch(model, optimizer):
            for _ in range(60):
                for inputs, labels in loader(x, y, size=16):
                    loss = functional.cross_entropy(model(inputs), labels)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    # The targets are not scaled: they are around 5000, which the rate never reaches.
    @faulty("", shows="H824 H828 H848")
    def house_prices_without_scaling(self) -> None:
        """The loss starts at tens of millions and hardly falls: the outputs move by 0.001."""
        x, y = friedman(2000)
        price = 5000 + 800 * y
        model = mlp(10, 32, 1)
        optimizer = adam(model, 1e-3)
        with self.watch(model, optimizer):
            for _ in range(6):
                for inputs, target in loader(x, price, size=32):
                    loss = functional.mse_loss(model(inputs).squeeze(1), target)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    # `next(iter(loader))` without shuffling gives the same first batch at every step.
    @faulty("", shows="H833")
    def first_batch_forever(self) -> None:
        """The training loss goes to zero, while the other rows are never seen."""
        x, y, held_x, held_y = digits(self.seed)
        train_loader = loader(x, y, size=32, shuffle=False)
        model = mlp(64, 64, 10)
        optimizer = adam(model, 2e-3)
        with self.watch(model, optimizer):
            for step in range(400):
                inputs, labels = next(iter(train_loader))
                loss = functional.cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if step % 100 == 99:
                    with torch.no_grad():
                        self.score = functional.cross_entropy(model(held_x), held_y).item()

    # The rows are sorted by class and not shuffled: every batch has a single class.
    @faulty("H843", shows="H826 H828")
    def batches_of_one_class(self) -> None:
        """The loss is near zero within a class and jumps whenever the next one begins."""
        x, y = digits(self.seed)[:2]
        order = y.argsort()
        model = mlp(64, 64, 10)
        optimizer = sgd(model, 0.1, momentum=0.9)
        with self.watch(model, optimizer):
            for _ in range(10):
                for inputs, labels in loader(x[order], y[order], size=32, shuffle=False):
                    loss = functional.cross_entropy(model(inputs), labels)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    # The target is among the features, so the model copies it and learns nothing else.
    @faulty("")
    def target_column_left_in_the_table(self) -> None:
        """The loss falls to almost nothing at once, although the labels are noisy."""
        x, y = blobs(self.seed, classes=2)
        y = torch.where(torch.rand(len(y)) < 0.25, 1 - y, y)
        frame = torch.cat([x, y[:, None].float()], dim=1)
        frame = (frame - frame.mean(dim=0)) / frame.std(dim=0)
        model = mlp(21, 32, 2)
        optimizer = adam(model, 3e-3)
        with self.watch(model, optimizer):
            for _ in range(8):
                for inputs, labels in loader(frame, y, size=64):
                    loss = functional.cross_entropy(model(inputs), labels)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    # The series predicts itself: the window to forecast from contains the value asked for.
    @faulty("")
    def forecast_of_a_value_it_sees(self) -> None:
        """The error goes to zero, far below the noise of the series."""
        series = seasons(100, 80)
        model = mlp(12, 32, 1)
        optimizer = adam(model, 2e-3)
        with self.watch(model, optimizer):
            for _ in range(400):
                row = torch.randint(100, (64, 1))
                end = torch.randint(12, 80, (64, 1))
                window = series[row, end + torch.arange(-11, 1)]
                loss = functional.mse_loss(model(window), series[row, end])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # The images are flipped at random, but their masks are not.
    @faulty("")
    def flipped_images_with_unflipped_masks(self) -> None:
        """Half of the masks are in the wrong place; the loss stops at a high level."""
        images, masks = discs(600)
        model = nn.Sequential(
            nn.Conv2d(1, 12, 5, padding=2),
            nn.ReLU(),
            nn.Conv2d(12, 12, 5, padding=2),
            nn.ReLU(),
            nn.Conv2d(12, 1, 1),
        )
        optimizer = adam(model, 3e-3)
        with self.watch(model, optimizer):
            for _ in range(8):
                for batch, mask in loader(images, masks, size=32):
                    flip = torch.rand(len(batch), 1, 1, 1) < 0.5
                    augmented = torch.where(flip, batch.flip(3), batch)
                    loss = functional.binary_cross_entropy_with_logits(model(augmented), mask)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    # A vocabulary of the wrong corpus maps nearly every word to the unknown token.
    @faulty("", shows="H828")
    def words_that_are_all_unknown(self) -> None:
        """Texts of one repeated id; the loss stays at the logarithm of the three classes."""
        model = Wired(
            lambda net, texts: net.out(net.embed(texts).mean(dim=1)),
            embed=nn.Embedding(40, 32),
            out=nn.Linear(32, 3),
        )
        vocabulary = torch.ones(40, dtype=torch.long)
        vocabulary[36:] = torch.arange(2, 6)
        optimizer = adam(model, 5e-3)
        with self.watch(model, optimizer):
            for _ in range(350):
                texts, labels = keyword_texts(48)
                loss = functional.cross_entropy(model(vocabulary[texts]), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    # Missing values are marked with -999 and go into the net as if they were measured.
    @faulty("", shows="H801 H802 H804 H825 H826 H828 H848 H856")
    def missing_values_as_large_numbers(self) -> None:
        """The loss jumps by orders of magnitude; huge inputs drown the others."""
        x, y = curve(self.seed, samples=1500)
        x = torch.where(torch.rand_like(x) < 0.08, -999.0, x)
        model = mlp(8, 32, 1)
        optimizer = sgd(model, 0.05)
        with self.watch(model, optimizer):
            for _ in range(10):
                for inputs, target in loader(x, y, size=50):
                    loss = functional.l1_loss(model(inputs), target)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    # A reshape instead of a transpose mixes the values of different samples.
    @faulty("", shows="H828")
    def reshape_that_mixes_samples(self) -> None:
        """Rows hold pieces of other rows; the loss hardly falls below that of guessing."""
        x, y = blobs(self.seed, samples=2000, features=16, classes=4)
        features_first = x.T.contiguous()
        rows = features_first.reshape(2000, 16)
        model = mlp(16, 32, 4)
        optimizer = adamw(model, 3e-3)
        with self.watch(model, optimizer):
            for _ in range(10):
                for inputs, labels in DataLoader(TensorDataset(rows, y), 64, shuffle=True):
                    loss = functional.cross_entropy(model(inputs), labels)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    # The augmentation adds noise ten times as strong as the image.
    @faulty("", shows="H828")
    def augmentation_that_drowns_the_image(self) -> None:
        """Training stays near the loss of guessing, while clean images would be easy."""
        images, labels = digit_images(self.seed)[:2]
        model = small_cnn()
        optimizer = optim.Adam(model.parameters(), lr=2e-3)
        with self.watch(model, optimizer):
            for _ in range(7):
                for batch, target in loader(images, labels, size=64):
                    noisy = batch + 10 * torch.randn_like(batch)
                    loss = functional.cross_entropy(model(noisy), target)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
