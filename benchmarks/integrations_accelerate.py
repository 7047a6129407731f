"""Accelerate in ``integrations``: a loop as in its documentation, and the same under `accelerate_guard`."""

from __future__ import annotations

import importlib.metadata
import time
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ProjectConfiguration
from torch.utils.data import DataLoader

import holdfast.checkpoint.store
from benchmarks.integrations_job import (
    BATCH,
    EVERY,
    WARM_STEPS,
    Decoder,
    Framework,
    How,
    Life,
    die_in,
    ended,
    step_was_made,
)
from holdfast.integrations.accelerate import accelerate_guard


def _prepared(life: Life, model: torch.nn.Module, data: Any) -> tuple[Any, ...]:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    saving = ProjectConfiguration(project_dir=str(life.folder), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=life.accumulate, project_config=saving)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    loader = DataLoader(data, batch_size=BATCH)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def live(life: Life) -> list[float]:
    """Train, from the newest checkpoint if there is one."""
    life.folder.mkdir(parents=True, exist_ok=True)
    model = Decoder(life)
    parts = _prepared(life, model, life.data())
    return (_guarded if life.how == "full" else _alone)(life, *parts)


def _alone(life: Life, accelerator: Any, model: Any, optimizer: Any, loader: Any) -> list[float]:
    if life.fault == "killed while saving" and life.first:
        die_in(torch, "save", 3)  # two in a checkpoint: this is the optimizer of the second, after its weights
    step = 0
    if any((life.folder / "checkpoints").glob("*")):
        accelerator.load_state()
        step = EVERY * (1 + max(int(path.name.split("_")[1]) for path in (life.folder / "checkpoints").glob("*")))
        accelerator.project_configuration.iteration = step // EVERY
        loader = accelerator.skip_first_batches(loader, step * life.accumulate)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            if step % EVERY == 0:
                accelerator.save_state()
            step_was_made(life, step)
    return ended(model)


def _guarded(life: Life, accelerator: Any, model: Any, optimizer: Any, loader: Any) -> list[float]:
    if life.fault == "killed while saving" and life.first:
        die_in(holdfast.checkpoint.store, "write_file", 3)  # the manifest of the checkpoint of the second interval
    guard = accelerate_guard(
        accelerator, model=model, optimizer=optimizer, loader=loader, max_grad_norm=1.0, recompute=False,
        save_interval_steps=EVERY, async_save=False,
    )  # fmt: skip
    for window in guard.batches(max_epochs=1):
        guard.step(window, lambda batch: model(**batch)["loss"])
        step_was_made(life, guard.global_step)
    if guard.stop_reason is not None:
        raise SystemExit("stopped")
    return ended(model)


def newest(folder: Path, how: How) -> Path:
    """Return the weights of the newest checkpoint."""
    place = folder / ("holdfast/checkpoints" if how == "full" else "checkpoints")
    return max(place.glob("[0-9c]*"), key=lambda path: path.stat().st_mtime) / "model.safetensors"


def timed(how: How, folder: Path, steps: int) -> list[float]:
    """Return the CPU seconds of each step of a perceptron over 1,024 inputs, two batches to a step."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(1024, 1024), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers)
    data = torch.randn(128 * 64, 1024).repeat(steps * 2 * 64 // (128 * 64) + 1, 1)[: steps * 2 * 64]
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, project_dir=str(folder))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=64))
    seconds: list[float] = []
    if how == "full":
        guard = accelerate_guard(
            accelerator, model=model, optimizer=optimizer, loader=loader, max_grad_norm=1.0, save_interval_steps=None
        )
        for window in guard.batches(max_epochs=1):
            guard.step(window, lambda batch: model(batch).square().mean())
            seconds.append(time.process_time())
    else:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                seconds.append(time.process_time())
    return [after - before for before, after in zip(seconds[WARM_STEPS:], seconds[WARM_STEPS + 1 :], strict=False)]


assert safetensors.torch  # accelerate loads it at its first save: not in a child
FRAMEWORK = Framework(
    name=f"accelerate {importlib.metadata.version('accelerate')}",
    hows=("alone", "full"),
    live=live,
    newest=newest,
    timed=timed,
)
