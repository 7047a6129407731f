"""From a folder to batches.

Spectrograms computed once into a file, samples, padding, and who is held out.

Not here: what is in the folder (``folder``), how a spectrogram is made (``audio``).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from holdfast import DataLoader
from holdfast.loader.order.orders import LengthBucketed
from recipes.features.cache import FeatureCache
from recipes.tacotron2.audio import MelSettings, log_mel, mel_filters
from recipes.tacotron2.folder import Row, SpeechFolder
from recipes.tacotron2.text import numbers_of

_ENOUGH = 64  # utterances for a mean
_VERSION = 1  # of MelFeatures; another one where it computes something else
_MANY = 1000  # utterances from which on several processes compute features


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MelFeatures:
    """Computes ``mel`` of a sample of a folder.

    Of one without sound, ``error`` says why, for the loader to raise.

    Args:
        settings: Of the spectrogram.
    """

    settings: MelSettings

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return the features of a sample."""
        if "error" in sample:
            return {"error": sample["error"]}
        try:
            return {"mel": log_mel(sample["wave"], self.settings)}
        except ValueError as error:  # too short for a window
            return {"error": str(error)}


def compute_features(folder: SpeechFolder, path: Path, settings: MelSettings) -> FeatureCache:
    """Return the features of a folder from their file, computing what is not in it yet.

    Args:
        folder: The utterances.
        path: HDF5 file.
        settings: Of the spectrograms.

    Raises:
        LoaderError: H620 if the file was made of something else, H621 to H625 if it cannot be had.
    """
    mel_filters(settings)  # are kept, and workers that are forked have them
    workers = None if len(folder) >= _MANY else 0
    about = {"folder": folder.digest, **dataclasses.asdict(settings)}
    features = MelFeatures(settings=settings)
    return FeatureCache.build(
        folder, features, path, version=_VERSION, parameters=about, num_workers=workers
    )


class Utterances(Dataset[dict[str, Tensor]]):
    """Symbols and spectrogram of some rows.

    Args:
        rows: Of the folder.
        features: Of the folder.
        chosen: Which of them.
    """

    def __init__(self, rows: Sequence[Row], features: FeatureCache, chosen: Sequence[int]) -> None:
        self._rows, self._features, self._chosen = rows, features, list(chosen)

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``text``, shape ``(symbols,)``, and ``mel``, shape ``(frames, n_mels)``.

        Raises:
            ValueError: Its sound cannot be read; the loader then sets it aside.
        """
        place = self._chosen[index]
        found = self._features[place]
        if "error" in found:
            path, error = str(self._rows[place].path), str(found["error"])
            raise ValueError(error if path in error else f"{path}: {error}")
        return {"text": torch.tensor(numbers_of(self._rows[place].text)), "mel": found["mel"]}

    def row(self, index: int) -> Row:
        """Return the row of a sample."""
        return self._rows[self._chosen[index]]

    def samples(self, index: int) -> int:
        """Return how long the wave is, 0 if that is not known."""
        return self.row(index).samples

    def mean_frame(self) -> Tensor:
        """Return the mean frame of the first utterances that have one, shape ``(n_mels,)``."""
        features = (self._features[place] for place in self._chosen)
        readable = (each["mel"] for each in features if "mel" in each)
        return torch.cat(list(itertools.islice(readable, _ENOUGH))).mean(dim=0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Padded:
    """Makes a batch of utterances, each padded behind its end.

    Args:
        frames_per_step: The frames of a batch are a multiple of it.
    """

    frames_per_step: int

    def __call__(self, utterances: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return ``text`` ``(batch, symbols)``, ``mel`` ``(batch, frames, n_mels)``, and their
        lengths.
        """
        texts, mels = [each["text"] for each in utterances], [each["mel"] for each in utterances]
        frames = max(len(mel) for mel in mels)
        frames += -frames % self.frames_per_step
        mel = mels[0].new_zeros(len(mels), frames, mels[0].shape[1])
        for place, each in zip(mel, mels, strict=True):
            place[: len(each)] = each
        return {
            "text": torch.nn.utils.rnn.pad_sequence(texts, batch_first=True),  # symbol 0 is padding
            "text_lengths": torch.tensor([len(text) for text in texts]),
            "mel": mel,
            "mel_lengths": torch.tensor([len(each) for each in mels]),
        }


def how_many_apart(utterances: int, held_out: int) -> int:
    """Return how many utterances `divide` holds out.

    As many as asked for, a tenth at most and one at least.
    """
    return max(1, min(held_out, utterances // 10))


def divide(
    folder: SpeechFolder, features: FeatureCache, held_out: int
) -> tuple[Utterances, Utterances]:
    """Return what is trained on and what is held out: see `how_many_apart`.

    Held out are utterances evenly from the whole folder, none of them unreadable.

    Raises:
        ValueError: There are not enough.
    """
    count = how_many_apart(len(folder), held_out)
    starts = [place * len(folder) // count for place in range(count + 1)]
    readable = (
        next((place for place in range(*each) if "mel" in features[place]), None)
        for each in itertools.pairwise(starts)
    )
    apart = [place for place in readable if place is not None]
    left = sorted(set(range(len(folder))) - set(apart))
    if not apart or not any("mel" in features[place] for place in left):
        first = next((each.trouble for each in folder.unreadable), "").partition("\n")[0]
        raise ValueError(
            f"{folder.path} holds too few utterances that can be read. {first}".rstrip()
            + "\nFix: at least two are needed."
        )
    return Utterances(folder.rows, features, left), Utterances(folder.rows, features, apart)


def make_loader(
    utterances: Utterances,
    *,
    batch_size: int,
    frames_per_step: int,
    seed: int,
    num_workers: int,
    quarantine: float,
    device: torch.device,
) -> DataLoader:
    """Return a loader of batches of about equally long utterances, in another order in each
    epoch.
    """
    on_gpu = device.type == "cuda"
    lengths = [utterances.samples(index) for index in range(len(utterances))]
    return DataLoader(
        utterances,
        sampler=LengthBucketed(lengths),
        batch_size=min(batch_size, len(utterances)),
        collate_fn=Padded(frames_per_step=frames_per_step),
        num_workers=num_workers,
        pin_memory=on_gpu,
        device=device if on_gpu else None,
        seed=seed,
        quarantine=quarantine,
    )
