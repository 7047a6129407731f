"""Describe in sentences in which collective ranks differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from holdfast.core.text import capitalized, listed
from holdfast.explain.evidence import innermost_user_frame
from holdfast.explain.flight.comparison import Stall
from holdfast.explain.flight.dumps import Call, Dump
from holdfast.explain.flight_finding import RankLine

# How many ranks, or groups of ranks with the same call, a sentence lists.
_MAX_RANKS = 8


def describe_stall(stall: Stall, dumps: Sequence[Dump]) -> str:
    """Return which ranks differ, in which collective, since when, and what is not known."""
    match stall.difference:
        case "not entered":
            words = _not_entered(stall, dumps)
        case "different":
            words = _different(stall)
        case "not completed":
            words = _not_completed(stall)
    if stall.without_dump:
        words += f" There is no dump of {_names_of_ranks(stall.without_dump)}."
    return words


def _not_entered(stall: Stall, dumps: Sequence[Dump]) -> str:
    call = stall.any_call
    missing = capitalized(_names_of_ranks(stall.missing))
    has = "has" if len(stall.missing) == 1 else "have"
    entered = f"{_names_of_ranks(stall.calls)} entered{_clause_about_place(call)}"
    words = (
        f"{missing} {has} not entered {call.name}, collective {stall.sequence} of"
        f" {call.group_label}, which {entered}."
    )
    newest = {dump.rank: dump.calls[-1] for dump in dumps if dump.calls}
    for rank in stall.missing[:_MAX_RANKS]:
        if rank in newest:
            words += f" The newest collective of rank {rank} is {_describe_call(newest[rank])}."
        else:
            words += f" Rank {rank} has recorded no collective."
    return words


def _different(stall: Stall) -> str:
    label = stall.any_call.group_label
    words = f"The ranks first differ in collective {stall.sequence} of {label}."
    callers: dict[str, list[int]] = {}
    for rank, call in sorted(stall.calls.items()):
        callers.setdefault(f"{_with_shape(call)}{_clause_about_place(call)}", []).append(rank)
    clauses = [f"{_names_of_ranks(ranks)} called {text}" for text, ranks in callers.items()]
    words += f" {capitalized(listed(clauses, most=_MAX_RANKS))}."
    if stall.differing:
        words += f" {capitalized(_names_of_ranks(stall.differing))} differed first."
    if stall.missing:
        words += f" No call by {_names_of_ranks(stall.missing)} is recorded there."
    return words


def _not_completed(stall: Stall) -> str:
    call = stall.any_call
    words = (
        f"All ranks with a dump entered {_with_shape(call)}, collective {stall.sequence} of"
        f" {call.group_label}{_clause_about_place(call)}"
    )
    if stall.differing:
        return f"{words}, and it did not complete on {_names_of_ranks(stall.differing)}."
    return f"{words}, and it completed on none of them."


def describe_equal_dumps(dumps: Sequence[Dump]) -> str:
    """Return a sentence about dumps in which no rank differs."""
    ranks = [dump.rank for dump in dumps]
    if len(ranks) == 1:
        return f"There is only a dump of {_names_of_ranks(ranks)}, and nothing to compare it with."
    return f"The collectives in the dumps of {_names_of_ranks(ranks)} do not differ."


# --- Parts of sentences ---------------------------------------------------------------------------


def describe_rank(dump: Dump) -> RankLine:
    """Return the newest collective of a rank in words."""
    text = "no collective recorded"
    if dump.calls:
        call = dump.calls[-1]
        text = f"newest collective: {_describe_call(call)}, {call.state}"
    return RankLine(rank=dump.rank, text=text, file=dump.file)


def _describe_call(call: Call) -> str:
    """Return a collective with its number and group and where it was called."""
    return f"{call.name}, number {call.sequence} of {call.group_label}{_clause_about_place(call)}"


def _with_shape(call: Call) -> str:
    if not call.sizes:
        return call.name
    return f"{call.name} of {listed(call.sizes)} ({listed(call.dtypes)})"


def _clause_about_place(call: Call) -> str:
    if not call.frames:
        return ""
    frame = innermost_user_frame(call.frames)
    return f" at {Path(frame.file).name}:{frame.line} in {frame.function}"


def _names_of_ranks(ranks: Iterable[int]) -> str:
    """Return ranks in words, such as ``"rank 1"`` or ``"ranks 0 and 2"``."""
    numbers = sorted(ranks)
    noun = "rank" if len(numbers) == 1 else "ranks"
    return f"{noun} {listed(numbers, most=_MAX_RANKS)}"
