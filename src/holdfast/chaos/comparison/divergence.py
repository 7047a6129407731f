"""Find the first step at which an attempt diverges from the undisturbed run, and the cause.

The fields of a step are compared in order from cause to effect (`differences.FIELDS`). The first
field that differs is not always the cause: losing a random state may first show as a different
input, and losing the state of a second optimizer may first show as a different loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.chaos.comparison.differences import END, FIELDS, START_FIELDS, RunDifference
from holdfast.chaos.comparison.reference import UNKNOWN_STATE, Reference, share_data
from holdfast.chaos.trace import RecordedStep, Segment

# If one of these fields of a step differs, the cause may be something that is not a field of the
# step.
CONSEQUENCES = frozenset({"parts", "inputs", "losses", "weights", "buffers"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """A step of an attempt that differs from the same step of the undisturbed run.

    Args:
        reference: The undisturbed run.
        segment: The records of the attempt.
        place: The number of steps of the undisturbed run after which the attempt started.
        index: The index of the step in the undisturbed run.
        step: The step as recorded in the attempt.
        expected: The step as recorded in the undisturbed run.
        field: The first field in which the two steps differ.
        restored: The names of the random generators whose state matched that of the undisturbed run
            in at least one of the attempt's model calls up to this step.
    """

    reference: Reference
    segment: Segment
    place: int
    index: int
    step: RecordedStep
    expected: RecordedStep
    field: str
    restored: frozenset[str]


def first_difference(reference: Reference, segment: Segment, place: int) -> RunDifference | None:
    """Return the first difference between an attempt and the undisturbed run, or None.

    Args:
        reference: The undisturbed run.
        segment: The records of the attempt, including at least one step.
        place: The number of steps of the undisturbed run after which the attempt continues, from
            `Reference.locate`.
    """
    difference = difference_at_start(reference, segment, place)
    if difference is not None:
        return difference
    _, end = reference.training_at(place)
    restored: set[str] = set()
    for index, step in enumerate(segment.steps, start=place):
        if index >= end:
            # Indices count from 0, and step numbers in a `RunDifference` from 1.
            return RunDifference(index + 1, END, f"the undisturbed run had ended after {end} steps")
        expected = reference.steps[index]
        if index == place:
            expected = remaining_parts(expected, step)
        restored |= _matching_random_states(step, expected)
        field = _first_field_that_differs(step, expected)
        if field is not None:
            divergence = Divergence(
                reference=reference,
                segment=segment,
                place=place,
                index=index,
                step=step,
                expected=expected,
                field=field,
                restored=frozenset(restored),
            )
            # Check the saved optimizer states first, because they prove the cause. Random states
            # only suggest a cause.
            difference = another_optimizer_lost_state(divergence)
            difference = difference or random_state_lost(divergence)
            return difference or RunDifference(index + 1, field, describe_field(divergence))
    return None


# --- at the start -------------------------------------------------------------------------------


def difference_at_start(reference: Reference, segment: Segment, place: int) -> RunDifference | None:
    """Return the first difference in an attempt's start state, apart from the weights, or None."""
    start = segment.steps[0].before or UNKNOWN_STATE
    fields = reference.start_fields_that_differ(place, start)
    if not fields:
        return None
    detail = START_FIELDS[fields[0]]
    if fields[0] == "optimizer":
        places = [
            other_place
            for other_place, state in enumerate(reference.states)
            if state.optimizer == start.optimizer
        ]
        # The state at place 0 is that of a new optimizer. It may match simply because the optimizer
        # state was not restored, so it is not named as the source.
        if places and places[0] > 0:
            detail = (
                f"the weights are those of step {place}, but the optimizer state is the one saved"
                f" after step {places[0]}"
            )
    return RunDifference(place + 1, fields[0], detail)


# --- one step -----------------------------------------------------------------------------------


def remaining_parts(expected: RecordedStep, step: RecordedStep) -> RecordedStep:
    """Return the remaining parts of an expected step if the attempt resumed in the middle of it.

    An attempt may resume in the middle of gradient accumulation. The attempt's first step, `step`,
    then consists only of the last parts (model calls) of the expected step. If the data of `step`
    is not that of these parts, the expected step is returned unchanged.
    """
    count = len(step.inputs)
    if not 0 < count < len(expected.inputs):
        return expected
    batch = expected.batch[-count:]
    inputs = expected.inputs[-count:]
    if (batch, inputs) != (step.batch, step.inputs):
        return expected
    random_states = expected.random_states[-count:]
    return replace(
        expected,
        parts=count,
        batch=batch,
        inputs=inputs,
        losses=expected.losses[-count:],
        random=random_states[0],
        random_states=random_states,
        resumed_midway=True,
    )


def _matching_random_states(step: RecordedStep, expected: RecordedStep) -> set[str]:
    """Return the names of the random generators that had an expected state at any model call."""
    states = {item for state in step.random_states for item in state.items()}
    expected_states = {item for state in expected.random_states for item in state.items()}
    return {name for name, _ in states & expected_states}


