"""The tutorial is run as it stands.

Its files are written, its commands called, its output compared.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.pages import DOCS, blocks, session, shows
from tests.prepared import run_prepared

pytest.importorskip("sklearn")  # the digits
pytest.importorskip("plotly")  # the report


@pytest.mark.slow
def test_the_tutorial_runs_from_top_to_bottom_and_prints_what_it_shows(tmp_path: Path) -> None:
    """In an empty folder, every file of the page is written and every command prints what the
    page says.
    """
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
    }
    called = 0
    for block in blocks(DOCS / "tutorial.md"):
        if block.title:
            (tmp_path / block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "console":
            for command, shown in session(block.text):
                printed = _called(command, tmp_path, environment)
                assert shows(shown, printed), f"$ {command}\n{printed}\n--- is shown as\n{shown}"
                called += 1
    assert called >= 14


def _called(command: str, folder: Path, environment: dict[str, str]) -> str:
    """Return what a command prints, and ``Killed`` after it as a terminal does where it was.

    Most of the time of ``python train.py`` is to import torch: it is forked from a process that has
    done so.
    """
    given = {"cwd": folder, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    setting, script = re.fullmatch(r"(?:(\w+=\w+) )?(?:python (.*))?.*", command).groups()
    if script:
        added = dict([setting.split("=")]) if setting else {}
        ended = run_prepared(script.split(), timeout=240, env={**environment, **added}, **given)
    else:
        ended = subprocess.run(
            ["bash", "-c", command], env=environment, text=True, timeout=240, check=False, **given
        )
    killed = ended.returncode == -signal.SIGKILL
    return ended.stdout + ("Killed\n" if killed else "")
