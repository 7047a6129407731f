"""The ledger of quarantined samples, with the epoch and the evidence for each sample.

The ledger is a JSON file next to the run's checkpoints, so it survives rollbacks and restarts. A
loader that is not part of a run keeps the ledger in memory. The ledger records the epoch from which
a sample is replaced, so that repeating an earlier epoch yields the same samples as before.

This module does not import torch.
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

# Maximum length of the evidence. The beginning of longer evidence is omitted, because the end of a
# traceback is more useful.
_EVIDENCE_CHARACTERS = 2000

# Maximum size of a ledger file.
_MAX_BYTES = 1 << 30

# A time in the year 6325. A later time means that the file is damaged, and `datetime` may not
# support it.
_LATEST_SECONDS = 2**37

# Maximum number of indices listed in an error message.
_INDICES_LISTED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """A sample that is quarantined from `epoch` on.

    Args:
        index: Dataset index: a number, a string, or a tuple of these.
        kind: ``"raised"``, ``"hung"``, ``"killed its worker"``, or ``"provenance"``.
        epoch: The first epoch in which the sample is replaced.
        evidence: A traceback, or a description of what happened.
        unix_seconds: When the sample was quarantined, in seconds since 1970.
        released: Whether a user has released the sample from quarantine.
    """

    index: Any
    kind: str
    epoch: int
    evidence: str
    unix_seconds: float
    released: bool = False


class QuarantineLedger:
    """The list of quarantined samples, in memory and, for a loader in a run, in the ledger file.

    Args:
        limit: The maximum number of quarantined samples: a count, or a fraction of the dataset
            below 1, which allows at least one. With 0, no samples are quarantined.
        length: The number of samples in the dataset, or None if unknown.
        now: Returns the current time, in seconds since 1970.
    """

    def __init__(self, limit: float, length: int | None, now: Callable[[], float]) -> None:
        self._now = now
        self._path: Path | None = None
        # Entries by key (see `key_of`), in the order in which the samples were quarantined.
        self._entries: dict[Any, Quarantined] = {}
        self._share = limit
        if limit >= 1 or limit == 0:
            self.limit = int(limit)
        else:
            # At least one sample is allowed, even if the length of the dataset is unknown.
            self.limit = max(1, math.floor(limit * (length or 0)))

    def __iter__(self) -> Iterator[Quarantined]:
        """Yield all samples that were ever quarantined, including released ones, oldest first."""
        return iter(self._entries.values())

    def __len__(self) -> int:
        """Return how many samples are currently quarantined."""
        return sum(not entry.released for entry in self)

    def keep_in(self, path: Path) -> None:
        """Load the ledger file of a run, and keep the file up to date from now on.

        Samples quarantined before this call are added unless the file already lists them. A sample
        that was released in the file but has failed again since then is quarantined again.

        Raises:
            LoaderError: H612 if the file lists too many samples, H617 if it is not a valid ledger.
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
                f"{path} lists {len(quarantined)} quarantined samples ({_list_some(quarantined)})"
            )
        has_new_entries = bool(self._entries)
        self._entries = entries
        self._path = path
        if has_new_entries:
            self._write()

    def bad(self, epoch: int) -> set[Any]:
        """Return the keys (see `key_of`) of all samples that are replaced in the given epoch."""
        return set(_quarantined_indices(entry for entry in self if entry.epoch <= epoch))

    def add(self, index: Any, kind: str, epoch: int, evidence: str) -> SampleQuarantined | None:
        """Quarantine a sample.

        If the ledger file cannot be written, training continues. This process remembers the sample.
        After a restart, the sample would fail again and be quarantined again.

        Args:
            index: Dataset index.
            kind: See `Quarantined`.
            epoch: See `Quarantined`.
            evidence: See `Quarantined`.

        Returns:
            The event to report, or None if the sample is already quarantined.

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
                f" samples are already quarantined ({_list_some(_quarantined_indices(self))})"
            )
        if len(evidence) > _EVIDENCE_CHARACTERS:
            evidence = "..." + evidence[-_EVIDENCE_CHARACTERS:]
        # An old entry is removed first, so that the new one is inserted at the end.
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
        """Release samples from quarantine, and return the keys of those that were quarantined."""
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
                "repair the data, or raise quarantine= if you can train without these samples."
                " `holdfast quarantine RUN_DIR` shows the evidence and can release samples."
            ),
            rule="H612",
        )


def last_line(evidence: str) -> str:
    """Return the last line of the evidence, which names the exception if it is a traceback.

    The lines with the fix and the rule id, with which holdfast's own errors end, are skipped.
    """
    lines = [line for line in evidence.strip().splitlines() if not line.startswith(("Fix: ", "[H"))]
    return lines[-1] if lines else ""


def key_of(index: Any) -> Any:
    """Return the key of an index: a form that can be compared and written to a file.

    NumPy and torch numbers become Python numbers, and lists become tuples. A value that cannot be
    stored in JSON or a set, such as a slice or a path, is replaced by its ``repr``.
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
    """Return an index in the form that users see: a number or a string."""
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
    """Return the entries of a run's ledger by key (see `key_of`).

    Returns an empty dict if the file does not exist.

    Raises:
        LoaderError: H617 if the file is not a valid ledger.
    """
    try:
        entries = _parse(read_file(path, _MAX_BYTES))
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise LoaderError(
            f"{path} is not a valid quarantine ledger ({type(error).__name__}: {error})",
            limit="ignoring the file would lose the list of quarantined samples",
            fix=(
                "restore the file from a copy, or delete it. If a newer holdfast wrote it, upgrade"
                " holdfast."
            ),
            rule="H617",
        ) from error
    return {entry.index: entry for entry in entries}


def _parse(content: bytes) -> list[Quarantined]:
    """Return the entries in the contents of a ledger file.

    Raises `ValueError`, `KeyError` or `TypeError` if the contents are not a ledger.
    """
    body = json.loads(content)
    if body["format"] != _FORMAT:
        raise ValueError(
            f"the file has format {body['format']!r}, but this holdfast only reads {_FORMAT}"
        )
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
