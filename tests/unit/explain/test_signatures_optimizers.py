"""The signatures of optimizers know wrong parameters, and states of another model by where they show."""

from __future__ import annotations

import re

import pytest

from holdfast.explain.evidence import Frame, Statement
from holdfast.explain.matching import best_match
from holdfast.explain.signature import Signature
from holdfast.explain.signatures import optimizers

SIGNATURES = optimizers.SIGNATURES


def cause(text: str, exception: str | None = "RuntimeError", *places: str) -> str | None:
    """Return the id of the best signature of all for one statement."""
    frames = tuple(
        Frame(file=place.rpartition(":")[0], line=1, function=place.rpartition(":")[2]) for place in places
    )
    statement = Statement(text=text, exception=exception, kind="exception" if exception else "line", frames=frames)
    found = best_match(statement)
    return found.signature.id if found else None


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda signature: signature.id)
def test_every_text_fits_its_own_patterns(signature: Signature) -> None:
    """The example and every other wording of a signature are found by one of its own patterns."""
    for text in (signature.example, *signature.also.values()):
        last = text.rpartition("in <module>\n")[2]
        bodies = (text, last, last.partition(": ")[2])
        assert any(re.search(pattern, body, re.IGNORECASE) for pattern in signature.patterns for body in bodies), text


_SIZES = "The size of tensor a (8) must match the size of tensor b (16) at non-singleton dimension 0"


def test_a_size_mismatch_within_a_step_is_a_state_of_another_model() -> None:
    """The same words are a state that does not fit within an optimizer, and a shape error anywhere else."""
    assert cause(_SIZES, "RuntimeError", "train.py:main", "site-packages/torch/optim/adam.py:step") == "H1327"
    assert cause(_SIZES, "RuntimeError", "train.py:main", "model.py:forward") == "H968"
    assert cause(_SIZES, "RuntimeError") == "H968"


def test_a_text_for_a_learning_rate_is_told_from_other_comparisons() -> None:
    """A comparison of text and number is a setting of an optimizer only if an optimizer made it."""
    text = "'<' not supported between instances of 'str' and 'float'"
    assert cause(text, "TypeError", "train.py:main", "site-packages/torch/optim/sgd.py:__init__") == "H1320"
    assert cause(text, "TypeError", "train.py:main") == "H1369"


@pytest.mark.parametrize(
    ("text", "exception", "expected"),
    [
        ("optimizer got an empty parameter list", "ValueError", "H975"),
        ("loaded state dict has a different number of parameter groups", "ValueError", "H976"),
        ("Tried to step 51 times. The specified number of total steps is 50", "ValueError", "H987"),
        ("ReduceLROnPlateau.step() missing 1 required positional argument: 'metrics'", "TypeError", "H1322"),
        ("step() missing 1 required positional argument: 'batch'", "TypeError", "H1365"),
        ("Linear is not an Optimizer", "TypeError", "H1321"),
        ("Adam does not support sparse gradients, please consider SparseAdam instead", "RuntimeError", "H1324"),
    ],
)
def test_neighbours_are_told_apart(text: str, exception: str, expected: str) -> None:
    """Texts that share words belong to one signature each."""
    assert cause(text, exception) == expected
