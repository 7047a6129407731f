"""Why an attempt must be repeated: the kinds of failure, and how an error is recognized as one.

Errors of any other kind leave the guard. What follows each kind is in ``remedies``.
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
    """Why an attempt must be repeated.

    It holds no exception, whose frames would keep the tensors of the attempt in memory.
    """

    # The error in words, for the other ranks.
    description: str = ""


@final
class OtherRankFailed(Failure):
    """The attempt has succeeded here, but another rank has failed."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PartWithoutItems(Failure):
    """A micro-batch declares that it has no items, but its loss is not zero."""

    # The position of its first sample in the batch.
    place: int


@final
class OutOfMemory(Failure):
    """The attempt ran out of memory. The description is the allocator's message."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NotRecomputable(Failure):
    """A module cannot be recomputed."""

    # The module; None if any module of the plan may be meant.
    block: nn.Module | None
    why: str


@final
class NotMeasurable(Failure):
    """It cannot be measured how much memory the modules keep for the backward pass."""


Recognition: TypeAlias = Callable[[Exception, Work, StepPlan], Failure | None]


def failure_of(error: Exception, work: Work, plan: StepPlan) -> Failure | None:
    """Return the failure that an error stands for, or None if the attempt must not be repeated.

    Args:
        error: The error that the attempt has raised.
        work: The step.
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
    """Recognize an out-of-memory of any allocator."""
    message = find_out_of_memory(error)
    return None if message is None else OutOfMemory(description=message)


def not_recomputable(error: Exception, _work: Work, plan: StepPlan) -> Failure | None:
    """Recognize an error that might not have occurred without recomputation."""
    if not plan.recompute or not may_be_caused_by_recomputing(error):
        return None
    description = describe_error(error)
    if isinstance(error, RecomputeDiffersError):
        return NotRecomputable(description=description, block=error.block, why=error.why)
    why = "one of them computes a different result when it is run again"
    return NotRecomputable(description=description, block=None, why=why)


def not_measurable(error: Exception, work: Work, _plan: StepPlan) -> Failure | None:
    """Recognize an error that measuring may have caused.

    Parts of `torch.func`, for example, refuse hooks on saved tensors.
    """
    if not work.measured or isinstance(error, HoldfastError) or is_sticky(error):
        return None
    return NotMeasurable(description=describe_error(error))


# The first function that recognizes an error decides. What is certain comes first; any error may
# have been caused by measuring.
RECOGNITIONS: tuple[Recognition, ...] = (
    part_without_items,
    out_of_memory,
    not_recomputable,
    not_measurable,
)
