"""Choose the pieces of evidence that a verdict shows, and their order."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.explain.causes import good_ends
from holdfast.explain.causes.candidate import FALLBACKS, CandidateCause
from holdfast.explain.exhibits import exhibits_of_flight, exhibits_of_training, quote
from holdfast.explain.signatures import ids
from holdfast.explain.signatures.signature import Signature
from holdfast.explain.verdict import Exhibit
from holdfast.explain.wording.judgement import Judgement

_MAX_EXHIBITS = 10
_MAX_CHAIN_EXHIBITS = 3
_MAX_CONFIRMATION_EXHIBITS = 3
_MAX_CASCADE_EXHIBITS = 3


def choose_exhibits(judgement: Judgement) -> list[Exhibit]:
    """Return the evidence for a verdict, without duplicates, with the strongest piece first."""
    candidate = judgement.candidate
    exhibits = [
        *_exhibits_of_doubt(judgement),
        *_exhibits_of_shortfalls(judgement),
        *_exhibits_of_decisive_flight(judgement),
        *(_exhibits_of_cause(candidate) if candidate is not None else ()),
        *_exhibits_of_other_flight(judgement),
        *judgement.end.exhibits,
        *_exhibits_of_fallen_loss(judgement),
        *exhibits_of_training(judgement.evidence),
        *_exhibits_of_nan_at_end(judgement),
        *_exhibits_of_other_candidates(judgement),
    ]
    return list(dict.fromkeys(exhibits))[:_MAX_EXHIBITS]


def _exhibits_of_doubt(judgement: Judgement) -> Iterator[Exhibit]:
    """Yield an exhibit of the statement that casts doubt on a good end."""
    if judgement.doubt is not None and judgement.doubt.candidate is not None:
        yield quote(judgement.doubt.candidate.statement, "fact")


def _exhibits_of_shortfalls(judgement: Judgement) -> Iterator[Exhibit]:
    """Yield the evidence for the problems of a run that ended well."""
    if judgement.is_good_end:
        yield from good_ends.exhibits(judgement.evidence)


def _exhibits_of_decisive_flight(judgement: Judgement) -> Iterator[Exhibit]:
    """Yield what the flight recorders say, if that is the cause."""
    flight = judgement.evidence.flight
    if flight is not None and flight.rule == judgement.signature.id:
        yield from exhibits_of_flight(flight)


def _exhibits_of_other_flight(judgement: Judgement) -> Iterator[Exhibit]:
    """Yield what the flight recorders say about a run that failed for another reason."""
    flight = judgement.evidence.flight
    if flight is not None and not judgement.is_good_end:
        yield from exhibits_of_flight(flight)


def _exhibits_of_fallen_loss(judgement: Judgement) -> Iterator[Exhibit]:
    """Yield the levels between which the loss of a run that ended well fell."""
    learning = judgement.evidence.learning
    if judgement.is_good_end and learning is not None and learning.outcome == "fell":
        yield Exhibit(text=learning.clause(), source="recorded steps")


def _exhibits_of_nan_at_end(judgement: Judgement) -> Iterator[Exhibit]:
    """Yield the NaN loss at which the user probably interrupted the run."""
    evidence = judgement.evidence
    if (
        evidence.nan_at_end is not None
        and judgement.signature.id == ids.INTERRUPTED_AFTER_DIVERGENCE
    ):
        yield Exhibit(text=evidence.nan_at_end.clause(), source=evidence.source)


def _exhibits_of_cause(candidate: CandidateCause) -> Iterator[Exhibit]:
    """Yield an exhibit of the statement that names the cause, then others from its chain."""
    yield quote(candidate.statement, candidate.signature.role)
    others = [statement for statement in candidate.chain if statement is not candidate.statement]
    for statement in others[:_MAX_CHAIN_EXHIBITS]:
        yield quote(statement, "fact")


def _exhibits_of_other_candidates(judgement: Judgement) -> Iterator[Exhibit]:
    """Yield exhibits of statements that confirm the cause, then of cascades that followed it."""
    others = [
        candidate for candidate in judgement.case.candidates if candidate is not judgement.candidate
    ]
    confirming = [other for other in others if _confirms(other, judgement.signature)]
    for candidate in confirming[:_MAX_CONFIRMATION_EXHIBITS]:
        yield quote(candidate.statement, "confirmation")
    if judgement.end.well:
        return
    cascades = [other for other in others if other.signature.role == "cascade"]
    for candidate in cascades[:_MAX_CASCADE_EXHIBITS]:
        yield quote(candidate.statement, "cascade")


def _confirms(candidate: CandidateCause, cause: Signature) -> bool:
    """Return whether a candidate confirms a cause because it is a root of the same family."""
    if candidate.signature.id in FALLBACKS or candidate.is_caught:
        return False
    return candidate.signature.role == "root" and candidate.signature.family == cause.family
