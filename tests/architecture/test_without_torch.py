"""What works, and what is said, where torch is not installed."""

from __future__ import annotations

import json
import subprocess
import sys

LOG = "Traceback (most recent call last):\n  File \"a.py\", line 1, in <module>\nKeyError: 'x'\n"


def run_without_torch(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program whose imports of torch fail as if it were not installed."""
    hidden = f"import sys\nsys.modules['torch'] = None\n{code}"
    return subprocess.run(
        [sys.executable, "-c", hidden, *arguments], check=False, capture_output=True, text=True
    )


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_without_torch("from holdfast.cli.main import main\nmain()", *arguments)


def test_a_log_is_explained_without_torch(tmp_path) -> None:
    """`holdfast explain` needs no torch."""
    log = tmp_path / "a.log"
    log.write_text(LOG)
    ended = run_command("explain", "--json", str(log))
    assert json.loads(ended.stdout)["family"] == "user code", ended.stderr


def test_a_forecast_says_that_it_needs_torch() -> None:
    """`holdfast plan` refuses at once, by its rule."""
    ended = run_command("plan", "--device", "T4", "train.py:build")
    assert ended.returncode == 2
    assert "[H742]" in ended.stderr


def test_a_guard_says_that_it_needs_torch() -> None:
    """The error names torch and how to get it."""
    ended = run_without_torch("import holdfast\nholdfast.Guard")
    assert ended.returncode == 1
    assert "holdfast.Guard needs torch" in ended.stderr
    assert "Fix: " in ended.stderr
