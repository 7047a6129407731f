"""Which mixtures there are: the layout of WSJ0-2mix and LibriMix, SpeechBrain's CSV files.

And making some.

Does not: read a wave to train with, see ``data``; one that cannot be used is found there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recipes.asr.corpus import (
    CorpusError,
    Utterance,
    insist_on_own_names,
    placed,
    read_rows,
    recording,
)
from recipes.wav import read_wav, write_wav

Waves = NDArray[np.float32]
_MIXED = ("mix", "mix_clean", "mix_both")  # WSJ0-2mix; LibriMix without and with noise
_LOUDEST_DB = 5.0  # WSJ0-2mix draws the level of one speaker over the other from 0 to 5 dB
_PEAK = 0.9  # of what is written or learnt


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """One mixture.

    Args:
        name: Unique among them.
        path: Of the mixture.
        sources: Of its sources.
    """

    name: str
    path: Path
    sources: tuple[Path, Path]


def read_mixtures(place: Path) -> list[Mixture]:
    """Return the mixtures of a set, in the order of their names or rows.

    Args:
        place: A folder with ``mix`` (or ``mix_clean``, ``mix_both``), ``s1`` and ``s2``, each with
            WAV or FLAC files of the same names; or a CSV file with the columns ID, mix_wav, s1_wav
            and s2_wav.

    Raises:
        CorpusError: It is neither, or empty, or has a name twice.
    """
    found = list(_from_csv(place) if place.suffix.lower() == ".csv" else _from_folder(place))
    if not found:
        raise CorpusError(
            f"{place} holds no mixture\nFix: name a folder with the folders mix, s1 and s2 of WAV"
            " or FLAC files of the same names, or a CSV file with the columns ID, duration,"
            " mix_wav, s1_wav and s2_wav."
        )
    insist_on_own_names(place, (each.name for each in found))
    return found


def _from_csv(file: Path) -> Iterator[Mixture]:
    for row in read_rows(file, ("ID", "mix_wav", "s1_wav", "s2_wav")):
        path, first, second = (
            recording(placed(file, row[column])) for column in ("mix_wav", "s1_wav", "s2_wav")
        )
        yield Mixture(name=row["ID"], path=path, sources=(first, second))


def _from_folder(folder: Path) -> Iterator[Mixture]:
    mixed = next((folder / name for name in _MIXED if (folder / name).is_dir()), folder / _MIXED[0])
    for path in _recordings(mixed, "*"):
        first, second = (recording(folder / source / path.name) for source in ("s1", "s2"))
        yield Mixture(name=path.stem, path=path, sources=(first, second))


def _recordings(folder: Path, pattern: str) -> list[Path]:
    """Return the recordings in a folder, each once: as WAV, or else as FLAC."""
    return sorted(
        {recording(path) for suffix in (".wav", ".flac") for path in folder.glob(pattern + suffix)}
    )


def read_speakers(folder: Path) -> list[Utterance]:
    """Return the recordings of single speakers, in a folder for each, at any depth.

    LibriSpeech's, WSJ0's, VCTK's.

    Raises:
        CorpusError: There are not two speakers.
    """
    found = [
        Utterance(name=path.stem, path=path, text="", speaker=path.relative_to(folder).parts[0])
        for path in _recordings(folder, "**/*")
        if path.parent != folder
    ]
    if len({each.speaker for each in found}) < 2:
        raise CorpusError(
            f"{folder} does not hold WAV or FLAC files of two speakers or more\nFix: name a folder"
            " that holds a folder for each speaker, as LibriSpeech's train-clean-100."
        )
    return found


def mixed(first: Waves, second: Waves, level_db: float) -> tuple[Waves, Waves]:
    """Return a mixture of two waves of one length, and its sources ``(2, samples)``.

    Args:
        first: Shape ``(samples,)``.
        second: Likewise.
        level_db: How much louder the first shall be, over all samples.
    """
    sources = np.stack(
        [_of_unit_power(first) * np.float32(10 ** (level_db / 20)), _of_unit_power(second)]
    )
    mixture = sources.sum(0)
    scale = np.float32(_PEAK / max(np.abs(mixture).max(), np.abs(sources).max(), 1e-6))
    return mixture * scale, sources * scale


def _of_unit_power(wave: Waves) -> Waves:
    return wave / np.float32(max(np.sqrt(np.mean(wave.astype(np.float64) ** 2)), 1e-6))


def make_mixtures(
    utterances: Sequence[Utterance], folder: Path, *, many: int, sample_rate: int, seed: int
) -> Path:
    """Write mixtures of two speakers each in the layout of WSJ0-2mix, or those that are lacking.

    Both begin at once, and end with the shorter one, as in the ``min`` version.

    Raises:
        ValueError: A recording cannot be read.
    """
    speakers = sorted({each.speaker for each in utterances})
    for number in range(many):
        name = f"{number:04d}.wav"
        if (folder / "mix" / name).is_file():
            continue
        random = np.random.default_rng([seed, number])
        pair = random.choice(len(speakers), 2, replace=False)
        by_pair = [[each for each in utterances if each.speaker == speakers[one]] for one in pair]
        waves = [
            read_wav(of_one[int(random.integers(len(of_one)))].path, sample_rate)
            for of_one in by_pair
        ]
        shorter = min(len(wave) for wave in waves)
        level = float(random.uniform(-_LOUDEST_DB, _LOUDEST_DB))
        mixture, sources = mixed(waves[0][:shorter], waves[1][:shorter], level)
        # The mixture last
        for place, wave in zip(("s1", "s2", "mix"), (*sources, mixture), strict=True):
            path = folder / place / name
            write_wav(path.with_suffix(".part"), wave, sample_rate)
            path.with_suffix(".part").replace(path)
    return folder
