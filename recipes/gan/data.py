"""Real images and the noise that goes with each: one sample is an image and two draws of noise.

The noise belongs to the sample, and not to the loss function, so that a batch that is split into
micro-batches meets the same noise, and so does a run that goes on in another process.

Does not: read files (``recipes.classifier.images`` does, for both recipes).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from recipes.classifier.images import DataError, Source, shape_of_all
from recipes.classifier.samples import UNREADABLE
from recipes.gan.model import SMALLEST


class Images(Dataset[Any]):
    """Images of shape ``(1, size, size)``, float32 from -1 (black) to 1, each with two draws of
    noise.

    Args:
        source: Where they are read from.
        latent: Numbers in a draw of noise.
        shape: Height and width that every image must have; None: that of most of the images.

    Raises:
        DataError: No image can be read.
    """

    def __init__(self, source: Source, latent: int, shape: tuple[int, ...] | None = None) -> None:
        self.source = source
        self._latent = latent
        self.shape = shape or shape_of_all(source, len(source.labels))
        self.size = SMALLEST * 2 ** max(1, (max(self.shape) - 1).bit_length() - 1)

    def __len__(self) -> int:
        return len(self.source.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # Noise from torch's generator, which holdfast.DataLoader seeds by (seed, epoch, index).
        return self.image(index), torch.randn(self._latent), torch.randn(self._latent)

    def image(self, index: int) -> torch.Tensor:
        """Return one image, padded with black to a power of two.

        Raises:
            ValueError: It cannot be read, or has another shape than the others.
        """
        stored = self.source.decode(self.source.read(index))
        if stored.shape != self.shape:
            raise ValueError(
                f"{self.source.name(index)} has shape {stored.shape}; the others have {self.shape}"
            )
        up, left = ((self.size - side) // 2 for side in self.shape)
        canvas = np.full((1, self.size, self.size), -1.0, np.float32)
        canvas[0, up : up + self.shape[0], left : left + self.shape[1]] = (
            stored / np.float32(127.5) - 1
        )
        return torch.from_numpy(canvas)

    def some(self, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images, evenly spread, and their labels; what cannot be read is passed over.

        Raises:
            DataError: Fewer than two can be used.
        """
        images, labels = [], []
        why = ""
        for index in range(0, len(self), max(1, len(self) // most)):
            try:
                images.append(self.image(index))
            except UNREADABLE as error:
                why = why or f" ({error})"
                continue
            labels.append(int(self.source.labels[index]))
        if len(images) < 2:
            raise DataError(
                f"of {len(self)} images such as {self.source.name(0)} {len(images)} can be"
                f" used{why}; two are needed.\nFix: look at them."
            )
        return torch.stack(images), torch.tensor(labels)
