"""``close`` that fails with EIO, as on a network disk.

The save failed, nothing is closed twice, nothing is left.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from holdfast.checkpoint.store import Store
from holdfast.recorder.reader import read_events

pytestmark = pytest.mark.slow

SOURCE = Path(__file__).parent / "programs" / "failing_close.c"
TRAINING = (
    "import sys; from pathlib import Path; from tests.faults.small_run import train;"
    " train(Path(sys.argv[1]), 9)"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the library that makes ``close`` fail, to be preloaded."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler here")
    made = tmp_path_factory.mktemp("library") / "failing_close.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", str(made), str(SOURCE), "-ldl"], check=True, timeout=60
    )
    return made


class Ended(NamedTuple):
    """A training of 9 steps that is over."""

    status: int
    errors: str
    run_dir: Path
    closed_twice: bool

    def kinds(self) -> list[str]:
        return [event.kind for event in read_events(self.run_dir / "recorder" / "rank0")]

    def saved_steps(self) -> list[int]:
        return sorted(entry.global_step for entry in Store(self.run_dir / "checkpoints").entries())

    def drafts(self) -> list[Path]:
        return list(self.run_dir.rglob(".tmp-*"))


def train_with(library: Path, tmp_path: Path, fails_for: str) -> Ended:
    """Train in a process in which the close of each file fails that has these words in its path."""
    run_dir, notes = tmp_path / "run", tmp_path / "closed twice"
    environment: dict[str, Any] = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "CLOSE_FAILS_FOR": f"{run_dir}{fails_for}",
        "CLOSED_TWICE": str(notes),
    }
    command = [sys.executable, "-c", TRAINING, str(run_dir)]
    ended = subprocess.run(
        command,
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return Ended(ended.returncode, ended.stderr, run_dir, notes.exists())


def test_one_save_fails_and_the_next_one_is_whole(library: Path, tmp_path: Path) -> None:
    """A file that may not be on the disk makes its save fail.

    Its draft is removed, and training goes on.
    """
    ended = train_with(library, tmp_path, "/checkpoints/.tmp-000003")

    # Each try of the third checkpoint fails, since it has the same number.
    assert ended.status == 74, ended.errors
    assert ended.kinds().count("save_failed") == 4
    assert ended.saved_steps() == [0, 2]
    assert (ended.drafts(), ended.closed_twice) == ([], False)


def test_a_file_of_one_step_fails_and_later_steps_are_saved(library: Path, tmp_path: Path) -> None:
    """The failure is an event of that step, and the run ends as if nothing had happened."""
    ended = train_with(library, tmp_path, "/checkpoints/.tmp-000003-step00000004")

    assert ended.status == 0, ended.errors
    assert ended.kinds().count("save_failed") == 1
    assert ended.saved_steps() == [6, 8, 9]
    assert (ended.drafts(), ended.closed_twice) == ([], False)


def test_the_lock_of_a_finished_run_is_given_back(library: Path, tmp_path: Path) -> None:
    """Nothing is written through the lock that must be on the disk, so its close may fail."""
    ended = train_with(library, tmp_path, "/lock")

    assert ended.status == 0, ended.errors
    assert ended.kinds()[-1] == "closed"
    assert ended.saved_steps()[-1] == 9
    assert not ended.closed_twice


def test_a_directory_in_which_no_file_can_be_closed_is_an_error_at_the_start(
    library: Path, tmp_path: Path
) -> None:
    """Nothing can be saved there, so H302 comes before any work."""
    ended = train_with(library, tmp_path, "")

    assert ended.status == 1
    assert "[H302]" in ended.errors
    assert (ended.drafts(), ended.closed_twice) == ([], False)
