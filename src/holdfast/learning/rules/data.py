"""Window rules about data: inputs that are not scaled, and labels that are not shuffled."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.learning.finding import Finding
from holdfast.learning.observations import Observations, ObservedInput, ObservedLoss
from holdfast.learning.rules.loss_progress import measure_progress
from holdfast.learning.rules.registry import LearningRule, rule

# Inputs are off the scale that weight initialisation assumes if their largest magnitude lies
# outside these bounds, or their mean exceeds this multiple of their standard deviation.
LARGE_INPUT = 100
SMALL_INPUT = 1e-3
LARGE_OFFSET = 20
# The minimum number of batches with labels to judge how well they are shuffled.
MIN_BATCHES = 12
# Shuffling is judged only if at least this many distinct labels are expected in a batch; fewer than
# this share of them is too few.
MIN_EXPECTED_LABELS = 1.8
FEW_LABELS = 0.6


@rule("H856", tier="window", severity="note", kind="cause", confidence=0.8)
def unscaled_inputs(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """The inputs are far from mean 0 and variance 1."""
    for name, inputs in run.inputs.items():
        if not is_far_from_unit_scale(inputs) or run.models[name].normalizes_input:
            continue
        suffers = run.had_nonfinite or measure_progress(run).is_poor
        yield rule.finding(
            f"the inputs are not scaled: they reach {inputs.largest:.3g}",
            "scale the inputs to mean 0 and variance 1, with the statistics of the training set.",
            name,
            severity="advice" if suffers else "note",
        )


def is_far_from_unit_scale(inputs: ObservedInput) -> bool:
    """Return whether inputs are far from the scale that weight initialisation assumes."""
    if inputs.largest is None or inputs.offset is None:
        return False
    # A batch that holds a single value has no scale.
    if inputs.flat > 0.5 * inputs.examined:
        return False
    if inputs.offset > LARGE_OFFSET:
        return True
    return not SMALL_INPUT <= inputs.largest <= LARGE_INPUT


@rule("H843", tier="window", severity="advice", kind="cause", confidence=0.85)
def labels_not_mixed(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Batches hold far fewer distinct labels than shuffled data would give."""
    if not run.minimizes_one_loss:
        return
    for name, loss in run.losses.items():
        if has_few_labels(loss):
            yield rule.finding(
                f"a batch holds {loss.distinct_labels:.1f} distinct labels on average; shuffled"
                f" data would give {loss.expected_labels:.1f}",
                "shuffle: DataLoader(..., shuffle=True).",
                name,
            )


def has_few_labels(loss: ObservedLoss) -> bool:
    """Return whether batches hold clearly fewer distinct labels than random draws would."""
    if loss.labelled_calls < MIN_BATCHES:
        return False
    if not loss.distinct_labels or not loss.expected_labels:
        return False
    if loss.expected_labels < MIN_EXPECTED_LABELS:
        return False
    return loss.distinct_labels < FEW_LABELS * loss.expected_labels
