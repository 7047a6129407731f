"""Calibration as far as a CPU allows: the arithmetic holds, and without CUDA the error is clear."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from holdfast.cli.main import make_app
from holdfast.forecast.devices.calibration import workspaces_of
from holdfast.forecast.devices.catalogue import find_device

MIB = 1 << 20
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a CUDA device")


@pytest.mark.parametrize(
    ("forward", "fused", "everything", "cublas"),
    [(32, 0, 64, 32), (8, 1, 18, 8), (8, 0, 8, 8), (8, 0, 20, 10), (0, 0, 0, 0)],
)
def test_two_handles_hold_all_workspaces(forward: int, fused: int, everything: int, cublas: int) -> None:
    """What a device is taken to hold for two threads is never less than what was left after a backward pass."""
    assert workspaces_of(forward, fused, everything) == (cublas, fused)
    assert 2 * (cublas + fused) >= everything


@without_cuda
def test_the_command_fails_clearly_without_cuda() -> None:
    """`holdfast calibrate` prints the error, as JSON if asked, and exits with 2."""
    plain = CliRunner().invoke(make_app("calibrate"), ["calibrate"])
    assert plain.exit_code == 2
    assert "H417" in plain.output
    found = CliRunner().invoke(make_app("calibrate"), ["calibrate", "--json"])
    assert found.exit_code == 2
    assert json.loads(found.stdout)["error"]["rule"] == "H417"


def test_the_command_writes_what_plans_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a device, whose measurements are given here, it writes the file that it names."""
    device = replace(find_device("T4"), name="NVIDIA Test", context_bytes=400 * MIB, flops={"fp32": 8e12})
    monkeypatch.setattr("holdfast.forecast.devices.calibration.calibrate", lambda index: device)
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(make_app("calibrate"), ["calibrate"])
    assert found.exit_code == 0, found.output
    assert "nvidia-test.json" in found.output
    assert find_device("nvidia-test.json") == device
    path = tmp_path / "mine.json"
    printed = CliRunner().invoke(make_app("calibrate"), ["calibrate", "--json", "--out", str(path)])
    assert json.loads(printed.stdout) == {"file": str(path), "device": "NVIDIA Test"}
    assert find_device(str(path)) == device
