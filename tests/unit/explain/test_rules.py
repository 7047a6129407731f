"""The catalogue: every rule explains itself, and ids are found however they are typed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import holdfast.explain.rules
from holdfast.core.errors import PolicyError
from holdfast.explain.rules import PAGES, RulePage, all_rules, find_rule

_PAGE = "\n".join(
    Path(holdfast.explain.rules.__file__).with_name(name).read_text(encoding="utf-8")
    for name in PAGES
)


@pytest.mark.parametrize("rule", all_rules().values(), ids=all_rules())
def test_every_rule_says_what_why_and_what_to_do(rule: RulePage) -> None:
    """A rule has a title, the meaning, why it matters and a fix.

    One about learning also says when it errs.
    """
    meaning, why, fix, *errs = rule.text.split("\n\n")
    assert rule.title
    assert rule.title[-1] != "."
    assert re.match(r"[A-Z`]", meaning)
    assert why.startswith("**Why it matters.** ")
    assert fix.startswith("**Fix.** ")
    assert meaning.endswith(".")
    assert why.endswith(".")
    assert fix.endswith((".", "`"))
    assert len(errs) == 1 if rule.id.startswith("H8") else len(errs) <= 1
    assert all(re.fullmatch(r"\*\*False positives\.\*\* [A-Z`].+\.", text, re.DOTALL) for text in errs)


def test_every_section_of_the_page_is_a_rule() -> None:
    """No heading is lost by a typing error, no id is used twice, and they are in order."""
    headings = re.findall(r"^## (.*)", _PAGE, re.MULTILINE)
    assert [f"{rule.id}: {rule.title}" for rule in all_rules().values()] == headings
    assert list(all_rules()) == sorted(all_rules())


def test_an_unknown_id_is_refused() -> None:
    """A typing error is an H702 that names what was typed."""
    with pytest.raises(PolicyError, match="'h702x' is not a rule") as caught:
        find_rule("h702x")
    assert caught.value.rule == "H702"
