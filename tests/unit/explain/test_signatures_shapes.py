"""The signatures of shapes, dtypes and layers tell mistakes apart whose texts look alike."""

from __future__ import annotations

import re

import pytest

from holdfast.explain.evidence import Statement
from holdfast.explain.matching import best_match
from holdfast.explain.signature import Signature
from holdfast.explain.signatures import layer_inputs, shapes

SIGNATURES = layer_inputs.SIGNATURES + shapes.SIGNATURES


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
    ("text", "exception", "expected"),
    [
        ("mat1 and mat2 shapes cannot be multiplied (4x11 and 10x2)", "RuntimeError", "H965"),
        ("mat1 and mat2 must have the same dtype, but got Double and Float", "RuntimeError", "H971"),
        ("Input type (unsigned char) and bias type (float) should be the same", "RuntimeError", "H971"),
        ("Input type (float) and bias type (c10::Half) should be the same", "RuntimeError", "H971"),
        ("The size of tensor a (9) must match the size of tensor b (5) at non-singleton dimension 3",
         "RuntimeError", "H968"),
        ("shape '[4, -1, 7]' is invalid for input of size 960", "RuntimeError", "H969"),
        ("Target size (torch.Size([8])) must be the same as input size (torch.Size([8, 1]))", "ValueError", "H973"),
        ("Expected input batch_size (28) to match target batch_size (4).", "ValueError", "H1313"),
        ("expected 4D input (got 2D input)", "ValueError", "H1311"),
        ("Expected more than 1 value per channel when training, got input size torch.Size([1, 8])",
         "ValueError", "H974"),
        ("Expected hidden size (1, 3, 6), got [1, 8, 6]", "RuntimeError", "H1312"),
        ("The shape of the mask [8] at index 0 does not match the shape of the indexed tensor [6, 4] at index 0",
         "IndexError", "H1314"),
        ("einsum(): subscript d has size 16 for operand 1 which does not broadcast with previously seen size 8",
         "RuntimeError", "H1315"),
        ("stack expects each tensor to be equal size, but got [3, 4] at entry 0 and [3, 5] at entry 1",
         "RuntimeError", "H942"),
    ],
)  # fmt: skip
def test_neighbours_are_told_apart(text: str, exception: str, expected: str) -> None:
    """Texts that share words belong to one signature each."""
    assert cause(text, exception) == expected


@pytest.mark.parametrize(
    "line",
    [
        "input shape: [8, 3, 224, 224], output size is [8, 1000]",
        "mat1 shape 4x11, mat2 shape 11x2",
        "Warning: Using a target size (torch.Size([8])) that is different to the input size (torch.Size([8, 1])).",
        "expected target size 512 after resize",
        "kernel size 3, stride 2, padding 1",
    ],
)
def test_prints_of_shapes_are_no_failure(line: str) -> None:
    """People print shapes, and torch warns of some that go on."""
    assert cause(line, None) is None
