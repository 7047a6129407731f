"""Lightning in ``integrations``: alone, with the strategy and a holdfast loader."""

from __future__ import annotations

import importlib.metadata
import logging
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import holdfast
from benchmarks import integrations_job as job

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the imports of Lightning itself
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    from holdfast.integrations.lightning import HoldfastStrategy

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
_QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}


class _Module(pl.LightningModule):
    def __init__(self, model: torch.nn.Module, rate: float) -> None:
        super().__init__()
        self.model, self.rate = model, rate

    def training_step(self, batch: Mapping[str, torch.Tensor], batch_idx: int) -> torch.Tensor:  # noqa: ARG002
        loss: torch.Tensor = self.model(**batch)["loss"]
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.rate, weight_decay=0.0)


class _OnStep(Callback):
    """Calls a function after each step."""

    def __init__(self, call: Callable[[int], None]) -> None:
        self._call = call

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        if trainer.global_step == 0:
            torch.manual_seed(1)  # torch's loader has drawn a number, holdfast's none

    def on_train_batch_end(
        self,
        trainer: Any,
        pl_module: Any,  # noqa: ARG002
        outputs: Any,  # noqa: ARG002
        batch: Any,  # noqa: ARG002
        batch_idx: int,
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self._call(trainer.global_step)


def _checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "saved").glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)


def live(life: job.Life) -> list[float]:
    """Train, from the newest checkpoint if there is one."""
    saves = ModelCheckpoint(
        life.folder / "saved", "{step}", every_n_train_steps=job.EVERY, save_top_k=-1
    )
    settings: dict[str, Any] = {
        "callbacks": [_OnStep(lambda step: job.step_was_made(life, step)), saves]
    }
    loader: Any = torch.utils.data.DataLoader(life.data(), batch_size=job.BATCH)
    if life.how == "full":
        settings["strategy"] = HoldfastStrategy({"recompute": False})
        loader = holdfast.DataLoader(life.data(), batch_size=job.BATCH)
    if life.fault == "killed while saving" and life.first:
        job.die_in(torch, "save", 2)
    module = _Module(job.Decoder(life), 0.01)
    settings |= {"accumulate_grad_batches": life.accumulate, "default_root_dir": life.folder}
    trainer = pl.Trainer(max_steps=life.steps, **settings, **_QUIET)
    found = _checkpoints(life.folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader, ckpt_path=str(found[-1]) if found else None)
    if trainer.global_step < life.steps:
        raise SystemExit("stopped")
    return job.ended(module.model)


def newest(folder: Path, _: job.How) -> Path:
    """Return the newest checkpoint, which holds the weights."""
    return _checkpoints(folder)[-1]


def timed(how: job.How, folder: Path, steps: int) -> list[float]:
    """Return the CPU time after each step, saves among them."""
    model, data = job.timed_job(steps)
    seconds: list[float] = []
    clock = _OnStep(lambda _: seconds.append(time.process_time()))
    saves = ModelCheckpoint(dirpath=folder / "saved", every_n_train_steps=steps)
    settings: dict[str, Any] = {"callbacks": [clock, saves]}
    if how == "full":
        settings["strategy"] = HoldfastStrategy()
    settings |= {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "default_root_dir": folder}
    trainer = pl.Trainer(max_steps=steps, **settings, **_QUIET)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(_Module(model, 5e-5), torch.utils.data.DataLoader(data, batch_size=8))
    return seconds


_VERSION = importlib.metadata.version("lightning")
_HOWS: tuple[job.How, ...] = ("alone", "full")
FRAMEWORK = job.Framework(
    name=f"lightning {_VERSION}", hows=_HOWS, live=live, newest=newest, timed=timed
)
