"""Recognize holdfast's own errors in logs and recordings by the rule ids that they contain.

These errors state the problem and the fix, so they need no signature from the catalog.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdfast.explain.evidence import Statement
from holdfast.explain.rules import RulePage, all_rules
from holdfast.explain.signatures.signature import Family, Signature

_NAMED_RULE = re.compile(r"\[(H\d{3,4})\] run `holdfast explain")
_FIX_OF_ERROR = re.compile(r"^Fix: (.+?)(?=\n\[H\d|\n\n|\Z)", re.MULTILINE | re.DOTALL)
_FIX_OF_PAGE = re.compile(r"\*\*Fix\.\*\* (.+?)(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
# The id of the error which says that another rank failed. That rank's own error may give more
# detail.
_OTHER_RANK_FAILED = "H114"
# The family of a holdfast error, given a prefix of its rule id. The first matching prefix applies.
_FAMILY_BY_PREFIX: tuple[tuple[str, Family], ...] = (
    (_OTHER_RANK_FAILED, "distributed"),
    ("H30", "storage"),
    ("H31", "checkpoint"),
    ("H403", "device"),
    ("H4", "out of memory"),
    ("H5", "numerics"),
    ("H6", "loader"),
)
# The `Signature.rank` of holdfast's errors. A lower rank takes precedence, so these errors come
# before the specific signatures, which have rank 70.
_SIGNATURE_RANK = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldfastErrorMatch:
    """A holdfast error that was found in a chain of exceptions or in a log line.

    Attributes:
        statement: The statement that contains the rule id.
        signature: A signature made from the rule's page and the fix in the error message.
    """

    statement: Statement
    signature: Signature


def find_holdfast_error(chain: tuple[Statement, ...]) -> HoldfastErrorMatch | None:
    """Return the outermost holdfast error in a chain of exceptions, or None if there is none."""
    for statement in reversed(chain):
        rule = all_rules().get(_rule_id_in(statement))
        if rule is not None:
            return HoldfastErrorMatch(statement=statement, signature=_signature_of(rule, statement))
    return None


def _rule_id_in(statement: Statement) -> str:
    """Return the rule id in a statement, or an empty string if there is none."""
    if statement.rule:
        return statement.rule
    match = _NAMED_RULE.search(statement.text)
    return match[1] if match is not None else ""


def _signature_of(rule: RulePage, statement: Statement) -> Signature:
    """Return a signature for a holdfast error.

    The title and the meaning come from the rule's page. The fix comes from the error message or, if
    the message was cut off, from the rule's page.
    """
    is_cascade = rule.id == _OTHER_RANK_FAILED
    return Signature(
        id=rule.id,
        title=rule.title,
        family=_family_of(rule.id),
        rank=_SIGNATURE_RANK,
        certainty="certain",
        role="cascade" if is_cascade else "root",
        restart="retry" if is_cascade else "stop",
        means=_in_one_line(rule.text.split("\n\n")[0]),
        fix=_fix_in(statement.text) or _fix_in(rule.text),
    )


def _family_of(rule_id: str) -> Family:
    """Return the family of a holdfast error; "user code" if no prefix matches its rule id."""
    for prefix, family in _FAMILY_BY_PREFIX:
        if rule_id.startswith(prefix):
            return family
    return "user code"


def _fix_in(text: str) -> str:
    """Return the fix in an error message or a rule page on one line, or "" if there is none."""
    match = _FIX_OF_ERROR.search(text) or _FIX_OF_PAGE.search(text)
    return _in_one_line(match[1]) if match is not None else ""


def _in_one_line(text: str) -> str:
    return " ".join(text.split())
