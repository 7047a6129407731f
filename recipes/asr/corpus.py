"""Which recordings there are and what is said: LibriSpeech's folders, LJSpeech's, SpeechBrain's CSV files.

Does not: read a recording. One that cannot be used is found when it is read, so that the loader can set it aside.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


class CorpusError(ValueError):
    """A corpus that cannot be used as a whole, or an option: what is wrong, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Utterance:
    """One recording.

    Args:
        name: Unique in the corpus.
        path: Of the recording, which need not be there.
        text: What is said, as the corpus writes it.
        speaker: Who says it; empty where the corpus does not know.
    """

    name: str
    path: Path
    text: str
    speaker: str = ""

    def size(self) -> int:
        """Return the bytes of the recording, which order recordings by length; 0 if there is none."""
        return self.path.stat().st_size if self.path.is_file() else 0


def read_corpus(place: Path) -> list[Utterance]:
    """Return the utterances of a corpus, in an order that depends on nothing but their names.

    Args:
        place: A CSV file as SpeechBrain's recipes prepare it (``ID,duration,wav,wrd``, perhaps ``spk_id``); a folder
            with ``metadata.csv`` and ``wavs`` as LJSpeech; or a folder with ``*.trans.txt`` anywhere below it, as
            LibriSpeech.

    Raises:
        CorpusError: It is none of these, or empty, or FLAC.
    """
    if place.suffix == ".csv":
        found = list(_from_csv(place))
    elif (place / "metadata.csv").is_file():
        found = list(_from_ljspeech(place))
    else:
        found = [each for file in sorted(place.rglob("*.trans.txt")) for each in _from_transcript(file)]
    if not found:
        raise CorpusError(
            f"{place} holds no utterance\nFix: name a folder as LibriSpeech's (speaker/chapter/*.trans.txt), one as "
            "LJSpeech's (metadata.csv, wavs), or a CSV file with the columns ID, duration, wav and wrd."
        )
    return found


def hold_out(utterances: Sequence[Utterance], every: int = 20) -> tuple[list[Utterance], list[Utterance]]:
    """Divide a corpus that comes without a held-out part: each so many is held out.

    Raises:
        CorpusError: There are too few.
    """
    if len(utterances) < every:
        raise CorpusError(f"{len(utterances)} utterances are too few to hold any out\nFix: name others: --held-out.")
    training = [each for number, each in enumerate(utterances) if (number + 1) % every]
    return training, [each for number, each in enumerate(utterances) if not (number + 1) % every]


def read_lines(file: Path) -> list[str]:
    """Return the lines of a text file.

    Raises:
        CorpusError: It cannot be read.
    """
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"{file} cannot be read: {error}\nFix: name a text file in UTF-8.") from error


def read_rows(file: Path, needed: Sequence[str]) -> list[dict[str, str]]:
    """Return the rows of a CSV file that has certain columns.

    Raises:
        CorpusError: It cannot be read, or lacks a column.
    """
    reader = csv.DictReader(read_lines(file))
    missing = [name for name in needed if name not in (reader.fieldnames or ())]
    if missing:
        raise CorpusError(
            f"{file} has no column {missing[0]!r}; it has {', '.join(reader.fieldnames or ()) or 'none'}\n"
            f"Fix: write the columns {', '.join(needed)}, as SpeechBrain's preparation does."
        )
    return [{key: value or "" for key, value in row.items() if key is not None} for row in reader]


def placed(file: Path, written: str) -> Path:
    """Return a path as a corpus file means it: below the folder of that file, where it is not absolute."""
    for root in ("$data_root", "{data_root}", "$data_folder"):
        written = written.replace(root, str(file.parent))
    return file.parent / written


def as_wav(path: Path) -> Path:
    """Return the WAV file of a recording: of one that is named as FLAC, that beside it.

    Raises:
        CorpusError: There is a FLAC file only.
    """
    if path.suffix not in (".wav", ".flac"):
        return path
    wav, flac = path.with_suffix(".wav"), path.with_suffix(".flac")
    if flac.is_file() and not wav.is_file():
        raise CorpusError(
            f"{flac} is no WAV file\n"
            "Fix: find . -name '*.flac' -exec sh -c 'ffmpeg -i \"$1\" \"${1%.flac}.wav\"' _ {} \\;"
        )
    return wav


def _from_csv(file: Path) -> Iterator[Utterance]:
    for row in read_rows(file, ("ID", "wav", "wrd")):
        path = as_wav(placed(file, row["wav"]))
        yield Utterance(name=row["ID"], path=path, text=row["wrd"], speaker=row.get("spk_id", ""))


def _from_ljspeech(folder: Path) -> Iterator[Utterance]:
    for line in read_lines(folder / "metadata.csv"):
        name, *texts = line.split("|")
        if name:
            yield Utterance(name=name, path=folder / "wavs" / f"{name}.wav", text=texts[-1] if texts else "")


def _from_transcript(file: Path) -> Iterator[Utterance]:
    for line in read_lines(file):
        name, _, text = line.partition(" ")
        if name:
            path = as_wav(file.parent / f"{name}.wav")
            yield Utterance(name=name, path=path, text=text, speaker=name.partition("-")[0])
