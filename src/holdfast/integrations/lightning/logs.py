"""What ``self.log`` and torchmetrics hold during a step of Lightning's, so that a step is logged once, as a whole.

An attempt that is taken back leaves nothing in them. Of a batch that was cut, the values logged for each step are the
mean over its parts, weighted by their samples; those that Lightning gathers over an epoch weigh each part by its own
samples, as Lightning does with whole batches.

Does not: log (Lightning does).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric

_KEPT = ("_computed", "_forward_cache", "_update_count", "_update_called", "has_reset")


class StepLogs:
    """The logged values of one trainer.

    Args:
        module: The LightningModule; the torchmetrics in it count samples too.
        trainer: Its trainer.
    """

    def __init__(self, module: nn.Module, trainer: Any) -> None:
        self._trainer = trainer
        self._metrics = [each for each in module.modules() if isinstance(each, Metric)]
        self._before: list[tuple[str | None, Metric, dict[str, Any]]] = []
        self._parts: list[tuple[int, dict[str, torch.Tensor]]] = []
        self._touched = False

    @property
    def parts(self) -> int:
        """Return in how many parts the batch has gone through the model, in this attempt."""
        return len(self._parts)

    def keep(self) -> None:
        """Note what is logged before a step."""
        self._before, self._parts, self._touched = self._now(), [], False

    def put_back(self) -> None:
        """Return to what was noted."""
        if self._touched:
            self._return_to(self._before)
        self._parts, self._touched = [], False

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Take back what is logged inside."""
        now = self._now()
        try:
            yield
        finally:
            self._return_to(now)

    def _now(self) -> list[tuple[str | None, Metric, dict[str, Any]]]:
        logged = self._trainer._results or {}
        metrics = [*logged.items(), *((None, each) for each in self._metrics)]
        return [(key, metric, _state_of(metric)) for key, metric in metrics]

    def _return_to(self, noted: list[tuple[str | None, Metric, dict[str, Any]]]) -> None:
        logged, keys = self._trainer._results, {key for key, _, _ in noted}
        for key in set(logged or ()) - keys:
            del logged[key]
        for _, metric, state in noted:
            vars(metric).update({name: _copied(value) for name, value in state.items()})

    def begin_part(self, part: Any, batch: Any) -> None:
        """Let the values to come count by the samples of this part of the batch."""
        self._touched = True
        logged = self._trainer._results
        if logged is not None and (part is not batch or self._parts):
            logged.batch, logged.batch_size = part, None

    def end_part(self, samples: int) -> None:
        """Take in what was logged of a part.

        Args:
            samples: In this part.
        """
        logged = self._trainer._results or {}
        seen = {key: value for key, item in logged.items() if (value := _step_value(item)) is not None}
        self._parts.append((samples, seen))

    def whole(self, batch: Any) -> None:
        """Replace the values of the last part by those of the whole batch."""
        logged = self._trainer._results
        if logged is None:
            return
        logged.batch, logged.batch_size = batch, None
        if len(self._parts) > 1:
            for key, item in logged.items():
                values = [(samples, seen[key]) for samples, seen in self._parts if key in seen]
                if values and _step_value(item) is not None:
                    total = sum(samples for samples, _ in values)
                    item._forward_cache = sum(value * (samples / total) for samples, value in values)


def _step_value(item: Any) -> torch.Tensor | None:
    """Return what is logged for this step, if a mean of it says something."""
    value = item._forward_cache if item.meta.on_step and item.is_tensor and item.meta.is_mean_reduction else None
    return value if isinstance(value, torch.Tensor) else None


def _state_of(metric: Metric) -> dict[str, Any]:
    names = [*metric._defaults, *(name for name in _KEPT if name in vars(metric))]
    found = {name: _copied(getattr(metric, name)) for name in names}
    if "value" in vars(metric) and "value" not in found:
        found["value"] = vars(metric)["value"]  # of a logged metric: the metric itself
    return found


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value
