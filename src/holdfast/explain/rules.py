"""The catalogue of rules: one for every id that an error, a finding or a verdict can carry.

The text of errors and findings is in ``rules.md`` and ``learning_rules.md`` beside this file, one
section for each rule, so that the same words are the page on the web and what `holdfast explain`
prints. That of verdicts is made from their signatures.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from importlib import resources

from holdfast.core.errors import PolicyError, nearest
from holdfast.explain.signature import Signature
from holdfast.explain.signatures import all_signatures

PAGES = ("rules.md", "learning_rules.md")
_SECTION = re.compile(r"^## (H\d{3,4}): ([^\n]+)\n\n(.+?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule."""

    id: str  # such as ``"H101"``
    title: str  # what is wrong, in a few words
    text: str  # meaning, why it matters, the fix and, of a finding, when it errs; Markdown


@functools.cache
def all_rules() -> dict[str, Rule]:
    """Return every rule of the pages by its id."""
    found = []
    for name in PAGES:
        page = resources.files("holdfast.explain").joinpath(name).read_text(encoding="utf-8")
        found += [
            Rule(id=match[1], title=match[2], text=match[3].strip())
            for match in _SECTION.finditer(page)
        ]
    return {rule.id: rule for rule in found}


@functools.cache
def catalogue() -> dict[str, Rule]:
    """Return the rules of the pages and the signatures of verdicts by their ids, in order."""
    found = {each.id: _of_signature(each) for each in all_signatures().values()} | all_rules()
    return dict(sorted(found.items(), key=lambda pair: int(pair[0][1:])))


def _of_signature(signature: Signature) -> Rule:
    """Return a signature as a page.

    What it means, the fix, when it errs, how it looks, its class.
    """
    parts = [signature.means, f"**Fix.** {signature.fix}"]
    if signature.changes:
        changes = ", ".join(f"`{name}={value}`" for name, value in signature.changes.items())
        parts.append(f"**Restarting.** `holdfast run` starts it again with {changes}.")
    if signature.false_positives:
        parts.append(f"**False positives.** {signature.false_positives}")
    if signature.example:
        parts.append(f"**Example.**\n\n{_indented(signature.example)}")
    for where, text in signature.also.items():
        parts.append(f"**Also** ({where}).\n\n{_indented(text)}")
    parts.append(f"**Class of causes.** {signature.family[:1].upper()}{signature.family[1:]}.")
    return Rule(id=signature.id, title=signature.title, text="\n\n".join(parts))


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def find_rule(rule_id: str) -> Rule:
    """Return the rule with this id, in upper or lower case (H702)."""
    rules = catalogue()
    found = rules.get(rule_id.upper())
    if found is None:
        # Of four characters one that is missing, and none that differs
        near = nearest(rule_id, rules, least=0.85)
        raise PolicyError(
            f"{rule_id!r} is not a rule",
            limit=f"there are {len(rules)} rules",
            fix=(
                f"did you mean {near!r}?"
                if near
                else "`holdfast explain` without an id lists all rules."
            ),
            rule="H702",
        )
    return found
