"""Trainings with Lightning on several ranks, for tests of its strategies."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tests.integrations.test_lightning import Small, quiet
from tests.ranks.test_frameworks import as_torchrun, classifier, data, weights
from torch.nn import functional as F
from torch.utils.data import DataLoader

import holdfast
from holdfast.core.errors import HoldfastError


class Classifier(pl.LightningModule):
    """Fails or is stopped where it is told to."""

    def __init__(self, rank: int, **how: Any) -> None:
        super().__init__()
        self.rank, self.net, self.how = rank, classifier(), how
        self.automatic_optimization = not how.get("manual")
        self.losses: list[float] = []

    def train_dataloader(self) -> Any:
        kind = holdfast.DataLoader if self.how.get("own_loader") else DataLoader
        return kind(data(bad=self.how["bad"] or ()), batch_size=2, shuffle=True)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        outputs = self.net(batch[0])
        if (self.rank, self.global_step) == self.how.get("fails"):
            self.how["fails"] = None
            torch.empty(2**50, dtype=torch.uint8)
        loss = F.cross_entropy(outputs, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=bool(self.how.get("sync")))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        if (self.rank, self.global_step) == self.how.get("stops"):
            os.kill(os.getpid(), signal.SIGTERM)

    def configure_optimizers(self) -> Any:
        return Small.configure_optimizers(self)  # with a schedule


def fit_each(rank: int, run: Path, trainings: dict[str, Any]) -> dict[str, Any]:
    """Train one after the other; return what `fit` does, or what was raised."""
    as_torchrun(rank, torch.distributed.get_world_size())
    os.environ["TORCHELASTIC_RUN_ID"] = "1"
    found = {}
    for name, given in trainings.items():
        try:
            found[name] = fit(rank, run / name, **given)
        except (HoldfastError, SystemExit) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def fit(
    rank: int,
    folder: Path,
    *,
    guarded: bool = True,
    ckpt_path: Any = None,
    saves: Any = None,
    **given: Any,
) -> Any:
    """Return weights, the losses of this rank and the learning rate."""
    how = {
        name: given.pop(name, None)
        for name in ("manual", "own_loader", "fails", "sync", "stops", "bad")
    }
    if saves is not None:
        saver = ModelCheckpoint(dirpath=folder / "saved", save_top_k=-1, filename="{step}", **saves)
        given |= {"enable_checkpointing": True, "callbacks": [saver]}
    module, usual = (
        Classifier(rank, **how),
        quiet(folder) | {"devices": 2, "gradient_clip_val": 0.5},
    )
    trainer = pl.Trainer(strategy="holdfast_ddp" if guarded else "ddp", **(usual | given))
    torch.manual_seed(rank)
    trainer.fit(module, ckpt_path=ckpt_path)
    return weights(module), module.losses, trainer.optimizers[0].param_groups[0]["lr"]
