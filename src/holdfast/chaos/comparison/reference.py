"""The undisturbed run of one rank, and where in it an attempt continues.

Steps are not numbered by the training script's own count, which may mean anything. A *place* is a
number of steps of the undisturbed run: place 3 is the state after step 3 and before step 4. An
attempt is placed by the digest of its weights before its first step; if no state of the undisturbed
run has these weights, by the state with the nearest weights; and if none is near, by its first
batch.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from holdfast.chaos.comparison.differences import FIELDS, RunDifference
from holdfast.chaos.trace import ModelState, Record, RecordedSave, RecordedStep, Segment

# Weights up to this relative distance count as rounded: bfloat16 rounds by up to 0.4 %
# (2 ** -8), fp8 by some percent.
ROUNDED_DISTANCE = 0.03
# Below this relative distance only weights outside the sample differ: float32 rounds by 6e-8
# (2 ** -24).
SAME_SAMPLE_DISTANCE = 1e-7

UNKNOWN_STATE = ModelState()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsteady:
    """What differs between two undisturbed runs, and is therefore not compared.

    Args:
        random_states: Names of random generators.
        entries: Paths of entries within checkpoints.
        files: Names of checkpoint files that only one of the two runs wrote.
    """

    random_states: frozenset[str] = frozenset()
    entries: frozenset[str] = frozenset()
    files: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The place where an attempt continues, and how its weights differ from that place, if so."""

    place: int
    difference: RunDifference | None = None


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The undisturbed run of one rank.

    One command may perform several training runs, as a sweep does, or pre-training followed by
    fine-tuning. Each training run is compared separately.

    Args:
        segments: The records of its processes.
        unsteady: Parts that are not compared.
        steps: All steps in order.
        boundaries: The places at which the training runs begin, and the end.
        saves: The last save at each place that has one.
        states: What is known of the state at each place, from 0 to the number of steps.
    """

    segments: Sequence[Segment]
    unsteady: Unsteady = field(default_factory=Unsteady)
    steps: list[RecordedStep]
    boundaries: list[int]
    saves: dict[int, RecordedSave]
    states: list[ModelState]

    def without(self, random_state: str) -> Reference:
        """Return a reference that ignores one of the random states."""
        random_states = self.unsteady.random_states | {random_state}
        return replace(self, unsteady=replace(self.unsteady, random_states=random_states))

    def trainings_in(self, segment: Segment) -> list[Segment]:
        """Split the record of a process into its training runs, if the command performs several."""
        if len(self.boundaries) == 2:
            return [segment]
        return split_by_training(segment)

    def training_at(self, place: int) -> tuple[int, int]:
        """Return the places at which the training run of a place begins and ends."""
        number = min(bisect_right(self.boundaries, place), len(self.boundaries) - 1)
        return self.boundaries[number - 1], self.boundaries[number]

    def locate(self, segment: Segment, reached: int) -> ResumePoint:
        """Return the place of the undisturbed run at which an attempt continues.

        It is the place with the same weights, else the one with nearly the same weights, else the
        one with the same data.

        Args:
            segment: The record of the attempt; it has steps.
            reached: The place that earlier attempts have reached.
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
        """Return the `START_FIELDS` that are known to differ from the state at a place."""
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
        """Return the places with the weights of a state.

        The end counts only if there is no other.
        """
        # Some scripts change weights between steps.
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
        """Return a sort key for how well an attempt fits a place; the best fit is largest.

        In this order: fields of the state at the start that do not differ, fields of the first step
        that are equal, whether earlier attempts have reached the place, and the later place.
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
        """Return the place with the nearest weights, except the end, and their distance."""
        distances = [_distance(state.sample, start.sample) for state in self.states[:-1]]
        nearest = min(distances)
        return distances.index(nearest), nearest

    def _place_with_data(self, first_step: RecordedStep, reached: int) -> int:
        """Return the last place up to `reached` whose next step has the same data as this step."""
        last_place = min(reached, len(self.steps) - 1)
        for place in range(last_place, -1, -1):
            if share_data(self.steps[place], first_step):
                return place
        return 0

    def random_states_drawn_before(self, index: int) -> set[str]:
        """Return the random states that change between the model calls of two adjacent steps.

        Args:
            index: Index of the later of the two steps.
        """
        if not 0 < index < len(self.steps):
            return set()
        earlier = self.steps[index - 1].random
        later = self.steps[index].random
        return {name for name in later if earlier.get(name) != later[name]}


def make_reference(segments: Sequence[Segment], unsteady: Unsteady | None = None) -> Reference:
    """Return the reference of one rank of the undisturbed run.

    Args:
        segments: The records of this rank's processes, in order; each has steps.
        unsteady: Differences between two undisturbed runs, None if there are none.
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
    """Return what is known of the state at a place.

    The state before the first step of an optimizer is recorded. Later on, the weights are those
    after the last step of an optimizer with the same models. Their buffers are known only if no
    other optimizer has stepped since, because a model call in between may change them. The buffers
    and the optimizer's state are also known if there is a save at this place.

    Args:
        steps: All steps of the undisturbed run.
        place: From 0 to the number of steps.
        save: The last save at this place, if there is one.
    """
    # The state at the end is the state of the models after the last step.
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
    # The models were wrapped again in between, so their identities have changed.
    return states[0] if states else UNKNOWN_STATE


def split_by_training(segment: Segment) -> list[Segment]:
    """Split the record of one process into its training runs.

    A training run begins with the first step of a new optimizer, provided that no earlier optimizer
    steps again. Each part counts its steps from 0.
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
    """Return the records of the steps from `begin` to `end`, counted from `begin`."""
    # Records directly after step `begin` belong to the previous training run; records before the
    # very first step belong to the first one.
    after = begin if begin > 0 else -1
    records: list[Record] = [
        replace(record, steps_made=record.steps_made - begin)
        for record in segment.records
        if after < record.steps_made <= end
    ]
    return Segment(records=records)


def share_data(step: RecordedStep, other: RecordedStep) -> bool:
    """Return whether two steps have a batch or an input of a model in common."""
    batches = set(step.batch) & set(other.batch)
    inputs = set(step.inputs) & set(other.inputs)
    return bool((batches | inputs) - {None})


def _known_to_differ(digest: str | None, expected: str | None) -> bool:
    if digest is None or expected is None:
        return False
    return digest != expected


def _distance(sample: list[float], other: list[float]) -> float:
    """Return the distance between two samples of weights, relative to the first one."""
    if not sample or len(sample) != len(other):
        return math.inf
    norm = math.hypot(*sample) or 1.0
    distance = math.dist(sample, other) / norm
    return math.inf if math.isnan(distance) else distance
