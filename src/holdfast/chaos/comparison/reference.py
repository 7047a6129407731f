"""The undisturbed run of one rank, and the place in it at which an attempt continues.

A *place* is a position in the undisturbed run, given as the number of completed steps: place 3 is
after step 3 and before step 4. The script's own step count is not used, because scripts count
differently. To find the place at which an attempt continues, the weights before the attempt's first
step are compared with the weights at each place. If no place has equal weights, the place with the
nearest weights is used. If even those are too different, the place is determined from the attempt's
first batch.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from holdfast.chaos.comparison.differences import FIELDS, RunDifference
from holdfast.chaos.trace import ModelState, Record, RecordedSave, RecordedStep, Segment

# Weights within this relative distance may differ only by rounding: bfloat16 rounds by up to 0.4 %
# (2 ** -8), and fp8 by a few percent.
ROUNDED_DISTANCE = 0.03
# Samples of weights within this relative distance count as equal, so the difference must be in
# other weights. The rounding error of float32 is 6e-8 (2 ** -24).
SAME_SAMPLE_DISTANCE = 1e-7

UNKNOWN_STATE = ModelState()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsteady:
    """Differences between two undisturbed runs, which are ignored when trials are compared.

    Args:
        random_states: The names of the random generators whose states differ.
        entries: The checkpoint entries that differ, as paths within the checkpoint.
        files: The names of the checkpoint files that only one of the two runs wrote.
    """

    random_states: frozenset[str] = frozenset()
    entries: frozenset[str] = frozenset()
    files: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The place at which an attempt continues, and how its weights differ from the expected ones.

    Args:
        place: The number of steps of the undisturbed run after which the attempt continues.
        difference: The difference in the weights, or None if they are equal.
    """

    place: int
    difference: RunDifference | None = None


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The undisturbed run of one rank.

    One command may perform several training runs, such as a hyperparameter sweep, or pre-training
    followed by fine-tuning. Each training run is compared separately.

    Args:
        segments: The records of each process.
        unsteady: The differences to ignore.
        steps: All steps of the run, in order.
        boundaries: The place at which each training run begins, followed by the total number of
            steps.
        saves: The last save at each place, for the places that have a save.
        states: The known fields of the state at each place, from place 0 to the number of steps.
    """

    segments: Sequence[Segment]
    unsteady: Unsteady = field(default_factory=Unsteady)
    steps: list[RecordedStep]
    boundaries: list[int]
    saves: dict[int, RecordedSave]
    states: list[ModelState]

    def without(self, random_state: str) -> Reference:
        """Return a copy that also ignores the state of the named random generator."""
        random_states = self.unsteady.random_states | {random_state}
        return replace(self, unsteady=replace(self.unsteady, random_states=random_states))

    def trainings_in(self, segment: Segment) -> list[Segment]:
        """Split a process's records into training runs, if the command performs several runs."""
        # With a single training run, the boundaries are only its beginning and its end.
        if len(self.boundaries) == 2:
            return [segment]
        return split_by_training(segment)

    def training_at(self, place: int) -> tuple[int, int]:
        """Return the first and the last place of the training run that contains `place`."""
        number = min(bisect_right(self.boundaries, place), len(self.boundaries) - 1)
        return self.boundaries[number - 1], self.boundaries[number]

    def locate(self, segment: Segment, reached: int) -> ResumePoint:
        """Find the place in the undisturbed run at which an attempt continues.

        This is the place with the same weights. If there is none, it is the place with nearly the
        same weights or, failing that, the place that is followed by the same data.

        Args:
            segment: The records of the attempt, including at least one step.
            reached: The number of steps of the undisturbed run that earlier attempts have reached.
        """
        first_step = segment.steps[0]
        start = first_step.before or UNKNOWN_STATE
        places = self._places_with_weights(start)
        if places:
            # Several places may have the same weights, for example if steps change nothing.
            return ResumePoint(
                max(places, key=lambda place: self._resemblance(place, first_step, start, reached))
            )
        place, distance = self._nearest_place(start)
        if distance < ROUNDED_DISTANCE:
            how = "some differ"
            if distance > SAME_SAMPLE_DISTANCE:
                how = f"they differ by {distance:.1g} (relative); were they rounded?"
            detail = (
                f"the weights at the start are close to those after step {place} but not the same:"
                f" {how}"
            )
        else:
            place = self._place_with_data(first_step, reached)
            detail = "the attempt starts with weights that the undisturbed run never had"
        return ResumePoint(place, RunDifference(place + 1, "weights", detail))

    def start_fields_that_differ(self, place: int, start: ModelState) -> list[str]:
        """Return the names of the `START_FIELDS` in which `start` differs from the known state.

        Args:
            place: The place whose known state is compared.
            start: The state in which an attempt starts.
        """
        state = self.states[place]
        differing = [
            "buffers"
            for digest, expected in zip(start.buffers, state.buffers, strict=False)
            if _known_to_differ(digest, expected)
        ]
        if _known_to_differ(start.optimizer, state.optimizer):
            differing.append("optimizer")
        return differing

    def _places_with_weights(self, start: ModelState) -> list[int]:
        """Return the places with the same weights as `start`.

        The last place, at the end of the run, is returned only if no other place has these weights.
        """
        # A place may have two sets of weights, because some scripts change weights between steps.
        places = [
            place
            for place, (state, step) in enumerate(zip(self.states, self.steps, strict=False))
            if start.weights in (state.weights, step.weights_at_begin)
        ]
        if not places and start.weights == self.states[-1].weights:
            return [len(self.steps)]
        return places

    def _resemblance(
        self, place: int, first_step: RecordedStep, start: ModelState, reached: int
    ) -> tuple[int, int, bool, int]:
        """Return a sort key for how well an attempt matches a place; a larger key is better.

        The best place has the fewest differing fields in the start state and, among those places,
        the most equal fields in the first step. If places are still tied, a place that earlier
        attempts have reached is preferred, and then the latest place.
        """
        differing_fields = len(self.start_fields_that_differ(place, start))
        equal_fields = 0
        if place < len(self.steps):
            expected = self.steps[place]
            equal_fields = sum(
                getattr(first_step, name) == getattr(expected, name) for name in FIELDS
            )
        return -differing_fields, equal_fields, place <= reached, place

    def _nearest_place(self, start: ModelState) -> tuple[int, float]:
        """Return the place with the nearest weights, and the distance to these weights.

        The last place, at the end of the run, is excluded.
        """
        distances = [_distance(state.sample, start.sample) for state in self.states[:-1]]
        nearest = min(distances)
        return distances.index(nearest), nearest

    def _place_with_data(self, first_step: RecordedStep, reached: int) -> int:
        """Return the last place up to `reached` that is followed by a step with the same data.

        Return 0 if no step shares a batch or an input with `first_step`.
        """
        last_place = min(reached, len(self.steps) - 1)
        for place in range(last_place, -1, -1):
            if share_data(self.steps[place], first_step):
                return place
        return 0

    def random_states_drawn_before(self, index: int) -> set[str]:
        """Return the names of the random generators that are used between two adjacent steps.

        A generator was used if its state before the first part (model call) of each step differs.

        Args:
            index: The index of the later of the two steps.
        """
        if not 0 < index < len(self.steps):
            return set()
        earlier = self.steps[index - 1].random
        later = self.steps[index].random
        return {name for name in later if earlier.get(name) != later[name]}


