"""The registry: every signature explains itself, finds its own texts, and no pattern can take for ever."""

from __future__ import annotations

import io
import re
import warnings

import pytest

from holdfast.explain.collecting import collect_stream
from holdfast.explain.evidence import Frame, Statement
from holdfast.explain.judging import judge
from holdfast.explain.logs.keeping import is_relevant
from holdfast.explain.matching import best_match, match_all
from holdfast.explain.rules import all_rules, catalogue, find_rule
from holdfast.explain.signature import FAMILIES
from holdfast.explain.signatures import all_signatures

SIGNATURES = all_signatures()
TEXTS = [
    pytest.param(signature, text, id=f"{signature.id}-{where}")
    for signature in SIGNATURES.values()
    for where, text in {"example": signature.example, **signature.also}.items()
    if signature.patterns
]


def test_every_row_of_the_table_is_there():
    """The 92 rows that the signatures come from have one each, and the runtime verdicts are there too."""
    assert {f"H{901 + row}" for row in range(92)} <= set(SIGNATURES)
    assert {f"H{number}" for number in range(1600, 1617)} <= set(SIGNATURES)


@pytest.mark.parametrize("signature", SIGNATURES.values(), ids=SIGNATURES)
def test_every_signature_explains_itself(signature):
    """Id, title, words, family and patterns have the form that the page and the verdicts rely on."""
    assert re.fullmatch(r"H(?:9\d\d|1[1-6]\d\d)", signature.id)
    assert signature.title
    assert "\n" not in signature.title
    assert not signature.title.endswith(".")
    assert signature.family in FAMILIES
    assert signature.means.endswith((".", "`", ")"))
    assert signature.fix.endswith((".", "`", ")"))
    assert signature.seen
    assert signature.example or not signature.patterns
    assert signature.restart != "remedy" or signature.family != "user code"


def test_the_page_of_a_signature_is_found_like_a_rule():
    """`find_rule` knows signatures in any case; ids of pages and of signatures do not overlap."""
    assert not set(all_rules()) & set(SIGNATURES)
    assert set(catalogue()) == set(all_rules()) | set(SIGNATURES)
    rule = find_rule("h965")
    assert rule.title == SIGNATURES["H965"].title
    for part in (SIGNATURES["H965"].means, "**Fix.**", "**Example.**", "**Seen.**"):
        assert part in rule.text


@pytest.mark.parametrize(("signature", "text"), TEXTS)
def test_every_example_is_judged_to_its_own_signature(signature, text):
    """Each quoted text, alone as the log of a command that failed, leads to the signature that quotes it."""
    facts = collect_stream(io.BytesIO(text.encode()), name="a.log", status=1)
    if signature.role == "confirmation":  # such only supports another
        assert signature.id in {match.signature.id for each in facts.statements for match in match_all(each)}
    else:
        assert judge(facts).cause == signature.id


@pytest.mark.parametrize(("signature", "text"), TEXTS)
def test_every_example_is_kept_of_a_large_log(signature, text):
    """What a signature looks for has a word by which a line is kept in the middle of a log of any size."""
    assert any(is_relevant(line) for line in text.splitlines())


@pytest.mark.parametrize("signature", SIGNATURES.values(), ids=SIGNATURES)
def test_patterns_compile_and_do_not_explode(signature):
    """No pattern has a repetition inside a repetition that can be left and entered at the same place."""
    for pattern in (*signature.patterns, *signature.frames):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            re.compile(pattern, re.IGNORECASE)
        # (x+)+, (x*)*, (x+)* with a single item inside: exponential on texts that nearly match.
        assert not re.search(r"\((?:\?:)?(?:\[[^\]]*\]|\\?.)[+*]\)[+*]", pattern)
        # An open-ended repetition at the start begins anew at every place: work by the square of the text.
        assert (
            not re.match(r"(?:\\?[\"']\??|\(\?:)?(?:\[(?:\\.|[^\]\\])*\]|\\[wS]|\.)[+*]", pattern)
            or pattern[0] == "'"
        )
        # Two open-ended wildcards in a row: the work grows with the square of the text for each place.
        assert not re.search(r"\.[*+]\??\.[*+]", pattern)


HOSTILE = [
    "a" * 20_000,
    "Error: " * 3_000,
    "0 " * 10_000,
    "[" * 20_000,
    "(1, 2) " * 3_000,
    "'x' " * 5_000,
    "\n" * 20_000,
]


@pytest.mark.slow
@pytest.mark.parametrize("text", HOSTILE, ids=[text[:7].strip() for text in HOSTILE])
def test_long_texts_that_match_nothing_are_passed_over(text):
    """20,000 characters that nearly match many patterns come to an end with all of them, and none matches."""
    for suffix in ("", " tensor", "\nRuntimeError"):
        assert not match_all(Statement(text=(text + suffix)[-20_000:]))
        match_all(Statement(text=(text + suffix)[-20_000:], kind="exception", exception="RuntimeError"))


def test_a_signature_that_asks_for_frames_gets_them():
    """With frames that do not fit it is out; without any frames it counts less than one that asks for none."""
    signature = next(each for each in SIGNATURES.values() if each.frames and each.example and each.patterns)
    (statement, *_) = [
        each
        for each in collect_stream(io.BytesIO(signature.example.encode()), name="a.log").statements
        if signature.id in {match.signature.id for match in match_all(each)}
    ]
    elsewhere = Statement(
        text=statement.text, kind="exception", exception=statement.exception,
        frames=(Frame(file="/x/y.py", line=1, function="zzz"),),
    )  # fmt: skip
    assert signature.id not in {match.signature.id for match in match_all(elsewhere)}


def test_words_that_people_print_match_nothing():
    """Sentences with words of errors are no signature."""
    for text in (
        "killed 3 zombie processes", "the loss is not nan", "error rate 0.12", "no errors", "0 failed, 2 passed",
        "out of memory killer disabled", "warning: this may take a while", "aborting the warm-up as asked",
    ):  # fmt: skip
        found = best_match(Statement(text=text))
        assert found is None, (text, found.signature.id)
