"""fp16 inside each framework on a CUDA device, beside the framework alone.

Elsewhere skipped by name: `make gpu`.

What a CPU can show of half precision is in tests/integrations: Lightning trains in fp16 there where
it is given as a plugin, Accelerate and the Trainer where their switch is set by force, SpeechBrain
refuses.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.marks import NEEDS_CUDA
from tests.integrations.hugging_face import make_gpt2, make_trainer, samples
from torch import nn
from torch.nn import functional as F

pytestmark = [
    *NEEDS_CUDA,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of the frameworks
]
BATCHES, SIZE = 8, 16


@pytest.fixture(autouse=True)
def exact_kernels() -> Iterator[None]:
    """Let kernels be deterministic, so that equal steps have equal bits."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4))


def make_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(SIZE, 32, generator=generator), torch.arange(SIZE) % 4) for _ in range(BATCHES)
    ]


def assert_trained_alike(train: Callable[[bool], Any]) -> None:
    """Train with the framework alone, then with holdfast.

    Weights are equal to the bit, finite, and have moved.
    """
    plain, guarded = (
        [each.detach().cpu() for each in train(with_holdfast).parameters()]
        for with_holdfast in (False, True)
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, guarded, strict=True))
    assert all(each.isfinite().all() for each in plain)
    assert len(plain) == 0 or not torch.equal(plain[0], next(make_model().parameters()).detach())


def test_the_trainer_trains_alike_in_fp16(tmp_path: Path) -> None:
    """Windows of two batches of the Trainer, with its own loss scale, are those of the guarded
    Trainer.
    """
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    if torch.cuda.device_count() > 1:
        pytest.skip(
            "the Trainer would spread each batch by DataParallel: set CUDA_VISIBLE_DEVICES=0"
        )
    from holdfast.integrations.transformers import HoldfastTrainer

    def train(with_holdfast: bool) -> Any:
        kind = HoldfastTrainer if with_holdfast else transformers.Trainer
        settings = {"fp16": True, "use_cpu": False, "gradient_accumulation_steps": 2}
        trainer = make_trainer(
            kind, tmp_path / str(with_holdfast), make_gpt2(), samples(48), **settings
        )
        trainer.train()
        return trainer.model

    assert_trained_alike(train)


def test_accelerate_trains_alike_in_fp16(tmp_path: Path) -> None:
    """Clipped steps of Accelerate's own loop, with its own loss scale, are those of the guard."""
    accelerate = pytest.importorskip("accelerate", exc_type=ImportError)
    from accelerate.state import AcceleratorState, GradientState

    from holdfast.integrations.accelerate import accelerate_guard

    def train(with_holdfast: bool) -> Any:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        accelerator = accelerate.Accelerator(
            mixed_precision="fp16", project_dir=tmp_path / str(with_holdfast)
        )
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader = torch.utils.data.DataLoader(make_batches(), batch_size=None)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        if with_holdfast:
            guard = accelerate_guard(
                accelerator, model=model, optimizer=optimizer, loader=loader, max_grad_norm=0.5
            )
            for batch in guard.batches(max_epochs=2):
                guard.step(batch, lambda batch: F.cross_entropy(model(batch[0]), batch[1]))
        else:
            for batch in [*loader, *loader]:
                accelerator.backward(F.cross_entropy(model(batch[0]), batch[1]))
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        return accelerator.unwrap_model(model)

    assert_trained_alike(train)


def test_lightning_trains_alike_in_fp16(tmp_path: Path) -> None:
    """Clipped steps of Lightning's 16-mixed are those of the strategy."""
    pl = pytest.importorskip("lightning.pytorch", exc_type=ImportError)
    from holdfast.integrations.lightning import HoldfastStrategy

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train(with_holdfast: bool) -> Any:
        module = Module()
        own = (
            {"strategy": HoldfastStrategy()}
            if with_holdfast
            else {"accelerator": "gpu", "devices": 1}
        )
        trainer = pl.Trainer(
            max_epochs=2,
            precision="16-mixed",
            gradient_clip_val=0.5,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=tmp_path / str(with_holdfast),
            **own,
        )
        trainer.fit(module, torch.utils.data.DataLoader(make_batches(), batch_size=None))
        return module.model

    assert_trained_alike(train)


def test_speechbrain_trains_alike_in_fp16(tmp_path: Path) -> None:
    """Steps of a Brain with its own loss scale are those of the guarded Brain."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sb = pytest.importorskip(
            "speechbrain", exc_type=ImportError, reason="see `make speechbrain`"
        )
    from holdfast.integrations.speechbrain import HoldfastMixin

    logging.getLogger("speechbrain").setLevel(logging.ERROR)

    class Plain(sb.Brain):  # type: ignore[misc, name-defined]
        def compute_forward(self, batch: Any, stage: Any) -> torch.Tensor:
            return self.modules.model(batch[0].to(self.device))

        def compute_objectives(
            self, predictions: torch.Tensor, batch: Any, stage: Any
        ) -> torch.Tensor:
            return F.cross_entropy(predictions, batch[1].to(self.device))

    class Guarded(HoldfastMixin, Plain):
        """The same, guarded."""

    def train(with_holdfast: bool) -> Any:
        own = {"holdfast_run_dir": tmp_path / "holdfast"} if with_holdfast else {}
        options = {
            "device": "cuda",
            "precision": "fp16",
            "noprogressbar": True,
            "max_grad_norm": 0.5,
        }
        kind = Guarded if with_holdfast else Plain
        brain = kind(
            {"model": make_model()},
            lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
            run_opts=options,
            **own,
        )
        brain.fit(range(1, 3), torch.utils.data.DataLoader(make_batches(), batch_size=None))
        return brain.modules.model

    assert_trained_alike(train)
