"""`holdfast quarantine` as a user calls it: what it lists, what it finds when reading again, what it takes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from holdfast.cli import quarantine
from holdfast.cli.factories import load_factory
from holdfast.guard.directory import RunDirectory
from holdfast.loader.quarantine import FILE_NAME, Ledger

FACTORY = """
import os, random, signal, time
from pathlib import Path
from torch.utils.data import IterableDataset
from torch.utils.data import DataLoader as TorchLoader
from holdfast import DataLoader

HERE = Path(__file__).parent

class Files:
    def __len__(self):
        return 10
    def __getitem__(self, index):
        drew = random.random()
        fault = HERE / f"fault{index}"
        fault = fault.read_text() if fault.exists() else ""
        if fault == "raise":
            raise OSError(f"[/bold] no file [{index}], drew {drew}")
        if fault == "nan":
            return float("nan")
        if fault == "hang":
            time.sleep(600)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return float(index)

class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))

def dataset():
    return Files()

def loader():
    return DataLoader(Files(), batch_size=5, seed=7, quarantine=5, check_finite=True)

def torch_loader():
    return TorchLoader(Files(), batch_size=2)

def stream():
    return Stream()

def raises():
    raise KeyError("DATA")
"""

app = typer.Typer()
app.command()(quarantine.run)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def as_json(*arguments: object) -> dict[str, Any]:
    result = call(*arguments, "--json")
    found: dict[str, Any] = json.loads(result.stdout)
    return {**found, "exit code": result.exit_code}


def factory(folder: Path, name: str) -> str:
    return f"{folder / 'program.py'}:{name}"


def quarantine_by_a_run(folder: Path, epoch: int) -> set[Any]:
    """Return what a run over these files has quarantined when it has trained an epoch."""
    loader = load_factory(factory(folder, "loader"))()
    loader.attach(lambda data: None, folder)
    loader.go_to(epoch)
    list(loader)
    return loader.ledger.bad(epoch)  # type: ignore[no-any-return]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return a run that has met a sample that raises and one with NaN; two more are entered by hand."""
    (tmp_path / "program.py").write_text(FACTORY)
    (tmp_path / "fault3").write_text("raise")
    (tmp_path / "fault5").write_text("nan")
    assert quarantine_by_a_run(tmp_path, 0) == {3, 5}
    ledger = Ledger(9, None, lambda: 1.7e9)
    ledger.keep_in(tmp_path / FILE_NAME)
    ledger.add(8, "hung", 2, "worker 1 is stuck")
    ledger.add(9, "killed its worker", 2, "worker 0 was killed by SIGSEGV")
    return tmp_path


def test_it_lists_what_is_quarantine(run_dir: Path) -> None:
    """The table has index, kind, epoch, time and the evidence's last line as it is; --evidence shows the rest."""
    listed = call(run_dir)
    assert listed.exit_code == 0, listed.output
    (row,) = [line for line in listed.output.splitlines() if "hung" in line]
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        "8", "hung", "2", "2023-11-14 22:13:20", "quarantined", "worker 1 is stuck",
    ]  # fmt: skip
    assert "OSError: [/bold] no file [3], drew 0." in listed.output
    assert "Traceback" not in listed.output
    assert listed.output.endswith("4 quarantined, 0 released\n")
    assert "  Traceback" in call(run_dir, "--evidence").output


def test_the_json_holds_all_that_is_known(run_dir: Path) -> None:
    """Each sample comes with its whole evidence, whether it was released, and the time in UTC."""
    found = as_json(run_dir)
    assert [row["index"] for row in found["samples"]] == [3, 5, 8, 9]
    assert found["samples"][2] == {
        "index": 8, "kind": "hung", "epoch": 2, "found": "2023-11-14 22:13:20",
        "evidence": "worker 1 is stuck", "released": False,
    }  # fmt: skip
    assert found["samples"][0]["evidence"].startswith("Traceback")
    assert found["released"] == []


def test_a_run_that_has_quarantined_nothing_says_so(tmp_path: Path) -> None:
    """A run directory without a ledger is an empty list, also if all that there is shall be released."""
    (tmp_path / "checkpoints").mkdir()
    for more in ((), ("--release-all",)):
        listed = call(tmp_path, *more)
        assert (listed.exit_code, listed.output) == (0, "0 quarantined, 0 released\n")
    assert not (tmp_path / FILE_NAME).exists()


@pytest.mark.parametrize("name", ["dataset", "torch_loader", "loader"])
def test_each_sample_is_read_again(run_dir: Path, name: str) -> None:
    """A sample that still raises, is not finite, hangs or kills is bad and is exit code 1; repaired, all are good."""
    (run_dir / "fault8").write_text("hang")
    (run_dir / "fault9").write_text("kill")
    retest = (run_dir, "--retest", factory(run_dir, name), "--timeout", 0.5)
    bad = as_json(*retest)
    assert bad["exit code"] == 1
    assert [row["now"] for row in bad["samples"]] == ["bad"] * 4
    for row, why in zip(bad["samples"], ("no file [3]", "sample holds 1 NaN", "0.5 s", "died"), strict=True):
        assert why in row["why"]
    for index in (3, 5, 8, 9):
        (run_dir / f"fault{index}").unlink()
    good = call(*retest)
    assert good.exit_code == 0
    assert good.stdout.count(" good ") == 4
    assert good.stdout.endswith("4 quarantined, 0 released\n")


