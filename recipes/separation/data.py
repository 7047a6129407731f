"""Samples to train with.

Mixtures made on the fly of single speakers, or cut out of mixtures that lie on a disk.

All that is random is drawn from torch's generator inside ``__getitem__``, which the loader seeds
for each sample and epoch. A recording that cannot be used raises an error that says why; the loader
then sets that sample aside.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from recipes.asr.corpus import Utterance
from recipes.separation.mixtures import Mixture, mixed
from recipes.wav import read_wav

Waves = NDArray[np.float32]
Sample = tuple[torch.Tensor, torch.Tensor]
_LEVEL_DB = 5.0  # largest difference between two speakers, as WSJ0-2mix
_TRIES = 5  # to find a second speaker whose recording can be read


class MixedOnTheFly(Dataset[Sample]):
    """Each recording with one of another speaker, drawn anew each time, as are their levels and
    what is cut out.

    A sample is the mixture ``(samples,)`` and its sources ``(2, samples)``. Only its first
    recording counts as its own: where the second cannot be read, another one is drawn, or one bad
    file would spoil many samples.

    Args:
        utterances: Of two speakers or more.
        sample_rate: Hz; recordings with another one are refused.
        samples: Of what is cut out; shorter recordings are filled up with silence.
    """

    def __init__(self, utterances: Sequence[Utterance], *, sample_rate: int, samples: int) -> None:
        self.utterances = utterances
        self.sample_rate = sample_rate
        self.samples = samples

    def __len__(self) -> int:
        return len(self.utterances)

    def __getitem__(self, index: int) -> Sample:
        """Return a sample.

        Raises:
            ValueError: The recording cannot be used.
        """
        own = self.utterances[index]
        first = _cut(read_wav(own.path, self.sample_rate), self.samples)
        second = _cut(self._other(own.speaker), self.samples)
        level = _LEVEL_DB * (2 * float(torch.rand(())) - 1)
        mixture, sources = mixed(first, second, level)
        return torch.from_numpy(mixture), torch.from_numpy(sources)

    def _other(self, speaker: str) -> Waves:
        """Return a recording of somebody else."""
        tries = 0
        while True:
            drawn = self.utterances[int(torch.randint(len(self), ()))]
            if drawn.speaker == speaker:
                continue
            tries += 1
            try:
                return read_wav(drawn.path, self.sample_rate)
            except (ValueError, OSError):
                if tries == _TRIES:
                    raise


class CutMixtures(Dataset[Sample]):
    """Mixtures from a disk: a stretch of each drawn anew each time, or all of it.

    Args:
        mixtures: As `read_mixtures` returns them.
        sample_rate: Hz; files with another one are refused.
        samples: Of what is cut out; None: all of it.
    """

    def __init__(
        self, mixtures: Sequence[Mixture], *, sample_rate: int, samples: int | None
    ) -> None:
        self.mixtures = mixtures
        self.sample_rate = sample_rate
        self.samples = samples

    def __len__(self) -> int:
        return len(self.mixtures)

    def __getitem__(self, index: int) -> Sample:
        """Return a sample: the mixture ``(samples,)`` and its sources ``(2, samples)``.

        Raises:
            ValueError: A file cannot be used, or they are not of one length.
        """
        found = self.mixtures[index]
        paths: tuple[Path, ...] = (found.path, *found.sources)
        waves = [read_wav(path, self.sample_rate) for path in paths]
        lengths = {len(wave) for wave in waves}
        if len(lengths) > 1:
            raise ValueError(
                f"{found.path} and its sources have {', '.join(str(len(wave)) for wave in waves)}"
                " samples\nFix: mix them again; they belong to one stretch of time."
            )
        together = np.stack(waves)
        cut = together if self.samples is None else _cut(together, self.samples)
        return torch.from_numpy(cut[0].copy()), torch.from_numpy(cut[1:].copy())


def _cut(wave: Waves, samples: int) -> Waves:
    """Return a stretch of so many samples, over the last dimension.

    Silence follows what is shorter.
    """
    room = wave.shape[-1] - samples
    if room <= 0:
        return np.pad(wave, [(0, 0)] * (wave.ndim - 1) + [(0, -room)])
    start = int(torch.randint(room + 1, ()))
    return wave[..., start : start + samples]
