"""The signatures of graphs tell neighbouring texts of autograd apart, and leave talk of gradients alone."""

from __future__ import annotations

import re

import pytest

from holdfast.explain.evidence import Statement
from holdfast.explain.matching import best_match
from holdfast.explain.signature import Signature
from holdfast.explain.signatures.autograd import SIGNATURES


def cause(text: str, exception: str | None = "RuntimeError") -> str | None:
    """Return the id of the best signature of all for one statement."""
    kind = "exception" if exception else "line"
    found = best_match(Statement(text=text, exception=exception, kind=kind))  # type: ignore[arg-type]
    return found.signature.id if found else None


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda signature: signature.id)
def test_every_text_fits_its_own_patterns(signature: Signature) -> None:
    """The example and every other wording of a signature are found by one of its own patterns."""
    for text in (signature.example, *signature.also.values()):
        assert any(re.search(pattern, text, re.IGNORECASE) for pattern in signature.patterns), text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("grad can be implicitly created only for scalar outputs", "H951"),
        ("grad can be computed only for real scalar outputs but got torch.complex64", "H1263"),
        ("grad can be implicitly created only for real scalar outputs but got torch.complex64", "H1263"),
        ("One of the differentiated Tensors does not require grad", "H1242"),
        ("One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused", "H1241"),
        ("element 3 of tensors does not require grad and does not have a grad_fn", "H950"),
        ("a view of a leaf Variable that requires grad is being used in an in-place operation.", "H952"),
        ("Output 3 of UnbindBackward0 is a view and is being modified inplace. This view is the output of", "H1250"),
        ("function PowerBackward returned an invalid gradient at index 1 - got [3] but expected shape", "H1245"),
        ("function PowerBackward returned an incorrect number of gradients (expected 12, got 1)", "H1244"),
    ],
)
def test_neighbouring_texts_are_told_apart(text: str, expected: str) -> None:
    """Texts that share most of their words have each their own cause."""
    assert cause(text) == expected


def test_a_missing_gradient_is_guessed_only_for_methods_of_tensors() -> None:
    """None where a tensor was expected is a missing gradient; None elsewhere is something else."""
    assert cause("'NoneType' object has no attribute 'norm'", "AttributeError") == "H1256"
    assert cause("'NoneType' object has no attribute 'items'", "AttributeError") != "H1256"
    assert cause("AttributeError: 'NoneType' object has no attribute 'norm'", None) is None


def test_backward_of_a_model_is_not_backward_of_a_number() -> None:
    """Only what cannot have a graph counts as a loss that is no tensor."""
    assert cause("'float' object has no attribute 'backward'", "AttributeError") == "H1264"
    assert cause("'Trainer' object has no attribute 'backward'", "AttributeError") != "H1264"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "froze 12 layers: requires_grad=False for 1.2M parameters",
        "grad_fn=<MeanBackward0>",
        "gradient checkpointing enabled, use_reentrant=False",
        "in-place ReLU: True",
        "running backward twice per step (retain_graph=True)",
        "compile: fullgraph=True, mode=max-autotune",
    ],
)
def test_talk_of_gradients_is_no_failure(line: str) -> None:
    """Lines that people print about their graphs fit no signature of this field."""
    assert cause(line, None) not in {signature.id for signature in SIGNATURES}
