"""Out of memory under a real limit: recovered, and equal to the step that never ran out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.prepared import run_prepared

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).parent / "programs" / "short_of_memory.py"
EVALUATION_PROGRAM = PROGRAM.with_name("evaluation_memory.py")


def take_steps(name: str, *shares: float) -> list[dict[str, Any]]:
    ended = run_prepared([PROGRAM, name, *shares], timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.mark.parametrize("name", ["mlp", "conv", "transformer", "lstm", "backward"])
def test_a_step_that_does_not_fit_is_taken_all_the_same(name):
    """With 60 and 35 % of the memory that the step needs, the gradient is that of the whole
    batch to 1e-5.
    """
    answers = take_steps(name, 0.6, 0.35)
    assert [answer.get("error") for answer in answers] == [None] * 2
    assert all(answer["attempts"] > 1 for answer in answers), "the limit was real"
    assert all(answer["difference"] <= 1e-5 for answer in answers)
    assert all(answer["trained_again"] == 1 for answer in answers)


def test_recomputation_is_exact_also_for_batch_norm():
    """A model with BatchNorm is recomputed, never split.

    Gradient and statistics are bit-identical.
    """
    (answer,) = take_steps("batch_norm", 0.6)
    assert answer.get("error") is None
    assert ["recompute", "bit-exact"] in answer["events"]
    assert answer["bit_equal"]
    assert answer["buffers_equal"]
    assert answer["micro_batch_size"] == 8192


def test_what_saves_most_is_recomputed_before_anything_is_split():
    """A part that does not repeat, is called often and keeps most is found.

    The step is exact, and not split.
    """
    (answer,) = take_steps("recurrence", 0.4)
    assert answer.get("error") is None
    assert answer["recomputed"][0] == ["recurrence"]
    assert answer["micro_batch_size"] == 8192
    assert answer["bit_equal"]
    assert answer["buffers_equal"]
    assert answer["observed"], "the diagnosis goes on"


def test_what_cannot_fit_ends_with_an_error_that_says_what_was_tried():
    """With next to no memory a model with BatchNorm ends in a clear error, and trains on with a
    smaller batch.
    """
    (answer,) = take_steps("batch_norm", 0.05)
    assert "not be split" in answer["error"]
    assert "BatchNorm1d" in answer["error"]
    assert "allow_split_with" in answer["error"]


@pytest.mark.parametrize(("share", "fewest_splits"), [(0.6, 1), (0.1, 3)])
def test_an_evaluation_that_does_not_fit_is_split(share, fewest_splits):
    """The outputs are those of the whole batch, in order."""
    ended = run_prepared([EVALUATION_PROGRAM, share], timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    answer = json.loads(ended.stdout)
    assert answer["splits"] >= fewest_splits, "the limit was real"
    assert answer["logits"]
    assert answer["labels"]
    assert answer["loss_error"] < 1e-5
    assert answer["training"]
