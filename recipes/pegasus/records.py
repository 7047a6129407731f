"""Documents and summaries in a file of JSON lines, read one by one from their byte offsets, and
made into tokens.

Nothing of the file but the offsets stays in memory, 8 bytes for a record, and workers share no
position in it. A record that cannot be used is a `RecordError`, which a `holdfast.DataLoader` sets
aside.
"""

from __future__ import annotations

import json
import os
import re
import weakref
from array import array
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

Records: TypeAlias = "JsonLines | list[tuple[str, str]]"
_LOOKED_AT = 100  # records, for their keys
_LEADING_WORDS = 10  # as many as a summary has
# JSON may spell one half of a pair alone, at which tokenizers fail
_HALF = re.compile(r"[\ud800-\udfff]")


class RecordError(ValueError):
    """A record, or the whole file, has not what summarising needs."""


class JsonLines(Dataset[tuple[str, str]]):
    """Pairs of document and summary.

    Args:
        path: The file: on each line an object. Lines with nothing but blanks do not count.
        text_column: Key of the document.
        summary_column: Key of the summary.
        title_column: Key of a title, which is put before the document as its first line, empty
            where a record has none. None: documents are left as they are.

    Raises:
        RecordError: if there is no record, or the first has not these keys.
        OSError: if the file cannot be read.
    """

    def __init__(
        self,
        path: Path,
        *,
        text_column: str = "document",
        summary_column: str = "summary",
        title_column: str | None = None,
    ) -> None:
        self.path = Path(path)
        self.titled = title_column is not None
        self._columns = text_column, summary_column
        self._title_column = title_column
        self._offsets, end = array("q"), 0
        with self.path.open("rb") as file:
            for line in file:
                if line.strip():
                    self._offsets.append(end)
                end += len(line)
        self._file: int | None = None
        if not self._offsets:
            raise RecordError(f"{path}: the file holds no record")
        self._offsets.append(end)
        self._check_columns()

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> tuple[str, str]:
        """Return document and summary.

        Raises:
            RecordError: if there is no usable one of both.
        """
        record = self._read(index)
        found = [record.get(column) for column in self._columns]
        for column, value in zip(self._columns, found, strict=True):
            if not isinstance(value, str) or not value.strip():
                what = (
                    "is missing"
                    if value is None
                    else "is empty"
                    if value in ("", [], {})
                    else f"is {value!r:.40}"
                )
                raise self._error(index, f"{column!r} {what}; a text is needed")
        document, summary = str(found[0]), str(found[1])
        if self._title_column is not None:
            title = record.get(self._title_column)
            document = f"{' '.join(title.split()) if isinstance(title, str) else ''}\n{document}"
        if _HALF.search(document) or _HALF.search(summary):
            raise self._error(
                index, "half a character (\\ud800 to \\udfff, alone), which no encoding has"
            )
        return document, summary

    def sizes(self, longest: int) -> tuple[NDArray[np.int64], list[str]]:
        """Return how long each record is, and why some cannot be used.

        Sizes are in characters of the document and of the summary, which go with their tokens.

        Args:
            longest: Characters that a document counts at most: what is cut off takes no time.
        """
        sizes, troubles = np.zeros(len(self), dtype=np.int64), []
        for index in range(len(self)):
            try:
                document, summary = self[index]
            except RecordError as error:
                troubles.append(str(error))
                continue  # the loader sets it aside when its turn comes
            sizes[index] = min(len(document), longest) + len(summary)
        return sizes, troubles

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker is sent: it opens the file itself."""
        return {**self.__dict__, "_file": None}

    def _read(self, index: int) -> dict[str, Any]:
        begin, end = self._offsets[index], self._offsets[index + 1]
        if self._file is None:
            self._file = os.open(self.path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)
        # Moves no position, which a forked worker would share
        line = os.pread(self._file, end - begin, begin)
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._error(index, f"no JSON ({error})") from None
        if not isinstance(record, dict):
            raise self._error(index, f"{type(record).__name__}; an object is needed")
        return record

    def _check_columns(self) -> None:
        """Tell at once, and not by setting everything aside, that the keys are called something
        else.

        The first records are looked at, and those that cannot be used among them are passed over.
        """
        keys: dict[str, None] = {}
        why: RecordError | None = None
        for index in range(min(len(self), _LOOKED_AT)):
            try:
                keys |= dict.fromkeys(map(str, self._read(index)))
            except RecordError as error:
                why = why or error
        if why is not None and not keys:
            fix = (
                "one JSON object a line is needed, as datasets' to_json writes them, in UTF-8 and"
                " unpacked"
            )
            raise RecordError(f"{why}\nFix: {fix}.")
        columns = (*self._columns, self._title_column)
        for column, option in zip(
            columns, ("--text-column", "--summary-column", "--title-column"), strict=True
        ):
            if column is not None and column not in keys:
                there = ", ".join(map(repr, keys))
                raise self._error(
                    0, f"no key {column!r} among {there}; name the right one with {option}"
                )

    def _error(self, index: int, what: str) -> RecordError:
        return RecordError(f"{self.path}, record {index} at byte {self._offsets[index]}: {what}")


class TokenizedRecords(Dataset[dict[str, list[int]]]):
    """What the model is given of each record.

    ``input_ids``, ``attention_mask`` and ``labels``, each a list.

    Args:
        records: Pairs of texts.
        tokenizer: A tokenizer of transformers.
        max_source_length: Tokens that a document is cut to.
        max_target_length: Tokens that a summary is cut to.
        copied: Share of the times that a record is read in which its target is how its document
            begins, which then has ``<mask_1>`` before it. It is PEGASUS's pre-training by gap
            sentences (arXiv 1912.08777), the leading ones, left in the text: that teaches to copy,
            which summaries alone do slowly.
    """

    def __init__(
        self,
        records: Records,
        tokenizer: Any,
        *,
        max_source_length: int,
        max_target_length: int,
        copied: float = 0.0,
    ) -> None:
        self._records = records
        self._tokenizer = tokenizer
        self._lengths = max_source_length, max_target_length
        self._copied = copied

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        """Return the tokens of a record.

        Raises:
            RecordError: if it cannot be used.
        """
        document, summary = self._records[index]
        # The loader seeds it by epoch and index
        if self._copied and float(torch.rand(())) < self._copied:
            document, summary = f"<mask_1> {document}", " ".join(document.split()[:_LEADING_WORDS])
        source = self._tokenizer(document, truncation=True, max_length=self._lengths[0])
        target = self._tokenizer(text_target=summary, truncation=True, max_length=self._lengths[1])
        return {
            "input_ids": source["input_ids"],
            "attention_mask": source["attention_mask"],
            "labels": target["input_ids"],
        }
