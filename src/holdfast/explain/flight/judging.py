"""Judge dumps of torch's flight recorder: which collective explains a hang or a timeout, if any."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from holdfast.explain.certainty import Certainty
from holdfast.explain.evidence import innermost_user_frame
from holdfast.explain.exhibits import exhibit_of_flight_rank
from holdfast.explain.flight.comparison import Difference, Stall, find_stall
from holdfast.explain.flight.dumps import Call, Dump, find_dumps, read_dumps
from holdfast.explain.flight.sentences import describe_equal_dumps, describe_rank, describe_stall
from holdfast.explain.flight_finding import FlightFinding
from holdfast.explain.signatures import all_signatures, ids
from holdfast.explain.verdict import Exhibit, Verdict
from holdfast.recorder.run_files import FLIGHT_FOLDER, flight_prefix

_RULES: dict[Difference, str] = {
    "not entered": ids.COLLECTIVE_NOT_ENTERED,
    "different": ids.DIFFERENT_COLLECTIVES,
    "not completed": ids.COLLECTIVE_NOT_COMPLETED,
}
# Dumps are written at slightly different times, so a rank may only be late.
_CERTAINTIES: dict[Difference, Certainty] = {
    "not entered": "likely",
    "different": "likely",
    "not completed": "a guess",
}
_MAX_RANKS = 8


def make_flight_finding(dumps: Sequence[Dump]) -> FlightFinding | None:
    """Return the collective in which ranks differ, in words, or None if they do not differ."""
    stall = find_stall(dumps)
    if stall is None:
        return None
    first = _first_differing_call(stall, dumps)
    return FlightFinding(
        rule=_RULES[stall.difference],
        sentence=describe_stall(stall, dumps),
        where="" if first is None else _place(first),
        rank=stall.differing[0] if len(stall.differing) == 1 else None,
        ranks=tuple(describe_rank(dump) for dump in _most_important(dumps, stall)),
    )


def read_flight_of_attempt(run: Path, attempt: int) -> tuple[FlightFinding | None, list[str]]:
    """Return the collective in which ranks of an attempt differ, and problems with the dumps."""
    folder = run / FLIGHT_FOLDER
    files: list[Path] = []
    with suppress(OSError):
        if folder.is_dir():
            prefix = flight_prefix(attempt)
            files = [file for file in find_dumps(folder) if file.name.startswith(prefix)]
    dumps, problems = read_dumps(files)
    return make_flight_finding(dumps), problems


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
    finding = make_flight_finding(dumps)
    stall = find_stall(dumps)
    rule = ids.COLLECTIVES_EQUAL if finding is None else finding.rule
    signature = all_signatures()[rule]
    sentence = describe_equal_dumps(dumps) if finding is None else finding.sentence
    rank = None if finding is None else finding.rank
    lines = (
        [describe_rank(dump) for dump in dumps[:_MAX_RANKS]] if finding is None else finding.ranks
    )
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
    ordered = sorted(dumps, key=lambda dump: (dump.rank not in stall.differing, dump.rank))
    return ordered[:_MAX_RANKS]


def _first_differing_call(stall: Stall, dumps: Sequence[Dump]) -> Call | None:
    """Return the newest call of the first rank that differs, or the call that others wait in."""
    if not stall.differing:
        return stall.any_call
    first = stall.differing[0]
    for dump in dumps:
        if dump.rank == first and first in stall.calls:
            return stall.calls[first]
        if dump.rank == first and dump.calls:
            return dump.calls[-1]
    return stall.any_call


def _place(call: Call) -> str:
    """Return where a collective was called, as ``file:line in function``; empty if unknown."""
    if not call.frames:
        return ""
    frame = innermost_user_frame(call.frames)
    return f"{frame.file}:{frame.line} in {frame.function}"
