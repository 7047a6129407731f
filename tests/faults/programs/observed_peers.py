"""A small training by the means of a framework.

Its last line says what was asked for and the losses.

Started as ``python observed_peers.py FRAMEWORK``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(1)
SAMPLES = [
    {"inputs": torch.randn(8), "labels": torch.tensor(float(index % 2))} for index in range(32)
]


class Model(nn.Module):
    """A layer that gives its own loss, as `transformers` wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.layer(inputs)[:, 0], labels)}


def accelerate() -> dict[str, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Model()
    loader = torch.utils.data.DataLoader(SAMPLES, batch_size=4, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item().hex())
    return {"steps": 4, "micro_steps": 2, "losses": losses}


def transformers() -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=4,
            use_cpu=True,
            report_to=[],
            logging_steps=1,
            save_steps=2,
            disable_tqdm=True,
        )
        trainer = Trainer(Model(), arguments, train_dataset=SAMPLES)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"steps": 4, "micro_steps": 2, "losses": losses}


def pytorch_lightning() -> dict[str, Any]:
    import pytorch_lightning

    losses = []

    class Lit(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            loss = self.model(**batch)["loss"]
            losses.append(loss.item().hex())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    trainer = pytorch_lightning.Trainer(
        max_epochs=1,
        accumulate_grad_batches=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
    )
    trainer.fit(Lit(), torch.utils.data.DataLoader(SAMPLES, batch_size=4, shuffle=True))
    return {"steps": 4, "micro_steps": 2, "losses": losses}


FRAMEWORKS = {
    "accelerate": accelerate,
    "transformers": transformers,
    "pytorch_lightning": pytorch_lightning,
}
print(json.dumps(FRAMEWORKS[sys.argv[1]]()))
