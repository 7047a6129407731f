"""Describe the collective in which ranks differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from holdfast.core.text import listed
from holdfast.explain.certainty import Certainty
from holdfast.explain.evidence import innermost_user_frame
from holdfast.explain.exhibits import exhibit_of_flight_rank
from holdfast.explain.flight.comparison import Difference, Stall, find_stall
from holdfast.explain.flight.dumps import Call, Dump, find_dumps, read_dumps
from holdfast.explain.flight_finding import FlightFinding, RankLine
from holdfast.explain.signatures import all_signatures, endings
from holdfast.explain.verdict import Exhibit, Verdict
from holdfast.recorder.run_files import FLIGHT_FOLDER, flight_prefix

_RULES: dict[Difference, str] = {
    "not entered": endings.COLLECTIVE_NOT_ENTERED,
    "different": endings.DIFFERENT_COLLECTIVES,
    "not completed": endings.COLLECTIVE_NOT_COMPLETED,
}
# Dumps are written at slightly different times, so a rank may only be late.
_CERTAINTIES: dict[Difference, Certainty] = {
    "not entered": "likely",
    "different": "likely",
    "not completed": "a guess",
}
_MAX_RANKS = 8


def flight_finding(dumps: Sequence[Dump]) -> FlightFinding | None:
    """Return the collective in which ranks differ, in words, or None if they do not differ."""
    stall = find_stall(dumps)
    if stall is None:
        return None
    first = _first_differing_call(stall, dumps)
    return FlightFinding(
        rule=_RULES[stall.difference],
        sentence=_sentence(stall, dumps),
        where="" if first is None else _place(first),
        rank=stall.odd[0] if len(stall.odd) == 1 else None,
        ranks=tuple(_rank_line(dump) for dump in _most_important(dumps, stall)),
    )


def flight_of_attempt(run: Path, attempt: int) -> tuple[FlightFinding | None, list[str]]:
    """Return the collective in which ranks of an attempt differ, and problems with the dumps."""
    folder = run / FLIGHT_FOLDER
    files: list[Path] = []
    with suppress(OSError):
        if folder.is_dir():
            prefix = flight_prefix(attempt)
            files = [file for file in find_dumps(folder) if file.name.startswith(prefix)]
    dumps, problems = read_dumps(files)
    return flight_finding(dumps), problems


def judge_dumps(path: Path) -> Verdict | None:
    """Return the verdict on the dumps at a path, or None if there are none.

    Args:
        path: A directory of dumps, or one of them.

    Raises:
        OSError: If the directory cannot be read.
    """
    dumps, problems = read_dumps(find_dumps(path))
    if not dumps:
        return None
    finding = flight_finding(dumps)
    stall = find_stall(dumps)
    rule = endings.COLLECTIVES_EQUAL if finding is None else finding.rule
    signature = all_signatures()[rule]
    sentence = _nothing_differs(dumps) if finding is None else finding.sentence
    rank = None if finding is None else finding.rank
    lines = [_rank_line(dump) for dump in dumps[:_MAX_RANKS]] if finding is None else finding.ranks
    return Verdict(
        cause=rule,
        family=signature.family,
        title=signature.title,
        summary=f"{sentence} {signature.means}",
        fix=signature.fix,
        certainty="a guess" if stall is None else _CERTAINTIES[stall.difference],
        evidence=(
            Exhibit(text=sentence, source="flight recorder", role="root", rank=rank),
            *map(exhibit_of_flight_rank, lines),
        ),
        missing=tuple(problems),
        restart=signature.restart,
        where="" if finding is None else finding.where,
        rank=rank,
    )


def _most_important(dumps: Sequence[Dump], stall: Stall) -> list[Dump]:
    """Return the dumps of the ranks that differ, then those of others, up to a limit."""
    ordered = sorted(dumps, key=lambda dump: (dump.rank not in stall.odd, dump.rank))
    return ordered[:_MAX_RANKS]


# --- Sentences ------------------------------------------------------------------------------------


def _sentence(stall: Stall, dumps: Sequence[Dump]) -> str:
    """Return which ranks differ, in which collective, since when, and what is not known."""
    match stall.difference:
        case "not entered":
            words = _not_entered(stall, dumps)
        case "different":
            words = _different(stall)
        case "not completed":
            words = _not_completed(stall)
    if stall.without_dump:
        words += f" There is no dump of {_ranks(stall.without_dump)}."
    return words


def _not_entered(stall: Stall, dumps: Sequence[Dump]) -> str:
    call = stall.any_call
    has = "has" if len(stall.missing) == 1 else "have"
    words = (
        f"{_capitalized(_ranks(stall.missing))} {has} not entered {call.name}, collective"
        f" {stall.sequence} of {call.group_label}, which {_ranks(stall.calls)} entered{_at(call)}."
    )
    newest = {dump.rank: dump.calls[-1] for dump in dumps if dump.calls}
    for rank in stall.missing[:_MAX_RANKS]:
        if rank in newest:
            words += f" The newest collective of rank {rank} is {_describe(newest[rank])}."
        else:
            words += f" Rank {rank} has recorded no collective."
    return words


def _different(stall: Stall) -> str:
    label = stall.any_call.group_label
    words = f"The ranks differ since collective {stall.sequence} of {label}."
    callers: dict[str, list[int]] = {}
    for rank, call in sorted(stall.calls.items()):
        callers.setdefault(f"{_with_shape(call)}{_at(call)}", []).append(rank)
    clauses = [f"{_ranks(ranks)} called {text}" for text, ranks in callers.items()]
    words += f" {_capitalized(listed(clauses, most=_MAX_RANKS))}."
    if stall.odd:
        words += f" {_capitalized(_ranks(stall.odd))} differed first."
    if stall.missing:
        words += f" {_capitalized(_ranks(stall.missing))} called nothing there yet."
    return words


def _not_completed(stall: Stall) -> str:
    call = stall.any_call
    words = (
        f"All ranks with a dump entered {_with_shape(call)}, collective {stall.sequence} of"
        f" {call.group_label}{_at(call)}"
    )
    if stall.odd:
        return f"{words}, and it did not complete on {_ranks(stall.odd)}."
    return f"{words}, and it completed on none of them."


def _nothing_differs(dumps: Sequence[Dump]) -> str:
    ranks = [dump.rank for dump in dumps]
    if len(ranks) == 1:
        return f"There is only a dump of {_ranks(ranks)}, and nothing to compare it with."
    return f"The collectives in the dumps of {_ranks(ranks)} do not differ."


# --- Parts of sentences ---------------------------------------------------------------------------


def _rank_line(dump: Dump) -> RankLine:
    text = "no collective recorded"
    if dump.calls:
        call = dump.calls[-1]
        text = f"newest collective: {_describe(call)}, {call.state}"
    return RankLine(rank=dump.rank, text=text, file=dump.file)


def _first_differing_call(stall: Stall, dumps: Sequence[Dump]) -> Call | None:
    """Return the newest call of the first rank that differs, or the call that others wait in."""
    odd = stall.odd[:1]
    for dump in dumps:
        if dump.rank in odd and dump.rank in stall.calls:
            return stall.calls[dump.rank]
        if dump.rank in odd and dump.calls:
            return dump.calls[-1]
    return stall.any_call


def _describe(call: Call) -> str:
    """Return a collective with its number and group and where it was called."""
    return f"{call.name}, number {call.sequence} of {call.group_label}{_at(call)}"


def _with_shape(call: Call) -> str:
    if not call.sizes:
        return call.name
    return f"{call.name} of {listed(call.sizes)} ({listed(call.dtypes)})"


def _at(call: Call) -> str:
    if not call.frames:
        return ""
    frame = innermost_user_frame(call.frames)
    return f" at {Path(frame.file).name}:{frame.line} in {frame.function}"


def _place(call: Call) -> str:
    if not call.frames:
        return ""
    frame = innermost_user_frame(call.frames)
    return f"{frame.file}:{frame.line} in {frame.function}"


def _ranks(ranks: Iterable[int]) -> str:
    """Return ranks in words, such as ``"rank 1"`` or ``"ranks 0 and 2"``."""
    numbers = sorted(ranks)
    noun = "rank" if len(numbers) == 1 else "ranks"
    return f"{noun} {listed(numbers, most=_MAX_RANKS)}"


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]
