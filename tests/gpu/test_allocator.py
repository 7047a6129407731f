"""The simulated allocator on a CUDA machine: it asks for the segments that torch asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.gpu.marks import NEEDS_CUDA

pytestmark = NEEDS_CUDA

RECORDING = """
import sys, torch
from torch import nn
from tests.gpu.recorded_allocator import first_difference

allowed = int(sys.argv[1]) or None
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
found = first_difference(torch.cuda.memory._snapshot(), cap_bytes=allowed)
assert not found, found
"""


@pytest.mark.parametrize("allowed", [0, 400 << 20])
def test_the_simulator_asks_for_the_same_segments(allowed: int) -> None:
    """What torch's allocator asked of the driver in a training run is what the simulator asks
    for, in its order.
    """
    command = [sys.executable, "-c", RECORDING, str(allowed)]
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:False",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    environment = os.environ | settings
    subprocess.run(command, check=True, timeout=180, env=environment)
