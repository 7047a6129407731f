"""Samples that are quarantined: which, since when, and on what evidence. No torch.

The ledger is a JSON file beside the run's checkpoints, so it outlives rollbacks and restarts; a
loader without a run keeps it in memory. A sample is replaced from the epoch on in which it was
found, so that an earlier epoch that is trained again sees what it saw.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.core.durable import replace_file
from holdfast.core.errors import LoaderError
from holdfast.core.events.run_events import SampleQuarantined
from holdfast.core.files import read_file

FILE_NAME = "quarantine.json"
_FORMAT = 1
_EVIDENCE_CHARACTERS = 2000
_LATEST_SECONDS = 2**37  # in the year 6325: later ones are damage, and may be no date any more


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """One sample that is quarantined, from `epoch` on.

    Args:
        index: Dataset index: a number, text, or a tuple of these.
        kind: ``"raised"``, ``"hung"``, ``"killed its worker"``, or ``"provenance"``.
        epoch: From this one on it is replaced.
        evidence: A traceback, or what was seen.
        unix_seconds: When it was found.
        released: Whether someone has released it.
    """

    index: Any
    kind: str
    epoch: int
    evidence: str
    unix_seconds: float
    released: bool = False


class Ledger:
    """Which samples are quarantined.

    At most `limit` may be: a share of the dataset below 1, which allows at least 1, or a number; 0
    for none at all.
    """

    def __init__(self, limit: float, length: int | None, now: Callable[[], float]) -> None:
        self._now = now
        self._path: Path | None = None
        self._entries: dict[Any, Quarantined] = {}
        self._share = limit
        self.limit = (
            int(limit) if limit >= 1 or limit == 0 else max(1, math.floor(limit * (length or 0)))
        )

    def __iter__(self) -> Iterator[Quarantined]:
        """Yield what was found, in that order, also what was released."""
        return iter(self._entries.values())

    def __len__(self) -> int:
        """Return how many are quarantined now."""
        return sum(not each.released for each in self)

    def keep_in(self, path: Path) -> None:
        """Read the ledger of a run, and write it from now on.

        H612 if it holds too many, H617 if it is none.

        What was found here without a run is added, unless the file knows of it; a sample that was
        released there and found bad here afterwards is quarantined again.
        """
        kept = read_ledger(path)
        for entry in self:
            known = kept.get(entry.index)
            if known is None or (known.released and entry.unix_seconds > known.unix_seconds):
                kept[entry.index] = entry
        held = _indices(kept.values())
        if len(held) > self.limit:
            raise self._too_many(f"{path} quarantines {len(held)} of the samples ({_some(held)})")
        found_here, self._entries, self._path = bool(self._entries), kept, path
        if found_here:
            self._write()

    def bad(self, epoch: int) -> set[Any]:
        """Return the indices that are replaced in an epoch."""
        return set(_indices(each for each in self if each.epoch <= epoch))

    def add(self, index: Any, kind: str, epoch: int, evidence: str) -> SampleQuarantined | None:
        """Quarantine a sample; return the event if that is news.

        H612 if that would be one too many.
        """
        index, not_written = key_of(index), None
        known = self._entries.get(index)
        if known is not None and not known.released and known.epoch <= epoch:
            return None
        if (known is None or known.released) and len(self) >= self.limit:
            raise self._too_many(
                f"sample {index!r} cannot be used ({kind}: {last_line(evidence)}), and {len(self)}"
                f" are quarantined already ({_some(_indices(self))})"
            )
        evidence = (
            evidence
            if len(evidence) <= _EVIDENCE_CHARACTERS
            else "..." + evidence[-_EVIDENCE_CHARACTERS:]
        )
        self._entries.pop(index, None)  # so that the order is that of finding
        self._entries[index] = Quarantined(
            index=index, kind=kind, epoch=epoch, evidence=evidence, unix_seconds=self._now()
        )
        try:
            self._write()
        # A disk that is full ends no training: the sample is known here, and found again
        except OSError as error:
            not_written = str(error)
        return SampleQuarantined(
            sample=plain(index),
            why=kind,
            evidence=last_line(evidence),
            quarantined=len(self),
            not_written=not_written,
        )

    def release(self, indices: Iterable[Any]) -> list[Any]:
        """Release samples; return those that were quarantined."""
        wanted = {key_of(index) for index in indices}
        released = [index for index in _indices(self) if index in wanted]
        for index in released:
            self._entries[index] = replace(self._entries[index], released=True)
        if released:
            self._write()
        return released

    def _write(self) -> None:
        if self._path is not None:
            body = {"format": _FORMAT, "samples": [asdict(each) for each in self]}
            replace_file(self._path, json.dumps(body, indent=1).encode() + b"\n")

    def _too_many(self, what: str) -> LoaderError:
        return LoaderError(
            what,
            limit=f"quarantine={self._share:g} allows {self.limit}",
            fix=(
                "repair the data (`holdfast quarantine RUN_DIR` shows the evidence and releases"
                " samples), or raise quarantine= if you can do without these samples."
            ),
            rule="H612",
        )


def last_line(evidence: str) -> str:
    """Return the last line of some evidence that says what happened.

    Of a traceback, the exception.
    """
    lines = [line for line in evidence.strip().splitlines() if not line.startswith(("Fix: ", "[H"))]
    return (lines or [""])[-1]


def key_of(index: Any) -> Any:
    """Return what an index is known by here, and in a file.

    Numpy's numbers are numbers, lists are tuples.

    What a file cannot hold, or a set, such as bytes, a slice or a path, is known by its text.
    """
    if type(index) is int:
        return index
    if isinstance(index, (list, tuple)):
        return tuple(key_of(each) for each in index)
    if getattr(index, "ndim", 0):
        return key_of(index.tolist())
    if hasattr(index, "__index__"):
        return int(index)
    return index if index is None or isinstance(index, (str, float)) else repr(index)


def plain(index: Any) -> int | str:
    """Return an index as it is shown and named: a number, or a text."""
    key = key_of(index)
    return key if isinstance(key, (int, str)) else repr(index)


def _indices(entries: Iterable[Quarantined]) -> list[Any]:
    return [each.index for each in entries if not each.released]


def _some(indices: list[Any]) -> str:
    return ", ".join(map(repr, indices[:10])) + (", ..." if len(indices) > 10 else "")


def read_ledger(path: Path) -> dict[Any, Quarantined]:
    """Return the ledger of a run by index, empty if there is none.

    H617 for a file that is no ledger.
    """
    try:
        body = json.loads(read_file(path, 1 << 30))
        if body["format"] != _FORMAT:
            raise ValueError(f"its format is {body['format']!r}, and this holdfast reads {_FORMAT}")  # noqa: TRY301
        return {each.index: each for each in map(_checked, body["samples"])}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise LoaderError(
            f"{path} is no quarantine ledger ({type(error).__name__}: {error})",
            limit="which samples are quarantined would be forgotten without a word",
            fix=(
                "bring it back from a copy, or delete it; upgrade holdfast if a newer one wrote it."
            ),
            rule="H617",
        ) from error


def _checked(found: dict[str, Any]) -> Quarantined:
    """Return one sample of the file, of which every field is what it must be."""
    entry = Quarantined(**{**found, "index": key_of(found["index"])})
    texts = isinstance(entry.kind, str) and isinstance(entry.evidence, str)
    if not (texts and isinstance(entry.epoch, int) and isinstance(entry.released, bool)):
        raise TypeError(f"sample {entry.index!r} has a field of another kind")
    if isinstance(found["index"], dict) or not 0 <= entry.unix_seconds < _LATEST_SECONDS:
        raise ValueError(f"sample {entry.index!r} has an index or a time that cannot be")
    return entry
