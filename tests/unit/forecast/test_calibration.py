"""Calibration as far as a CPU allows: the probes run, the arithmetic holds, and without CUDA the error is clear."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from typer.testing import CliRunner

from holdfast.cli.main import make_app
from holdfast.core.errors import PolicyError
from holdfast.forecast.devices.calibration import Measurements, calibrate, device_of
from holdfast.forecast.devices.catalogue import find_device
from holdfast.forecast.devices.probes import PROBES, Probe, measure_scratch

MIB = 1 << 20
PLAIN_PROBES = [probe for probe in PROBES if not probe.cuda_only]
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a CUDA device")


class ScriptedMeter:
    """An allocator whose figures are known beforehand."""

    def __init__(self, *figures: int) -> None:
        self._figures = list(figures)

    def reset_peak(self) -> None:
        pass

    def allocated_bytes(self) -> int:
        return self._figures.pop(0)

    def peak_bytes(self) -> int:
        return self._figures.pop(0)


def measurements(*, forward: int, fused: int, everything: int) -> Measurements:
    return Measurements(
        name="NVIDIA Test",
        total_bytes=16 << 30,
        usable_bytes=15 << 30,
        context_bytes=400 * MIB,
        forward_workspace_bytes=forward,
        fused_workspace_bytes=fused,
        all_workspaces_bytes=everything,
        bandwidth=3e11,
        flops={"fp32": 8e12},
        capability=(7, 5),
        scratch_bytes={"sort float32 forward": 5},
        software={"torch": "2.13"},
    )


@pytest.mark.parametrize("probe", PLAIN_PROBES, ids=lambda probe: str(probe.name))
def test_every_probe_runs_forward_and_backward(probe: Probe) -> None:
    """Each probe makes an output, and a gradient of each of its leaves; shapes only, since the sizes are for GPUs."""
    with FakeTensorMode():
        operation, leaves = probe.make(torch.device("cpu"), torch.float32)
        output = operation()
        assert output.requires_grad == bool(leaves)
        if leaves:
            output.backward(torch.ones_like(output))
        assert all(leaf.grad is not None for leaf in leaves)


def test_names_of_probes_are_distinct() -> None:
    """No probe overwrites what another measured."""
    assert len({probe.name for probe in PROBES}) == len(PROBES)


def test_scratch_is_the_peak_beyond_what_lives_before_or_after() -> None:
    """Forward 100, 180 after with an output of 64, peak 250; backward 190, 130 after, peak 220: 70, 16 and 30."""
    weight = torch.ones(16, requires_grad=True)
    probe = Probe(name="double", make=lambda device, dtype: (lambda: weight * 2, [weight]))
    meter = ScriptedMeter(100, 180, 250, 190, 220, 130)
    assert measure_scratch(probe, torch.device("cpu"), torch.float32, meter) == {
        "double float32 forward": 70,
        "double float32 kept": 16,
        "double float32 backward": 30,
    }
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0] * 16  # that of the first run was dropped


@pytest.mark.parametrize(
    ("forward", "fused", "everything", "cublas"),
    [(32, 0, 64, 32), (8, 1, 18, 8), (8, 0, 8, 8), (8, 0, 20, 10), (0, 0, 0, 0)],
)
def test_two_handles_hold_all_workspaces(forward: int, fused: int, everything: int, cublas: int) -> None:
    """What a device is taken to hold for two threads is never less than what was left after a backward pass."""
    device = device_of(measurements(forward=forward, fused=fused, everything=everything))
    assert (device.cublas_workspace_bytes, device.cublaslt_workspace_bytes) == (cublas, fused)
    assert sum(device.workspace_bytes) >= everything
    assert device.measured
    assert set(device.sources.values()) == {"measured by `holdfast calibrate`"}


@without_cuda
def test_without_cuda_it_says_so() -> None:
    """Without a CUDA device the error says that, and what to do instead (H417)."""
    with pytest.raises(PolicyError, match="no CUDA device") as caught:
        calibrate()
    assert caught.value.rule == "H417"
    assert "--device" in caught.value.fix


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
    """With a device, whose measurements are given here, it prints the figures and writes the file that it names."""
    device = device_of(measurements(forward=8 * MIB, fused=0, everything=16 * MIB))
    monkeypatch.setattr("holdfast.forecast.devices.calibration.calibrate", lambda index, on_progress: device)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    found = CliRunner().invoke(make_app("calibrate"), ["calibrate"])
    assert found.exit_code == 0, found.output
    assert "0.391 GiB" in found.output
    assert "8.0 TFLOPS" in found.output
    assert find_device("Test") == device
    path = tmp_path / "mine.json"
    told = CliRunner().invoke(make_app("calibrate"), ["calibrate", "--json", "--out", str(path)])
    assert json.loads(told.stdout) == {"file": str(path), "device": "NVIDIA Test"}
    assert find_device(str(path)) == device
