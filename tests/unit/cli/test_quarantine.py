"""`holdfast quarantine` as a user calls it: what it lists, what it releases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from holdfast import DataLoader
from holdfast.cli.quarantine import run as quarantine
from holdfast.guard.directory import RunDirectory
from holdfast.loader.quarantine import FILE_NAME, QuarantineLedger


class Files:
    """Samples of which some are faulty, as files beside them say."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> float:
        fault = self.folder / f"fault{index}"
        if fault.exists() and fault.read_text() == "raise":
            raise OSError(f"[/bold] no file [{index}]")
        if fault.exists():
            raise ValueError("damaged")
        return float(index)


app = typer.Typer()
app.command()(quarantine)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def as_json(*arguments: object) -> dict[str, Any]:
    result = call(*arguments, "--json")
    found: dict[str, Any] = json.loads(result.stdout)
    return {**found, "exit code": result.exit_code}


def quarantine_by_a_run(folder: Path, epoch: int) -> set[Any]:
    """Return what a run over these files has quarantined when it has trained an epoch."""
    loader = DataLoader(Files(folder), batch_size=5, seed=7, quarantine=5)
    loader.attach(lambda data: None, folder)
    loader.go_to(epoch)
    list(loader)
    return loader.ledger.bad(epoch)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return a run that has met a sample that raises and one that is damaged.

    Two more are entered by hand.
    """
    (tmp_path / "fault3").write_text("raise")
    (tmp_path / "fault5").write_text("damage")
    assert quarantine_by_a_run(tmp_path, 0) == {3, 5}
    ledger = QuarantineLedger(9, None, lambda: 1.7e9)
    ledger.keep_in(tmp_path / FILE_NAME)
    ledger.add(8, "hung", 2, "worker 1 is stuck")
    ledger.add(9, "killed its worker", 2, "worker 0 was killed by SIGSEGV")
    return tmp_path


def test_it_lists_what_is_quarantine(run_dir: Path) -> None:
    """The table has index, kind, epoch, time and the evidence's last line as it is.

    --evidence shows the rest.
    """
    listed = call(run_dir)
    assert listed.exit_code == 0, listed.output
    (row,) = [line for line in listed.output.splitlines() if "hung" in line]
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        "8",
        "hung",
        "2",
        "2023-11-14 22:13:20",
        "quarantined",
        "worker 1 is stuck",
    ]
    assert "OSError: [/bold] no file [3]" in listed.output
    assert "Traceback" not in listed.output
    assert listed.output.endswith("4 quarantined, 0 released\n")
    assert "  Traceback" in call(run_dir, "--evidence").output


def test_the_json_holds_all_that_is_known(run_dir: Path) -> None:
    """Each sample comes with its whole evidence, whether it was released, and the time in UTC."""
    found = as_json(run_dir)
    assert [row["index"] for row in found["samples"]] == [3, 5, 8, 9]
    assert found["samples"][2] == {
        "index": 8,
        "kind": "hung",
        "epoch": 2,
        "found": "2023-11-14 22:13:20",
        "evidence": "worker 1 is stuck",
        "released": False,
    }
    assert found["samples"][0]["evidence"].startswith("Traceback")
    assert found["released"] == []


def test_a_run_that_has_quarantined_nothing_says_so(tmp_path: Path) -> None:
    """A run directory without a ledger is an empty list, also if all that there is shall be
    released.
    """
    (tmp_path / "checkpoints").mkdir()
    for more in ((), ("--release-all",)):
        listed = call(tmp_path, *more)
        assert (listed.exit_code, listed.output) == (0, "0 quarantined, 0 released\n")
    assert not (tmp_path / FILE_NAME).exists()


def test_a_released_sample_is_read_again_by_the_run(run_dir: Path) -> None:
    """What was repaired is used again, and what is still bad is quarantined anew."""
    (run_dir / "fault5").unlink()
    found = as_json(run_dir, "--release-all")
    assert found["released"] == [3, 5, 8, 9]
    assert quarantine_by_a_run(run_dir, 2) == {3}


def test_samples_are_released_by_name(run_dir: Path) -> None:
    """--release may be repeated and takes what the list prints, also of keys.

    --release-all takes the rest.
    """
    ledger = QuarantineLedger(9, None, lambda: 1.7e9)
    ledger.keep_in(run_dir / FILE_NAME)
    ledger.add(("anna", 7), "raised", 0, "")
    ledger.add(b"\x01", "raised", 0, "")
    found = as_json(run_dir, "--release", "('anna', 7)", "--release", 8)
    assert (found["exit code"], found["released"]) == (0, [8, "('anna', 7)"])
    rest = call(run_dir, "--release-all")
    assert rest.exit_code == 0
    assert [line for line in rest.output.splitlines() if line.startswith("released")] == [
        "released 3",
        "released 5",
        "released 9",
        r"released b'\x01'",
    ]
    assert rest.output.endswith("0 quarantined, 6 released\n")


def test_nothing_is_released_under_a_live_run(run_dir: Path) -> None:
    """A run that holds the directory keeps its ledger, which may still be listed."""
    before = (run_dir / FILE_NAME).read_bytes()
    directory = RunDirectory(run_dir)
    directory.acquire()
    try:
        for how in (("--release", 3), ("--release-all",)):
            refused = as_json(run_dir, *how)
            assert (refused["exit code"], refused["error"]["rule"]) == (2, "H301")
        assert call(run_dir).exit_code == 0
    finally:
        directory.release()
    assert (run_dir / FILE_NAME).read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "rule", "what"),
    [
        (("--release", 4), "H710", "sample '4' is not quarantined"),
        (("--release", 3, "--release", "x"), "H710", "sample 'x' is not quarantined"),
    ],
)
def test_wrong_use_changes_nothing(
    run_dir: Path, arguments: tuple[object, ...], rule: str, what: str
) -> None:
    """A message with the fix and exit code 2, and the ledger is as it was."""
    before = (run_dir / FILE_NAME).read_bytes()
    failed = as_json(run_dir, *arguments)
    assert (failed["exit code"], failed["error"]["rule"]) == (2, rule)
    assert what in failed["error"]["what"]
    assert "Fix: " in call(run_dir, *arguments).output
    assert (run_dir / FILE_NAME).read_bytes() == before


def test_a_wrong_directory_and_a_damaged_ledger_are_told(tmp_path: Path) -> None:
    """What is not there is H733 and is not made; a damaged ledger is H617."""
    missing = as_json(tmp_path / "nowhere", "--release-all")
    assert (missing["exit code"], missing["error"]["rule"]) == (2, "H733")
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / FILE_NAME).write_text('{"format": 1, "sam')
    damaged = as_json(tmp_path, "--release-all")
    assert (damaged["exit code"], damaged["error"]["rule"]) == (2, "H617")
