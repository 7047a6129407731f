"""Samples that are set aside: which, since when, and on what evidence. No torch.

The ledger is a JSON file beside the run's checkpoints, so it outlives rollbacks and restarts; a loader without a run
keeps it in memory. A sample counts as set aside from the epoch on in which it was found, so that an earlier epoch
that is trained again sees what it saw.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.core.durable import replace_file
from holdfast.core.errors import LoaderError

FILE_NAME = "quarantine.json"
_EVIDENCE_CHARACTERS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """One sample that is set aside.

    Args:
        index: Dataset index.
        kind: ``"raised"``, ``"non-finite"``, ``"hung"``, ``"killed its worker"``, or ``"provenance"``.
        epoch: From this one on it is replaced.
        evidence: A traceback, or what was seen.
        unix_seconds: When it was found.
        released: Whether someone has taken it back.
    """

    index: Any
    kind: str
    epoch: int
    evidence: str
    unix_seconds: float
    released: bool = False


class Ledger:
    """Which samples are set aside.

    Args:
        limit: Most samples that may be: a share of the dataset below 1, which allows at least 1, or a number; 0 for
            none at all.
        length: Samples in the dataset, or None if it is not known, which a share takes as 1.
        now: Tells the time.
    """

    def __init__(self, limit: float, length: int | None, now: Callable[[], float]) -> None:
        self._now = now
        self._path: Path | None = None
        self._entries: dict[Any, Quarantined] = {}
        self._share = limit
        self.limit = int(limit) if limit >= 1 or limit == 0 else max(1, math.floor(limit * (length or 0)))

    def __iter__(self) -> Iterator[Quarantined]:
        """Yield what was found, in that order, also what was released."""
        return iter(self._entries.values())

    def __len__(self) -> int:
        """Return how many are set aside now."""
        return sum(not each.released for each in self)

    def keep_in(self, path: Path) -> None:
        """Read the ledger of a run, and write it from now on.

        Raises:
            LoaderError: H617 for a file that is no ledger.
        """
        here, self._entries = self._entries, read_ledger(path)
        self._path = path
        for entry in here.values():
            self._entries.setdefault(entry.index, entry)
        if here:
            self._write()

    def aside(self, epoch: int) -> set[Any]:
        """Return the indices that are replaced in an epoch."""
        return {each.index for each in self if not each.released and each.epoch <= epoch}

    def add(self, index: Any, kind: str, epoch: int, evidence: str) -> bool:
        """Set a sample aside.

        Returns:
            Whether that is news.

        Raises:
            LoaderError: H612 if that would be one too many.
        """
        index = _plain(index)
        known = self._entries.get(index)
        if known is not None and not known.released and known.epoch <= epoch:
            return False
        if (known is None or known.released) and len(self) >= self.limit:
            raise self._one_too_many(index, kind, evidence)
        evidence = evidence if len(evidence) <= _EVIDENCE_CHARACTERS else "..." + evidence[-_EVIDENCE_CHARACTERS:]
        self._entries[index] = Quarantined(
            index=index, kind=kind, epoch=epoch, evidence=evidence, unix_seconds=self._now()
        )
        self._write()
        return True

    def release(self, index: Any) -> bool:
        """Take a sample back; return whether it was set aside."""
        index = _plain(index)
        known = self._entries.get(index)
        if known is None or known.released:
            return False
        self._entries[index] = replace(known, released=True)
        self._write()
        return True

    def _write(self) -> None:
        if self._path is not None:
            body = {"format": 1, "samples": [asdict(each) for each in self]}
            replace_file(self._path, json.dumps(body, indent=1, default=repr).encode() + b"\n")

    def _one_too_many(self, index: Any, kind: str, evidence: str) -> LoaderError:
        others = [each.index for each in self if not each.released]
        last = evidence.strip().splitlines()[-1] if evidence.strip() else kind
        return LoaderError(
            f"sample {index!r} cannot be used ({kind}: {last}), and {len(others)} are set aside already "
            f"({', '.join(map(repr, others[:10]))})",
            limit=f"quarantine={self._share:g} allows {self.limit}",
            fix="repair the data (`holdfast quarantine RUN_DIR` shows the evidence), or raise quarantine= if you can "
            "do without these samples.",
            rule="H612",
        )


def _plain(index: Any) -> Any:
    """Return an index as JSON keeps it: numpy's numbers are numbers, lists are tuples."""
    if isinstance(index, (list, tuple)):
        return tuple(_plain(each) for each in index)
    return int(index) if hasattr(index, "__index__") else index


def read_ledger(path: Path) -> dict[Any, Quarantined]:
    """Return the ledger of a run by index; empty if there is none.

    Raises:
        LoaderError: H617 for a file that is no ledger.
    """
    with suppress(FileNotFoundError):
        try:
            found = json.loads(path.read_bytes())["samples"]
            samples = [Quarantined(**{**each, "index": _plain(each["index"])}) for each in found]
        except (ValueError, KeyError, TypeError) as error:
            raise LoaderError(
                f"{path} is no quarantine ledger ({error})",
                limit="which samples are set aside would be forgotten without a word",
                fix="bring it back from a copy, or delete it to set nothing aside.",
                rule="H617",
            ) from error
        return {each.index: each for each in samples}
    return {}