def _first_field_that_differs(step: RecordedStep, expected: RecordedStep) -> str | None:
    """Return the name of the first field that differs in a way that matters, or None.

    A difference in random states alone does not matter, because the step may not use these states.
    """
    differing = [
        name
        for name in FIELDS
        if name != "random" and getattr(step, name) != getattr(expected, name)
    ]
    if not differing:
        return None
    if differing[0] == "parts":
        return _foreign_data(step, expected) or "parts"
    return differing[0]


def _foreign_data(step: RecordedStep, expected: RecordedStep) -> str | None:
    """Return "batch" or "inputs" if the step's first batch or input is not in the expected step.

    A different number of parts is then only a consequence of the different data. Return None if
    neither is the case.
    """
    if step.batch and step.batch[0] not in expected.batch:
        return "batch"
    if step.inputs and step.inputs[0] not in expected.inputs:
        return "inputs"
    return None


# --- causes -------------------------------------------------------------------------------------


def another_optimizer_lost_state(divergence: Divergence) -> RunDifference | None:
    """Return a difference if an optimizer that steps later did not resume from its saved state.

    Losing an optimizer's state may have an effect before that optimizer's own first step. Return
    None if this is not the cause of the divergence.
    """
    reference = divergence.reference
    place = divergence.place
    if divergence.field not in CONSEQUENCES or place not in reference.saves:
        return None
    save = reference.saves[place]
    # The optimizer of the first step was compared at the start of the attempt, so begin with the
    # second step, whose number is `place + 2` because numbers count from 1.
    later_steps = zip(divergence.segment.steps[1:], reference.steps[place + 1 :], strict=False)
    for number, (step, expected) in enumerate(later_steps, start=place + 2):
        if step.before is None or step.after.structure != expected.after.structure:
            continue
        saved_state = save.state_of(expected.optimizer_index)
        if saved_state is None:
            continue
        first_step = divergence.index + 1
        resumed = f"the optimizer of step {number} resumed with"
        if step.before.parameters != saved_state.parameters:
            detail = f"{resumed} weights other than the saved ones"
            return RunDifference(first_step, "weights", detail)
        if step.before.optimizer != saved_state.optimizer:
            detail = f"{resumed} a state other than the saved one"
            return RunDifference(first_step, "optimizer", detail)
    return None


def random_state_lost(divergence: Divergence) -> RunDifference | None:
    """Return a difference if a random state that is used at this step was not restored.

    A random state that matched at an earlier model call of the attempt is not the cause. It was
    restored correctly, and it differs now because something else made the attempt draw a different
    number of random numbers. Return None if no random state is the cause.
    """
    step = divergence.step
    expected = divergence.expected
    reference = divergence.reference
    differing = {name for name, state in expected.random.items() if step.random.get(name) != state}
    differing -= reference.unsteady.random_states
    differing -= divergence.restored
    if divergence.field == "batch" and divergence.index == divergence.place:
        # Merely starting a loader draws from torch's generator, so the state of that generator may
        # differ here without being the cause of the different batch.
        causes = differing & {"numpy", "python"}
        consequence = "and with it the batch"
    elif divergence.field in CONSEQUENCES:
        index = divergence.index
        drawn = reference.random_states_drawn_before(index)
        drawn |= reference.random_states_drawn_before(index + 1)
        causes = differing & drawn
        consequence = "or the attempt draws more numbers from it"
    else:
        return None
    if not causes:
        return None
    names = sorted(causes)
    detail = f"the random state of {' and '.join(names)} differs, {consequence}"
    return RunDifference(divergence.index + 1, "random", detail, names)


# --- words --------------------------------------------------------------------------------------


def describe_field(divergence: Divergence) -> str:
    """Describe the first field that differs, including both values unless they are digests."""
    field = divergence.field
    step = divergence.step
    expected = divergence.expected
    description = FIELDS[field]
    if field == "settings":
        return f"{description}: {_describe_settings(step.settings, expected.settings)}"
    if field in ("scale", "parts", "losses"):
        return f"{description}: {getattr(step, field)} instead of {getattr(expected, field)}"
    if field == "batch":
        return f"{description}: {_describe_batch(divergence.reference, step)}"
    if field == "weights" and expected.resumed_midway:
        return (
            "the weights after the step differ: the state from the step's earlier micro-batches,"
            " such as accumulated gradients, was lost"
        )
    return description


def _describe_settings(settings: str, expected: str) -> str:
    """Describe the first parameter group whose settings differ, and count all such groups."""
    pairs = zip(settings.split("; "), expected.split("; "), strict=False)
    differing = [
        f"{group} instead of {expected_group}"
        for group, expected_group in pairs
        if group != expected_group
    ]
    first = "".join(differing[:1])
    return f"{first} ({len(differing)} parameter groups)"


def _describe_batch(reference: Reference, step: RecordedStep) -> str:
    for index, other in enumerate(reference.steps):
        if share_data(other, step):
            return f"the batch of step {index + 1}"
    return "a batch that the undisturbed run never used"
