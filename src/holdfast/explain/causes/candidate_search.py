"""Find possible causes of a failure in statements, and order them by likelihood.

Every exception is a candidate, and so is every line that matches a signature. A chain of exceptions
yields only one candidate. A candidate's `Tier` says how certain it is that the failure ended its
process; `earlier_tracebacks` corrects the tiers by comparing the candidates with each other.

`ends` judges how the processes ended, and `choosing` picks one of the candidates.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import PurePath

from holdfast.explain.causes.candidate import GENERIC_RANK, TYPE_RANK, CandidateCause, Tier
from holdfast.explain.causes.earlier_tracebacks import (
    demote_earlier_starts,
    demote_earlier_tracebacks,
)
from holdfast.explain.causes.error_lines import find_error_line
from holdfast.explain.causes.holdfast_errors import HoldfastErrorMatch, find_holdfast_error
from holdfast.explain.causes.shadowing import find_shadowing_file
from holdfast.explain.evidence import Evidence, Statement, is_user_code
from holdfast.explain.signatures import all_signatures, ids
from holdfast.explain.signatures.matching import SignatureMatch, find_best_kind, match_all
from holdfast.explain.signatures.signature import Signature

# An exception that matches a signature with at most this `Signature.rank` (hardware, memory, device
# asserts) is taken as the root even if it was raised from another exception.
_MAX_STRONG_RANK = 30
# Lines that match a signature with at most this `Signature.rank` come from the kernel, a driver or
# a scheduler, and report a hardware or memory failure that no process survives.
_MAX_LOUD_RANK = 20
# Classes of exceptions that only repeat the traceback of another exception.
_REPETITIONS = frozenset(
    {"_RemoteTraceback", "RemoteTraceback", "ExceptionGroup", "BaseExceptionGroup"}
)
# Failures of other processes, which Ctrl-C may have interrupted as well.
_FAMILIES_OF_OTHER_PROCESSES = frozenset({"loader", "distributed"})


def find_candidates(evidence: Evidence) -> list[CandidateCause]:
    """Return all possible causes found in the statements, in the order of the statements."""
    candidates = []
    for chain in _group_into_chains(evidence.statements):
        candidate = _make_candidate(chain)
        if candidate is not None:
            candidates.append(candidate)
    candidates += _unknown_error_lines(evidence, candidates)
    return demote_earlier_starts(demote_earlier_tracebacks(candidates))


def order_candidates(
    candidates: Iterable[CandidateCause], *, first_rank: int | None
) -> list[CandidateCause]:
    """Return the candidates sorted by likelihood, with the most likely cause first.

    Candidates are compared by tier; then specific signatures come before generic ones, the rank
    that failed first before other ranks, and earlier statements before later ones. Statements are
    compared by time or, if some times are unknown, by position. Among caught failures, later
    statements come first.

    Args:
        candidates: Candidates that are all roots or all cascades, in any order.
        first_rank: The rank that failed first, or None if unknown.
    """
    remaining = list(candidates)
    times_are_known = all(
        candidate.statement.unix_seconds is not None
        for candidate in remaining
        if not candidate.is_caught
    )

    def precedence(candidate: CandidateCause) -> tuple[float, ...]:
        statement = candidate.statement
        elsewhere = (
            first_rank is not None and statement.rank is not None and statement.rank != first_rank
        )
        if candidate.is_caught:
            # If no candidate ended the run, the newest candidate is the most informative.
            return (candidate.tier, candidate.is_generic, elsewhere, 0.0, -statement.position)
        time = 0.0
        if times_are_known and statement.unix_seconds is not None:
            time = statement.unix_seconds
        return (candidate.tier, candidate.is_generic, elsewhere, time, statement.position)

    return sorted(remaining, key=precedence)


# --- From statements to candidates ----------------------------------------------------------------


def _group_into_chains(statements: Sequence[Statement]) -> list[tuple[Statement, ...]]:
    """Group exceptions that led to one another into chains, each with the root cause first.

    A log line forms a chain of its own.
    """
    chains: list[tuple[Statement, ...]] = []
    chain: list[Statement] = []
    for statement in statements:
        chain.append(statement)
        # Only an exception can lead to another exception, so a log line always ends its chain.
        if not statement.led_to_another or statement.kind == "line":
            chains.append(tuple(chain))
            chain = []
    if chain:
        chains.append(tuple(chain))
    return chains


def _make_candidate(chain: tuple[Statement, ...]) -> CandidateCause | None:
    """Return the candidate for a chain of exceptions or a log line, or None if there is none."""
    own_error = find_holdfast_error(chain)
    if own_error is not None:
        return _make_candidate_from_holdfast_error(own_error, chain)
    if chain[0].kind == "line":
        return _make_candidate_from_line(chain[0])
    return _find_shadowed_module(chain) or _match_exception(chain) or _quote_exception(chain)


def _make_candidate_from_holdfast_error(
    error: HoldfastErrorMatch, chain: tuple[Statement, ...]
) -> CandidateCause:
    """Return the candidate for a holdfast error that was found in a chain or in a log line."""
    statement = error.statement
    if statement.fatal is False:
        tier = Tier.CAUGHT
    elif statement.kind == "exception":
        tier = _tier_of_exception(chain[-1])
    elif statement.source == "guard" and statement.fatal:
        tier = Tier.ENDED_PROCESS
    else:
        tier = Tier.OTHER_LINE
    return CandidateCause(signature=error.signature, statement=statement, tier=tier, chain=chain)


def _make_candidate_from_line(line: Statement) -> CandidateCause | None:
    """Return the candidate for a log line, or None if no signature matches the line."""
    matches = match_all(line)
    if not matches:
        return None
    best, *others = [match.signature for match in matches]
    return CandidateCause(
        signature=best,
        statement=line,
        tier=_tier_of_line(line, best),
        chain=(line,),
        other_signatures=tuple(others),
    )


def _tier_of_line(line: Statement, signature: Signature) -> Tier:
    """Return the tier of a log line that matches a signature."""
    if line.fatal is False or (line.logged and not line.fatal):
        return Tier.CAUGHT
    if line.fatal or signature.rank <= _MAX_LOUD_RANK:
        return Tier.NOT_CONTINUED
    return Tier.OTHER_LINE


def _tier_of_exception(last: Statement) -> Tier:
    """Return the tier of a chain of exceptions, given the last exception in the chain."""
    if last.fatal is not None:
        return Tier.ENDED_PROCESS if last.fatal else Tier.CAUGHT
    if last.frames and not last.logged:
        return Tier.NOT_CONTINUED
    return Tier.LAST_LINE


def _find_shadowed_module(chain: tuple[Statement, ...]) -> CandidateCause | None:
    """Return a candidate if a user file shadowed the module that was to be imported, or None."""
    for statement in chain:
        file = find_shadowing_file(statement)
        if file:
            signature = all_signatures()[ids.SHADOWED]
            title = f"{signature.title}: {PurePath(file).name}"
            return CandidateCause(
                signature=replace(signature, title=title),
                statement=statement,
                tier=_tier_of_exception(chain[-1]),
                chain=chain,
            )
    return None


def _match_exception(chain: tuple[Statement, ...]) -> CandidateCause | None:
    """Return a candidate for the exception in a chain that has the best matching signature.

    Return None if no signature matches, or if the best signature is a cascade that an earlier
    exception in the chain may have caused.
    """
    matches_of_chain = [match_all(statement) for statement in chain]
    best_matches = [
        (index, matches[0].signature) for index, matches in enumerate(matches_of_chain) if matches
    ]
    if not best_matches:
        return None
    with_signature = {index for index, _ in best_matches}

    best_matches = _without_explained(best_matches) or best_matches
    best_matches = list(_without_late_interruptions(best_matches))

    def precedence(entry: tuple[int, Signature]) -> tuple[float, ...]:
        index, signature = entry
        # Prefer roots to cascades, then specific to generic signatures, then signatures with at
        # most `_MAX_STRONG_RANK` to others, then earlier exceptions in the chain to later ones.
        return (
            signature.role != "root",
            signature.rank >= GENERIC_RANK,
            signature.rank > _MAX_STRONG_RANK,
            index,
        )

    index, signature = min(best_matches, key=precedence)
    first = _index_of_first_original(chain)
    follows_from_another = first is not None and first < index
    if signature.role != "root" and follows_from_another:
        return None
    return CandidateCause(
        signature=signature,
        statement=chain[index],
        tier=_tier_of_exception(chain[-1]),
        chain=chain,
        follows_unknown=follows_from_another and first not in with_signature,
        other_signatures=_other_signatures(itertools.chain(*matches_of_chain), signature),
    )


def _without_explained(matches: Sequence[tuple[int, Signature]]) -> list[tuple[int, Signature]]:
    """Return the matches that no other match of the same chain explains.

    A later exception of the chain may name the cause of an earlier one, such as an HTTP error.
    """
    explained = {signature_id for _, signature in matches for signature_id in signature.explains}
    return [(index, signature) for index, signature in matches if signature.id not in explained]


def _without_late_interruptions(
    matches: Sequence[tuple[int, Signature]],
) -> Sequence[tuple[int, Signature]]:
    """Return the matches without an interruption that came while a failure was being handled.

    Ctrl-C reaches the loader workers and the other ranks as well, so their failures may be its
    consequence even if they were seen first.
    """
    for index, signature in matches:
        if signature.id == ids.INTERRUPTED:
            earlier = [
                (other_index, other)
                for other_index, other in matches
                if other_index < index and other.family not in _FAMILIES_OF_OTHER_PROCESSES
            ]
            return earlier or matches
    return matches


def _other_signatures(
    matches: Iterable[SignatureMatch], chosen: Signature
) -> tuple[Signature, ...]:
    """Return the matching signatures except the chosen one, with the best match first.

    Each signature occurs once.
    """
    signatures: dict[str, Signature] = {}
    for match in sorted(matches, key=lambda match: match.order):
        signatures[match.signature.id] = match.signature
    del signatures[chosen.id]
    return tuple(signatures.values())


def _quote_exception(chain: tuple[Statement, ...]) -> CandidateCause | None:
    """Return a candidate that quotes the first original exception in a chain, or None."""
    first = _index_of_first_original(chain)
    if first is None:
        return None
    statement = chain[first]
    return CandidateCause(
        signature=_fallback_signature(statement),
        statement=statement,
        tier=_tier_of_exception(chain[-1]),
        chain=chain,
    )


def _index_of_first_original(chain: Sequence[Statement]) -> int | None:
    """Return the index of the first exception that does not merely repeat another one, or None.

    An exception that a script raised on purpose while it handled another one counts as the first,
    because its message was written for this case.
    """
    first = None
    for index, statement in enumerate(chain):
        if statement.exception in _REPETITIONS or _is_bare_exit(statement):
            continue
        if first is None or statement.replaces_previous:
            first = index
    return first


def _is_bare_exit(statement: Statement) -> bool:
    """Return whether a statement is a ``SystemExit`` with a number, as notebooks print it."""
    return statement.exception == "SystemExit" and statement.text.strip()[-1:].isdigit()


# --- Failures without a signature -----------------------------------------------------------------


def _unknown_error_lines(
    evidence: Evidence, candidates: Sequence[CandidateCause]
) -> list[CandidateCause]:
    """Return a list with one candidate for an error line that matches no signature.

    The list is empty if there is no such line, or if the given candidates already explain the
    failure.
    """
    line = None
    relevant = [candidate for candidate in candidates if not candidate.is_caught]
    if all(candidate.signature.id == ids.ABORTED for candidate in relevant):
        # There is no other candidate, or only an abort, which does not explain the failure.
        line = find_error_line(evidence.statements, only_certain=bool(relevant))
    elif any(candidate.signature.id == ids.NCCL_FAILED for candidate in candidates):
        # The exception only says that NCCL failed. A warning printed by NCCL may give the reason.
        line = _unknown_nccl_warning(evidence.statements)
    if line is None:
        return []
    signature = _fallback_signature(line)
    return [
        CandidateCause(signature=signature, statement=line, tier=Tier.OTHER_LINE, chain=(line,))
    ]


def _unknown_nccl_warning(statements: Iterable[Statement]) -> Statement | None:
    """Return the first NCCL warning that matches no signature, or None."""
    for statement in statements:
        if "NCCL WARN" in statement.text and not match_all(statement):
            return statement
    return None


def _fallback_signature(statement: Statement) -> Signature:
    """Return a signature that quotes an exception or a log line as the cause.

    The class of the cause comes from the kind of unknown failure that matches the statement best,
    and so does the fix, if the kind has one. If no kind matches, the class is "user code" if the
    exception was raised in user code, and "unknown" otherwise.
    """
    is_exception = statement.kind == "exception"
    signature = all_signatures()[ids.UNCAUGHT if is_exception else ids.ERROR_LINE]
    signature = replace(signature, fix="")
    raised_in_own_code = bool(statement.frames) and is_user_code(statement.frames[-1])
    kind = find_best_kind(statement)
    if kind is not None and not (raised_in_own_code and kind.rank >= TYPE_RANK):
        return replace(
            signature,
            family=kind.family,
            rank=max(kind.rank, GENERIC_RANK),
            means=kind.means,
            fix=kind.fix,
            explains=kind.explains,
        )
    return replace(signature, family="user code" if raised_in_own_code else "unknown")
