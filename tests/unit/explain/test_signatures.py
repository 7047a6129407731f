"""The catalogue: every entry explains itself, finds its own texts and no others, and no pattern can
take for ever.

An entry that breaks a rule fails here with its id. `wordings.yaml` holds statements that neighbours
must keep apart.
"""

from __future__ import annotations

import io
import re
import warnings
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.explain import signatures
from holdfast.explain.collecting import collect_stream
from holdfast.explain.evidence import Frame, Statement
from holdfast.explain.hangs.blame import KINDS as HANG_KINDS
from holdfast.explain.hangs.blame import SIGNATURES_OF
from holdfast.explain.judging import judge
from holdfast.explain.logs.excerpt import has_error_word
from holdfast.explain.logs.quick_pattern import QuickPattern
from holdfast.explain.rules import all_rules, catalogue
from holdfast.explain.signatures import (
    UNJUDGED,
    WELL,
    all_signatures,
    ids,
    kinds_of_unknown,
    leaks,
)
from holdfast.explain.signatures.matching import match_all
from holdfast.explain.signatures.signature import FAMILIES, Restart, Role, Signature

CATALOGUE = all_signatures()
BY_PATTERN = [each for each in CATALOGUE.values() if each.patterns]
TEXTS = [
    pytest.param(each, text, id=f"{each.id}-{where}")
    for each in BY_PATTERN
    for where, text in {"example": each.example, **each.also}.items()
]
WORDINGS = yaml.safe_load(Path(__file__).with_name("wordings.yaml").read_text(encoding="utf-8"))


def fits(text: str, *, exception: str | None = None, frames: Any = ()) -> list[str]:
    """Return the ids of the signatures that fit a statement, the best first."""
    statement = Statement(
        text=text,
        kind="exception" if exception else "line",
        exception=exception,
        frames=tuple(
            Frame(file=file, line=line, function=function) for file, line, function in frames
        ),
    )
    return [match.signature.id for match in match_all(statement)]


def test_few_kinds_of_unknown_failures_have_a_fix() -> None:
    """Only those whose words leave a single thing to do; see the head of `kinds.yaml`."""
    for kind in kinds_of_unknown():
        assert kind.family in FAMILIES
        assert kind.means[-1:] in (".", "")
    assert {kind.title for kind in kinds_of_unknown() if kind.fix} == {
        "a module is not installed",
        "the folder for a file that is saved does not exist",
        "a file does not exist",
        "the configuration and the code have different keys",
        "a variable has no value",
        "no process group was initialized",
        "the samples of a batch have different lengths and were not padded",
    }


def test_ids_are_unique_in_the_files_and_never_those_of_other_rules() -> None:
    """No entry hides another, and a rule of the pages keeps its id."""
    files = [file for file in resources.files(signatures).iterdir() if file.name.endswith(".yaml")]
    entries = [
        entry for file in files for entry in yaml.safe_load(file.read_text(encoding="utf-8"))
    ]
    ids = [entry["id"] for entry in entries if "id" in entry]
    # They have that of what they say more about
    assert len(entries) - len(ids) == len(kinds_of_unknown())
    assert len(ids) == len(set(ids))
    leaking = {leaks.signature_of(kind, on_host=False) for kind in leaks.KINDS}
    assert set(CATALOGUE) - set(ids) == leaking | {WELL.id, UNJUDGED.id}
    assert not set(all_rules()) & set(CATALOGUE)
    assert set(catalogue()) == set(all_rules()) | set(CATALOGUE)
    assert len(CATALOGUE) <= 250


@pytest.mark.parametrize("signature", CATALOGUE.values(), ids=CATALOGUE)
def test_every_signature_explains_itself(signature: Signature) -> None:
    """Id, title, words, family and the other fields have the form that the page and the verdicts
    rely on.
    """
    assert re.fullmatch(r"H(?:9\d\d|1[0-6]\d\d)", signature.id)
    assert signature.title
    assert "\n" not in signature.title
    assert not signature.title.endswith(".")
    assert signature.family in FAMILIES
    assert signature.role in Role.__args__
    assert signature.restart in Restart.__args__
    assert (signature.restart == "remedy") == bool(signature.changes)
    for text in (signature.means, signature.fix, signature.false_positives or "."):
        assert text.endswith((".", "`", ")"))
        assert "\n" not in text
    assert signature.example or not signature.patterns
    assert set(signature.explains) <= set(catalogue())


