"""The catalogue of rules: one for every id that an error, a finding or a verdict can carry.

Rules for errors and findings are the sections of ``rules.md`` and ``learning_rules.md`` beside this
file, so the website and `holdfast explain` show the same text. The rule for a verdict is generated
from its signature.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from importlib import resources

from holdfast.core.errors import PolicyError, nearest
from holdfast.explain.signatures import all_signatures
from holdfast.explain.signatures.signature import Signature

PAGES = ("rules.md", "learning_rules.md")
_SECTION = re.compile(r"^## (H\d{3,4}): ([^\n]+)\n\n(.+?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
# For ids of four characters: a missing character is tolerated, a different one is not.
_MIN_SIMILARITY = 0.85


@dataclass(frozen=True, slots=True, kw_only=True)
class RulePage:
    """The page of one rule.

    Attributes:
        id: Such as ``"H101"``.
        title: What is wrong, in a few words.
        text: Markdown: the meaning, why it matters, the fix and, for a finding, its false
            positives.
    """

    id: str
    title: str
    text: str


@functools.cache
def all_rules() -> dict[str, RulePage]:
    """Return every rule of the pages by its id."""
    rules: dict[str, RulePage] = {}
    for name in PAGES:
        page = resources.files("holdfast.explain").joinpath(name).read_text(encoding="utf-8")
        for section in _SECTION.finditer(page):
            rule_id, title, text = section.groups()
            rules[rule_id] = RulePage(id=rule_id, title=title, text=text.strip())
    return rules


@functools.cache
def catalogue() -> dict[str, RulePage]:
    """Return the rules of the pages and of all signatures by their ids, in the order of the ids."""
    rules = {signature.id: _rule_of(signature) for signature in all_signatures().values()}
    rules.update(all_rules())
    return dict(sorted(rules.items(), key=lambda entry: int(entry[0][1:])))


def find_rule(rule_id: str) -> RulePage:
    """Return the rule with this id, which is matched case-insensitively.

    Raises:
        PolicyError: H702 if there is no such rule.
    """
    rules = catalogue()
    rule = rules.get(rule_id.upper())
    if rule is not None:
        return rule
    fix = "`holdfast explain` without an id lists all rules."
    near = nearest(rule_id, rules, least=_MIN_SIMILARITY)
    if near is not None:
        fix = f"did you mean {near!r}?"
    raise PolicyError(
        f"{rule_id!r} is not a rule", limit=f"there are {len(rules)} rules", fix=fix, rule="H702"
    )


def _rule_of(signature: Signature) -> RulePage:
    """Return the rule page of a signature: meaning, fix, false positives, examples and class."""
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
    family = signature.family[:1].upper() + signature.family[1:]
    parts.append(f"**Class of causes.** {family}.")
    return RulePage(id=signature.id, title=signature.title, text="\n\n".join(parts))


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
