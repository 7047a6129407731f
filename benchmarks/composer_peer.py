"""Composer as a peer of `step_overhead`, where it can be had.

Its newest version (0.32.1) asks for torch 2.7, and imports much that a plain training does not use. It trains with
torch 2.13 if it is installed without what it asks for, and what it only imports is stood in for:

    pip install --no-deps --target FOLDER mosaicml==0.32.1 torch-optimizer pytorch-ranger coolname py-cpuinfo tabulate
    PYTHONPATH=FOLDER python -m benchmarks.step_overhead
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.step_models import MAX_GRAD_NORM, Job

_ONLY_IMPORTED = frozenset({"torchvision", "mcli", "gql", "validators", "arrow", "backoff",
                            "questionary"})  # fmt: skip


class _Anything:
    def __init__(self, *_: Any, **__: Any) -> None:
        """Take what it is called with."""


class _StandIn(types.ModuleType):
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, _: Any = None, __: Any = None) -> importlib.machinery.ModuleSpec | None:
        wanted = name.partition(".")[0] in _ONLY_IMPORTED
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if wanted else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave it as it is."""


def is_there() -> bool:
    """Return whether Composer can be imported."""
    return importlib.util.find_spec("composer") is not None


def train(job: Job, loader: Any, most_steps: int, stepped: Callable[[], None]) -> None:
    """Train, and call a function before the first step and after each."""
    sys.meta_path.append(_StandIns())  # only for what is not there
    sys.modules.setdefault("importlib_metadata", importlib.metadata)
    from composer import Callback, Trainer
    from composer.algorithms import GradientClipping
    from composer.models import ComposerModel

    class Model(ComposerModel):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.net = job.model

        def forward(self, batch: Any) -> Any:
            return self.net(batch[0])

        def loss(self, outputs: Any, batch: Any, *_: Any) -> Any:
            return torch.nn.functional.cross_entropy(outputs, batch[1])

    class Waits(Callback):  # type: ignore[misc, unused-ignore]
        def fit_start(self, *_: Any) -> None:
            stepped()

        def batch_end(self, *_: Any) -> None:
            stepped()

    Trainer(
        model=Model(), train_dataloader=loader, optimizers=job.optimizer, max_duration=f"{most_steps}ba",
        device="cpu", algorithms=[GradientClipping(clipping_type="norm", clipping_threshold=MAX_GRAD_NORM)],
        callbacks=[Waits()], device_train_microbatch_size=len(job.batch[1]), progress_bar=False, log_to_console=False,
    ).fit()  # fmt: skip
