"""Windows on the data: inputs that are not scaled, and labels that are not mixed."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.learning.finding import Finding
from holdfast.learning.observations import Observations, ObservedInput, ObservedLoss
from holdfast.learning.progress import measure_progress
from holdfast.learning.rules.registry import Rule, rule

# Largest magnitudes beyond which inputs are far from the scale that weights are initialised for,
# and mean relative to the spread.
LARGE_INPUT = 100
SMALL_INPUT = 1e-3
LARGE_OFFSET = 20
# Batches whose labels are known before their order is judged.
FEWEST_BATCHES = 12
# Different labels in a batch: expected ones before they can be too few, and the share of them that
# is too few.
FEWEST_EXPECTED_LABELS = 1.8
FEW_LABELS = 0.6


@rule("H856", tier="window", severity="note", kind="cause", confidence=0.8)
def unscaled_inputs(run: Observations, rule: Rule) -> Iterator[Finding]:
    """Inputs are far from mean 0 and variance 1."""
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
    """Return whether inputs are far from the scale that weights are initialised for."""
    if inputs.largest is None or inputs.offset is None:
        return False
    # Batches that hold a single value have no scale.
    if inputs.flat > 0.5 * inputs.examined:
        return False
    if inputs.offset > LARGE_OFFSET:
        return True
    return not SMALL_INPUT <= inputs.largest <= LARGE_INPUT


@rule("H843", tier="window", severity="advice", kind="cause", confidence=0.85)
def labels_not_mixed(run: Observations, rule: Rule) -> Iterator[Finding]:
    """Batches hold far fewer different labels than shuffled data would."""
    if not run.minimizes_one_loss:
        return
    for name, loss in run.losses.items():
        if has_few_labels(loss):
            yield rule.finding(
                f"a batch holds {loss.distinct_labels:.1f} different labels, where"
                f" {loss.expected_labels:.1f} are expected of shuffled data",
                "shuffle: DataLoader(..., shuffle=True).",
                name,
            )


def has_few_labels(loss: ObservedLoss) -> bool:
    """Return whether a batch holds fewer labels than one that is drawn at random."""
    if loss.labelled_calls < FEWEST_BATCHES:
        return False
    if not loss.distinct_labels or not loss.expected_labels:
        return False
    if loss.expected_labels < FEWEST_EXPECTED_LABELS:
        return False
    return loss.distinct_labels < FEW_LABELS * loss.expected_labels
