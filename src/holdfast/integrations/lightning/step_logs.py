"""Keep ``self.log`` and torchmetrics consistent, so that each step is logged exactly once.

The guard may call ``training_step`` several times for one batch: again after an error, and once per
part if the batch is split.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from holdfast.integrations.refusals import load

load("lightning.pytorch")
from torchmetrics import Metric  # noqa: E402

# The attributes of a metric, other than its states, that an update changes.
_UPDATE_ATTRIBUTES = (
    "_computed",
    "_forward_cache",
    "_update_count",
    "_update_called",
    "has_reset",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _MetricSnapshot:
    """Copies of a metric's attributes, from which the metric can be restored."""

    # The metric's key in Lightning's logged results, or None if it is a metric of the module.
    key: str | None
    metric: Metric
    attributes: dict[str, Any]

    def restore(self) -> None:
        for name, value in self.attributes.items():
            vars(self.metric)[name] = _copy(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartLogs:
    """The values logged for one part of a batch."""

    samples: int
    values: dict[str, torch.Tensor]


class StepLogs:
    """Keeps logged values and metrics correct while a step is attempted, repeated and split.

    An attempt that is undone leaves no logged values behind. If a batch is split, the value logged
    for the step is the mean over the parts, weighted by their numbers of samples. For values that
    Lightning accumulates over an epoch, parts are weighted by samples too, just as Lightning
    weights batches.

    Args:
        module: The ``LightningModule``.
        trainer: The module's trainer.
    """

    def __init__(self, module: nn.Module, trainer: Any) -> None:
        self._trainer = trainer
        self._metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
        self._before_step: list[_MetricSnapshot] = []
        self._parts: list[_PartLogs] = []
        # Whether values may have been logged since `begin_step`.
        self._has_changed = False

    @property
    def num_parts(self) -> int:
        """Return the number of parts of the batch that have been computed in this attempt."""
        return len(self._parts)

    def begin_step(self) -> None:
        """Take a snapshot of the logged values and metrics, at the beginning of a step."""
        self._before_step = self._snapshot()
        self._parts = []
        self._has_changed = False

    def undo_attempt(self) -> None:
        """Restore the logged values and metrics from before the step."""
        if self._has_changed:
            self._restore(self._before_step)
        self._parts = []
        self._has_changed = False

    @contextlib.contextmanager
    def discarded(self) -> Iterator[None]:
        """Return a context that, on exit, undoes all logging done within it."""
        snapshot = self._snapshot()
        try:
            yield
        finally:
            self._restore(snapshot)

    def _snapshot(self) -> list[_MetricSnapshot]:
        logged = self._trainer._results or {}
        snapshots = [
            _MetricSnapshot(key=key, metric=metric, attributes=_attributes(metric))
            for key, metric in logged.items()
        ]
        for metric in self._metrics:
            snapshots.append(
                _MetricSnapshot(key=None, metric=metric, attributes=_attributes(metric))
            )
        return snapshots

    def _restore(self, snapshots: list[_MetricSnapshot]) -> None:
        logged = self._trainer._results
        keys_before = {snapshot.key for snapshot in snapshots}
        for key in set(logged or ()) - keys_before:
            del logged[key]
        for snapshot in snapshots:
            snapshot.restore()

    def begin_part(self, part: Any, batch: Any) -> None:
        """Prepare for logging a part, so that its values are weighted by its number of samples.

        Args:
            part: The part of the batch that is about to be computed.
            batch: The whole batch.
        """
        self._has_changed = True
        logged = self._trainer._results
        if logged is None:
            return
        if part is not batch or self._parts:
            logged.batch = part
            # If `batch_size` is None, Lightning counts the samples in `logged.batch` itself.
            logged.batch_size = None

    def end_part(self, samples: int) -> None:
        """Store the values that were logged for the current part.

        Args:
            samples: The number of samples in the part.
        """
        logged = self._trainer._results or {}
        values = {}
        for key, item in logged.items():
            value = _step_value(item)
            if value is not None:
                values[key] = value
        self._parts.append(_PartLogs(samples=samples, values=values))

    def end_step(self, batch: Any) -> None:
        """Replace the values logged for the last part with the means over the whole batch.

        Args:
            batch: The batch to which Lightning assigns later logged values.
        """
        logged = self._trainer._results
        if logged is None:
            return
        logged.batch = batch
        logged.batch_size = None
        if len(self._parts) < 2:
            return
        for key, item in logged.items():
            mean = self._mean_over_parts(key)
            if mean is not None and _step_value(item) is not None:
                item._forward_cache = mean

    def _mean_over_parts(self, key: str) -> torch.Tensor | None:
        """Return the sample-weighted mean of the values logged for a key, or None without any."""
        parts = [part for part in self._parts if key in part.values]
        if not parts:
            return None
        total = sum(part.samples for part in parts)
        mean: Any = 0
        for part in parts:
            mean = mean + part.values[key] * (part.samples / total)
        result: torch.Tensor = mean
        return result


def _step_value(item: Any) -> torch.Tensor | None:
    """Return the value that was logged for an item in this step, or None if it cannot be averaged.

    Args:
        item: An entry of Lightning's logged results.
    """
    if not item.meta.on_step or not item.is_tensor or not item.meta.is_mean_reduction:
        return None
    value = item._forward_cache
    return value if isinstance(value, torch.Tensor) else None


def _attributes(metric: Metric) -> dict[str, Any]:
    """Return copies of the metric's attributes that an update changes."""
    names = list(metric._defaults)
    names += [name for name in _UPDATE_ATTRIBUTES if name in vars(metric)]
    attributes = {name: _copy(getattr(metric, name)) for name in names}
    if "value" in vars(metric) and "value" not in attributes:
        # The user passed a metric to ``self.log``. Lightning's item refers to the metric object
        # itself, which must not be copied.
        attributes["value"] = vars(metric)["value"]
    return attributes


def _copy(value: Any) -> Any:
    """Return a copy of a tensor or list. Other values are immutable, and are returned unchanged."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, list):
        return list(value)
    return value
