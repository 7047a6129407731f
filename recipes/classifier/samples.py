"""Samples for training: images that are read, checked, scaled and shifted, with their labels.

Does not: know files (see ``images``) or faults (see ``faults``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from recipes.classifier.images import DataError, Source

UNREADABLE = (OSError, ValueError)  # of the file, of what is in it
_MEASURED = 2000  # images that mean and spread are taken from


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What images are brought to mean 0 and variance 1 with, and the size that they have."""

    mean: float
    spread: float
    shape: tuple[int, ...]

    @classmethod
    def of(cls, source: Source, shape: tuple[int, ...]) -> Scale:
        """Measure some images, evenly spread.

        Those that cannot be read, or have another shape, are passed over here.

        Raises:
            DataError: None of them can be read.
        """
        count = len(source.labels)
        found = []
        for index in range(0, count, max(1, count // _MEASURED)):
            try:
                image = source.decode(source.read(index))
            except UNREADABLE:
                continue
            if image.shape == shape:
                found.append(image)
        if not found:
            raise DataError(
                f"none of the images such as {source.name(0)} can be read.\nFix: look at one of"
                " them."
            )
        values = np.stack(found)
        return cls(mean=float(values.mean()), spread=float(values.std()) or 1.0, shape=shape)


class Samples(Dataset[Any]):
    """Images of shape ``(1, height, width)``, float32, with their labels.

    Args:
        source: Where they are read from.
        scale: Of the training set; None leaves the values as they are stored, from 0 to 255.
        shape: Height and width that every image must have.
        classes: Number of classes.
        shift: Whether to shift each by up to one pixel at random, as augmentation.
    """

    def __init__(
        self,
        source: Source,
        scale: Scale | None,
        *,
        shape: tuple[int, ...],
        classes: int,
        shift: bool,
    ) -> None:
        self.source, self.classes = source, classes
        self._scale, self._shape, self._shift = scale, shape, shift

    def __len__(self) -> int:
        return len(self.source.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        try:
            image = self.source.decode(self.source.read(index))
        except UNREADABLE as error:
            raise ValueError(f"{self.source.name(index)} cannot be read: {error}") from error
        label = int(self.source.labels[index])
        if image.shape != self._shape or not 0 <= label < self.classes:
            raise ValueError(
                f"{self.source.name(index)} has shape {image.shape} and label {label}; needed are"
                f" {self._shape} and a label below {self.classes}"
            )
        values = torch.from_numpy(image.astype(np.float32)).unsqueeze(0)
        if self._scale is not None:
            values = (values - self._scale.mean) / self._scale.spread
        if self._shift:
            down, right = torch.randint(-1, 2, (2,)).tolist()
            values = values.roll((down, right), dims=(1, 2))
        return values, torch.tensor(label)
