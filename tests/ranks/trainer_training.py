"""Trainings with the Trainer of transformers on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from tests.integrations import hugging_face
from tests.ranks.test_frameworks import as_torchrun

from holdfast.integrations.transformers import HoldfastTrainer


def train_each(
    rank: int, run: Path, kinds: list[tuple[bool, int]], settings: dict[str, Any]
) -> Any:
    """Train with these kinds of a Trainer, one after the other.

    One that saves goes on from what it finds.
    """
    as_torchrun(rank, torch.distributed.get_world_size())
    # On several ranks without a device the Trainer asks torch.load for "cpu:0", which torch does
    # not know.
    torch.serialization.register_package(
        0, lambda _: None, lambda data, where: data if where == "cpu:0" else None
    )
    found = []
    for number, (guarded, steps) in enumerate(kinds):
        AcceleratorState._reset_state(reset_partial_state=False)
        GradientState._reset_state()
        transformers.set_seed(rank)
        trainer = hugging_face.make_trainer(
            HoldfastTrainer if guarded else transformers.Trainer,
            run / (f"{number}" if settings.get("save_strategy", "no") == "no" else "same"),
            hugging_face.make_gpt2(),
            hugging_face.samples(48),
            max_steps=steps,
            ddp_backend="gloo",
            **settings,
        )
        trainer.train(resume_from_checkpoint="save_strategy" in settings)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found.append((hugging_face.digest(trainer.model), losses))
    return found
