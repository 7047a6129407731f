"""Commands whose output somebody stops to read, as `| head` does."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from tests.prepared import Prepared
from tests.unit.report.made_runs import make_run

pytestmark = pytest.mark.slow
CLI = ["-c", "from holdfast.cli.main import main; main()"]


def into_a_closed_pipe(command: list[str], *, errors_too: bool = False) -> tuple[int, str]:
    reading, writing = os.pipe()
    os.close(reading)
    errors = writing if errors_too else subprocess.PIPE
    with Prepared([*CLI, *command], stdout=writing, stderr=errors, text=True) as ended:
        os.close(writing)
        said = ended.communicate(timeout=300)[1]
    return ended.returncode, said or ""


@pytest.mark.parametrize(
    "command",
    [
        "events RUN",
        "events RUN --json",
        "explain",
        "explain RUN --json",
        "explain H101",
        "report RUN --json",
        "watch RUN --once",
        "metrics RUN --jsonl -",
        "metrics RUN --jsonl - --follow",
        "plan --help",
    ],
)
def test_a_reader_that_leaves_ends_a_command_quietly(tmp_path: Path, command: str) -> None:
    """No traceback and no message, and the exit code that a shell gives any program which
    SIGPIPE ended.
    """
    run = str(make_run(tmp_path / "run", steps=3))
    assert into_a_closed_pipe([run if word == "RUN" else word for word in command.split()]) == (
        141,
        "",
    )


def test_the_exit_code_of_a_supervised_command_stays_its_own(tmp_path: Path) -> None:
    """Nobody reads what `holdfast run` prints at the end, and its exit code is still that of the
    command.
    """
    options = ["run", "--json", "--run-dir", str(tmp_path / "run")]
    assert (
        into_a_closed_pipe([*options, "--", "sh", "-c", "echo hi; exit 3"], errors_too=True)[0] == 3
    )


def test_a_pipe_that_nobody_reads_does_not_keep_a_supervised_command(tmp_path: Path) -> None:
    """The command has filled the pipe, and `holdfast run` still ends with its exit code."""
    options = ["run", "--run-dir", str(tmp_path / "run"), "--grace-seconds", "1"]
    script = "head -c 65536 /dev/zero | tr '\\0' x >&2; exit 3"
    reading, writing = os.pipe()
    try:
        with Prepared(
            [*CLI, *options, "--", "sh", "-c", script], stdout=subprocess.DEVNULL, stderr=writing
        ) as ended:
            assert ended.wait(timeout=300) == 3
    finally:
        os.close(reading)
        os.close(writing)
