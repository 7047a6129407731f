"""Check the arguments of loss functions with a table of checks, each of which may raise a flag.

A check examines a single call. The learning rules decide how many calls must raise a flag before it
is reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from holdfast.learning.losses.loss_functions import (
    BINARY_LOSSES,
    REGRESSION_LOSSES,
    SCORE_LOSSES,
    TARGET_LOSSES,
)
from holdfast.learning.losses.sources import SourceOperation, source_of
from holdfast.learning.measurements import Measurements

# Maximum number of rows of scores to examine: enough for a decision, but cheap compared with the
# loss.
MAX_ROWS = 256
# Minimum number of scores for identifying them as probabilities by their values. With this many, it
# cannot be a coincidence that all of them are between 0 and 1.
MIN_VALUES = 16
# Rounding error allowed in a sum of probabilities, which should be 1.
SUM_TOLERANCE = 1e-4
# Rounding error allowed in the logarithm of a sum of probabilities, which should be 0.
LOG_SUM_TOLERANCE = 1e-2
# Rounding error allowed in log-probabilities, which should not be above 0.
LOG_TOLERANCE = 1e-4
# If more than this share of the scores is at the bounds of a clamp, too much of the gradient is
# lost.
MAX_AT_BOUNDS = 0.2
# If more than this share of the targets is outside the range of an activation, the model cannot fit
# the targets.
MAX_BEYOND = 0.25
# The output range of each activation, by operation name.
RANGES = {
    "Tanh": (-1.0, 1.0),
    "Sigmoid": (0.0, 1.0),
    "Softmax": (0.0, 1.0),
    "Relu": (0.0, math.inf),
}


# The fields of `LossArguments` that are measured on the device.
STATISTICS = (
    "lowest",
    "highest",
    "sum_error",
    "log_sum_error",
    "share_at_bounds",
    "target_lowest",
    "target_highest",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossArguments:
    """Measurements of the scores and targets in one call of a loss function.

    Args:
        source: The operation that computed the scores.
        classes: Number of classes.
        elements: Number of examined scores.
        lowest: The lowest score.
        highest: The highest score.
        sum_error: Largest difference between a row's sum and 1.
        log_sum_error: Largest absolute logsumexp of a row.
        share_at_bounds: Share of scores that are equal to the lowest or the highest score.
        target_lowest: The lowest target, or 0 if targets are labels.
        target_highest: The highest target, or 0 if targets are labels.
    """

    source: SourceOperation
    classes: int
    elements: int
    lowest: float
    highest: float
    sum_error: float
    log_sum_error: float
    share_at_bounds: float
    target_lowest: float
    target_highest: float


def measure_flags(
    measurements: Measurements,
    function: str,
    scores: Tensor,
    target: Tensor,
    note_flags: Callable[[list[str]], None],
) -> None:
    """Measure the arguments of a call of a loss function.

    Args:
        measurements: The measurements of the step.
        function: The name of the loss function.
        scores: Its first argument.
        target: Its second argument.
        note_flags: Function that is called with the flags that the call has raised, once the
            arguments have been read.
    """
    if function in REGRESSION_LOSSES:
        if has_known_range(scores):
            measure_range(measurements, scores, target, note_flags)
        return
    rows = rows_of(scores).float()
    note = partial(
        _note_arguments,
        function,
        note_flags,
        source=source_of(scores),
        classes=rows.shape[-1],
        elements=rows.numel(),
    )
    measurements.add(note, _statistics_of(rows, target))


def _statistics_of(rows: Tensor, target: Tensor) -> Tensor:
    """Return the values of `STATISTICS`, shape ``(len(STATISTICS),)``."""
    lowest, highest = rows.aminmax()
    target_lowest = rows.new_zeros(())
    target_highest = rows.new_zeros(())
    if target.is_floating_point():
        target_lowest, target_highest = target.detach().float().aminmax()
    # In the order of `STATISTICS`.
    statistics = [
        lowest,
        highest,
        (rows.sum(-1) - 1).abs().max(),
        rows.logsumexp(-1).abs().max(),
        ((rows <= lowest) | (rows >= highest)).float().mean(),
        target_lowest,
        target_highest,
    ]
    return torch.stack(statistics)


def _note_arguments(
    function: str, note_flags: Callable[[list[str]], None], statistics: Tensor, **facts: Any
) -> None:
    """Note the flags that a call raises.

    Args:
        function: The name of the loss function.
        note_flags: Function that is called with the flags.
        statistics: The values of `STATISTICS`.
        **facts: The other fields of `LossArguments`.
    """
    values = dict(zip(STATISTICS, statistics.tolist(), strict=True))
    arguments = LossArguments(**facts, **values)
    flags = [
        check.flag
        for check in CHECKS
        if function in check.functions and check.is_raised_by(arguments)
    ]
    note_flags(flags)


def rows_of(scores: Tensor) -> Tensor:
    """Return the first rows of scores, shape ``(rows, classes)``.

    Args:
        scores: The scores, with the classes on axis 1.
    """
    scores = scores.detach()
    if scores.dim() < 2:
        return scores.reshape(1, -1)
    positions = math.prod(scores.shape[2:])
    samples = max(1, MAX_ROWS // max(1, positions))
    by_class = scores[:samples].movedim(1, -1)
    return by_class.reshape(-1, scores.shape[1])[:MAX_ROWS]


def has_known_range(predicted: Tensor) -> bool:
    """Return whether a prediction was computed by an activation with a known range."""
    return source_of(predicted).name in RANGES


def measure_range(
    measurements: Measurements,
    predicted: Tensor,
    target: Tensor,
    note_flags: Callable[[list[str]], None],
) -> None:
    """Measure how many of the targets the activation before a prediction cannot produce.

    Args:
        measurements: The measurements of the step.
        predicted: The prediction, for which `has_known_range` is True.
        target: The targets.
        note_flags: Function that is called with a flag such as ``"beyond_tanh"`` if too many
            targets are beyond the range, and without flags otherwise.
    """
    operation = source_of(predicted).name
    lowest, highest = RANGES[operation]
    target = target.detach()
    beyond = ((target < lowest) | (target > highest)).float().mean()
    flag = f"beyond_{operation.lower()}"
    measurements.add(partial(_note_range, flag, note_flags), beyond)


def _note_range(flag: str, note_flags: Callable[[list[str]], None], beyond: Tensor) -> None:
    """Note a flag if the share of targets that are beyond the range is too large."""
    note_flags([flag] if float(beyond) > MAX_BEYOND else [])


def pairs_all_with_all(predicted: torch.Size, target: torch.Size) -> bool:
    """Return whether broadcasting two shapes yields more elements than either of them has."""
    if predicted == target:
        return False
    pairs = math.prod(torch.broadcast_shapes(predicted, target))  # type: ignore[no-untyped-call]
    return pairs > max(math.prod(predicted), math.prod(target))


# --- checks ---------------------------------------------------------------------------------------


def is_given_probabilities(arguments: LossArguments) -> bool:
    """Return whether the scores come from a softmax or have the values of probabilities."""
    if arguments.source.name == "Softmax":
        return True
    if arguments.classes < 2 or arguments.elements < MIN_VALUES:
        return False
    within_unit_range = arguments.lowest >= 0 and arguments.highest <= 1
    return within_unit_range and arguments.sum_error < SUM_TOLERANCE


def comes_from_sigmoid(arguments: LossArguments) -> bool:
    """Return whether the scores are the output of a sigmoid."""
    return arguments.source.name == "Sigmoid"


def comes_from_tanh(arguments: LossArguments) -> bool:
    """Return whether the scores are the output of a tanh."""
    return arguments.source.name == "Tanh"


def comes_from_relu(arguments: LossArguments) -> bool:
    """Return whether the scores are the output of a ReLU."""
    return arguments.source.name == "Relu"


def is_normalized_over_batch(arguments: LossArguments) -> bool:
    """Return whether the softmax before the loss is over the samples instead of the classes."""
    return arguments.source.is_softmax_over_batch


def is_above_zero(arguments: LossArguments) -> bool:
    """Return whether at least one log-probability is above 0."""
    return arguments.highest > LOG_TOLERANCE


def is_not_normalized(arguments: LossArguments) -> bool:
    """Return whether the probabilities of a row, given by their logarithms, do not sum to 1."""
    if arguments.classes < 2 or arguments.highest > LOG_TOLERANCE:
        return False
    return arguments.log_sum_error > LOG_SUM_TOLERANCE


def is_clamped_into_range(arguments: LossArguments) -> bool:
    """Return whether unbounded scores were clamped to [0, 1], which changed many of them."""
    source = arguments.source
    if not source.clamped or source.name in ("Sigmoid", "Softmax", ""):
        return False
    return arguments.share_at_bounds > MAX_AT_BOUNDS


def has_targets_outside_unit_range(arguments: LossArguments) -> bool:
    """Return whether at least one target of a binary loss is outside [0, 1]."""
    return arguments.target_lowest < 0 or arguments.target_highest > 1


@dataclass(frozen=True, slots=True)
class ArgumentCheck:
    """A check of loss arguments, the loss functions that it applies to, and the flag it raises."""

    flag: str
    functions: tuple[str, ...]
    is_raised_by: Callable[[LossArguments], bool]


CHECKS = (
    ArgumentCheck("softmax_input", SCORE_LOSSES, is_given_probabilities),
    ArgumentCheck("sigmoid_source", SCORE_LOSSES, comes_from_sigmoid),
    ArgumentCheck("tanh_source", SCORE_LOSSES, comes_from_tanh),
    ArgumentCheck("relu_source", SCORE_LOSSES, comes_from_relu),
    ArgumentCheck("batch_axis", TARGET_LOSSES, is_normalized_over_batch),
    ArgumentCheck("positive", ("nll_loss", "kl_div"), is_above_zero),
    ArgumentCheck("not_normalised", ("nll_loss",), is_not_normalized),
    ArgumentCheck("clamped_scores", ("binary_cross_entropy",), is_clamped_into_range),
    ArgumentCheck("target_out_of_range", BINARY_LOSSES, has_targets_outside_unit_range),
)
