"""The undisturbed run of one rank, and where in it an attempt continues.

A *place* is a number of steps of the undisturbed run: place 3 is after step 3 and before step 4.
The script's own step count is not used, because scripts count differently. To find the place where
an attempt continues, its weights before its first step are compared with those at each place. If
none are equal, the place with the nearest weights is used. If none are near, the place is found by
the attempt's first batch.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from holdfast.chaos.comparison.differences import FIELDS, RunDifference
from holdfast.chaos.trace import ModelState, Record, RecordedSave, RecordedStep, Segment

# Weights within this relative distance may have been rounded: bfloat16 rounds by up to 0.4 %
# (2 ** -8), and fp8 by a few percent.
ROUNDED_DISTANCE = 0.03
# If a sample of the weights is within this relative distance, the sample is equal and other weights
# differ. The rounding error of float32 is 6e-8 (2 ** -24).
SAME_SAMPLE_DISTANCE = 1e-7

UNKNOWN_STATE = ModelState()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsteady:
    """Differences between two undisturbed runs, which are ignored in trials.

    Args:
        random_states: Names of random generators whose states differ.
        entries: Paths within checkpoints of the entries that differ.
        files: Names of checkpoint files that only one of the two runs wrote.
    """

    random_states: frozenset[str] = frozenset()
    entries: frozenset[str] = frozenset()
    files: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The place where an attempt continues, and how its weights differ from those at the place."""

    place: int
    difference: RunDifference | None = None


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The undisturbed run of one rank.

    One command may perform several training runs, such as a sweep, or pre-training followed by
    fine-tuning. Each training run is compared separately.

    Args:
        segments: The records of each process.
        unsteady: Differences to ignore.
        steps: All steps, in order.
        boundaries: The place at which each training run begins, followed by the number of steps.
        saves: The last save at each place that has a save.
        states: The known state at each place, from 0 to the number of steps.
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
        """Split a process's records into training runs, if the command performs several."""
        if len(self.boundaries) == 2:
            return [segment]
        return split_by_training(segment)

    def training_at(self, place: int) -> tuple[int, int]:
        """Return the first and the last place of the training run that contains a place."""
        number = min(bisect_right(self.boundaries, place), len(self.boundaries) - 1)
        return self.boundaries[number - 1], self.boundaries[number]

    def locate(self, segment: Segment, reached: int) -> ResumePoint:
        """Return the place of the undisturbed run at which an attempt continues.

        The attempt continues at the place with the same weights. If there is none, use the place
        with nearly the same weights or, failing that, the place with the same data.

        Args:
            segment: The records of the attempt, including at least one step.
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
        """Return the `START_FIELDS` in which `start` differs from the known state at a place."""
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
        """Return the places that have the same weights as `start`.

        The end of the run is returned only if no other place has these weights.
        """
        # Some scripts change weights between steps, so a place may have two sets of weights.
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

        The best fit has the fewest differing fields in the start state, then the most equal fields
        in the first step. After that, places that earlier attempts have reached are better, and
        later places are better.
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
        """Return the place with the nearest weights, and their distance. The end is excluded."""
        distances = [_distance(state.sample, start.sample) for state in self.states[:-1]]
        nearest = min(distances)
        return distances.index(nearest), nearest

    def _place_with_data(self, first_step: RecordedStep, reached: int) -> int:
        """Return the last place up to `reached` whose next step has the data of `first_step`.

        Return 0 if there is none.
        """
        last_place = min(reached, len(self.steps) - 1)
        for place in range(last_place, -1, -1):
            if share_data(self.steps[place], first_step):
                return place
        return 0

    def random_states_drawn_before(self, index: int) -> set[str]:
        """Return the names of the random generators that are used between two adjacent steps.

        A generator is used if its state before the model call of the later step has changed.

        Args:
            index: Index of the later of the two steps.
        """
        if not 0 < index < len(self.steps):
            return set()
        earlier = self.steps[index - 1].random
        later = self.steps[index].random
        return {name for name in later if earlier.get(name) != later[name]}


def make_reference(segments: Sequence[Segment], unsteady: Unsteady | None = None) -> Reference:
    """Create the reference for one rank of the undisturbed run.

    Args:
        segments: The records of this rank's processes, in order. Each has at least one step.
        unsteady: Differences between two undisturbed runs, to ignore; None for no differences.
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
    """Return the known fields of the state at a place, for the optimizer that steps next.

    If this is the optimizer's first step, the whole state was recorded. Otherwise, the weights are
    those after the last step of an optimizer that trains the same models. The buffers are known
    only if no other optimizer has stepped since, because model calls may have changed them. With a
    save at this place, the buffers and the optimizer's state are also known.

    Args:
        steps: All steps of the undisturbed run.
        place: A place from 0 to the number of steps.
        save: The last save at this place, or None.
    """
    # At the end, no step follows; use the models of the last step.
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
    # The models were wrapped again in the meantime, so their identities have changed.
    return states[0] if states else UNKNOWN_STATE


def split_by_training(segment: Segment) -> list[Segment]:
    """Split the records of one process into its training runs.

    A training run begins with the first step of a new optimizer, provided that no earlier optimizer
    steps again. In each returned segment, steps are counted from 0.
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
    """Return the records of the steps from `begin` to `end`, with steps counted from `begin`."""
    # Other records between two training runs, such as the last save, belong to the earlier run.
    # Records before the first step of all belong to the first run.
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
    """Return the distance between two samples of weights, relative to the first one."""
    if not sample or len(sample) != len(other):
        return math.inf
    norm = math.hypot(*sample) or 1.0
    distance = math.dist(sample, other) / norm
    return math.inf if math.isnan(distance) else distance