def make_reference(segments: Sequence[Segment], unsteady: Unsteady | None = None) -> Reference:
    """Create the reference for one rank from the records of the undisturbed run.

    Args:
        segments: The records of this rank's processes, in order. Each contains at least one step.
        unsteady: Differences between two undisturbed runs, which are ignored; None to ignore none.
    """
    steps: list[RecordedStep] = []
    saves: dict[int, RecordedSave] = {}
    boundaries = [0]
    for segment in segments:
        for training in split_by_training(segment):
            begin = len(steps)
            for save in training.saves:
                saves[begin + save.steps_made] = save
            steps += training.steps
            boundaries.append(len(steps))
    states = [known_state(steps, place, saves.get(place)) for place in range(len(steps) + 1)]
    return Reference(
        segments=segments,
        unsteady=unsteady or Unsteady(),
        steps=steps,
        boundaries=boundaries,
        saves=saves,
        states=states,
    )


def known_state(steps: Sequence[RecordedStep], place: int, save: RecordedSave | None) -> ModelState:
    """Return the state at a place, as far as it is known, for the optimizer that steps next.

    If the next step is the optimizer's first step, the whole state was recorded. Otherwise, the
    weights are those after the last step of an optimizer that trains the same models. The buffers
    are known only if no other optimizer has stepped since then, because the model calls for such a
    step may have changed the buffers. If there is a save at this place, the buffers and the
    optimizer's state are also known.

    Args:
        steps: All steps of the undisturbed run.
        place: The number of completed steps, from 0 to the number of all steps.
        save: The last save at this place, or None.
    """
    # No step follows the last place, so use the models and the optimizer of the last step.
    step = steps[-1]
    if place < len(steps):
        step = steps[place]
        if step.before is not None:
            return step.before
    state = _state_after_last_step_of_same_models(steps[:place], step)
    saved_state = None if save is None else save.state_of(step.optimizer_index)
    if saved_state is not None:
        return replace(state, buffers=saved_state.buffers, optimizer=saved_state.optimizer)
    if state is not steps[place - 1].after:
        return replace(state, buffers=[])
    return state


