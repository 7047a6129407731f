"""Hugging Face's Trainer in ``integrations``: alone, with the callback, with the mixin."""

from __future__ import annotations

import importlib.metadata
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

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
from holdfast.integrations.transformers import HoldfastCallback, HoldfastTrainer, last_good_checkpoint

transformers.utils.logging.set_verbosity_error()


class _Striking(TrainerCallback):
    """Brings the fault."""

    def __init__(self, life: Life) -> None:
        self.life = life

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        step_was_made(self.life, state.global_step)


def live(life: Life) -> list[float]:
    """Train, from the newest checkpoint if there is one that can be loaded."""
    arguments = TrainingArguments(
        str(life.folder),
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=life.accumulate,
        max_steps=life.steps,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        save_steps=EVERY,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        auto_find_batch_size=life.how.endswith("auto_find_batch_size"),
    )
    callbacks = [_Striking(life), *([HoldfastCallback()] if life.how == "callback" else [])]
    kind = HoldfastTrainer if life.how == "full" else Trainer
    policy = {"holdfast_policy": {"recompute": False}} if life.how == "full" else {}
    model = Decoder(life)
    trainer = kind(model, arguments, train_dataset=life.data(), callbacks=callbacks, **policy)
    if life.fault == "killed while saving" and life.first:
        die_in(torch, "save", 6)  # four in a checkpoint: this is the optimizer of the second, after its weights
    found = any(life.folder.glob("checkpoint-*/trainer_state.json"))
    newest_or_good = last_good_checkpoint(life.folder) if life.how == "callback" and found else found
    trainer.train(resume_from_checkpoint=newest_or_good or None)
    if trainer.state.global_step < life.steps:
        raise SystemExit("stopped")
    return ended(model)


def newest(folder: Path, _: How) -> Path:
    """Return the weights of the newest checkpoint."""
    return max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1])) / "model.safetensors"


class _Clock(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        self.seconds.append(time.process_time())


def timed(how: How, folder: Path, steps: int) -> list[float]:
    """Return the CPU seconds of each step of a decoder of 0.6 million weights, saves among them."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=64, n_embd=128, n_layer=3, n_head=4))
    tokens = torch.randint(3, 512, (steps * 16, 64))
    clock = _Clock()
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=8, gradient_accumulation_steps=2, max_steps=steps, save_steps=steps,
        logging_steps=10, report_to=[], disable_tqdm=True, use_cpu=True, save_total_limit=1,
    )  # fmt: skip
    callbacks = [clock, *([HoldfastCallback()] if how == "callback" else [])]
    kind = HoldfastTrainer if how == "full" else Trainer
    kind(model, arguments, train_dataset=[{"input_ids": t, "labels": t} for t in tokens], callbacks=callbacks).train()
    return [
        after - before
        for before, after in zip(clock.seconds[WARM_STEPS:], clock.seconds[WARM_STEPS + 1 :], strict=False)
    ]


FRAMEWORK = Framework(
    name=f"transformers {importlib.metadata.version('transformers')}",
    hows=("alone", "alone, auto_find_batch_size", "callback", "full"),
    live=live,
    newest=newest,
    timed=timed,
)
