"""``llms.txt`` and the JSON schemas describe the commands as they are."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.docs.pages import ROOT
from typer.testing import CliRunner

import holdfast
from holdfast.cli.main import make_app

jsonschema = pytest.importorskip("jsonschema")


def llms() -> ModuleType:
    spec = importlib.util.spec_from_file_location("llms", ROOT / "docs" / "llms.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_llms_txt_is_current() -> None:
    """The file equals what ``python docs/llms.py`` writes."""
    assert (ROOT / "llms.txt").read_text() == llms().llms_txt()


def guarded_run(path: Path) -> tuple[Path, Any]:
    """Return a run directory with a checkpoint, and what `holdfast save` has printed meanwhile."""
    import torch

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    loader = holdfast.DataLoader(torch.randn(8, 2), batch_size=4)
    guard = holdfast.Guard(path, model=model, optimizer=optimizer, loader=loader)
    with (
        guard,
        subprocess.Popen(
            [sys.executable, "-m", "holdfast", "save", str(path), "--json"], stdout=subprocess.PIPE
        ) as request,
    ):
        for batch in guard.batches(max_steps=100_000):
            guard.step(batch, lambda batch: model(batch).square().mean())
            if request.poll() is not None:
                break
        assert request.stdout is not None
        return path, json.load(request.stdout)


def output_of(words: list[str], *, in_own_process: bool = False) -> Any:
    if in_own_process:
        command = [sys.executable, "-m", "holdfast", *words]
        shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    else:
        shown = CliRunner().invoke(make_app(), words).stdout
    return json.loads(shown)


def test_json_output_matches_its_schema(tmp_path: Path) -> None:
    """What the commands print is what the schemas in docs/schemas say."""
    run_dir, saved = guarded_run(tmp_path / "run")
    run = str(run_dir)
    log = tmp_path / "train.log"
    log.write_text("Traceback (most recent call last):\nKeyError: 'a'\n")
    supervised = ["run", "--json", "--quiet", "--max-restarts", "0", "--run-dir"]
    outputs = {
        "error": [output_of(["events", str(tmp_path / "missing"), "--json"])],
        "explain": [output_of(["explain", where, "--json"]) for where in (run, str(log))],
        "rule": [output_of(["explain", "H401", "--json"])],
        "run": [
            output_of(
                [*supervised, str(tmp_path / "supervised"), "--", sys.executable, "-c", "1 / 0"],
                in_own_process=True,
            )
        ],
        "events": [output_of(["events", run, "--json"])],
        "checkpoints": [output_of(["checkpoints", run, "--json"])],
        "doctor": [output_of(["doctor", "--run-dir", str(tmp_path), "--json"])],
        "request": [saved],
    }
    for path, schema in llms().schemas():
        assert path.stem in outputs, "a schema without a test"
        for output in outputs[path.stem]:
            jsonschema.validate(output, schema)
