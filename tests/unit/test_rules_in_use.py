"""Every rule that the code names is explained, and every rule that is explained is named by the
code.
"""

from __future__ import annotations

import re
from pathlib import Path

import holdfast
from holdfast.explain.rules import all_rules

_SOURCE = Path(holdfast.__file__).parent
_RECIPES = Path(__file__).parents[2] / "recipes"
_RULE = re.compile(r'(?:rule=|_cause\(\s*|@rule\(\s*)"(H\w*)"')
_CHOSEN = re.compile(r'rule="(H\w*)" if .+ else "(H\w*)"')


def _rules_in_use() -> dict[str, set[str]]:
    """Return the files of the library and the recipes that name each rule."""
    found: dict[str, set[str]] = {}
    for path in sorted([*_SOURCE.rglob("*.py"), *_RECIPES.rglob("*.py")]):
        text = path.read_text(encoding="utf-8")
        for rule in {
            *_RULE.findall(text),
            *(rule for pair in _CHOSEN.findall(text) for rule in pair),
        }:
            found.setdefault(rule, set()).add(str(path))
    return found


def test_rules_in_use_and_rules_in_the_catalogue_are_the_same() -> None:
    """No error ends with an id that cannot be explained, and the catalogue explains nothing that
    never happens.
    """
    in_use = _rules_in_use()
    assert {rule: files for rule, files in in_use.items() if rule not in all_rules()} == {}
    assert set(all_rules()) - set(in_use) == set()
