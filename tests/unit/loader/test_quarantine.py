"""The ledger of samples that are quarantined: its cap, what it keeps, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.loader.samples import Samples, items

from holdfast.core.errors import LoaderError
from holdfast.core.events.data import EventData
from holdfast.core.events.run_events import SampleQuarantined
from holdfast.loader.loader import DataLoader
from holdfast.loader.quarantine import FILE_NAME, Quarantined, QuarantineLedger, read_ledger

ENTRY = {
    "index": 3,
    "kind": "raised",
    "epoch": 0,
    "evidence": "x",
    "unix_seconds": 5.0,
    "released": False,
}


def _ledger(limit: float = 5, at: float = 1.0) -> QuarantineLedger:
    return QuarantineLedger(limit, None, lambda: at)


def _written(tmp_path: Path, *samples: dict[str, Any]) -> Path:
    path = tmp_path / FILE_NAME
    path.write_text(json.dumps({"format": 1, "samples": list(samples)}))
    return path


@pytest.mark.parametrize(
    ("limit", "length", "allowed"),
    [
        (0.001, 10, 1),
        (0.001, 5000, 5),
        (0.5, 3, 1),
        (0.001, None, 1),
        (1, 5000, 1),
        (7, 3, 7),
        (0, 5000, 0),
    ],
)
def test_the_cap_is_a_share_or_a_number(limit: float, length: int | None, allowed: int) -> None:
    """A share below 1 allows at least one sample, a number that many, 0 none.

    One more is H612 and is not kept.
    """
    ledger = QuarantineLedger(limit, length, lambda: 0.0)
    for index in range(allowed):
        assert ledger.add(index, "raised", 0, "")
    with pytest.raises(LoaderError) as found:
        ledger.add(allowed, "raised", 0, "Traceback\n  ...\nOSError: no file")
    assert found.value.rule == "H612"
    assert f"sample {allowed} cannot be used (raised: OSError: no file)" in found.value.what
    assert found.value.limit == f"quarantine={limit:g} allows {allowed}"
    assert len(ledger) == allowed
    assert allowed not in ledger.bad(0)


@pytest.mark.parametrize(("found_at", "expected"), [(4.0, set()), (5.0, set()), (6.0, {3})])
def test_what_was_released_meanwhile_comes_back_only_if_found_anew(
    tmp_path: Path, found_at: float, expected: set[int]
) -> None:
    """A run that goes on in the same process honours a release in the file, unless it found the
    sample bad later.
    """
    path = _written(tmp_path, {**ENTRY, "released": True})
    ledger = _ledger(at=found_at)
    ledger.add(3, "raised", 0, "")
    ledger.keep_in(path)
    assert ledger.bad(0) == expected


def test_a_run_with_more_quarantined_than_is_allowed_is_refused(tmp_path: Path) -> None:
    """With a lower cap than before, the error comes at the start and the file stays as it is."""
    path = _written(tmp_path, ENTRY, {**ENTRY, "index": 4}, {**ENTRY, "index": 5, "released": True})
    before = path.read_bytes()
    for limit in (0, 1):
        with pytest.raises(LoaderError, match=r"\(3, 4\)") as found:
            _ledger(limit).keep_in(path)
        assert found.value.rule == "H612"
    _ledger(2).keep_in(path)
    assert path.read_bytes() == before


def test_a_file_that_cannot_be_written_ends_no_training(tmp_path: Path) -> None:
    """The sample is quarantined all the same, the event says that the file lacks it, and the
    next one writes both.
    """

    def read(index: int) -> int:
        if index in {3, 5}:
            raise ValueError("unreadable")
        return index

    place = tmp_path / "gone"
    place.mkdir()
    loader = DataLoader(Samples(8, read), batch_size=2, quarantine=2)
    told: list[str | None] = []

    def record(event: EventData) -> None:
        assert isinstance(event, SampleQuarantined)
        told.append(event.not_written)
        place.mkdir(exist_ok=True)

    loader.attach(record, place)
    place.rmdir()
    assert items(loader) == [0, 1, 2, 4, 4, 6, 6, 7]
    assert "No such file" in str(told[0])
    assert told[1:] == [None]
    assert [*read_ledger(place / FILE_NAME)] == [3, 5]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"\xff\xfe",
        b'{"format": 1}',
        b'{"format": 1, "samples": {"a": 1}}',
        b'{"format": 2, "samples": []}',
        b"[" * 100_000,
        *(
            json.dumps({"format": 1, "samples": [changed]}).encode()
            for changed in (
                {**ENTRY, "index": {"a": 1}},
                {**ENTRY, "index": {"bytes": "xyz"}},
                {**ENTRY, "epoch": "0"},
                {**ENTRY, "evidence": None},
                {**ENTRY, "released": 1},
                {**ENTRY, "unix_seconds": float("nan")},
                {**ENTRY, "unix_seconds": 1e300},
                {**ENTRY, "unix_seconds": "now"},
                {**ENTRY, "more": 1},
                {name: value for name, value in ENTRY.items() if name != "kind"},
            )
        ),
    ],
)
def test_a_file_that_is_no_ledger_is_refused(tmp_path: Path, body: bytes) -> None:
    """Damage is H617 when a run or a command reads it, never another exception and never an
    empty ledger.
    """
    (tmp_path / FILE_NAME).write_bytes(body)
    with pytest.raises(LoaderError, match=r"\[H617\]"):
        _ledger().keep_in(tmp_path / FILE_NAME)
    (tmp_path / FILE_NAME).write_text(json.dumps({"format": 1, "samples": [ENTRY]}))
    assert read_ledger(tmp_path / FILE_NAME) == {3: Quarantined(**ENTRY)}
