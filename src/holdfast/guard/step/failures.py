"""The kinds of failure after which an attempt is repeated, and functions that recognize them.

All other errors are raised to the script. ``remedies`` handles each kind of failure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, final

from torch import nn

from holdfast.core.errors import HoldfastError
from holdfast.guard.record import describe_error
from holdfast.guard.state.work import Work
from holdfast.guard.step.passes import EmptyPartError
from holdfast.memory.ladder import StepPlan
from holdfast.memory.oom import find_out_of_memory, is_sticky
from holdfast.memory.recompute import RecomputeDiffersError, may_be_caused_by_recomputing


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The reason why an attempt must be repeated.

    This object does not hold the exception, whose frames would keep the attempt's tensors in
    memory.
    """

    # The error as text, which is sent to the other ranks.
    description: str = ""


@final
class OtherRankFailed(Failure):
    """The attempt succeeded on this rank, but failed on another one."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PartWithoutItems(Failure):
    """A micro-batch declares that it has no items, but its loss is not zero."""

    # The position of the micro-batch's first sample in the batch.
    place: int


@final
class OutOfMemory(Failure):
    """The attempt ran out of memory. The description is the allocator's message."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NotRecomputable(Failure):
    """A module cannot be recomputed."""

    # The module. None if the error may come from any module that the plan recomputes.
    block: nn.Module | None
    why: str


@final
class NotMeasurable(Failure):
    """The memory that modules keep for the backward pass cannot be measured."""


Recognition: TypeAlias = Callable[[Exception, Work, StepPlan], Failure | None]


def failure_of(error: Exception, work: Work, plan: StepPlan) -> Failure | None:
    """Return the failure that an error indicates, or None if the attempt must not be repeated.

    Args:
        error: The error that the attempt raised.
        work: The input of the step.
        plan: The plan of the attempt.
    """
    for recognize in RECOGNITIONS:
        failure = recognize(error, work, plan)
        if failure is not None:
            return failure
    return None


def part_without_items(error: Exception, _work: Work, _plan: StepPlan) -> Failure | None:
    """Recognize the error that `Passes` raises for a part without items."""
    if not isinstance(error, EmptyPartError):
        return None
    return PartWithoutItems(description=describe_error(error), place=error.place)


def out_of_memory(error: Exception, _work: Work, _plan: StepPlan) -> Failure | None:
    """Recognize an out-of-memory error from any allocator."""
    message = find_out_of_memory(error)
    return None if message is None else OutOfMemory(description=message)


def not_recomputable(error: Exception, _work: Work, plan: StepPlan) -> Failure | None:
    """Recognize an error that might not have occurred without recomputation."""
    if not plan.recompute or not may_be_caused_by_recomputing(error):
        return None
    description = describe_error(error)
    if isinstance(error, RecomputeDiffersError):
        return NotRecomputable(description=description, block=error.block, why=error.why)
    why = "one of these modules computes a different result when it is run again"
    return NotRecomputable(description=description, block=None, why=why)


def not_measurable(error: Exception, work: Work, _plan: StepPlan) -> Failure | None:
    """Recognize an error that the memory measurement may have caused.

    For example, parts of `torch.func` do not allow hooks on saved tensors.
    """
    if not work.measured or isinstance(error, HoldfastError) or is_sticky(error):
        return None
    return NotMeasurable(description=describe_error(error))


# The first function that recognizes an error decides. Specific errors come first. The measurement
# comes last, since it may cause any error.
RECOGNITIONS: tuple[Recognition, ...] = (
    part_without_items,
    out_of_memory,
    not_recomputable,
    not_measurable,
)
