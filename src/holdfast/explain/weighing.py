"""Candidates for the cause of a failure, found in statements, and their order.

Every statement that a signature matches is a candidate, and so is every exception that none
matches. A chain of exceptions yields one candidate. How certainly it is what ended its process is
its `Tier`.

This module does not look at how processes ended (see `runtime_causes`), and it does not choose
(see `choosing`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import PurePath

from holdfast.explain.candidate import GENERIC_RANK, TYPE_RANK, Candidate, Tier
from holdfast.explain.error_lines import find_error_line
from holdfast.explain.evidence import Evidence, Statement, is_own_code
from holdfast.explain.matching import Match, match_all, match_kinds
from holdfast.explain.own_errors import OwnError, find_own_error
from holdfast.explain.shadowing import find_shadowing_file
from holdfast.explain.signature import Signature
from holdfast.explain.signatures import all_signatures, endings

# Up to this rank (hardware, memory, device asserts) a failure is the root even where it wraps
# another one.
_STRONG_RANK = 30
# Up to this rank a line is from the kernel, the driver or a scheduler, and about hardware or
# memory. No process survives what it reports.
_LOUD_RANK = 20
# Tracebacks this close belong to one failure: a child's, then its parent's.
_BURST_LINES = 150
# Exceptions that only repeat the traceback of another one.
_REPETITIONS = frozenset(
    {"_RemoteTraceback", "RemoteTraceback", "ExceptionGroup", "BaseExceptionGroup"}
)


def find_candidates(evidence: Evidence) -> list[Candidate]:
    """Return every candidate, in the order of the statements."""
    candidates = []
    for chain in _chains(evidence.statements):
        candidate = _candidate_of(chain)
        if candidate is not None:
            candidates.append(candidate)
    candidates += _candidates_that_no_signature_knows(evidence, candidates)
    return _demote_earlier_tracebacks(candidates)


def order_candidates(candidates: Iterable[Candidate], *, first_rank: int | None) -> list[Candidate]:
    """Return candidates of one role with the most likely cause first.

    The tier decides, then a specific signature before a generic one, then the rank that failed
    first, then the time, or the place in the log where not all times are known.

    Args:
        candidates: The candidates, in any order.
        first_rank: The rank that a launcher saw fail first, or None.
    """
    remaining = list(candidates)
    times_are_known = all(
        candidate.statement.unix_seconds is not None
        for candidate in remaining
        if not candidate.is_caught
    )

    def precedence(candidate: Candidate) -> tuple[float, ...]:
        statement = candidate.statement
        elsewhere = (
            first_rank is not None and statement.rank is not None and statement.rank != first_rank
        )
        if candidate.is_caught:
            # Of what did not end the run, the newest says most.
            return (candidate.tier, candidate.generic, elsewhere, 0.0, -statement.position)
        time = 0.0
        if times_are_known and statement.unix_seconds is not None:
            time = statement.unix_seconds
        return (candidate.tier, candidate.generic, elsewhere, time, statement.position)

    return sorted(remaining, key=precedence)


# --- From statements to candidates ----------------------------------------------------------------


def _chains(statements: Sequence[Statement]) -> list[tuple[Statement, ...]]:
    """Return exceptions together with those that were raised from them, the root first."""
    chains: list[tuple[Statement, ...]] = []
    chain: list[Statement] = []
    for statement in statements:
        chain.append(statement)
        # Only an exception can lead to another one.
        if not statement.cause or statement.kind == "line":
            chains.append(tuple(chain))
            chain = []
    if chain:
        chains.append(tuple(chain))
    return chains


def _candidate_of(chain: tuple[Statement, ...]) -> Candidate | None:
    """Return the candidate of a chain of exceptions, or of a line; None if it is none."""
    own_error = find_own_error(chain)
    if own_error is not None:
        return _candidate_of_own_error(own_error, chain)
    if chain[0].kind == "line":
        return _candidate_of_line(chain[0])
    return _candidate_of_exceptions(chain)


def _candidate_of_own_error(error: OwnError, chain: tuple[Statement, ...]) -> Candidate:
    statement = error.statement
    if statement.fatal is False:
        tier = Tier.CAUGHT
    elif statement.kind == "exception":
        tier = _tier_of_exception(chain[-1])
    elif statement.source == "guard" and statement.fatal:
        tier = Tier.ENDED_PROCESS
    else:
        tier = Tier.OTHER_LINE
    return Candidate(signature=error.signature, statement=statement, tier=tier, chain=chain)


def _candidate_of_line(line: Statement) -> Candidate | None:
    matches = match_all(line)
    if not matches:
        return None
    best, *others = [match.signature for match in matches]
    return Candidate(
        signature=best,
        statement=line,
        tier=_tier_of_line(line, best),
        chain=(line,),
        also=tuple(others),
    )


def _tier_of_line(line: Statement, signature: Signature) -> Tier:
    if line.fatal is False or (line.logged and not line.fatal):
        return Tier.CAUGHT
    if line.fatal or signature.rank <= _LOUD_RANK:
        return Tier.NOT_CONTINUED
    return Tier.OTHER_LINE


def _tier_of_exception(last: Statement) -> Tier:
    """Return the tier of a chain of exceptions, of which this is the last."""
    if last.fatal is not None:
        return Tier.ENDED_PROCESS if last.fatal else Tier.CAUGHT
    if last.frames and not last.logged:
        return Tier.NOT_CONTINUED
    return Tier.LAST_LINE


def _candidate_of_exceptions(chain: tuple[Statement, ...]) -> Candidate | None:
    """Return the candidate of a chain of exceptions: its root, as far as it is known."""
    return (
        _shadowed_module(chain)
        or _known_exception(chain)
        or _exception_that_no_signature_knows(chain)
    )


def _shadowed_module(chain: tuple[Statement, ...]) -> Candidate | None:
    """Return the candidate for a file of the user that was imported in place of a module."""
    for statement in chain:
        file = find_shadowing_file(statement)
        if file:
            signature = all_signatures()[endings.SHADOWED]
            title = f"{signature.title}: {PurePath(file).name}"
            return Candidate(
                signature=replace(signature, title=title),
                statement=statement,
                tier=_tier_of_exception(chain[-1]),
                chain=chain,
            )
    return None


def _known_exception(chain: tuple[Statement, ...]) -> Candidate | None:
    """Return the candidate for the exception of a chain that signatures know best.

    None if they know none, or only one that may follow from an earlier exception in the chain.
    """
    matches_of_chain = [match_all(statement) for statement in chain]
    known = [
        (index, matches[0].signature) for index, matches in enumerate(matches_of_chain) if matches
    ]
    if not known:
        return None

    def precedence(entry: tuple[int, Signature]) -> tuple[float, ...]:
        index, signature = entry
        # A failure of its own before a consequence, a specific signature before a generic one, a
        # strong failure even where it wraps another; then the exception nearest to the root.
        return (
            signature.role != "root",
            signature.rank >= GENERIC_RANK,
            signature.rank > _STRONG_RANK,
            index,
        )

    index, signature = min(known, key=precedence)
    first = _first_original(chain)
    follows_from_another = first is not None and first < index
    if signature.role != "root" and follows_from_another:
        return None
    return Candidate(
        signature=signature,
        statement=chain[index],
        tier=_tier_of_exception(chain[-1]),
        chain=chain,
        also=_other_signatures(itertools.chain(*matches_of_chain), signature),
    )


def _other_signatures(matches: Iterable[Match], chosen: Signature) -> tuple[Signature, ...]:
    """Return the other signatures that match, the best first, each once."""
    signatures: dict[str, Signature] = {}
    for match in sorted(matches, key=lambda match: match.order):
        signatures[match.signature.id] = match.signature
    del signatures[chosen.id]
    return tuple(signatures.values())


def _exception_that_no_signature_knows(chain: tuple[Statement, ...]) -> Candidate | None:
    first = _first_original(chain)
    if first is None:
        return None
    statement = chain[first]
    return Candidate(
        signature=_fallback_signature(statement),
        statement=statement,
        tier=_tier_of_exception(chain[-1]),
        chain=chain,
    )


def _first_original(chain: Sequence[Statement]) -> int | None:
    """Return the index of the first exception that does not only repeat another one."""
    for index, statement in enumerate(chain):
        if statement.exception not in _REPETITIONS:
            return index
    return None


# --- What no signature knows ----------------------------------------------------------------------


def _candidates_that_no_signature_knows(
    evidence: Evidence, candidates: Sequence[Candidate]
) -> list[Candidate]:
    """Return the line that says more than the candidates that signatures found, if there is one."""
    line = None
    relevant = [candidate for candidate in candidates if not candidate.is_caught]
    if all(candidate.signature.id == endings.ABORTED for candidate in relevant):
        # Nothing was found, or only that a process aborted, which does not say why.
        line = find_error_line(evidence.statements, only_certain=bool(relevant))
    elif any(candidate.signature.id == endings.NCCL_FAILED for candidate in candidates):
        line = _first_unknown_warning_of_nccl(evidence.statements)
    if line is None:
        return []
    signature = _fallback_signature(line)
    return [Candidate(signature=signature, statement=line, tier=Tier.OTHER_LINE, chain=(line,))]


def _first_unknown_warning_of_nccl(statements: Iterable[Statement]) -> Statement | None:
    for statement in statements:
        if "NCCL WARN" in statement.text and not match_all(statement):
            return statement
    return None


def _fallback_signature(statement: Statement) -> Signature:
    """Return the words of an exception or of a line as the cause.

    Its class is the one that the kind of failure shows. Without a kind it is user code, if the
    exception was raised there, otherwise it is unknown. There is no fix: advice that only a class
    of failures suggests is as often wrong as right.
    """
    is_exception = statement.kind == "exception"
    signature = all_signatures()[endings.UNCAUGHT if is_exception else endings.ERROR_LINE]
    signature = replace(signature, fix="")
    raised_in_own_code = bool(statement.frames) and is_own_code(statement.frames[-1])
    kind = _kind_of(statement)
    if kind is not None and not (raised_in_own_code and kind.rank >= TYPE_RANK):
        return replace(
            signature,
            family=kind.family,
            rank=max(kind.rank, GENERIC_RANK),
            means=kind.means,
            explains=kind.explains,
        )
    return replace(signature, family="user code" if raised_in_own_code else "unknown")


def _kind_of(statement: Statement) -> Signature | None:
    kinds = match_kinds(statement)
    return kinds[0].signature if kinds else None


# --- Tracebacks before the one that ended a process -----------------------------------------------


def _demote_earlier_tracebacks(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates with tracebacks demoted that stand before the one that ended a process.

    Of two tracebacks of one process that was not seen to continue, the later one ended it. The
    earlier one belongs to it only if it is close by and nothing between them says that the run
    started again. A traceback that lines of progress follow can be the cause only if no root came
    later.
    """
    # By rank: where the earliest traceback begins of those that belong to the end of its process.
    begins: dict[int | None, int] = {}
    # Ranks of which a root came later.
    ranks_with_root: set[int | None] = set()
    result = []
    for original in reversed(candidates):
        candidate = original
        if _is_raised(candidate):
            candidate = _demoted(candidate, begins, ranks_with_root)
            rank = candidate.statement.rank
            if candidate.tier == Tier.NOT_CONTINUED:
                begins[rank] = candidate.statement.position
            if not candidate.is_caught and candidate.signature.role == "root":
                ranks_with_root.add(rank)
        result.append(candidate)
    result.reverse()
    return result


def _is_raised(candidate: Candidate) -> bool:
    statement = candidate.statement
    return statement.kind == "exception" and bool(statement.source)


def _demoted(
    candidate: Candidate, begins: dict[int | None, int], ranks_with_root: set[int | None]
) -> Candidate:
    """Return a candidate with the tier that later tracebacks of its process leave it."""
    statement = candidate.statement
    last = candidate.chain[-1]
    root_came_later = statement.rank in ranks_with_root
    if candidate.tier == Tier.NOT_CONTINUED:
        later = begins.get(statement.rank)
        is_far = later is not None and later - statement.position > _BURST_LINES
        if is_far or (last.resumed and root_came_later):
            return replace(candidate, tier=Tier.CAUGHT)
    elif last.overtaken and not root_came_later:
        return replace(candidate, tier=Tier.OTHER_LINE)
    return candidate
