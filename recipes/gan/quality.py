"""How good drawn images are.

The Fréchet distance of features, and how many of the classes are drawn.

As FID (arXiv 1706.08500), with other features: those of a small classifier that is trained on the
real images on the spot, which takes seconds and is the same in every process. So the figures of one
data set compare with each other, and with no published FID.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

_FEATURES = 32
_STEPS, _BATCH = 300, 128
_LEAST_SHARE = 0.02  # of the drawn images, from which a class counts as drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """What was measured.

    Args:
        frechet: Distance of drawn images from real ones.
        classes: Classes that at least 2 % of the drawn images belong to.
    """

    frechet: float
    classes: int


class Judge:
    """Measures images against real ones.

    Args:
        images: Real, shape ``(n, 1, size, size)``.
        labels: Of their classes, shape ``(n,)``.
    """

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        from torchmetrics.image.fid import FrechetInceptionDistance

        with torch.random.fork_rng(devices=[]):  # training goes on as if nobody had looked
            torch.manual_seed(0)
            self._features, self._classify = _fit(images, labels)
        self._classes = int(labels.max()) + 1
        self._distance = FrechetInceptionDistance(self._features, reset_real_features=False)
        self._distance.update(images, real=True)

    def measure(self, images: torch.Tensor) -> Quality:
        """Return how good images are, shape ``(n, 1, size, size)``.

        Of few the distance is larger.
        """
        with torch.no_grad():
            kinds = self._classify(self._features(images)).argmax(dim=1)
        shares = torch.bincount(kinds, minlength=self._classes) / len(images)
        self._distance.reset()
        self._distance.update(images, real=False)
        return Quality(
            frechet=float(self._distance.compute()), classes=int((shares >= _LEAST_SHARE).sum())
        )


def _fit(images: torch.Tensor, labels: torch.Tensor) -> tuple[nn.Module, nn.Module]:
    features = nn.Sequential(
        nn.Flatten(),
        nn.Linear(images[0].numel(), 128),
        nn.ReLU(),
        nn.Linear(128, _FEATURES),
        nn.ReLU(),
    )
    features.num_features = _FEATURES  # which torchmetrics asks for
    classify = nn.Linear(_FEATURES, int(labels.max()) + 1)
    optimizer = torch.optim.Adam([*features.parameters(), *classify.parameters()], lr=3e-3)
    with torch.enable_grad():  # it may be wanted in the middle of an evaluation
        for _ in range(_STEPS):
            chosen = torch.randint(len(images), (_BATCH,))
            optimizer.zero_grad()
            F.cross_entropy(classify(features(images[chosen])), labels[chosen]).backward()
            optimizer.step()
    return features.requires_grad_(requires_grad=False), classify.requires_grad_(
        requires_grad=False
    )
