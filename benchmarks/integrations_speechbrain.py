"""SpeechBrain in ``integrations``: alone, with the mixin; left out where it cannot be imported.

There is no callback in SpeechBrain, so there are two ways only.
"""

from __future__ import annotations

import logging
import time
import warnings
from pathlib import Path
from typing import Any

import torch

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
    warnings.simplefilter("ignore")  # of the imports of SpeechBrain itself
    import speechbrain as sb
    from speechbrain.dataio.dataloader import SaveableDataLoader
    from speechbrain.utils.checkpoints import Checkpointer

from transformers import GPT2Config, GPT2LMHeadModel

from holdfast.integrations.speechbrain import HoldfastMixin

logging.getLogger("speechbrain").setLevel(logging.ERROR)


class _Brain(sb.Brain):
    """Trains a model that returns its loss, counts steps, and saves every few of them."""

    life: Life | None = None

    def compute_forward(self, batch: Any, stage: Any) -> Any:  # noqa: ARG002
        return self.modules.model(**batch)

    def compute_objectives(self, predictions: Any, batch: Any, stage: Any) -> torch.Tensor:  # noqa: ARG002
        loss: torch.Tensor = predictions["loss"]
        return loss

    def on_fit_batch_end(self, batch: Any, outputs: Any, loss: Any, should_step: Any) -> None:  # noqa: ARG002
        if self.step % self.grad_accumulation_factor:
            return
        self.seconds.append(time.process_time())
        if self.life is not None:
            step_was_made(self.life, self.step // self.grad_accumulation_factor)


class _Guarded(HoldfastMixin, _Brain):
    """The same, guarded."""


def _options(**more: Any) -> dict[str, Any]:
    return {"device": "cpu", "noprogressbar": True, "grad_accumulation_factor": 2, **more}


def live(life: Life) -> list[float]:
    """Train one epoch, from the newest checkpoint if there is one."""
    model = Decoder(life)
    saves = Checkpointer(life.folder / "save", {"model": model})
    kind, given = _Brain, {}
    if life.how == "full":
        kind, given = (
            _Guarded,
            {"holdfast_policy": {"recompute": False}, "holdfast_run_dir": life.folder / "holdfast"},
        )
    options = _options(ckpt_interval_steps=EVERY * life.accumulate, nonfinite_patience=3)
    brain = kind(
        {"model": model},
        opt_class=lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.0),
        run_opts=options,
        checkpointer=saves,
        **given,
    )
    brain.life, brain.seconds = life, []
    if life.fault == "killed while saving" and life.first:
        die_in(torch, "save", 4)  # half-way through the second checkpoint
    loader = SaveableDataLoader(life.data(), batch_size=BATCH)
    saves.add_recoverable("dataloader", loader)
    torch.manual_seed(1)
    brain.fit(range(1), loader)
    return ended(model)


def newest(folder: Path, _: How) -> Path:
    """Return the weights of the newest checkpoint."""
    return max((folder / "save").glob("CKPT*"), key=lambda path: path.stat().st_mtime_ns) / "model.ckpt"


def timed(how: How, folder: Path, steps: int) -> list[float]:
    """Return the CPU seconds of each step of a decoder of 0.6 million weights."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=64, n_embd=128, n_layer=3, n_head=4))
    tokens = torch.randint(3, 512, (steps * 16, 64))
    kind, given = (_Guarded, {"holdfast_run_dir": folder / "holdfast"}) if how == "full" else (_Brain, {})
    brain = kind({"model": model}, opt_class=torch.optim.AdamW, run_opts=_options(max_grad_norm=1.0), **given)
    brain.seconds = []
    data = [{"input_ids": each, "labels": each} for each in tokens]
    brain.fit(range(1), torch.utils.data.DataLoader(data, batch_size=8))
    return [
        after - before
        for before, after in zip(brain.seconds[WARM_STEPS:], brain.seconds[WARM_STEPS + 1 :], strict=False)
    ]


FRAMEWORK = Framework(
    name=f"speechbrain {sb.__version__}", hows=("alone", "full"), live=live, newest=newest, timed=timed
)
