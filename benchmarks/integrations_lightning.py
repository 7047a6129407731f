"""Lightning in ``integrations``: alone, with the callback, with the strategy and a holdfast loader."""

from __future__ import annotations

import importlib.metadata
import logging
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import holdfast
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

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the imports of Lightning itself
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    from holdfast.integrations.lightning import HoldfastCallback, HoldfastStrategy

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
_QUIET: dict[str, Any] = {
    "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu",
}  # fmt: skip


class _Module(pl.LightningModule):
    """A model that returns its loss, as a LightningModule."""

    def __init__(self, model: torch.nn.Module, rate: float) -> None:
        super().__init__()
        self.model = model
        self.rate = rate

    def training_step(self, batch: Mapping[str, torch.Tensor], batch_idx: int) -> torch.Tensor:  # noqa: ARG002
        loss: torch.Tensor = self.model(**batch)["loss"]
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.rate, weight_decay=0.0)


class _Striking(Callback):
    """Brings the fault."""

    def __init__(self, life: Life) -> None:
        self.life = life

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        if trainer.global_step == 0:
            torch.manual_seed(1)  # torch's loader has drawn a number, holdfast's none

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            step_was_made(self.life, trainer.global_step)


def _checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "saved").glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)


def live(life: Life) -> list[float]:
    """Train, from the newest checkpoint if there is one."""
    saves = ModelCheckpoint(
        dirpath=life.folder / "saved", every_n_train_steps=EVERY, save_top_k=-1, filename="{step}"
    )
    settings: dict[str, Any] = {"callbacks": [_Striking(life), saves]}
    loader: Any = torch.utils.data.DataLoader(life.data(), batch_size=BATCH)
    if life.how == "callback":
        settings["callbacks"].append(HoldfastCallback())
    if life.how == "full":
        settings["strategy"] = HoldfastStrategy({"recompute": False})
        loader = holdfast.DataLoader(life.data(), batch_size=BATCH)
    if life.fault == "killed while saving" and life.first:
        die_in(torch, "save", 2)
    module = _Module(Decoder(life), 0.01)
    trainer = pl.Trainer(
        max_steps=life.steps,
        accumulate_grad_batches=life.accumulate,
        default_root_dir=life.folder,
        **settings,
        **_QUIET,
    )
    found = _checkpoints(life.folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader, ckpt_path=str(found[-1]) if found else None)
    if trainer.global_step < life.steps:
        raise SystemExit("stopped")
    return ended(module.model)


def newest(folder: Path, _: How) -> Path:
    """Return the newest checkpoint, which holds the weights."""
    return _checkpoints(folder)[-1]


class _Clock(Callback):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.seconds.append(time.process_time())


def timed(how: How, folder: Path, steps: int) -> list[float]:
    """Return the CPU seconds of each step of a decoder of 0.6 million weights, saves among them."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=64, n_embd=128, n_layer=3, n_head=4))
    tokens = torch.randint(3, 512, (steps * 16, 64))
    clock = _Clock()
    saves = ModelCheckpoint(dirpath=folder / "saved", every_n_train_steps=steps)
    settings: dict[str, Any] = {"callbacks": [clock, saves]}
    if how == "callback":
        settings["callbacks"].append(HoldfastCallback())
    if how == "full":
        settings["strategy"] = HoldfastStrategy()
    trainer = pl.Trainer(
        max_steps=steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        default_root_dir=folder,
        **settings,
        **_QUIET,
    )
    data = [{"input_ids": each, "labels": each} for each in tokens]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(_Module(model, 5e-5), torch.utils.data.DataLoader(data, batch_size=8))
    return [
        after - before
        for before, after in zip(clock.seconds[WARM_STEPS:], clock.seconds[WARM_STEPS + 1 :], strict=False)
    ]


FRAMEWORK = Framework(
    name=f"lightning {importlib.metadata.version('lightning')}",
    hows=("alone", "callback", "full"),
    live=live,
    newest=newest,
    timed=timed,
)
