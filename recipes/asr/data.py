"""From recordings and texts to batches.

Log-mel features, characters, and what is changed in each epoch anew.

A recording or a text that cannot be used raises an error that says why; the loader then sets that
sample aside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from recipes.asr.corpus import Utterance
from recipes.tacotron2.audio import MelSettings, log_mel, mel_filters
from recipes.wav import read_wav

Sample = Mapping[str, torch.Tensor]
CHARACTERS = " 'abcdefghijklmnopqrstuvwxyz"
"""What is recognised; the label of a character is its place here plus one, and 0 is CTC's blank."""
_DASHES_AND_DOTS, _CURLY_QUOTE = "\u2013\u2014\u2026", "\u2019"
_PUNCTUATION = str.maketrans(
    dict.fromkeys('.,;:!?()[]"-' + _DASHES_AND_DOTS, " ") | {_CURLY_QUOTE: "'"}
)
_WINDOW_SECONDS, _HOP_SECONDS = 0.025, 0.010
_SPEEDS = (0.95, 1.05)  # SpeechBrain's recipes choose among 95, 100 and 105 %
# SpecAugment (arXiv 1904.08779), for short sentences
_MASKS, _MASKED_FRAMES, _MASKED_MELS = 2, 12, 6
FRAMES_EACH = 2
"""Frames of the features for each frame of the model's output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sound:
    """How recordings become features.

    Args:
        sample_rate: Hz; recordings with another one are refused.
        n_mels: Bands of a frame.
    """

    sample_rate: int
    n_mels: int

    def settings(self) -> MelSettings:
        """Return them as the spectrogram's: windows of 25 ms, one each 10 ms."""
        window = round(_WINDOW_SECONDS * self.sample_rate)
        return MelSettings(
            sample_rate=self.sample_rate,
            n_fft=2 ** (window - 1).bit_length(),
            hop_length=round(_HOP_SECONDS * self.sample_rate),
            win_length=window,
            n_mels=self.n_mels,
            fmax=self.sample_rate / 2,
        )

    def features(self, wave: NDArray[np.float32]) -> torch.Tensor:
        """Return log-mel features, each band with mean 0 and variance 1 over the recording.

        ``(frames, n_mels)``.
        """
        found = log_mel(wave, self.settings())
        return (found - found.mean(0)) / (found.std(0) + 1e-5)


def encode(text: str) -> torch.Tensor:
    """Return the labels of a text, in small letters and without punctuation.

    Raises:
        ValueError: Nothing is left of it, or it holds something that is no letter.
    """
    plain = " ".join(text.lower().translate(_PUNCTUATION).split())
    strange = sorted(set(plain) - set(CHARACTERS))
    if strange:
        raise ValueError(
            f"the text {text!r} holds {strange[0]!r}\nFix: write it out in letters from a to z."
        )
    if not plain:
        raise ValueError(
            f"the text {text!r} holds no letter\nFix: write down what is said, or leave the row"
            " out."
        )
    return torch.tensor([CHARACTERS.index(character) + 1 for character in plain])


def decode(labels: Sequence[int]) -> str:
    """Return the text of some labels."""
    return "".join(CHARACTERS[label - 1] for label in labels if label)


class Speech(Dataset[Sample]):
    """Recordings with their texts.

    A sample has ``features`` ``(frames, n_mels)`` and ``labels`` ``(characters,)``.

    Args:
        utterances: Of a corpus.
        sound: How they become features.
        augment: Whether speed, loudness of noise and masks are drawn anew each time, from torch's
            generator, which the loader seeds for each sample and epoch.
    """

    def __init__(self, utterances: Sequence[Utterance], sound: Sound, *, augment: bool) -> None:
        self.utterances = utterances
        self.sound = sound
        self.augment = augment
        mel_filters(sound.settings())  # are kept, and workers that are forked have them

    def __len__(self) -> int:
        return len(self.utterances)

    def __getitem__(self, index: int) -> Sample:
        """Return a sample.

        Raises:
            ValueError: The recording or its text cannot be used.
        """
        utterance = self.utterances[index]
        labels = encode(utterance.text)
        wave = read_wav(utterance.path, self.sound.sample_rate)
        features = self.sound.features(_varied(wave) if self.augment else wave)
        # A blank parts what is doubled
        needed = len(labels) + int((labels[1:] == labels[:-1]).sum())
        if frames_out(len(features)) < needed:
            raise ValueError(
                f"{utterance.path}: {len(labels)} characters in"
                f" {len(wave) / self.sound.sample_rate:.2f} s\nFix: check that the text belongs to"
                " the recording; nobody speaks as fast."
            )
        return {"features": _masked(features) if self.augment else features, "labels": labels}


def frames_out(frames: int) -> int:
    """Return how many frames the model makes of so many."""
    return -(-frames // FRAMES_EACH)


def _varied(wave: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a recording at another speed, with some noise."""
    low, high = _SPEEDS
    speed = low + (high - low) * float(torch.rand(()))
    places = np.arange(0, len(wave) - 1, speed)
    faster = np.interp(places, np.arange(len(wave)), wave)
    noise = 10 ** (-3.0 + float(torch.rand(()))) * torch.randn(len(faster)).numpy()  # 0.001 to 0.01
    return (faster + noise).astype(np.float32)


def _masked(features: torch.Tensor) -> torch.Tensor:
    """Return features of which some stretches of time and some bands are 0, the mean."""
    masked = features.clone()
    for _ in range(_MASKS):
        for dimension, most in ((0, _MASKED_FRAMES), (1, _MASKED_MELS)):
            width = int(torch.randint(0, most + 1, ()))
            start = int(torch.randint(0, max(1, features.shape[dimension] - width), ()))
            masked.narrow(dimension, start, min(width, features.shape[dimension] - start)).zero_()
    return masked


def collate(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Return a batch: features and labels padded with 0, and how much of each row counts."""
    return {
        "features": pad_sequence([each["features"] for each in samples], batch_first=True),
        "frames": torch.tensor([len(each["features"]) for each in samples]),
        "labels": pad_sequence([each["labels"] for each in samples], batch_first=True),
        "characters": torch.tensor([len(each["labels"]) for each in samples]),
    }
