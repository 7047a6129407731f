"""Steps that are decided late, on a CUDA device: they never wait, and change nothing else.

``tests/unit/guard/test_waits.py`` checks without a device where the host would wait.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from tests.gpu.marks import NEEDS_CUDA
from tests.own_process import in_own_process
from tests.ports import unused_port
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import holdfast

pytestmark = NEEDS_CUDA

# In the first steps, the guard learns which buffers change.
WARM_STEPS = 60
STRICT_STEPS = 100
BATCHES = 90
# The batches that make a step non-finite. The diagnosis samples the step at batch 69.
BAD_BATCHES = [57, 58, 69, 75]


def parts(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with dropout and running statistics, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.ReLU(), nn.Linear(64, 8)
    ).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def batches(device: str, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return inputs and labels."""
    generator = torch.Generator().manual_seed(1)
    pairs = []
    for _ in range(count):
        inputs = torch.randn(64, 32, generator=generator)
        labels = inputs[:, :8].argmax(1)
        pairs.append((inputs.to(device), labels.to(device)))
    return pairs


def test_warm_steps_never_synchronize(tmp_path: Path) -> None:
    """In 100 warm steps, of which the diagnosis samples ten, no CUDA call makes the host wait."""
    model, optimizer = parts("cuda")
    guard = holdfast.Guard(
        tmp_path,
        model=model,
        optimizer=optimizer,
        loader=batches("cuda", WARM_STEPS + STRICT_STEPS + 1),
        max_grad_norm=1.0,
        save_interval_steps=None,
        # A snapshot is copied to the host as a whole, for which the host waits.
        snapshot_interval_steps=None,
    )

    try:
        for number, batch in enumerate(guard.batches(max_epochs=1)):
            if number == WARM_STEPS:
                torch.cuda.set_sync_debug_mode("error")
            if number == WARM_STEPS + STRICT_STEPS:
                torch.cuda.set_sync_debug_mode("default")
            guard.step(batch, lambda pair: F.cross_entropy(model(pair[0]), pair[1]))
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert guard.global_step == WARM_STEPS + STRICT_STEPS + 1


def trained(run_dir: Path, decide: str, device: str) -> dict[str, Any]:
    """Train with deterministic algorithms, and return the state on the CPU.

    The steps of `BAD_BATCHES` are skipped.
    """
    # cuBLAS reads it when its first handle is created, so this needs a process of its own.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    model, optimizer = parts(device)
    loader = batches(device, BATCHES)
    for number in BAD_BATCHES:
        inputs, _ = loader[number]
        inputs[3, 5] = float("nan")
    torch.manual_seed(2)
    guard = holdfast.Guard(
        run_dir,
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, BATCHES),
        loader=loader,
        max_grad_norm=1.0,
        save_interval_steps=None,
        decide=decide,
    )
    # Results are read after the loop, because reading one decides its step.
    results = [
        guard.step(batch, lambda pair: F.cross_entropy(model(pair[0]), pair[1]))
        for batch in guard.batches(max_epochs=1)
    ]
    moments = [
        value.cpu()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return {
        "skipped": [number for number, result in enumerate(results) if result.skipped],
        "steps": guard.global_step,
        "findings": [
            (event.kind, event.global_step, event.data)
            for event in guard.events()
            if event.kind in ("finding", "note")
        ],
        "learning rate": optimizer.param_groups[0]["lr"],
        "weights and buffers": [value.cpu() for value in model.state_dict().values()],
        "moments": moments,
        "next random number": torch.rand((), device=device).item(),
    }


def assert_same_training(folder: Path, device: str) -> None:
    """Train twice, and compare all that a step may change."""
    now = in_own_process(trained, folder / "now", "now", device)
    late = in_own_process(trained, folder / "late", "late", device)

    assert now["skipped"] == BAD_BATCHES
    for name in ("weights and buffers", "moments"):
        pairs = zip(now.pop(name), late.pop(name), strict=True)
        assert all(torch.equal(expected, value) for expected, value in pairs), name
    assert late == now


def test_late_and_now_give_the_same_weights(tmp_path: Path) -> None:
    """With deterministic algorithms, all state is equal bit for bit, also after skipped steps."""
    assert_same_training(tmp_path, "cuda")


def train_replicated(run_dir: Path) -> int:
    """Train a replicated model on a single rank, and raise if a warm step synchronizes."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(unused_port())
    torch.cuda.set_device(0)
    distributed.init_process_group("nccl", rank=0, world_size=1)
    model, _ = parts("cuda")
    replica = DistributedDataParallel(model, device_ids=[0])
    guard = holdfast.Guard(
        run_dir,
        model=replica,
        optimizer=torch.optim.AdamW(replica.parameters(), lr=1e-2, fused=True),
        max_grad_norm=1.0,
        save_interval_steps=None,
        diagnose=False,
    )
    for number, batch in enumerate(batches("cuda", WARM_STEPS + STRICT_STEPS)):
        if number == WARM_STEPS:
            torch.cuda.set_sync_debug_mode("error")
        guard.step(batch, lambda pair: F.cross_entropy(replica(pair[0]), pair[1]))
    torch.cuda.set_sync_debug_mode("default")
    guard.close()
    distributed.destroy_process_group()
    return guard.global_step


def test_warm_steps_of_a_replicated_model_never_synchronize(tmp_path: Path) -> None:
    """The numbers that ranks exchange in each step do not make the host wait, either."""
    assert in_own_process(train_replicated, tmp_path) == WARM_STEPS + STRICT_STEPS
