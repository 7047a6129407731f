"""Keep the ledger of quarantined samples: which, since when, and on what evidence. No torch.

The ledger is a JSON file beside the run's checkpoints, so it outlives rollbacks and restarts. A
loader without a run keeps it in memory. A sample is replaced starting with the epoch in which it
was quarantined, so that an earlier epoch that is trained again gets the same samples as before.
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

# Longer evidence is cut at its beginning, because the end of a traceback says what happened.
_EVIDENCE_CHARACTERS = 2000

# The largest ledger that is read.
_MOST_BYTES = 1 << 30

# A time in the year 6325. A later one can only be damage, and may be beyond the range of
# `datetime`.
_LATEST_SECONDS = 2**37

# The number of indices that an error message lists.
_INDICES_LISTED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """One sample that is quarantined, starting with `epoch`.

    Args:
        index: Dataset index: a number, text, or a tuple of these.
        kind: ``"raised"``, ``"hung"``, ``"killed its worker"``, or ``"provenance"``.
        epoch: The first epoch in which it is replaced.
        evidence: A traceback, or a description of what happened.
        unix_seconds: When it was found.
        released: Whether someone has released it.
    """

    index: Any
    kind: str
    epoch: int
    evidence: str
    unix_seconds: float
    released: bool = False


class QuarantineLedger:
    """The samples that are quarantined.

    Args:
        limit: The largest number of quarantined samples: a count, or a fraction of the dataset
            below 1, which allows at least one. With 0, none are quarantined.
        length: The number of samples in the dataset, or None if unknown.
        now: Returns the time, in seconds since 1970.
    """

    def __init__(self, limit: float, length: int | None, now: Callable[[], float]) -> None:
        self._now = now
        self._path: Path | None = None
        # By `key_of` the index, in the order in which they were found.
        self._entries: dict[Any, Quarantined] = {}
        self._share = limit
        if limit >= 1 or limit == 0:
            self.limit = int(limit)
        else:
            self.limit = max(1, math.floor(limit * (length or 0)))

    def __iter__(self) -> Iterator[Quarantined]:
        """Yield all samples ever quarantined, including released ones, oldest first."""
        return iter(self._entries.values())

    def __len__(self) -> int:
        """Return how many samples are currently quarantined."""
        return sum(not entry.released for entry in self)

    def keep_in(self, path: Path) -> None:
        """Read the ledger file of a run, and keep it up to date from now on.

        Samples that were found before this call are added, unless the file already lists them. A
        sample that was released in the file and has failed here since then is quarantined again.

        Raises:
            LoaderError: H612 if the file quarantines too many samples, H617 if it is not a ledger.
        """
        entries = read_ledger(path)
        for entry in self:
            in_file = entries.get(entry.index)
            is_found_again = (
                in_file is not None
                and in_file.released
                and entry.unix_seconds > in_file.unix_seconds
            )
            if in_file is None or is_found_again:
                entries[entry.index] = entry
        quarantined = _quarantined_indices(entries.values())
        if len(quarantined) > self.limit:
            raise self._too_many(
                f"{path} quarantines {len(quarantined)} of the samples ({_list_some(quarantined)})"
            )
        has_new_entries = bool(self._entries)
        self._entries = entries
        self._path = path
        if has_new_entries:
            self._write()

    def bad(self, epoch: int) -> set[Any]:
        """Return the keys (`key_of`) of the indices that are replaced in an epoch."""
        return set(_quarantined_indices(entry for entry in self if entry.epoch <= epoch))

    def add(self, index: Any, kind: str, epoch: int, evidence: str) -> SampleQuarantined | None:
        """Quarantine a sample.

        A file that cannot be written does not end training: this process still knows the sample,
        and it would be found again after a restart.

        Args:
            index: Dataset index.
            kind: As `Quarantined`.
            epoch: As `Quarantined`.
            evidence: As `Quarantined`.

        Returns:
            The event, or None if the sample is quarantined already.

        Raises:
            LoaderError: H612 if the quarantine is full.
        """
        key = key_of(index)
        known = self._entries.get(key)
        is_quarantined = known is not None and not known.released
        if known is not None and is_quarantined and known.epoch <= epoch:
            return None
        if not is_quarantined and len(self) >= self.limit:
            raise self._too_many(
                f"sample {key!r} cannot be used ({kind}: {last_line(evidence)}), and {len(self)}"
                f" are quarantined already ({_list_some(_quarantined_indices(self))})"
            )
        if len(evidence) > _EVIDENCE_CHARACTERS:
            evidence = "..." + evidence[-_EVIDENCE_CHARACTERS:]
        # Removed first, so that it moves to the end.
        self._entries.pop(key, None)
        self._entries[key] = Quarantined(
            index=key, kind=kind, epoch=epoch, evidence=evidence, unix_seconds=self._now()
        )
        not_written = None
        try:
            self._write()
        except OSError as error:
            not_written = str(error)
        return SampleQuarantined(
            sample=plain(key),
            why=kind,
            evidence=last_line(evidence),
            quarantined=len(self),
            not_written=not_written,
        )

    def release(self, indices: Iterable[Any]) -> list[Any]:
        """Release samples; return those that were quarantined."""
        keys = {key_of(index) for index in indices}
        released = [index for index in _quarantined_indices(self) if index in keys]
        for index in released:
            self._entries[index] = replace(self._entries[index], released=True)
        if released:
            self._write()
        return released

    def _write(self) -> None:
        if self._path is None:
            return
        body = {"format": _FORMAT, "samples": [asdict(entry) for entry in self]}
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
    """Return the last line of some evidence, which names the exception if it is a traceback.

    The fix and the rule at the end of holdfast's own errors are skipped.
    """
    lines = [line for line in evidence.strip().splitlines() if not line.startswith(("Fix: ", "[H"))]
    return lines[-1] if lines else ""


def key_of(index: Any) -> Any:
    """Return the key of an index: the form in which it is compared and written to a file.

    NumPy and torch numbers become Python numbers, and lists become tuples. Anything that JSON or a
    set cannot hold, such as a slice or a path, becomes its text.
    """
    if type(index) is int:
        return index
    if isinstance(index, (list, tuple)):
        return tuple(key_of(part) for part in index)
    if getattr(index, "ndim", 0):
        return key_of(index.tolist())
    if hasattr(index, "__index__"):
        return int(index)
    if index is None or isinstance(index, (str, float)):
        return index
    return repr(index)


def plain(index: Any) -> int | str:
    """Return an index as it is shown to users: a number or a text."""
    key = key_of(index)
    return key if isinstance(key, (int, str)) else repr(index)


def _quarantined_indices(entries: Iterable[Quarantined]) -> list[Any]:
    return [entry.index for entry in entries if not entry.released]


def _list_some(indices: list[Any]) -> str:
    text = ", ".join(repr(index) for index in indices[:_INDICES_LISTED])
    if len(indices) > _INDICES_LISTED:
        text += ", ..."
    return text


# --- the file -------------------------------------------------------------------------------------


def read_ledger(path: Path) -> dict[Any, Quarantined]:
    """Return the entries of a run's ledger by `key_of` their indices; empty if there is no file.

    Raises:
        LoaderError: H617 for a file that is not a ledger.
    """
    try:
        entries = _parse(read_file(path, _MOST_BYTES))
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise LoaderError(
            f"{path} is not a quarantine ledger ({type(error).__name__}: {error})",
            limit="ignoring it would silently forget which samples are quarantined",
            fix=(
                "restore it from a copy, or delete it; upgrade holdfast if a newer version wrote"
                " it."
            ),
            rule="H617",
        ) from error
    return {entry.index: entry for entry in entries}


def _parse(content: bytes) -> list[Quarantined]:
    """Return the entries of a ledger.

    Raises `ValueError`, `KeyError` or `TypeError` for anything else.
    """
    body = json.loads(content)
    if body["format"] != _FORMAT:
        raise ValueError(f"its format is {body['format']!r}, and this holdfast reads {_FORMAT}")
    return [_parse_entry(fields) for fields in body["samples"]]


def _parse_entry(fields: dict[str, Any]) -> Quarantined:
    entry = Quarantined(**{**fields, "index": key_of(fields["index"])})
    has_right_types = (
        isinstance(entry.kind, str)
        and isinstance(entry.evidence, str)
        and isinstance(entry.epoch, int)
        and isinstance(entry.released, bool)
    )
    if not has_right_types:
        raise TypeError(f"sample {entry.index!r} has a field of the wrong type")
    if isinstance(fields["index"], dict) or not 0 <= entry.unix_seconds < _LATEST_SECONDS:
        raise ValueError(f"sample {entry.index!r} has an impossible index or time")
    return entry
