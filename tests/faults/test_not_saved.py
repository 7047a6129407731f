"""A run whose newest state is in no checkpoint does not end with exit code 0, and code after its
loop still runs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from recipes.demo.small_disk import command_with_small_disk
from tests.forked_attempts import run_supervised
from tests.prepared import run_prepared

from holdfast.checkpoint.store import Store
from holdfast.guard.saving.unsaved import EXIT_CODE

PROGRAM = Path(__file__).parent / "programs" / "not_saved.py"


def run(tmp_path: Path, *, fault: str = "no_room", end: str = "returns", **more: Any) -> Any:
    request = {"run_dir": str(tmp_path / "run"), "fault": fault, "end": end, **more}
    return run_prepared([PROGRAM, json.dumps(request)], timeout=300)


def test_the_exit_code_is_that_of_an_error_of_input_or_output() -> None:
    """Schedulers and scripts compare numbers: 74 is EX_IOERR of sysexits.h."""
    assert EXIT_CODE == 74


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("fault", ["no_room", "no_such_disk", "no_directory", "no_permission"])
def test_a_run_that_could_not_save_ends_with_its_own_exit_code(
    fault: str, async_save: Any, tmp_path: Path
) -> None:
    """Whatever refuses the last saves.

    Stderr names the run, and code after the loop is not cut off.
    """
    ended = run(tmp_path, fault=fault, async_save=async_save)

    assert ended.returncode == EXIT_CODE, ended.stderr
    assert "after the loop" in ended.stdout
    assert str(tmp_path / "run") in ended.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("exit with 0", EXIT_CODE),
        ("stopped", EXIT_CODE),
        ("breaks", EXIT_CODE),
        ("has no loop", EXIT_CODE),
        ("another run is saved", EXIT_CODE),
        ("exit with 3", 3),
        ("exit with words", 1),
        ("raises", 1),
    ],
)
def test_an_exit_code_of_the_script_that_is_not_0_stays(
    end: str, status: int, tmp_path: Path
) -> None:
    """However a program ends: 0 becomes 74, and every other code is the script's."""
    ended = run(tmp_path, end=end)

    assert ended.returncode == status, ended.stderr
    assert "after the loop" in ended.stdout


@pytest.mark.parametrize(
    "end", ["room before the end", "closed later", "closed at exit", "trains on"]
)
def test_a_later_save_that_works_takes_the_exit_code_back(end: str, tmp_path: Path) -> None:
    """By the loop itself, by `close`, or by another loop.

    Then the newest state is in a checkpoint.
    """
    ended = run(tmp_path, end=end)

    assert ended.returncode == 0, ended.stderr
    assert Store(tmp_path / "run" / "checkpoints").entries()[0].global_step >= 12


def test_a_forked_child_has_its_own_exit_code(tmp_path: Path) -> None:
    """It has saved nothing, and nothing of it is lost."""
    ended = run(tmp_path, end="forks")

    assert "the child ended with 0" in ended.stdout
    assert ended.returncode == EXIT_CODE


@pytest.mark.slow
def test_a_full_disk_at_the_end_is_an_exit_code(start: Any, small_disk: Path) -> None:
    """On a real disk that is really full, the process ends with 74 after its own last words."""
    life = start(
        command=command_with_small_disk(small_disk, []),
        run_dir=str(small_disk / "run"),
        fill_at=8,
        filler=str(small_disk / "filler"),
    )

    assert life.process.wait(300) == EXIT_CODE
    assert "digest" in life.lines()[-1]


@pytest.mark.slow
def test_the_supervisor_does_not_start_it_again_and_says_why(tmp_path: Path) -> None:
    """The verdict is that it finished and was not saved; the exit code is passed on."""
    request = json.dumps({"run_dir": str(tmp_path / "run"), "fault": "no_room", "end": "returns"})
    command = [sys.executable, PROGRAM, request]

    ended = run_supervised(["--run-dir", tmp_path / "supervised", "--", *command], timeout=200)

    verdict = json.loads((tmp_path / "supervised" / "verdict.json").read_text())
    assert (ended.returncode, verdict["cause"], verdict["restart"]) == (
        EXIT_CODE,
        "H1622",
        "stop",
    ), ended.stderr
