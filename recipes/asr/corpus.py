"""Which recordings there are and what is said.

LibriSpeech's folders, LJSpeech's, SpeechBrain's CSV files.

Does not: read a recording, but headers of some. One that cannot be used is found when it is read,
so that the loader can set it aside.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.options import insist_on_usable, most_quarantined
from recipes.wav import WrongSampleRateError, trouble_of

_NAMED = 5  # names that a message tells
_LOOKED_AT = 500  # recordings of a corpus, for their sample rates


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
        """Return the bytes of the recording, which order recordings by length, FLAC nearly.

        0 if there is none.
        """
        return self.path.stat().st_size if self.path.is_file() else 0


def read_corpus(place: Path) -> list[Utterance]:
    """Return the utterances of a corpus, in an order that depends on nothing but their names.

    Args:
        place: A CSV file as SpeechBrain's recipes prepare it (``ID,duration,wav,wrd``, perhaps
            ``spk_id``); a folder with ``metadata.csv`` and ``wavs`` as LJSpeech; or a folder with
            ``*.trans.txt`` anywhere below it, as LibriSpeech.

    Raises:
        CorpusError: It is none of these, or empty, or has a name twice.
    """
    if place.suffix.lower() == ".csv":
        found = list(_from_csv(place))
    elif (place / "metadata.csv").is_file():
        found = list(_from_ljspeech(place))
    else:
        found = [
            each for file in sorted(place.rglob("*.trans.txt")) for each in _from_transcript(file)
        ]
    if not found:
        raise CorpusError(
            f"{place} holds no utterance\nFix: name a folder as LibriSpeech's"
            " (speaker/chapter/*.trans.txt), one as LJSpeech's (metadata.csv, wavs), or a CSV file"
            " with the columns ID, duration, wav and wrd."
        )
    insist_on_own_names(place, (each.name for each in found))
    return found


def insist_on_own_names(place: Path, names: Iterable[str]) -> None:
    """Insist that each sample of a corpus has a name of its own.

    Raises:
        CorpusError: One occurs twice: it would be learnt twice, or be held out and learnt.
    """
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise CorpusError(
            f"{place} has names more than once: {', '.join(twice[:_NAMED])}\n"
            "Fix: remove the rows that are there twice, or give them names of their own."
        )


def insist_on_recordings(
    recordings: Sequence[Sequence[Path]], sample_rate: int, quarantine: float
) -> None:
    """Insist that recordings can be used and have a sample rate, by the headers of some, evenly
    spread.

    Args:
        recordings: Of each sample.
        sample_rate: That they need, Hz.
        quarantine: What may be quarantined, as `holdfast.DataLoader` takes it.

    Raises:
        CorpusError: More have another one, or most of those that were looked at.
        OptionError: More cannot be used for another reason.
    """
    looked_at = recordings[:: max(1, -(-len(recordings) // _LOOKED_AT))]
    troubles = [[(trouble_of(path, sample_rate), path) for path in paths] for paths in looked_at]
    first = [
        next((each for each in of_one if each[0] is not None), (None, None)) for of_one in troubles
    ]
    others = [
        (why.sample_rate, path) for why, path in first if isinstance(why, WrongSampleRateError)
    ]
    unusable = [
        str(why) for why, _ in first if not isinstance(why, (WrongSampleRateError, type(None)))
    ]
    insist_on_usable(unusable, len(recordings), quarantine)
    are_most = 2 * len(others) > len(looked_at)
    if not are_most and len(others) <= most_quarantined(quarantine, len(recordings)):
        return
    counted = Counter(rate for rate, _ in others).most_common(_NAMED)
    change = f"--sample-rate {counted[0][0]}, or resample" if are_most else "resample"
    raise CorpusError(
        f"{len(others)} of {len(looked_at)} recordings that were looked at have another sample rate"
        f" than {sample_rate} Hz: {', '.join(f'{rate} Hz ({many})' for rate, many in counted)},"
        f" such as {others[0][1]}\nFix: {change} all files once, for instance: sox in.wav -r"
        f" {sample_rate} -c 1 -b 16 out.wav"
    )


def hold_out(
    utterances: Sequence[Utterance], every: int = 20
) -> tuple[list[Utterance], list[Utterance]]:
    """Divide a corpus that comes without a held-out part: each so many is held out.

    Raises:
        CorpusError: There are too few.
    """
    if len(utterances) < every:
        raise CorpusError(
            f"{len(utterances)} utterances are too few to hold any out: {every} are needed, of"
            " which one is\nFix: name others to test with, by --held-out, or a larger corpus by"
            " --data."
        )
    training = [each for number, each in enumerate(utterances) if (number + 1) % every]
    return training, [each for number, each in enumerate(utterances) if not (number + 1) % every]


def _read(file: Path) -> str:
    """Return a text file, whatever ends its lines, with or without a mark of UTF-8 at its
    beginning.

    Raises:
        CorpusError: It cannot be read.
    """
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(
            f"{file} cannot be read: {error}\nFix: name a text file in UTF-8."
        ) from error


def _lines(file: Path) -> list[str]:
    """Return the lines of a text file that are not blank."""
    return [line.strip() for line in _read(file).split("\n") if line.strip()]


def read_rows(file: Path, needed: Sequence[str]) -> list[dict[str, str]]:
    """Return the rows of a CSV file that has certain columns.

    Raises:
        CorpusError: It cannot be read, or lacks a column.
    """
    reader = csv.DictReader(io.StringIO(_read(file), newline=""))
    try:
        rows = list(reader)
    except csv.Error as error:
        raise CorpusError(
            f"{file} is no CSV file that can be read: {error}\nFix: look behind line"
            f" {reader.line_num}."
        ) from error
    missing = [name for name in needed if name not in (reader.fieldnames or ())]
    if missing:
        raise CorpusError(
            f"{file} has no column {missing[0]!r}; it has"
            f" {', '.join(reader.fieldnames or ()) or 'none'}\nFix: write the columns"
            f" {', '.join(needed)}, as SpeechBrain's preparation does."
        )
    return [{key: value or "" for key, value in row.items() if key is not None} for row in rows]


def placed(file: Path, written: str) -> Path:
    """Return a path as a corpus file means it.

    Below the folder of that file, where it is not absolute.
    """
    for root in ("$data_root", "{data_root}", "$data_folder"):
        written = written.replace(root, str(file.parent))
    return file.parent / written


def recording(path: Path) -> Path:
    """Return where a recording lies: as WAV or else as FLAC, of that name.

    The path itself if neither is there.
    """
    if path.suffix not in (".wav", ".flac"):
        return path
    return next((each for each in map(path.with_suffix, (".wav", ".flac")) if each.is_file()), path)


def _from_csv(file: Path) -> Iterator[Utterance]:
    for row in read_rows(file, ("ID", "wav", "wrd")):
        path = recording(placed(file, row["wav"]))
        yield Utterance(name=row["ID"], path=path, text=row["wrd"], speaker=row.get("spk_id", ""))


def _from_ljspeech(folder: Path) -> Iterator[Utterance]:
    for line in _lines(folder / "metadata.csv"):
        name, *texts = (part.strip() for part in line.split("|"))
        # The normalised one, if there is one
        text = next((each for each in reversed(texts) if each), "")
        yield Utterance(name=name, path=recording(folder / "wavs" / f"{name}.wav"), text=text)


def _from_transcript(file: Path) -> Iterator[Utterance]:
    for line in _lines(file):
        name, *text = line.split(maxsplit=1)
        path = recording(file.parent / f"{name}.wav")
        yield Utterance(name=name, path=path, text="".join(text), speaker=name.partition("-")[0])
