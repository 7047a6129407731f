"""The places where a loss is computed, and what was seen there: counts of flags, labels, and a constant's loss.

Holds no hook and judges nothing: ``loss_inputs`` fills it in, and `LossSites.facts` is plain data.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from torch import Tensor

_CLASS_LOSSES = ("cross_entropy", "nll_loss")
_BINARY = ("binary_cross_entropy", "binary_cross_entropy_with_logits")
_MOST_COLUMNS = 4096
_MOST_LABELS = 65536
_KEPT_VALUES = 400


def elements(name: str, given: Tensor, target: Tensor) -> int:
    """Return the items that a summed loss is over."""
    return max(1, target.shape.numel() if name in _CLASS_LOSSES else given.shape.numel())


class LossSite:
    """What was seen at one call of one loss function, step after step."""

    def __init__(self, function: str) -> None:
        self.function = function
        self.signs: list[int] = []
        self._calls = 0
        self._flags: Counter[str] = Counter()
        self._texts: dict[str, str] = {}
        self._values: list[float] = []
        self._first: float | None = None
        self._comparable = True
        self._labels: Counter[int] = Counter()
        self._distinct: list[tuple[int, int]] = []
        self._sums: Tensor | None = None
        self._squares: Tensor | None = None
        self._deviations: list[float] = []
        self._sizes: list[float] = []
        self._count = 0

    def add(self, flags: dict[str, bool], **texts: str) -> None:
        """Count the flags that are true."""
        self._flags.update(key for key, value in flags.items() if value)
        self._texts.update(texts)

    def called(self) -> None:
        """Count a call."""
        self._calls += 1

    def value(self, value: float, *, comparable: bool) -> None:
        """Keep the mean loss of a call; `comparable` if a constant's loss is on the same scale."""
        self._comparable = self._comparable and comparable
        if math.isfinite(value):
            self._first = value if self._first is None else self._first
            self._values.append(value)
            del self._values[:-_KEPT_VALUES]

    def targets(self, target: Tensor, *, ignored: int) -> None:
        """Add the targets of a call to what the best constant is computed from."""
        if self.function in _CLASS_LOSSES and not target.is_floating_point():
            labels = target.detach().reshape(-1)[:_MOST_LABELS]
            counted = Counter(labels[labels != ignored].tolist())
            self._labels.update(counted)
            if target.dim() == 1:
                self._distinct.append((len(counted), sum(counted.values())))
                del self._distinct[:-_KEPT_VALUES]
        elif target.dtype.is_complex or self.function == "kl_div" or self.function in _CLASS_LOSSES:
            self._comparable = False
        else:
            self._add_columns(target.detach())

    def _add_columns(self, target: Tensor) -> None:
        wide = target.reshape(target.shape[0], -1).double() if target.dim() else target.reshape(1, 1).double()
        if wide.shape[1] > _MOST_COLUMNS or (self._sums is not None and wide.shape[1] != self._sums.shape[0]):
            wide = wide.reshape(-1, 1)
        if self._sums is not None and wide.shape[1] != self._sums.shape[0]:
            self._comparable = False
            return
        sums, squares = wide.sum(0).cpu(), wide.square().sum(0).cpu()
        self._sums = sums if self._sums is None else self._sums + sums
        self._squares = squares if self._squares is None or self._sums is None else self._squares + squares
        self._count += wide.shape[0]
        if self.function == "mse_loss":
            self._sizes.append(float(wide.abs().max()))
            del self._sizes[:-_KEPT_VALUES]
        if self.function == "l1_loss":
            self._deviations.append(float((wide - wide.median(0).values).abs().mean()))
        if self.function in _BINARY and wide.shape[1] == 1:
            self._distinct.append((len(set(wide.flatten().tolist())), wide.shape[0]))
            del self._distinct[:-_KEPT_VALUES]

    def baseline(self) -> float | None:
        """Return the loss of the best constant prediction, None if it is unknown."""
        if not self._comparable:
            return None
        if self._labels:
            total = sum(self._labels.values())
            return -sum(n / total * math.log(n / total) for n in self._labels.values())
        if self._sums is None or self._squares is None or self._count < 2:
            return None
        mean = self._sums / self._count
        if self.function in _BINARY:
            p = mean.clamp(1e-12, 1 - 1e-12)
            return float(-(p * p.log() + (1 - p) * (1 - p).log()).mean())
        if self.function == "mse_loss":
            return float((self._squares / self._count - mean.square()).mean())
        if self.function == "l1_loss" and len(self._deviations) >= 10:
            return sum(self._deviations) / len(self._deviations)
        return None

    def expected_distinct(self) -> float | None:
        """Return how many different labels a batch would hold if batches were drawn at random; None if unknown."""
        total = sum(self._labels.values())
        if not self._distinct:
            return None
        size = sorted(n for _, n in self._distinct)[len(self._distinct) // 2]
        if self._labels:
            return sum(1 - (1 - n / total) ** size for n in self._labels.values())
        if self._sums is None or self.function not in _BINARY:
            return None
        p = float(self._sums[0]) / max(1, self._count)
        return (1 - (1 - p) ** size) + (1 - p**size)

    def facts(self) -> dict[str, Any]:
        """Return what was seen, as plain data."""
        distinct = [n for n, _ in self._distinct]
        return {
            "function": self.function,
            "calls": self._calls,
            **{key: count for key, count in self._flags.items() if count},
            **self._texts,
            "values": list(self._values),
            "baseline": self.baseline(),
            "negative_signs": self.signs.count(-1),
            "positive_signs": self.signs.count(1),
            "labelled_calls": len(distinct),
            "distinct_labels": sum(distinct) / len(distinct) if distinct else None,
            "expected_labels": self.expected_distinct(),
            "constant_target": self._constant(),
            "first": self._first,
            "target_scale": self._scale(),
            "target_sizes": list(self._sizes),
        }

    def _scale(self) -> float | None:
        """Return the mean square of the targets of a squared error: the loss of predicting 0."""
        if self.function != "mse_loss" or self._squares is None or not self._count:
            return None
        return float((self._squares / self._count).mean())

    def _constant(self) -> float | None:
        """Return the one value that all targets have, None if there is no such."""
        if self._labels:
            return float(next(iter(self._labels))) if len(self._labels) == 1 else None
        if self._sums is None or self._squares is None or self._count < 2:
            return None
        mean = self._sums / self._count
        spread = (self._squares / self._count - mean.square()).clamp_min(0).max().sqrt()
        return float(mean[0]) if spread <= 1e-6 * (1e-12 + mean.abs().max()) else None


class LossSites:
    """All places of one run, told apart by function and by order within the step."""

    def __init__(self) -> None:
        self._sites: dict[str, LossSite] = {}
        self._in_step: Counter[str] = Counter()

    def begin_step(self) -> None:
        """Start to count the calls of a step anew."""
        self._in_step.clear()

    def enter(self, function: str) -> LossSite:
        """Return the place of this call and count it."""
        self._in_step[function] += 1
        # A loss over a varying number of parts shares its last place, so that places stay few.
        key = f"{function}#{min(self._in_step[function], 8)}"
        site = self._sites.setdefault(key, LossSite(function))
        site.called()
        return site

    def note(self, function: str, *, shapes: str | None = None, **flags: bool) -> None:
        """Count a call with its flags."""
        self.enter(function).add(flags, **({} if shapes is None else {"shapes": shapes}))

    def facts(self) -> dict[str, dict[str, Any]]:
        """Return what was seen by place, as plain data."""
        return {key: site.facts() for key, site in self._sites.items()}
