"""Lower the tier of tracebacks that belong to an earlier failure, which the run survived.

A log shows only the order of what was printed. A traceback that is far from the last one, or that
another start of the same script printed, did not end the run.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from holdfast.explain.causes.candidate import CandidateCause, Tier
from holdfast.explain.evidence import Statement

# Tracebacks that are at most this many lines apart are assumed to report the same failure, such as
# the tracebacks of a child process and of its parent.
_BURST_LINES = 150
_NUMBER = re.compile(r"\d+")


@dataclass(slots=True)
class _LaterFailures:
    """The failures that a rank reported after the traceback that is being judged."""

    # The earliest traceback that is known to be part of the process's end.
    earliest: Statement | None = None
    # Whether these failures include a root that may have ended the process.
    include_root: bool = False


def demote_earlier_tracebacks(candidates: Sequence[CandidateCause]) -> list[CandidateCause]:
    """Lower the tier of tracebacks that precede the traceback that ended their process.

    If a process printed two tracebacks and no progress after either, the later traceback ended the
    process. The earlier traceback reports the same failure only if it is close to the later one and
    no retry or progress was printed in between. A traceback that is followed by progress can be the
    cause only if no root comes after it.

    Returns:
        The candidates in the same order, with their tiers adjusted.
    """
    later_by_rank: dict[int | None, _LaterFailures] = defaultdict(_LaterFailures)
    result = []
    for candidate in reversed(candidates):
        statement = candidate.statement
        if statement.kind == "line" or not statement.source:
            result.append(candidate)
            continue
        later = later_by_rank[statement.rank]
        judged = replace(candidate, tier=_tier_given_later_failures(candidate, later))
        if judged.tier == Tier.NOT_CONTINUED:
            later.earliest = statement
        if not judged.is_caught and judged.signature.role == "root":
            later.include_root = True
        result.append(judged)
    result.reverse()
    return result


def demote_earlier_starts(candidates: Sequence[CandidateCause]) -> list[CandidateCause]:
    """Lower the tier of failures that belong to an earlier start of the same script.

    If the same statement of the main module is on another line in a later traceback, the script was
    edited and started again in between, and its output was appended to the same file.

    Returns:
        The candidates in the same order, with their tiers adjusted.
    """
    newest_lines: dict[tuple[str, str], int] = {}
    first_position_of_newest_start: int | None = None
    for candidate in reversed(candidates):
        place = _place_in_main_module(candidate)
        if place is None:
            continue
        script, line = place
        if newest_lines.setdefault(script, line) != line:
            break
        first_position_of_newest_start = candidate.statement.position
    else:
        return list(candidates)
    started_at = first_position_of_newest_start or 0
    return [
        replace(candidate, tier=Tier.CAUGHT)
        if candidate.statement.source and candidate.statement.position < started_at
        else candidate
        for candidate in candidates
    ]


def _place_in_main_module(candidate: CandidateCause) -> tuple[tuple[str, str], int] | None:
    """Return the file and code of a traceback's outermost frame, and its line number.

    Return None if the frame is not in a main module or if its code is unknown.
    """
    frames = candidate.chain[-1].frames
    if not frames or frames[0].function != "<module>" or not frames[0].code:
        return None
    return (frames[0].file, frames[0].code), frames[0].line


def _tier_given_later_failures(candidate: CandidateCause, later: _LaterFailures) -> Tier:
    """Return the tier of a candidate, given the failures that the same rank reported after it."""
    last = candidate.chain[-1]
    if candidate.tier == Tier.NOT_CONTINUED:
        is_far = later.earliest is not None and _is_far(candidate.statement, later.earliest)
        continued = last.continued_before_next and later.include_root
        return Tier.CAUGHT if is_far or continued else candidate.tier
    if last.followed_by_progress and not later.include_root:
        return Tier.OTHER_LINE
    return candidate.tier


def _is_far(statement: Statement, later: Statement) -> bool:
    """Return whether a traceback is too far from a later one to report the same failure.

    A traceback that is printed thousands of times, of which only some are kept, is never far.
    """
    repeats = later.exception == statement.exception and (
        _without_numbers(later.text) == _without_numbers(statement.text)
    )
    return not repeats and later.position - statement.position > _BURST_LINES


def _without_numbers(text: str) -> str:
    return _NUMBER.sub("#", text)