def _state_after_last_step_of_same_models(
    earlier: Sequence[RecordedStep], step: RecordedStep
) -> ModelState:
    states = [
        other.after for other in reversed(earlier) if other.after.structure == step.after.structure
    ]
    for state in states:
        if state.roots == step.after.roots:
            return state
    # If no root modules are the same objects, the script has wrapped its models again in the
    # meantime. Use the last state of models with the same structure.
    return states[0] if states else UNKNOWN_STATE


def split_by_training(segment: Segment) -> list[Segment]:
    """Split the records of one process into its training runs.

    A training run begins with the first step of a new optimizer, provided that no earlier optimizer
    steps after that. In each returned segment, the step count of the records starts from 0 again.
    """
    steps = segment.steps
    last_step_of = {step.optimizer_index: index for index, step in enumerate(steps)}
    begins = [0]
    for index, step in enumerate(steps):
        is_first_step_of_optimizer = index > 0 and step.before is not None
        if is_first_step_of_optimizer and all(
            last_step_of[earlier.optimizer_index] < index for earlier in steps[:index]
        ):
            begins.append(index)
    return [
        _part_of(segment, begin, end) for begin, end in itertools.pairwise([*begins, len(steps)])
    ]


def _part_of(segment: Segment, begin: int, end: int) -> Segment:
    """Return the records of the steps with indices `begin` to `end - 1`, counted from `begin`."""
    # Other records between two training runs, such as the last save, are assigned to the earlier
    # training run. Records before the very first step are assigned to the first training run.
    after = begin if begin > 0 else -1
    records: list[Record] = [
        replace(record, steps_made=record.steps_made - begin)
        for record in segment.records
        if after < record.steps_made <= end
    ]
    return Segment(records=records)


def share_data(step: RecordedStep, other: RecordedStep) -> bool:
    """Return whether two steps have a batch or a model input in common."""
    batches = set(step.batch) & set(other.batch)
    inputs = set(step.inputs) & set(other.inputs)
    return bool((batches | inputs) - {None})


def _known_to_differ(digest: str | None, expected: str | None) -> bool:
    if digest is None or expected is None:
        return False
    return digest != expected


def _distance(sample: list[float], other: list[float]) -> float:
    """Return the distance between two samples of weights, relative to the first sample's norm."""
    if not sample or len(sample) != len(other):
        return math.inf
    norm = math.hypot(*sample) or 1.0
    distance = math.dist(sample, other) / norm
    return math.inf if math.isnan(distance) else distance
