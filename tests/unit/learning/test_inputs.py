"""What a model is fed with is recognised again, and constant or bad inputs are seen."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.learning.facts import InputFacts
from holdfast.learning.inputs import InputObserver, fingerprint


def after(*batches: Any, answers: Any = None) -> InputFacts:
    inputs = InputObserver()
    for step, batch in enumerate(batches):
        inputs.begin_step(step)
        inputs.note_arguments(batch)
        if answers is not None:
            inputs.note_answer(answers)
    return inputs.facts()


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64],
)
def test_a_fingerprint_is_that_of_the_contents(dtype: torch.dtype) -> None:
    """Equal contents are equal, one other element is not, and neither is another shape."""
    one = torch.arange(12).to(dtype).view(3, 4)
    other = one.clone()
    other[0, 0] = 1
    assert fingerprint(one) == fingerprint(one.clone()) == fingerprint(one.T.contiguous().T)
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one) != fingerprint(one.view(4, 3))


def test_a_batch_that_is_used_twice_in_a_step_is_no_repeat() -> None:
    """Two passes over one batch, as sharpness-aware steps and inner loops make them, are one
    batch of one step.
    """
    inputs = InputObserver()
    for step in range(6):
        batch = torch.randn(8, 3)
        inputs.begin_step(step)
        inputs.note_arguments(batch)
        inputs.note_arguments(batch)
    facts = inputs.facts()
    assert (facts.different, facts.fingerprints, facts.calls) == (6, 6, 12)


@pytest.mark.parametrize(
    ("batch", "constant"),
    [
        (torch.ones(8, 3), 1),
        (torch.randn(8, 3), 0),
        (torch.randn(1, 3).expand(8, 3), 1),
        ({"ids": torch.zeros(8, 3, dtype=torch.long), "mask": torch.ones(8, 3)}, 1),
        ({"ids": torch.arange(24).view(8, 3), "mask": torch.ones(8, 3)}, 0),
        (torch.ones(1, 3), 0),
    ],
)
def test_samples_without_difference_are_seen(batch: Any, constant: int) -> None:
    """A batch is constant only if no tensor in it tells its samples apart; one sample cannot be."""
    assert after(batch).constant == constant


@pytest.mark.parametrize(("value", "bad"), [(math.nan, 1), (math.inf, 1), (-math.inf, 0), (0.0, 0)])
def test_masks_of_minus_infinity_are_not_bad(value: float, bad: int) -> None:
    """NaN and plus infinity in an input are counted, the minus infinity of a mask is not."""
    batch = torch.randn(4, 3)
    batch[1, 1] = value
    assert after(batch).nonfinite == bad


@pytest.mark.parametrize(
    ("batch", "answer", "counted"),
    [
        (torch.randn(8, 3), torch.ones(8, 2), (1, 1)),
        (torch.randn(8, 3), torch.randn(8, 2), (1, 0)),
        (torch.ones(8, 3), torch.ones(8, 2), (0, 0)),
        (torch.randn(8, 3), torch.tensor(1.0), (0, 0)),
    ],
)
def test_equal_answers_to_different_samples_are_seen(
    batch: Tensor, answer: Tensor, counted: tuple[int, int]
) -> None:
    """Only where the samples differ and there is an answer for each does an equal answer say
    something.
    """
    facts = after(batch, answers=answer)
    assert (facts.answers, facts.same_answers) == counted
