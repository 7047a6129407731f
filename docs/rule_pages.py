"""Divide the catalogue of rules into the pages of the site: one page for each family.

Each rule keeps its address on the overview ``rules.md``, which lists all of them and leads to the
page with the text.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.explain.rules import all_rules, catalogue
from holdfast.explain.signatures import all_signatures


@dataclass(frozen=True)
class RulePage:
    """A page with rules.

    Attributes:
        name: The name of the file in ``docs/rules``, without its extension.
        title: The heading of the page.
        families: What the page holds: leading digits of rules such as ``"H1"`` for H1xx, or
            families of signatures such as ``"hang"``.
    """

    name: str
    title: str
    families: tuple[str, ...]

    @property
    def uri(self) -> str:
        """Return the place of the page in the site's sources."""
        return f"rules/{self.name}.md"


PAGES = (
    RulePage("settings", "Settings and arguments", ("H1",)),
    RulePage("steps", "Batches, losses and steps", ("H2",)),
    RulePage("checkpoints", "Run directories and checkpoints", ("H3",)),
    RulePage("memory", "Memory and its forecast", ("H4",)),
    RulePage("numerics", "NaN, Inf and divergence", ("H5",)),
    RulePage("loading", "Loading of data", ("H6",)),
    RulePage("commands", "Commands and unchanged scripts", ("H7",)),
    RulePage("learning", "Runs that do not learn", ("H8",)),
    RulePage("ended-memory", "Ended: out of memory", ("out of memory", "host out of memory")),
    RulePage("ended-hang", "Ended: hang", ("hang",)),
    RulePage("ended-ranks", "Ended: several ranks", ("distributed",)),
    RulePage("ended-loading", "Ended: loading of data", ("loader",)),
    RulePage(
        "ended-environment",
        "Ended: drivers, packages and devices",
        ("environment", "device", "hardware"),
    ),
    RulePage(
        "ended-code",
        "Ended: shapes, types, gradients and other errors in code",
        ("shape or type", "autograd", "user code"),
    ),
    RulePage("ended-numerics", "Ended: NaN, Inf and learning", ("numerics", "learning")),
    RulePage("ended-storage", "Ended: checkpoints and storage", ("checkpoint", "storage")),
    RulePage("ended-killed", "Ended: crashed, killed or preempted", ("crash", "preempted")),
    RulePage("ended-otherwise", "Ended: well, or for an unknown reason", ("ended well", "unknown")),
)


def family_of(rule_id: str) -> str:
    """Return the family of a rule, as `RulePage.families` names it."""
    if rule_id in all_rules():
        return rule_id[:2]
    return all_signatures()[rule_id].family


@functools.cache
def page_of(rule_id: str) -> RulePage:
    """Return the page that holds a rule.

    Raises:
        LookupError: If no page has its family.
    """
    family = family_of(rule_id)
    for page in PAGES:
        if family in page.families:
            return page
    raise LookupError(f"no page of docs/rule_pages.py has the family {family!r} of {rule_id}")


def rules_of(page: RulePage) -> Iterator[str]:
    """Yield the ids of the rules on a page, in the order of the catalogue."""
    for rule_id in catalogue():
        if page_of(rule_id) is page:
            yield rule_id
