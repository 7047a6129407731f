"""After which errors an attempt is repeated, and as which kind of failure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.guard.state.work import Work
from holdfast.guard.step.failures import (
    RECOGNITIONS,
    Failure,
    NotMeasurable,
    NotRecomputable,
    OutOfMemory,
    PartWithoutItems,
    failure_of,
)
from holdfast.guard.step.passes import EmptyPartError
from holdfast.loader.random_state import capture
from holdfast.memory.ladder import StepPlan
from holdfast.memory.recompute import RecomputeDiffersError

PLAIN = StepPlan()
RECOMPUTING = StepPlan(recompute=("model.0",))
MODIFIED = RuntimeError("a variable has been modified by an inplace operation")


def a_step(*, measured: bool = False) -> Work:
    return Work(
        batch=torch.ones(4, 2),
        loss_fn=torch.sum,
        names=["optimizer"],
        split=0,
        size=4,
        parameters=[],
        inputs=lambda: None,
        random_state=capture([]),
        tensors=[],
        versions=[],
        measured=measured,
    )


@pytest.mark.parametrize(
    ("error", "plan", "measured", "kind"),
    [
        (EmptyPartError(3), PLAIN, False, PartWithoutItems),
        (MemoryError("no room"), PLAIN, False, OutOfMemory),
        (torch.OutOfMemoryError("CUDA out of memory"), PLAIN, False, OutOfMemory),
        (MODIFIED, RECOMPUTING, False, NotRecomputable),
        (RuntimeError("hooks are not allowed"), PLAIN, True, NotMeasurable),
        # Two rules apply: an out-of-memory is certain, and measuring explains any error.
        (MemoryError("no room"), RECOMPUTING, True, OutOfMemory),
        (MODIFIED, RECOMPUTING, True, NotRecomputable),
    ],
)
def test_the_first_rule_that_recognizes_an_error_decides(
    error: Exception, plan: StepPlan, measured: bool, kind: type[Failure]
) -> None:
    failure = failure_of(error, a_step(measured=measured), plan)

    assert type(failure) is kind
    assert failure.description


@pytest.mark.parametrize(
    ("error", "plan", "measured"),
    [
        (ValueError("the user's own"), PLAIN, False),
        # Nothing is recomputed, so recomputing is not the cause.
        (MODIFIED, PLAIN, False),
        # The guard has raised it, and a dead device cannot be measured again.
        (holdfast.BatchError("a batch", limit="none", fix="none.", rule="H202"), PLAIN, True),
        (RuntimeError("CUDA error: device-side assert triggered"), PLAIN, True),
    ],
)
def test_any_other_error_leaves_the_guard(error: Exception, plan: StepPlan, measured: bool) -> None:
    assert failure_of(error, a_step(measured=measured), plan) is None


def test_a_failure_names_what_its_remedy_needs() -> None:
    block = nn.Linear(2, 2)
    differs = RecomputeDiffersError(block, "it draws from its own generator")

    empty = failure_of(EmptyPartError(3), a_step(), PLAIN)
    recomputed = failure_of(differs, a_step(), RECOMPUTING)

    assert isinstance(empty, PartWithoutItems)
    assert empty.place == 3
    assert isinstance(recomputed, NotRecomputable)
    assert recomputed.block is block
    assert recomputed.why == "it draws from its own generator"


def test_a_failure_holds_no_exception() -> None:
    """The frames of an exception would keep the tensors of the failed attempt in memory."""
    errors: list[tuple[Exception, dict[str, Any]]] = [
        (EmptyPartError(3), {}),
        (MemoryError("no room"), {}),
        (MODIFIED, {"plan": RECOMPUTING}),
        (RuntimeError("hooks are not allowed"), {"measured": True}),
    ]
    assert len(errors) == len(RECOGNITIONS)
    for error, how in errors:
        work = a_step(measured=how.get("measured", False))
        failure = failure_of(error, work, how.get("plan", PLAIN))
        names = [*Failure.__dataclass_fields__, *type(failure).__dataclass_fields__]
        assert not any(isinstance(getattr(failure, name), BaseException) for name in names)
