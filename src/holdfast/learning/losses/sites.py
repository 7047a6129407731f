"""Store observations for each place in the script where a loss is computed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from holdfast.learning.losses.loss_functions import BINARY_LOSSES
from holdfast.learning.losses.targets import (
    ConstantClassShares,
    ConstantMean,
    ConstantMedian,
    LabelMix,
    best_constant_for,
    labels_of,
)
from holdfast.learning.measurements import Measurements
from holdfast.learning.measures import append_newest
from holdfast.learning.observations import ObservedLoss

# Maximum number of sites per loss function. Further calls in a pass share the last site, so that a
# script that sums a varying number of losses does not create more and more sites.
MAX_SITES = 8


class LossSite:
    """The observations at one loss site: a call of a loss function that recurs in every step."""

    def __init__(self, function: str) -> None:
        self.observed = ObservedLoss(function=function)
        self._constant = best_constant_for(function)
        # False once a call has used weights or label smoothing, because the loss of a constant
        # prediction is computed without them.
        self._comparable = True
        # Loss of the best constant prediction on the targets of the last call.
        self._constant_now: float | None = None
        self._labels = LabelMix()

    def note_call(self, *, examined: bool) -> None:
        """Count a call.

        Args:
            examined: Whether its arguments are examined.
        """
        self.observed.calls += 1
        self.observed.examined += examined

    def note_flags(self, flags: Iterable[str]) -> None:
        """Count the flags raised by a call."""
        for flag in flags:
            self.observed.flags[flag] = self.observed.flags.get(flag, 0) + 1

    def note_broadcast(self, left: torch.Size, right: torch.Size) -> None:
        """Count a call in which broadcasting pairs every prediction with every target.

        Args:
            left: The shape of one of the two.
            right: The shape of the other one.
        """
        self.note_flags(["broadcast"])
        self.observed.shapes = f"{tuple(left)} and {tuple(right)}"

    def note_sign(self, gradient: Tensor) -> None:
        """Record the sign of the objective's derivative with respect to this loss.

        Args:
            gradient: The derivative, shape ``()``.
        """
        value = float(gradient)
        if math.isfinite(value) and value != 0:
            append_newest(self.observed.signs, 1 if value > 0 else -1)

    def note_value(self, value: float, *, comparable: bool) -> None:
        """Record the mean loss of a call.

        Args:
            value: The mean loss.
            comparable: Whether the loss can be compared with the loss of a constant prediction.
        """
        self._comparable = self._comparable and comparable
        if not math.isfinite(value):
            return
        if self.observed.first is None:
            self.observed.first = value
        append_newest(self.observed.values, value)
        if self._constant_now is not None:
            append_newest(self.observed.gains, self._constant_now - value)

    def measure_targets(
        self, measurements: Measurements, target: Tensor, *, ignore_index: int
    ) -> None:
        """Measure the targets of a call.

        Args:
            measurements: The measurements of the step.
            target: The targets.
            ignore_index: The class label that does not count.
        """
        constant = self._constant
        if constant is None or target.is_complex():
            measurements.add(self._note_incomparable)
        elif isinstance(constant, ConstantClassShares):
            self._measure_class_labels(measurements, constant, target, ignore_index)
        else:
            measurements.add(partial(self._note_targets, constant), constant.measure(target))
            has_one_per_sample = target.dim() < 2 or target.shape[-1] == 1
            if self.observed.function in BINARY_LOSSES and has_one_per_sample:
                measurements.add(self._note_binary_labels, labels_of(target))

    def _measure_class_labels(
        self,
        measurements: Measurements,
        constant: ConstantClassShares,
        target: Tensor,
        ignore_index: int,
    ) -> None:
        # The best constant prediction is not implemented for targets that are class probabilities.
        if target.is_floating_point():
            measurements.add(self._note_incomparable)
            return
        note = partial(
            self._note_class_labels,
            constant,
            ignore_index=ignore_index,
            is_one_per_sample=target.dim() == 1,
        )
        measurements.add(note, labels_of(target))

    def _note_incomparable(self) -> None:
        self._comparable = False

    def _note_targets(self, constant: ConstantMean | ConstantMedian, measured: Tensor) -> None:
        self._constant_now = constant.add(measured)

    def _note_class_labels(
        self,
        constant: ConstantClassShares,
        target: Tensor,
        *,
        ignore_index: int,
        is_one_per_sample: bool,
    ) -> None:
        labels = [label for label in target.tolist() if label != ignore_index]
        self._constant_now = constant.add(labels)
        if is_one_per_sample:
            self._labels.add(labels)

    def _note_binary_labels(self, target: Tensor) -> None:
        labels: list[float] = target.tolist()
        if all(label in (0, 1) for label in labels):
            self._labels.add(labels)

    def observations(self) -> ObservedLoss:
        """Return all observations, with updated statistics."""
        self.observed.baseline = None
        if self._constant is not None and self._comparable:
            self.observed.baseline = self._constant.loss()
        self.observed.labelled_calls = self._labels.batches
        self.observed.distinct_labels = self._labels.mean_different()
        self.observed.expected_labels = self._labels.expected_different()
        if isinstance(self._constant, ConstantMean) and self.observed.function == "mse_loss":
            self.observed.target_scale = self._constant.mean_square()
        return self.observed


class LossSites:
    """The loss sites of one run.

    A site is identified by its loss function and by the position of the call among all calls of
    that function in a pass.
    """

    def __init__(self) -> None:
        self._sites: dict[str, LossSite] = {}
        self._calls_in_pass: Counter[str] = Counter()

    def begin_pass(self) -> None:
        """Start a new forward pass, and restart the numbering of calls."""
        self._calls_in_pass.clear()

    def enter(self, function: str) -> LossSite:
        """Return the loss site of a call of a loss function, which is the next one in this pass."""
        self._calls_in_pass[function] += 1
        position = min(self._calls_in_pass[function], MAX_SITES)
        return self._sites.setdefault(f"{function}#{position}", LossSite(function))

    def observations(self) -> dict[str, ObservedLoss]:
        """Return the observations of all sites, keyed by site name."""
        return {
            # A site without calls belongs to a step that was undone.
            name: site.observations()
            for name, site in self._sites.items()
            if site.observed.calls
        }
