"""The catalogue of rules: one for every id that an error or a finding can carry.

The text lies in ``rules.md`` and ``learning_rules.md`` beside this file, one section for each rule, so that the same
words are the page on the web and what `holdfast explain` prints.
"""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass
from importlib import resources

from holdfast.core.errors import PolicyError

PAGES = ("rules.md", "learning_rules.md")
_SECTION = re.compile(r"^## (H\d{3}): ([^\n]+)\n\n(.+?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule.

    Args:
        id: Such as ``"H101"``.
        title: What is wrong, in a few words.
        text: Meaning, why it matters, the fix and, of a finding, when it errs; Markdown.
    """

    id: str
    title: str
    text: str


@functools.cache
def all_rules() -> dict[str, Rule]:
    """Return every rule by its id."""
    found = []
    for name in PAGES:
        page = resources.files("holdfast.diagnose").joinpath(name).read_text(encoding="utf-8")
        found += [Rule(id=match[1], title=match[2], text=match[3].strip()) for match in _SECTION.finditer(page)]
    return {rule.id: rule for rule in found}


def find_rule(rule_id: str) -> Rule:
    """Return the rule with this id, in upper or lower case.

    Raises:
        PolicyError: H702, naming the nearest id.
    """
    rules = all_rules()
    found = rules.get(rule_id.upper())
    if found is None:
        begun = [known for known in rules if rule_id.upper().startswith(known)]
        nearest = (begun or difflib.get_close_matches(rule_id.upper(), rules, n=1, cutoff=0.0))[0]
        raise PolicyError(
            f"{rule_id!r} is not a rule",
            limit=f"there are {len(rules)} rules",
            fix=f"did you mean {nearest}?",
            rule="H702",
        )
    return found
