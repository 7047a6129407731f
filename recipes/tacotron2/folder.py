"""A folder in the format of LJSpeech.

``metadata.csv`` with ``name|text|normalised text``, and ``wavs/<name>.wav``.

All that can be known without reading the sound is checked first, so that a mistake is told in the
first second and not in the third hour. A file that turns out to be no sound is the loader's
business: it sets such samples aside.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.tacotron2.text import numbers_of
from recipes.wav import SAMPLE_RATE, WrongSampleRateError, check_wav, read_wav

_NAMED = 5  # mistakes that a message names; more are counted
_FORMAT = "a row is name|text|normalised text, as in LJSpeech, and wavs/<name>.wav is its sound"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One utterance.

    Args:
        name: Of the file, without ``.wav``.
        text: Normalised.
        path: Of the file.
        samples: As its header says; 0 if it cannot be read.
        trouble: Why it cannot.
    """

    name: str
    text: str
    path: Path
    samples: int
    trouble: str = ""


class SpeechFolder:
    """The utterances of a folder: a dataset of text and wave.

    Args:
        path: The folder.
        sample_rate: That all files must have.

    Raises:
        ValueError: What is wrong with the folder, its first mistakes by line, and what to do.
        OSError: ``metadata.csv`` cannot be read.
    """

    def __init__(self, path: Path, sample_rate: int = SAMPLE_RATE) -> None:
        self.path, self.sample_rate = Path(path), sample_rate
        metadata = self.path / "metadata.csv"
        if not metadata.is_file():
            raise ValueError(
                f"{self.path} holds no metadata.csv.\nFix: name a folder in which {_FORMAT}."
            )
        raw = metadata.read_bytes()
        try:
            lines = raw.decode("utf-8-sig").split("\n")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{metadata} is not UTF-8 ({error}).\nFix: convert it with iconv."
            ) from error
        self._mistakes: list[str] = []
        self._fixes: dict[str, None] = {}  # of mistakes that rows are not to blame for
        self.rows = [
            row
            for number, line in enumerate(lines, 1)
            if (row := self._row(number, line.rstrip("\r")))
        ]
        self._complain(metadata)
        sizes = "".join(f"{row.name} {row.path.stat().st_size}\n" for row in self.rows)
        self.digest = hashlib.sha256(raw + sizes.encode()).hexdigest()
        """Of the metadata and the sizes of all files."""

    @property
    def unreadable(self) -> list[Row]:
        """Return the rows whose file cannot be used.

        The loader will set them aside, or stop if they are too many.
        """
        return [row for row in self.rows if not row.samples]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return ``text``, and ``wave`` of shape ``(samples,)``, or ``error`` in its place."""
        row = self.rows[index]
        try:
            return {"text": row.text, "wave": read_wav(row.path, self.sample_rate)}
        except (ValueError, OSError) as error:
            return {"text": row.text, "error": str(error)}

    def _row(self, number: int, line: str) -> Row | None:
        """Return a row, or None where there is none or a mistake, which is remembered."""
        if not line.strip():
            return None
        name, *texts = (part.strip() for part in line.split("|"))
        # The normalised one, if there is one
        text = next((each for each in reversed(texts) if each), "")
        path = self.path / "wavs" / f"{name}.wav"
        if len(texts) not in (1, 2):
            self._mistakes.append(f"line {number} has {len(texts) + 1} columns: {line[:60]!r}")
        elif not name or Path(name).name != name:
            self._mistakes.append(f"line {number}: {name!r} is no name of a file in wavs/")
        elif not numbers_of(text):
            self._mistakes.append(
                f"line {number}: the text {text[:60]!r} of {name!r} has no letter in it"
            )
        elif not path.is_file():
            self._mistakes.append(f"line {number}: there is no {path}")
        else:
            samples, trouble = self._samples(number, path)
            return Row(name=name, text=text, path=path, samples=samples, trouble=trouble)
        return None

    def _samples(self, number: int, path: Path) -> tuple[int, str]:
        """Return how many samples a file has, and why it cannot be used."""
        try:
            return check_wav(path, self.sample_rate), ""
        except WrongSampleRateError as error:
            what, _, fix = str(error).partition("\nFix: ")
            self._mistakes.append(f"line {number}: {what}")
            self._fixes[fix] = None
            return 0, ""
        except (ValueError, OSError) as error:
            return 0, str(error)

    def _complain(self, metadata: Path) -> None:
        twice = [
            name for name, times in Counter(row.name for row in self.rows).items() if times > 1
        ]
        if twice:
            self._mistakes.append(f"names that occur more than once: {', '.join(twice[:_NAMED])}")
        if not self._mistakes and not self.rows:
            self._mistakes.append("it has no rows")
        if self._mistakes:
            more = (
                [f"... and {len(self._mistakes) - _NAMED} more"]
                if len(self._mistakes) > _NAMED
                else []
            )
            listed = "\n  ".join([*self._mistakes[:_NAMED], *more])
            fixes = [*self._fixes, f"correct or remove these rows; {_FORMAT}."]
            raise ValueError(f"{metadata} cannot be used:\n  {listed}\nFix: {'; or '.join(fixes)}")
