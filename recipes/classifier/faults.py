"""What can be made wrong with the training, one thing at a time, and by which rule or event
holdfast names it.

Most are settings that somebody has really used by mistake; the others change what is read, or hurt
a loader worker.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from recipes.classifier.images import Source

FaultName = Literal[
    "unscaled-inputs",
    "lr-too-high",
    "lr-too-low",
    "momentum-too-high",
    "weight-decay-too-high",
    "scheduler-every-batch",
    "vanishing-gradients",
    "exploding-gradients",
    "zero-init",
    "frozen-layer",
    "no-shuffle",
    "shuffled-labels",
    "nan-inputs",
    "corrupt-samples",
    "too-many-workers",
    "dead-worker",
    "stopped-worker",
    "slow-worker",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is wrong.

    Args:
        named_by: Rule of a finding, or kind of an event, that says so.
        options: Options of the recipe that it sets.
        policy: Fields of the policy that it sets.
        loading: Arguments of the loader that it sets.
    """

    named_by: str
    options: Mapping[str, Any] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)
    loading: Mapping[str, Any] = field(default_factory=dict)


_MANY_WORKERS = 4 * (os.cpu_count() or 1)
# Of the loop with a worker that hangs, so that nobody waits a minute to see it
_PATIENCE_SECONDS = 2
FAULTS: Mapping[FaultName, Fault] = {
    "unscaled-inputs": Fault(
        named_by="H856", options={"scale_inputs": False}, policy={"max_grad_norm": None}
    ),
    "lr-too-high": Fault(named_by="H825", options={"lr": 50.0}),
    "lr-too-low": Fault(named_by="H824", options={"lr": 1e-6}),
    "momentum-too-high": Fault(named_by="H825", options={"lr": 1.0, "momentum": 0.999}),
    "weight-decay-too-high": Fault(named_by="H858", options={"weight_decay": 2.0}),
    "scheduler-every-batch": Fault(named_by="H854"),
    "vanishing-gradients": Fault(named_by="H848", options={"activation": "sigmoid", "depth": 8}),
    "exploding-gradients": Fault(
        named_by="H848", options={"init_scale": 3.0, "depth": 8}, policy={"max_grad_norm": None}
    ),
    "zero-init": Fault(named_by="H822", options={"init_scale": 0.0}),
    "frozen-layer": Fault(named_by="H814"),
    "no-shuffle": Fault(named_by="H843", options={"shuffle": False}),
    "shuffled-labels": Fault(named_by="H828"),
    "nan-inputs": Fault(named_by="nonfinite_origin"),
    "corrupt-samples": Fault(named_by="sample_quarantined", options={"quarantine": 0.01}),
    "too-many-workers": Fault(named_by="H630", options={"num_workers": _MANY_WORKERS}),
    "dead-worker": Fault(named_by="loader_healed", options={"num_workers": 2}),
    "stopped-worker": Fault(named_by="loader_healed", options={"num_workers": 2}),
    "slow-worker": Fault(
        named_by="loader_healed", options={"num_workers": 2}, loading={"timeout": _PATIENCE_SECONDS}
    ),
}
CUT_OFF = (7, 77, 177)
"""Training images of which the second half is missing, under ``corrupt-samples``."""
NOT_A_NUMBER = (70,)
"""Training images that hold NaN, under ``nan-inputs``."""
# The training image at which a worker dies, stops or hangs, the first time that it is read
_HURTS = 100


class Altered:
    """A source with something wrong with what is stored.

    Args:
        source: The sound one.
        fault: Which.
        seed: Of the order of shuffled labels.
    """

    def __init__(self, source: Source, fault: FaultName | None, seed: int) -> None:
        self._source, self._cut = source, CUT_OFF if fault == "corrupt-samples" else ()
        self._order = list(range(len(source.labels)))
        self.labels: Sequence[int] = source.labels
        if fault == "no-shuffle":  # as files lie in folders, one class after the other
            self._order.sort(key=lambda index: source.labels[index])
            self.labels = [source.labels[index] for index in self._order]
        elif fault == "shuffled-labels":
            chance = torch.Generator().manual_seed(seed)
            self.labels = [
                source.labels[i]
                for i in torch.randperm(len(source.labels), generator=chance).tolist()
            ]

    def name(self, index: int) -> str:
        """Return what an image is called."""
        return self._source.name(self._order[index])

    def shape(self, index: int) -> tuple[int, ...] | None:
        """Return height and width of an image."""
        return self._source.shape(self._order[index])

    def read(self, index: int) -> bytes:
        """Return what is stored, or the first half of it."""
        stored = self._source.read(self._order[index])
        return stored[: len(stored) // 2] if index in self._cut else stored

    def decode(self, stored: bytes) -> np.ndarray:
        """Return the image."""
        return self._source.decode(stored)


class Hurting(Dataset[Any]):
    """A dataset with one bad image.

    NaN in it, or something that the worker does when it first comes to it.

    Args:
        samples: The sound dataset.
        fault: Which.
        marks: Folder in which it is noted what has happened, since it happens once.
    """

    def __init__(self, samples: Dataset[Any], fault: FaultName | None, marks: Path) -> None:
        self._samples, self._fault, self._mark = samples, fault, marks / f"{fault}.happened"
        marks.mkdir(parents=True, exist_ok=True)

    def __len__(self) -> int:
        return len(self._samples)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        image, label = self._samples[index]
        if self._fault == "nan-inputs" and index in NOT_A_NUMBER:
            # As from a division by the spread of a blank page
            image = torch.full_like(image, float("nan"))
        elif index == _HURTS and get_worker_info() is not None and not self._mark.exists():
            self._mark.touch()
            if self._fault == "slow-worker":
                time.sleep(600)
            elif self._fault in ("dead-worker", "stopped-worker"):
                os.kill(
                    os.getpid(),
                    signal.SIGSTOP if self._fault == "stopped-worker" else signal.SIGKILL,
                )
        return image, label
