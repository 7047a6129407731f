"""Accelerate in ``integrations``.

A loop as in its documentation, and the same under `accelerate_guard`.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ProjectConfiguration
from torch.utils.data import DataLoader

import holdfast.checkpoint.store
from benchmarks import integrations_job as job
from holdfast.integrations.accelerate import accelerate_guard

OnStep = Callable[[int], None]


def _train(
    how: job.How,
    folder: Path,
    model: torch.nn.Module,
    data: Any,
    size: int,
    every: int | None,
    on_step: OnStep,
) -> None:
    """Train from the newest checkpoint, if there is one.

    Two batches to a step, saved every so many steps.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    saving = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, project_config=saving)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=size)
    )
    if how == "full":
        guard = accelerate_guard(
            accelerator,
            model=model,
            optimizer=optimizer,
            loader=loader,
            max_grad_norm=1.0,
            recompute=False,
            save_interval_steps=every,
            async_save=False,
        )
        for window in guard.batches(max_epochs=1):
            guard.step(window, lambda batch: model(**batch)["loss"])
            on_step(guard.global_step)
        if guard.stop_reason is not None:
            raise SystemExit("stopped")
        return
    step, saved = 0, [int(path.name.split("_")[1]) for path in (folder / "checkpoints").glob("*")]
    if saved and every is not None:
        accelerator.load_state()
        step = every * (1 + max(saved))
        accelerator.project_configuration.iteration = step // every
        loader = accelerator.skip_first_batches(loader, 2 * step)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            if every is not None and step % every == 0:
                accelerator.save_state()
            on_step(step)


def live(life: job.Life) -> list[float]:
    """Train, from the newest checkpoint if there is one."""
    life.folder.mkdir(parents=True, exist_ok=True)
    if life.fault == "killed while saving" and life.first:
        # Alone there are two writes in a checkpoint: this is the optimizer of the second, after its
        # weights. A guard's third one is the manifest of the checkpoint of the second interval.
        die_in = (
            (holdfast.checkpoint.store, "write_file") if life.how == "full" else (torch, "save")
        )
        job.die_in(*die_in, 3)
    model = job.Decoder(life)
    on_step: OnStep = lambda step: job.step_was_made(life, step)  # noqa: E731
    _train(life.how, life.folder, model, life.data(), job.BATCH, job.EVERY, on_step)
    return job.ended(model)


def newest(folder: Path, how: job.How) -> Path:
    """Return the weights of the newest checkpoint."""
    place = folder / ("holdfast/checkpoints" if how == "full" else "checkpoints")
    return max(place.glob("[0-9c]*"), key=lambda path: path.stat().st_mtime) / "model.safetensors"


def timed(how: job.How, folder: Path, steps: int) -> list[float]:
    """Return the CPU time after each step, without saves."""
    model, data = job.timed_job(steps)
    seconds: list[float] = []
    _train(how, folder, model, data, 8, None, lambda _: seconds.append(time.process_time()))
    return seconds


assert safetensors.torch  # accelerate loads it at its first save: not in a child
_VERSION = importlib.metadata.version("accelerate")
_HOWS: tuple[job.How, ...] = ("alone", "full")
FRAMEWORK = job.Framework(
    name=f"accelerate {_VERSION}", hows=_HOWS, live=live, newest=newest, timed=timed
)
