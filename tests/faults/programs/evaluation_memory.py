"""Evaluate a batch whose activations do not fit into a real limit of memory.

    python evaluation_memory.py SHARE

SHARE is the share of the memory that the whole batch needs. It prints one line of JSON.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import holdfast
from holdfast.testing import limit_memory, memory_limited

SAMPLES = 4096


def peak_bytes() -> int:
    text = Path("/proc/self/status").read_text()
    match = re.search(r"VmHWM:\s+(\d+)", text)
    assert match is not None
    return int(match[1]) * 1024


def main(share: float) -> None:
    # This limit is never met. It makes the guard set malloc as it does under a limit.
    limit_memory(2**45)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8192), nn.BatchNorm1d(8192), nn.ReLU(), nn.Linear(8192, 4))
    batch = (torch.randn(SAMPLES, 16), torch.randint(0, 4, (SAMPLES,)))
    guard = holdfast.Guard(
        tempfile.mkdtemp(),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        save_interval_steps=None,
    )
    model.eval()
    with torch.no_grad():
        model(batch[0][:8])
        Path("/proc/self/clear_refs").write_text("5")
        before = peak_bytes()
        expected = model(batch[0])
        needed_bytes = peak_bytes() - before
    model.train()

    def outputs(part):
        logits = model(part[0])
        return logits, part[1], (nn.functional.cross_entropy(logits, part[1]), len(part[1]))

    with memory_limited(int(share * needed_bytes)):
        logits, labels, loss = guard.evaluate_batches([batch, batch], outputs)

    expected_loss = nn.functional.cross_entropy(expected, batch[1]).item()
    print(
        json.dumps(
            {
                "logits": torch.allclose(logits, torch.cat([expected, expected]), atol=1e-5),
                "labels": torch.equal(labels, torch.cat([batch[1], batch[1]])),
                "loss_error": abs(loss - expected_loss),
                "training": model.training,
                "splits": sum(event.kind == "evaluation_split" for event in guard.events()),
            }
        )
    )


if __name__ == "__main__":
    main(float(sys.argv[1]))
