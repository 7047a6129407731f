"""Compare all attempts of a trial with the undisturbed run.

`reference` finds the place in the undisturbed run at which each attempt continues, and `divergence`
compares the attempt's steps from that place on. This module combines the attempts: it determines
which steps led to the final weights, how much work was repeated, and whether a restart ignored a
newer checkpoint.

A *place* is a position in the undisturbed run, given as the number of completed steps: place 3 is
after step 3 and before step 4.
"""

from __future__ import annotations

import cmath
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from holdfast.chaos.comparison.differences import END, FIELDS, OLDER, START_FIELDS, RunDifference
from holdfast.chaos.comparison.divergence import first_difference, remaining_parts
from holdfast.chaos.comparison.reference import Reference, Unsteady, make_reference
from holdfast.chaos.comparison.saved_entries import last_saves, saved_difference
from holdfast.chaos.trace import RecordedStep, Segment
from holdfast.chaos.trials import Trial

# If several fields differ at the same step, the first one in this list is reported.
_CAUSAL_ORDER = [*START_FIELDS, *FIELDS]


@dataclass(slots=True, kw_only=True)
class TrialComparison:
    """The result of comparing one rank of a trial with the undisturbed run.

    The attributes have the same names in the output of ``holdfast chaos --json``.

    Args:
        differences: All differences, in the order of the attempts.
        steps_again: The number of steps that were repeated after a restart.
        batches_twice: The number of batches that the final weights were trained on too often.
        batches_never: The number of batches that the final weights were never trained on.
        resumed_at: For the second and each later attempt, the number of steps of the undisturbed
            run after which it continued.
        finite: Whether the losses of the last step and a sample of the weights after it are finite.
        losses: The loss of each step that led to the final weights; None for a step without a loss.
    """

    differences: list[RunDifference] = field(default_factory=list)
    steps_again: int = 0
    batches_twice: int = 0
    batches_never: int = 0
    resumed_at: list[int] = field(default_factory=list)
    finite: bool = True
    losses: list[float | None] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint that was saved in a trial.

    Args:
        place: The number of steps of the undisturbed run after which the checkpoint was saved.
        training_begin: The number of steps of the undisturbed run before the first step of the
            checkpoint's training run. (One command may perform several training runs.)
        entry_names: The names of the checkpoint's top-level entries. Two checkpoints with the same
            names are of the same kind, for example "last state" as opposed to "best weights".
        is_complete: False if the process may have ended in the middle of this save.
    """

    place: int
    training_begin: int
    entry_names: frozenset[str]
    is_complete: bool


def compare(references: dict[int, Reference], trial: Trial) -> TrialComparison:
    """Compare all ranks of a trial, and return the comparison of the rank that differs first.

    Args:
        references: The undisturbed run of each rank.
        trial: The trial to compare with the undisturbed run.
    """
    segments_by_rank = trial.segments_by_rank()
    last_attempt_made_steps = any(segment.steps for segment in trial.last.segments)
    comparisons = {
        rank: compare_rank(
            reference,
            segments_by_rank[rank],
            last_attempt_made_steps=last_attempt_made_steps,
        )
        for rank, reference in references.items()
        if rank in segments_by_rank
    }
    if not comparisons:
        return TrialComparison(finite=False)
    rank = min(comparisons, key=lambda number: _urgency(comparisons[number]))
    comparison = comparisons[rank]
    if len(references) > 1:
        comparison.differences = [
            replace(difference, detail=f"on rank {rank} {difference.detail}")
            for difference in comparison.differences
        ]
    return comparison


def _urgency(comparison: TrialComparison) -> tuple[float, int]:
    """Return a sort key: the earliest step that differs, then the field that differs in this step.

    Comparisons with other kinds of differences only, such as missing steps at the end, come next.
    Comparisons without differences come last.
    """
    causes = [
        (difference.step, _CAUSAL_ORDER.index(difference.what))
        for difference in comparison.differences
        if difference.what in _CAUSAL_ORDER
    ]
    if causes:
        return min(causes)
    return math.inf, int(not comparison.differences)


def compare_rank(
    reference: Reference, segments: Sequence[Segment], *, last_attempt_made_steps: bool
) -> TrialComparison:
    """Compare all attempts of one rank with the undisturbed run.

    Args:
        reference: The undisturbed run of this rank.
        segments: The records of this rank's processes, in order. Each contains at least one step.
        last_attempt_made_steps: Whether any process of the last attempt took a step.
    """
    timeline = Timeline(reference)
    for number, segment in enumerate(segments):
        parts = reference.trainings_in(segment)
        for part in parts:
            is_last_of_process = part is parts[-1]
            timeline.add(part, resumed=number > 0, may_be_cut=is_last_of_process)
    comparison = timeline.comparison
    if all(difference.what == OLDER for difference in comparison.differences):
        difference = timeline.difference_at_end(last_attempt_made_steps=last_attempt_made_steps)
        difference = difference or saved_difference(reference, segments)
        if difference is not None:
            comparison.differences.append(difference)
    steps = list(timeline.steps.values())
    expected_batches = _batches(reference.steps)
    batches = _batches(steps)
    comparison.batches_twice = (batches - expected_batches).total()
    comparison.batches_never = (expected_batches - batches).total()
    comparison.finite = _is_finite(timeline.steps[max(timeline.steps)])
    comparison.losses = losses(steps)
    return comparison


class Timeline:
    """The steps of one rank that led to its final weights, across all attempts.

    A restart resumes from a checkpoint, so the steps after that checkpoint are removed from the
    timeline and added again when they are repeated.

    Args:
        reference: The undisturbed run of this rank.
    """

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        # The steps by their index in the undisturbed run, in the order in which they were taken.
        self.steps: dict[int, RecordedStep] = {}
        self.comparison = TrialComparison()
        self._saves: list[SavedCheckpoint] = []

    def add(self, part: Segment, *, resumed: bool, may_be_cut: bool) -> None:
        """Add the records of one training run of a process to the timeline.

        Args:
            part: The records to add, including at least one step.
            resumed: Whether the records are from an attempt after a restart.
            may_be_cut: Whether the process ended after the last of these records. If so, its last
                save may be incomplete.
        """
        # Steps are indexed from 0, so the number of steps reached is the highest index plus 1.
        reached = max(self.steps, default=-1) + 1
        placement = self._reference.locate(part, reached)
        place = placement.place
        begin, end = self._reference.training_at(place)
        steps_again = [index for index in self.steps if place <= index < end]
        if resumed:
            self.comparison.resumed_at.append(place)
            self.comparison.steps_again += len(steps_again)
            self._note_older_checkpoint(begin, place)
        difference = placement.difference or first_difference(self._reference, part, place)
        if difference is not None:
            self.comparison.differences.append(difference)
        self._add_saves(part, begin, place, may_be_cut=may_be_cut)
        for index in steps_again:
            del self.steps[index]
        self._add_steps(part, place)

    def difference_at_end(self, *, last_attempt_made_steps: bool) -> RunDifference | None:
        """Return a difference if the run has more or fewer steps than expected; otherwise None."""
        expected_count = len(self._reference.steps)
        unmatched = set(range(expected_count)) ^ self.steps.keys()
        if not unmatched:
            return None
        first_unmatched = min(unmatched)
        if last_attempt_made_steps:
            detail = f"the run consists of {len(self.steps)} steps instead of {expected_count}"
        else:
            # The steps after the last save are in the timeline, but their effect was lost.
            first_unmatched = min(
                first_unmatched, max([save.place for save in self._saves], default=0)
            )
            detail = (
                f"the last attempt did not train although only {first_unmatched} of"
                f" {expected_count} steps were saved"
            )
        return RunDifference(first_unmatched + 1, END, detail)

    def _note_older_checkpoint(self, begin: int, place: int) -> None:
        """Add a difference if a restart ignored a newer, complete checkpoint of the same kind.

        If the run started over, it ignored all checkpoints, so their kind does not matter.

        Args:
            begin: The place at which the training run begins.
            place: The place at which the restart continued.
        """
        resumed_kinds = {save.entry_names for save in self._saves if save.place == place}
        places = [
            save.place
            for save in self._saves
            if save.is_complete
            and save.training_begin == begin
            and (place == begin or save.entry_names in resumed_kinds)
        ]
        newest = max(places, default=0)
        if newest <= place:
            return
        where = f"after step {place}" if place else "from the beginning"
        detail = f"the run resumed {where} although a checkpoint of step {newest} was saved"
        self.comparison.differences.append(RunDifference(place + 1, OLDER, detail))

    def _add_saves(self, part: Segment, begin: int, place: int, *, may_be_cut: bool) -> None:
        """Add the checkpoints that were saved in `part`, which began at `place`."""
        for save in part.saves:
            # For a save in a background thread, it is unknown which step's state was saved.
            if save.in_thread:
                continue
            is_after_last_step = save.steps_made >= len(part.steps)
            self._saves.append(
                SavedCheckpoint(
                    place=place + save.steps_made,
                    training_begin=begin,
                    entry_names=frozenset(path.partition(".")[0] for path in save.entries),
                    is_complete=not (may_be_cut and is_after_last_step),
                )
            )

    def _add_steps(self, part: Segment, place: int) -> None:
        """Add the steps of `part`, which began at `place`, replacing the steps that they repeat."""
        steps = list(part.steps)
        if place < len(self._reference.steps):
            expected = remaining_parts(self._reference.steps[place], steps[0])
            if expected.resumed_midway:
                # The earlier parts of this step ran before the restart.
                steps[0] = self._reference.steps[place]
        for index, step in enumerate(steps, start=place):
            self.steps[index] = step


def compare_undisturbed(
    first: Sequence[Segment], second: Sequence[Segment]
) -> tuple[Reference, RunDifference | None]:
    """Compare two undisturbed runs of one rank.

    Args:
        first: The records of the first run's processes. Each has at least one step.
        second: The records of the second run's processes.

    Returns:
        The first run, as a reference that ignores harmless differences; and the first difference
            that is not harmless, or None.
    """
    reference = make_reference(first, _find_unsteady(first, second))
    second_steps = [step for segment in second for step in segment.steps]
    reached = 0
    for segment in second:
        for part in reference.trainings_in(segment):
            placement = reference.locate(part, reached)
            if placement.difference is not None:
                detail = "the weights at the start differ: set the seed before creating the model"
                return reference, replace(placement.difference, detail=detail)
            difference = first_difference(reference, part, placement.place)
            if difference is not None:
                return reference, difference
            reached += len(part.steps)
    step_counts = (len(reference.steps), len(second_steps))
    if min(step_counts) != max(step_counts):
        detail = "only one of the two undisturbed runs has this step"
        return reference, RunDifference(min(step_counts) + 1, END, detail)
    return reference, None


def _find_unsteady(first: Sequence[Segment], second: Sequence[Segment]) -> Unsteady:
    """Return the random states, checkpoint entries and files that differ between two such runs."""
    saves = last_saves(first)
    other_saves = last_saves(second)
    common_files = saves.keys() & other_saves.keys()
    entry_pairs = [(saves[name], other_saves[name]) for name in common_files]
    if saves and other_saves:
        # Also compare the newest saves of both runs, whose file names may differ.
        entry_pairs.append((list(saves.values())[-1], list(other_saves.values())[-1]))
    steps = [step for segment in first for step in segment.steps]
    other_steps = [step for segment in second for step in segment.steps]
    random_pairs = [
        (step.random, other.random) for step, other in zip(steps, other_steps, strict=False)
    ]
    return Unsteady(
        random_states=_keys_that_differ(random_pairs),
        entries=_keys_that_differ(entry_pairs),
        files=frozenset(saves.keys() ^ other_saves.keys()),
    )


def _keys_that_differ(pairs: Iterable[tuple[dict[str, str], dict[str, str]]]) -> frozenset[str]:
    """Return the keys whose values differ between the two dictionaries in at least one pair."""
    return frozenset(
        key for values, others in pairs for key in values if values[key] != others.get(key)
    )


def _batches(steps: Iterable[RecordedStep]) -> Counter[str | None]:
    return Counter(batch for step in steps for batch in step.batch)


def _is_finite(step: RecordedStep) -> bool:
    """Return whether a step's losses and the sample of weights recorded after it are finite."""
    numbers = [*map(complex, step.losses), *step.after.sample]
    return all(cmath.isfinite(number) for number in numbers)


def losses(steps: Iterable[RecordedStep]) -> list[float | None]:
    """Return the first loss of each step, with None for a loss that is missing or not finite.

    Losses are divided by the gradient scaler's scale, if there is one.
    """
    return [_loss(step) for step in steps]


def _loss(step: RecordedStep) -> float | None:
    if not step.losses:
        return None
    # `complex` can parse any recorded loss, since a backward pass may start from a complex number.
    loss = complex(step.losses[0]) / (step.scale or 1)
    return loss.real if cmath.isfinite(loss) else None
