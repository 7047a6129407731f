"""The signatures of values tell a loss that diverged from talk of it, and a wrong index from its neighbours."""

from __future__ import annotations

import re

import pytest

from holdfast.explain.evidence import Statement
from holdfast.explain.matching import best_match
from holdfast.explain.signature import Signature
from holdfast.explain.signatures import values

SIGNATURES = values.SIGNATURES


def cause(text: str, exception: str | None = "RuntimeError") -> str | None:
    """Return the id of the best signature of all for one statement."""
    statement = Statement(text=text, exception=exception, kind="exception" if exception else "line")
    found = best_match(statement)
    return found.signature.id if found else None


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda signature: signature.id)
def test_every_text_fits_its_own_patterns(signature: Signature) -> None:
    """The example and every other wording of a signature are found by one of its own patterns."""
    for text in (signature.example, *signature.also.values()):
        last = text.rpartition("in <module>\n")[2]
        bodies = (text, last, last.partition(": ")[2])
        assert any(re.search(pattern, body, re.IGNORECASE) for pattern in signature.patterns for body in bodies), text


@pytest.mark.parametrize(
    "line",
    [
        "epoch 3 loss nan",
        "step=812 train_loss=nan lr=0.01",
        "{'loss': nan, 'grad_norm': nan, 'epoch': 0.4}",
        "Loss is nan, stopping training",
        "ERROR: loss is not finite: tensor(inf)",
        "NaN loss detected at step 40, aborting",
        "non-finite loss, ending training tensor([nan])",
    ],
)
def test_a_loss_that_is_not_finite_is_known_in_the_words_that_scripts_use(line: str) -> None:
    """Loggers, trainers and hand-written checks say it differently, and all of them are found."""
    assert cause(line, None) == "H963"


@pytest.mark.parametrize(
    "line",
    [
        "epoch 3 loss 0.412 nan_count 0",
        "best_val_loss=inf, patience 5",
        "Validation loss decreased (inf --> 0.512). Saving model",
        "terminate_on_nan_loss=True",
        "will stop if loss is nan",
        "no NaN loss so far",
        "loss information: 3 terms",
        "nan_to_num applied to loss weights",
        "skip nan loss: enabled",
        "loss function: nanmean",
    ],
)
def test_talk_of_losses_and_nan_is_no_divergence(line: str) -> None:
    """Settings, first values of a best loss and promises hold the same words and mean nothing."""
    assert cause(line, None) is None


@pytest.mark.parametrize(
    ("text", "exception", "expected"),
    [
        ("index 600 is out of bounds for dimension 0 with size 512", "IndexError", "H970"),
        ("index 110 is out of bounds for axis 0 with size 100", "IndexError", "H970"),
        ("list index out of range", "IndexError", "H1372"),
        ("Dimension out of range (expected to be in range of [-1, 0], but got 1)", "IndexError", "H1310"),
        ("too many indices for tensor of dimension 1", "IndexError", "H1310"),
        ("linalg.svd: The algorithm failed to converge because the input matrix contained non-finite values.",
         "_LinAlgError", "H964"),
        ("Singular matrix", "LinAlgError", "H964"),
        ("a Tensor with 3 elements cannot be converted to Scalar", "RuntimeError", "H1303"),
        ("float division by zero", "ZeroDivisionError", "H1302"),
        ("max() iterable argument is empty", "ValueError", "H1305"),
    ],
)  # fmt: skip
def test_neighbours_are_told_apart(text: str, exception: str, expected: str) -> None:
    """Texts that share words belong to one signature each."""
    assert cause(text, exception) == expected


def test_a_division_by_zero_counts_only_as_an_exception() -> None:
    """A line about it is no failure."""
    assert cause("division by zero is avoided with eps=1e-8", None) is None
