"""`holdfast calibrate` on a CUDA machine: plausible figures, a file that plans read, and a simulator that agrees."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.gpu.marks import NEEDS_CUDA

from holdfast.forecast.devices.catalogue import find_device

pytestmark = NEEDS_CUDA

RECORDING = """
import sys, torch
from torch import nn
from tests.gpu.recorded_allocator import first_difference

expandable, allowed = sys.argv[1] == "expandable", int(sys.argv[2]) or None
total = torch.cuda.get_device_properties(0).total_memory
if allowed:
    torch.cuda.set_per_process_memory_fraction(allowed / total)
    allowed = int(allowed / total * total)  # as torch rounds it
torch.cuda.memory._record_memory_history(context=None, max_entries=1_000_000)
torch.manual_seed(0)
model = nn.Sequential(*(nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True) for _ in range(4))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(6):
    optimizer.zero_grad()
    try:
        model(torch.randn(8 + 3 * (step % 3), 200 + 50 * (step % 2), 256, device="cuda")).square().mean().backward()
        optimizer.step()
    except torch.OutOfMemoryError:
        assert allowed  # part of what is compared
found = first_difference(torch.cuda.memory._snapshot(), expandable=expandable, cap_bytes=allowed)
assert not found, found
"""


def test_figures_are_plausible_and_a_plan_finds_them(tmp_path: Path) -> None:
    """A calibration gives memory, workspaces and rates in the range of real boards, and its file is a device."""
    path = tmp_path / "here.json"
    code = "from holdfast.cli.main import make_app; make_app('calibrate')()"
    command = [sys.executable, "-c", code, "calibrate", "--out", str(path)]
    subprocess.run(command, check=True, timeout=180)
    device = find_device(str(path))
    assert device.measured
    assert device.usable_bytes <= device.total_bytes
    assert 0.05 * 2**30 < device.context_bytes < 2 * 2**30
    assert 4 << 20 <= device.cublas_workspace_bytes <= 256 << 20
    assert 1e11 < device.bandwidth < 2e13
    assert device.flops["fp32"] < device.flops.get("bf16", float("inf"))


@pytest.mark.parametrize(("mode", "allowed"), [("default", 0), ("default", 400 << 20), ("expandable", 0)])
def test_the_simulator_asks_for_the_same_segments(mode: str, allowed: int) -> None:
    """What torch's allocator asked of the driver in a training run is what the simulator asks for, in its order."""
    setting = f"expandable_segments:{mode == 'expandable'}"
    command = [sys.executable, "-c", RECORDING, mode, str(allowed)]
    environment = os.environ | {"PYTORCH_ALLOC_CONF": setting, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run(command, check=True, timeout=180, env=environment)