def test_the_runs_loader_gives_the_random_numbers_of_the_run(run_dir: Path) -> None:
    """Read again through the loader of the run, a sample draws what it drew when it was quarantined."""
    row = as_json(run_dir, "--retest", factory(run_dir, "loader"), "--timeout", 5)["samples"][0]
    assert row["why"].splitlines()[-1] == row["evidence"].splitlines()[-1]
    first, second = (as_json(run_dir, "--retest", factory(run_dir, "dataset"))["samples"][0]["why"] for _ in range(2))
    assert first == second != row["why"]


def test_what_is_good_now_can_be_released(run_dir: Path) -> None:
    """--release-good releases what was read and nothing else, and the run that goes on reads just that again."""
    (run_dir / "fault5").unlink()
    (run_dir / "fault9").write_text("kill")
    arguments = (run_dir, "--retest", factory(run_dir, "loader"), "--release-good")
    found = as_json(*arguments)
    assert found["exit code"] == 1
    assert found["released"] == [5, 8]
    assert [row["released"] for row in found["samples"]] == [False, True, True, False]
    assert quarantine_by_a_run(run_dir, 2) == {3, 9}
    assert "2 quarantined, 2 released" in call(run_dir).output
    assert "now" not in as_json(*arguments)["samples"][1], "what was released before is not read again"


def test_reading_does_not_answer_what_training_found(run_dir: Path) -> None:
    """A sample that provenance has quarantined is unclear if it can be read, and --release-good leaves it aside."""
    ledger = Ledger(9, None, lambda: 1.7e9)
    ledger.keep_in(run_dir / FILE_NAME)
    ledger.release([3, 5])
    ledger.add(1, "provenance", 4, "NaN in the loss")
    found = as_json(run_dir, "--retest", factory(run_dir, "dataset"), "--release-good")
    assert found["exit code"] == 0
    assert found["released"] == [8, 9]
    assert found["samples"][-1]["now"] == "unclear"
    assert "provenance" in found["samples"][-1]["why"]


def test_samples_are_released_by_name(run_dir: Path) -> None:
    """--release may be repeated and takes what the list prints, also of keys; --release-all takes the rest."""
    ledger = Ledger(9, None, lambda: 1.7e9)
    ledger.keep_in(run_dir / FILE_NAME)
    ledger.add(("anna", 7), "raised", 0, "")
    ledger.add(b"\x01", "raised", 0, "")
    found = as_json(run_dir, "--release", "('anna', 7)", "--release", 8)
    assert (found["exit code"], found["released"]) == (0, [8, "('anna', 7)"])
    rest = call(run_dir, "--release-all")
    assert rest.exit_code == 0
    assert [line for line in rest.output.splitlines() if line.startswith("released")] == [
        "released 3", "released 5", "released 9", r"released b'\x01'",
    ]  # fmt: skip
    assert rest.output.endswith("0 quarantined, 6 released\n")


def test_nothing_is_released_under_a_live_run(run_dir: Path) -> None:
    """A run that holds the directory keeps its ledger, which may still be listed."""
    before = (run_dir / FILE_NAME).read_bytes()
    directory = RunDirectory(run_dir)
    directory.acquire()
    try:
        for how in (("--release", 3), ("--release-all",), ("--retest", factory(run_dir, "raises"), "--release-good")):
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
        (("--release-good",), "H105", "--release-good without --retest"),
        (("--retest", "nowhere"), "H703", "no function after a colon"),
        (("--retest", "{}:raises"), "H703", "KeyError: 'DATA'"),
        (("--retest", "{}:stream", "--release-all"), "H703", "its samples have no index"),
    ],
)
def test_wrong_use_changes_nothing(run_dir: Path, arguments: tuple[object, ...], rule: str, what: str) -> None:
    """A message with the fix and exit code 2, and the ledger is as it was."""
    before = (run_dir / FILE_NAME).read_bytes()
    filled = [str(each).format(run_dir / "program.py") for each in arguments]
    failed = as_json(run_dir, *filled)
    assert (failed["exit code"], failed["error"]["rule"]) == (2, rule)
    assert what in failed["error"]["what"]
    assert "Fix: " in call(run_dir, *filled).output
    assert (run_dir / FILE_NAME).read_bytes() == before


def test_a_wrong_directory_and_a_damaged_ledger_are_told(tmp_path: Path) -> None:
    """What is no run directory is H701 and is not made into one; a damaged ledger is H617."""
    missing = as_json(tmp_path / "nowhere", "--release-all")
    assert (missing["exit code"], missing["error"]["rule"]) == (2, "H701")
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / FILE_NAME).write_text('{"format": 1, "sam')
    damaged = as_json(tmp_path, "--release-all")
    assert (damaged["exit code"], damaged["error"]["rule"]) == (2, "H617")
