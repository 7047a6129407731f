"""Hugging Face's Trainer in ``integrations``: alone, with the mixin."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks import integrations_job as job
from holdfast.integrations.transformers import HoldfastTrainer

transformers.utils.logging.set_verbosity_error()


class _OnStep(TrainerCallback):
    """Calls a function after each step."""

    def __init__(self, call: Callable[[int], None]) -> None:
        self._call = call

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        self._call(state.global_step)


def live(life: job.Life) -> list[float]:
    """Train, from the newest checkpoint if there is one that can be loaded."""
    arguments = TrainingArguments(
        str(life.folder),
        per_device_train_batch_size=job.BATCH,
        gradient_accumulation_steps=life.accumulate,
        max_steps=life.steps,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        save_steps=job.EVERY,
        logging_steps=1,
        train_sampling_strategy="sequential",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        auto_find_batch_size=life.how.endswith("auto_find_batch_size"),
    )
    callbacks = [_OnStep(lambda step: job.step_was_made(life, step))]
    kind = HoldfastTrainer if life.how == "full" else Trainer
    policy = {"holdfast_policy": {"recompute": False}} if life.how == "full" else {}
    model = job.Decoder(life)
    trainer = kind(model, arguments, train_dataset=life.data(), callbacks=callbacks, **policy)
    if life.fault == "killed while saving" and life.first:
        # Four in a checkpoint: this is the optimizer of the second, after its weights
        job.die_in(torch, "save", 6)
    found = any(life.folder.glob("checkpoint-*/trainer_state.json"))
    trainer.train(resume_from_checkpoint=found or None)
    if trainer.state.global_step < life.steps:
        raise SystemExit("stopped")
    return job.ended(model)


def newest(folder: Path, _: job.How) -> Path:
    """Return the weights of the newest checkpoint."""
    return (
        max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
        / "model.safetensors"
    )


def timed(how: job.How, folder: Path, steps: int) -> list[float]:
    """Return the CPU time after each step, saves among them."""
    model, data = job.timed_job(steps)
    seconds: list[float] = []
    clock = _OnStep(lambda _: seconds.append(time.process_time()))
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=steps,
        save_steps=steps,
        logging_steps=10,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_total_limit=1,
    )
    kind = HoldfastTrainer if how == "full" else Trainer
    kind(model, arguments, train_dataset=data, callbacks=[clock]).train()
    return seconds


_VERSION = importlib.metadata.version("transformers")
_HOWS: tuple[job.How, ...] = ("alone", "alone, auto_find_batch_size", "full")
FRAMEWORK = job.Framework(
    name=f"transformers {_VERSION}", hows=_HOWS, live=live, newest=newest, timed=timed
)
