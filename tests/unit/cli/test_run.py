"""`holdfast run` as a user calls it, as far as it needs no training: its options and what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

_CLI = [sys.executable, "-c", "from holdfast.cli.main import main; main()", "run"]


def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*_CLI, *arguments], cwd=folder, capture_output=True, text=True, check=False)


def test_a_mistake_in_a_target_of_metrics_is_told_before_anything_is_made(tmp_path):
    """There is no run directory and no runs/last afterwards, nor a file of the target before it."""
    ended = call(tmp_path, "--metrics", "jsonl=m.jsonl", "--metrics", "nonsense", "--", "true")
    assert (ended.returncode, "[H743]" in ended.stderr) == (2, True), ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_metrics_of_a_continued_run_begin_where_it_is_continued(tmp_path):
    """The second call in the same directory exports the events of its own attempt only."""
    for number in range(2):
        options = ["--run-dir", "same", "--metrics", f"jsonl=same/{number}.jsonl"]
        ended = call(tmp_path, *options, "--", "sh", "-c", "true")
        assert ended.returncode == 0, ended.stderr
        lines = [json.loads(line) for line in (tmp_path / "same" / f"{number}.jsonl").read_text().splitlines()]
        assert [line["facts"]["attempt"] for line in lines if line["event"] == "attempt_started"] == [number]
        assert lines[-1]["event"] == "stopped"
    assert "1 attempt in " in ended.stderr
