"""The signatures of precision tell number types, scalers and draws apart, and leave talk of them alone."""

from __future__ import annotations

import re

import pytest

from holdfast.explain.evidence import Statement
from holdfast.explain.matching import best_match
from holdfast.explain.signature import Signature
from holdfast.explain.signatures.precision import SIGNATURES


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
        ("\"addmm_impl_cpu_\" not implemented for 'Half'", "H1271"),
        ("\"softmax_lastdim_kernel_impl\" not implemented for 'Long'", "H1272"),
        ("mean(): could not infer output dtype. Input dtype must be either a floating point or complex", "H1272"),
        ("value cannot be converted to type at::Half without overflow", "H1277"),
        ("value cannot be converted to type int64_t without overflow", "H1278"),
        ("value cannot be converted to type uint8_t without overflow", "H1278"),
        ("unscale_() has already been called on this optimizer since the last update().", "H957"),
        ("step() has already been called since the last update().", "H1274"),
        ("invalid multinomial distribution (sum of probabilities <= 0)", "H1284"),
        ("invalid multinomial distribution (encountering probability entry < 0)", "H961"),
        ("probability tensor contains either `inf`, `nan` or element < 0", "H961"),
        ("Got unsupported ScalarType BFloat16", "H1271"),
        ("Got unsupported ScalarType QInt8", "H1287"),
        ("multinomial only supports floating-point dtypes for input, got: Long", "H1272"),
        ("cannot convert float NaN to integer", "H1291"),
        ("cannot convert float infinity to integer", "H1291"),
    ],
)
def test_neighbouring_texts_are_told_apart(text: str, expected: str) -> None:
    """Texts that share most of their words have each their own cause."""
    assert cause(text, "ValueError" if "convert float" in text else "RuntimeError") == expected


def test_words_of_numpy_count_only_as_errors() -> None:
    """NumPy prints the same words as a warning, after which the program goes on."""
    assert cause("overflow encountered in exp", "FloatingPointError") == "H1281"
    assert cause("loss.py:4: RuntimeWarning: overflow encountered in exp", None) != "H1281"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "loss scale: 65536.0, steps skipped: 2",
        "using bfloat16 autocast on cpu",
        "dropout 0.1, label smoothing 0.0",
        "grad norm nan, step skipped",
        "deterministic: True, seed 2**63",
        "sampled 8 of 100 without replacement",
        "Half of the data is used",
    ],
)
def test_talk_of_precision_is_no_failure(line: str) -> None:
    """Lines that people print about precision fit no signature of this field."""
    assert cause(line, None) not in {signature.id for signature in SIGNATURES}
