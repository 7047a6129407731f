"""Recognise holdfast's own errors in logs and recordings by the rule id that each one names.

Such an error states what is wrong and how to fix it, so no signature from the catalogue is needed.
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
# This error says that another rank failed, whose own error may have been recorded in more detail.
_OTHER_RANK_FAILED = "H114"
# Families of holdfast's errors by the prefix of the rule id. The first match counts.
_FAMILY_BY_PREFIX: tuple[tuple[str, Family], ...] = (
    (_OTHER_RANK_FAILED, "distributed"),
    ("H30", "storage"),
    ("H31", "checkpoint"),
    ("H403", "device"),
    ("H4", "out of memory"),
    ("H5", "numerics"),
    ("H6", "loader"),
)
# The `Signature.rank` of these errors: before all specific signatures (70).
_SIGNATURE_RANK = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnError:
    """A holdfast error in a chain of exceptions or in a line.

    Attributes:
        statement: The statement that names the rule.
        signature: A signature made from the rule, with the error's own fix.
    """

    statement: Statement
    signature: Signature


def find_own_error(chain: tuple[Statement, ...]) -> OwnError | None:
    """Return the holdfast error in a chain, or None; the outermost if there are several."""
    for statement in reversed(chain):
        rule = all_rules().get(_rule_id_in(statement))
        if rule is not None:
            return OwnError(statement=statement, signature=_signature_of(rule, statement))
    return None


def _rule_id_in(statement: Statement) -> str:
    """Return the id of the rule that a statement names, or an empty text."""
    if statement.rule:
        return statement.rule
    named = _NAMED_RULE.search(statement.text)
    return named[1] if named is not None else ""


def _signature_of(rule: RulePage, statement: Statement) -> Signature:
    """Return a signature for the error that a statement quotes.

    Title and meaning come from the page of its rule. The fix is the one in the error itself, or
    that of the page if the error has been cut off.
    """
    is_cascade = rule.id == _OTHER_RANK_FAILED
    return Signature(
        id=rule.id,
        title=rule.title,
        family=_family_of(rule.id),
        rank=_SIGNATURE_RANK,
        role="cascade" if is_cascade else "root",
        restart="retry" if is_cascade else "stop",
        means=_in_one_line(rule.text.split("\n\n")[0]),
        fix=_fix_in(statement.text) or _fix_in(rule.text),
    )


def _family_of(rule_id: str) -> Family:
    for prefix, family in _FAMILY_BY_PREFIX:
        if rule_id.startswith(prefix):
            return family
    return "user code"


def _fix_in(text: str) -> str:
    """Return the fix from an error message or a rule page, on one line."""
    match = _FIX_OF_ERROR.search(text) or _FIX_OF_PAGE.search(text)
    return _in_one_line(match[1]) if match is not None else ""


def _in_one_line(text: str) -> str:
    return " ".join(text.split())
