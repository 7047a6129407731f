"""The catalog of rules: one rule for each id that an error, a finding or a verdict can have.

The rules for errors and findings are the sections of ``rules.md`` and ``learning_rules.md`` in this
package's directory. The website and `holdfast explain` both show these files. The rule for a
verdict is generated from its signature.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from importlib import resources

from holdfast.core.errors import PolicyError, nearest
from holdfast.core.text import capitalized
from holdfast.explain.signatures import all_signatures
from holdfast.explain.signatures.signature import Signature

PAGES = ("rules.md", "learning_rules.md")
_SECTION = re.compile(r"^## (H\d{3,4}): ([^\n]+)\n\n(.+?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
# The lowest similarity at which a rule id is suggested for a mistyped id. With ids of four
# characters, a missing character is tolerated, but a wrong character is not.
_MIN_SIMILARITY = 0.85


@dataclass(frozen=True, slots=True, kw_only=True)
class RulePage:
    """The page that explains one rule.

    Attributes:
        id: The rule id, such as ``"H101"``.
        title: The problem in a few words.
        text: Markdown that explains the problem, why it matters, how to fix it and, for a finding,
            when it is a false positive.
    """

    id: str
    title: str
    text: str


@functools.cache
def all_rules() -> dict[str, RulePage]:
    """Return the rules for errors and findings, read from the files in `PAGES`, keyed by id."""
    rules: dict[str, RulePage] = {}
    for name in PAGES:
        page = resources.files("holdfast.explain").joinpath(name).read_text(encoding="utf-8")
        for section in _SECTION.finditer(page):
            rule_id, title, text = section.groups()
            rules[rule_id] = RulePage(id=rule_id, title=title, text=text.strip())
    return rules


@functools.cache
def catalogue() -> dict[str, RulePage]:
    """Return all rules, from `PAGES` and from the signatures, keyed by id in ascending order."""
    rules = {signature.id: _page_of_signature(signature) for signature in all_signatures().values()}
    rules.update(all_rules())
    return dict(sorted(rules.items(), key=lambda entry: int(entry[0][1:])))


def find_rule(rule_id: str) -> RulePage:
    """Return the rule with the given id, ignoring case.

    Raises:
        PolicyError: H702 if no rule has this id.
    """
    rules = catalogue()
    rule = rules.get(rule_id.upper())
    if rule is not None:
        return rule
    fix = "`holdfast explain` without an id lists all rules."
    suggestion = nearest(rule_id, rules, least=_MIN_SIMILARITY)
    if suggestion is not None:
        fix = f"did you mean {suggestion!r}?"
    raise PolicyError(
        f"{rule_id!r} is not a rule", limit=f"there are {len(rules)} rules", fix=fix, rule="H702"
    )


def _page_of_signature(signature: Signature) -> RulePage:
    """Return the page for a signature.

    It gives the meaning, the fix, the restart, false positives, examples and the class of causes.
    """
    parts = [signature.means, f"**Fix.** {signature.fix}"]
    if signature.changes:
        changes = ", ".join(f"`{name}={value}`" for name, value in signature.changes.items())
        parts.append(f"**Restarting.** `holdfast run` restarts the command with {changes}.")
    if signature.false_positives:
        parts.append(f"**False positives.** {signature.false_positives}")
    if signature.example:
        parts.append(f"**Example.**\n\n{_indented(signature.example)}")
    for where, text in signature.also.items():
        parts.append(f"**Also** ({where}).\n\n{_indented(text)}")
    parts.append(f"**Class of causes.** {capitalized(signature.family)}.")
    return RulePage(id=signature.id, title=signature.title, text="\n\n".join(parts))


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