def test_an_unknown_field_names_its_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A typing error in a file is an error with the id of the entry."""
    monkeypatch.setattr(signatures, "_entries", lambda: [{"id": "H999", "titel": "x"}])
    with pytest.raises(ValueError, match=r"H999.*titel"):
        all_signatures.__wrapped__()


def test_what_code_chooses_by_id_is_there() -> None:
    """Every id that an ending, a hang or a leak is given has its entry, of the right class."""
    chosen = {
        value for name, value in vars(ids).items() if name.isupper() and isinstance(value, str)
    }
    assert chosen <= set(CATALOGUE)
    assert {CATALOGUE[SIGNATURES_OF[kind]].family for kind in HANG_KINDS} == {"hang"}
    for kind in leaks.KINDS:
        assert CATALOGUE[leaks.signature_of(kind, on_host=True)].family == "host out of memory"
        on_device = CATALOGUE[leaks.signature_of(kind, on_host=False)]
        assert (on_device.family, on_device.title[-13:]) == ("out of memory", ", on a device")


@pytest.mark.parametrize(("signature", "text"), TEXTS)
def test_every_example_is_judged_to_its_own_signature(signature: Signature, text: str) -> None:
    """Each quoted text, alone as the log of a command that failed, leads to the signature that
    quotes it.
    """
    facts = collect_stream(io.BytesIO(text.encode()), name="a.log", status=1)
    assert judge(facts).cause == signature.id
    # A line is kept in the middle of a log of any size for its words.
    assert any(has_error_word(line) for line in text.splitlines())


@pytest.mark.parametrize("signature", BY_PATTERN, ids=lambda signature: signature.id)
def test_patterns_compile_and_do_not_explode(signature: Signature) -> None:
    """No pattern has a repetition inside a repetition that can be left and entered at the same
    place.
    """
    for pattern in (
        *signature.patterns,
        *signature.frames,
        *(text for pair in signature.in_frames for text in pair),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            re.compile(pattern, re.IGNORECASE)
        # (x+)+, (x*)*, (x+)* with a single item inside: exponential on texts that nearly match.
        assert not re.search(r"\((?:\?:)?(?:\[[^\]]*\]|\\?.)[+*]\)[+*]", pattern)
        # An open-ended repetition at the start begins anew at every place: work by the square of
        # the text.
        start = re.match(r"(?:\\?[\"']\??|\(\?:)?(?:\[(?:\\.|[^\]\\])*\]|\\[wS]|\.)[+*]", pattern)
        assert not start or pattern[0] == "'"
        # Two open-ended wildcards in a row: the work grows with the square of the text for each
        # place.
        assert not re.search(r"\.[*+]\??\.[*+]", pattern)


@pytest.mark.parametrize(("exception", "text"), WORDINGS["restated"])
def test_no_entry_restates_an_exception(exception: str, text: str) -> None:
    """What a reader of the exception knows already is no signature.

    Such an entry is to be deleted.
    """
    assert fits(text, exception=exception, frames=[("train.py", 3, "main")]) == []


@pytest.mark.parametrize("known", WORDINGS["known"], ids=lambda known: known["text"][:40])
def test_neighbouring_texts_are_kept_apart(known: dict[str, Any]) -> None:
    """Texts that share most of their words have each their own cause, or none."""
    found = fits(known["text"], exception=known.get("exception"), frames=known.get("frames", ()))
    assert next(iter(found), None) == known["cause"]


@pytest.mark.parametrize("line", WORDINGS["harmless"])
def test_words_that_people_print_match_nothing(line: str) -> None:
    """Sentences with words of errors are no failure."""
    assert fits(line) == []


@pytest.mark.slow
@pytest.mark.parametrize("piece", WORDINGS["hostile"])
def test_long_texts_that_match_nothing_are_passed_over(piece: str) -> None:
    """20,000 characters that nearly match many patterns come to an end with all of them, and
    none matches.
    """
    text = piece * (20_000 // len(piece))
    for suffix in ("", " tensor", "\nRuntimeError"):
        assert not fits((text + suffix)[-20_000:])
        fits((text + suffix)[-20_000:], exception="RuntimeError")


def test_no_text_is_passed_over_that_a_pattern_fits() -> None:
    """A pattern is only tried where a word is that it needs, and finds the same in all texts
    that are quoted.
    """
    texts = [text for _, text in (each.values for each in TEXTS)]
    patterns = {pattern for each in CATALOGUE.values() for pattern in each.patterns}
    patterns |= {pattern for each in kinds_of_unknown() for pattern in each.patterns}
    patterns |= {r"a(?:b|c)?d", r"(?:x|yz)+", r"[ab]\d", r"É.?", r"\bno\b|(?:\d|two)"}
    for pattern in patterns:
        quick, plain = QuickPattern(pattern), re.compile(pattern, re.IGNORECASE)
        for text in [*texts, "AD", "acd", "yz", "b7", "é", "No", "TWO", "7"]:
            assert (quick.search(text, text.lower()) is None) == (plain.search(text) is None), (
                pattern,
                text,
            )
