"""Window rules about data: unscaled inputs and labels that are not shuffled."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.learning.finding import Finding
from holdfast.learning.observations import Observations, ObservedInput, ObservedLoss
from holdfast.learning.rules.loss_progress import measure_progress
from holdfast.learning.rules.registry import LearningRule, rule

# Inputs do not have the scale that weight initialization assumes if their largest absolute value is
# outside these bounds, or if their mean exceeds this multiple of their standard deviation.
LARGE_INPUT = 100
SMALL_INPUT = 1e-3
LARGE_OFFSET = 20
# Minimum number of labeled batches for evaluating how well the data is shuffled.
MIN_BATCHES = 12
# Shuffling is evaluated only if at least this many distinct labels are expected per batch. If the
# actual number is below this share of the expected number, there are too few.
MIN_EXPECTED_LABELS = 1.8
FEW_LABELS = 0.6


@rule("H856", tier="window", severity="note", kind="cause", confidence=0.8)
def unscaled_inputs(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report inputs that are far from mean 0 and variance 1."""
    for name, inputs in run.inputs.items():
        if not is_far_from_unit_scale(inputs) or run.models[name].normalizes_input:
            continue
        suffers = run.had_nonfinite or measure_progress(run).is_poor
        yield rule.finding(
            f"the inputs are not scaled: values reach {inputs.largest:.3g}",
            "scale the inputs to mean 0 and variance 1, using the statistics of the training set.",
            name,
            severity="advice" if suffers else "note",
        )


def is_far_from_unit_scale(inputs: ObservedInput) -> bool:
    """Return whether inputs are far from the scale that weight initialization assumes."""
    if inputs.largest is None or inputs.offset is None:
        return False
    # A batch in which all elements are equal has no scale.
    if inputs.flat > 0.5 * inputs.examined:
        return False
    if inputs.offset > LARGE_OFFSET:
        return True
    return not SMALL_INPUT <= inputs.largest <= LARGE_INPUT


@rule("H843", tier="window", severity="advice", kind="cause", confidence=0.85)
def labels_not_mixed(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report batches that contain far fewer distinct labels than shuffled batches would."""
    if not run.minimizes_one_loss:
        return
    for name, loss in run.losses.items():
        if has_few_labels(loss):
            yield rule.finding(
                f"batches contain {loss.distinct_labels:.1f} distinct labels on average, but"
                f" shuffled batches would contain {loss.expected_labels:.1f}",
                "shuffle the data with DataLoader(..., shuffle=True).",
                name,
            )


def has_few_labels(loss: ObservedLoss) -> bool:
    """Return whether batches contain far fewer distinct labels than randomly drawn ones would."""
    if loss.labelled_calls < MIN_BATCHES:
        return False
    if not loss.distinct_labels or not loss.expected_labels:
        return False
    if loss.expected_labels < MIN_EXPECTED_LABELS:
        return False
    return loss.distinct_labels < FEW_LABELS * loss.expected_labels
