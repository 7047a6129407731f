"""Write a verdict: its title and summary (see ``sentences``), its fix, and its evidence.

`causes.choosing` has already chosen the cause, which does not change here.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.explain import observations
from holdfast.explain.causes import good_ends
from holdfast.explain.causes.candidate import FALLBACKS, CandidateCause
from holdfast.explain.evidence import NO_STATUS
from holdfast.explain.exhibits import exhibits_of_flight, exhibits_of_training, quote
from holdfast.explain.signatures import endings
from holdfast.explain.signatures.signature import Signature
from holdfast.explain.verdict import Exhibit, Verdict
from holdfast.explain.wording.judgement import Judgement
from holdfast.explain.wording.remarks import fix_of_training
from holdfast.explain.wording.sentences import summary, title

_MAX_EXHIBITS = 10
_MAX_CHAIN_EXHIBITS = 3
_MAX_CONFIRMATION_EXHIBITS = 3
_MAX_CASCADE_EXHIBITS = 3

FIX_OF_A_LOSS_THAT_NEVER_WAS_FINITE = (
    "Train a few steps in float32 without autocast: if the loss is finite then, use bfloat16, or"
    " keep the operation that overflows in float32. If it is not, check the first batch for NaN,"
    " empty targets and unscaled inputs, the loaded weights for NaN, and the model for a softmax"
    " over a row that is masked completely. A learning rate is to blame only if the loss of the"
    " very first step is finite."
)
# The fix for a save that the Guard refused because of NaN or Inf. A save that failed for another
# reason needs a different fix.
_FIX_OF_NONFINITE_STATE = (
    "Find the origin of the NaN or Inf with `holdfast events RUN --kind nonfinite_origin`, and"
    " check the loss before it. Then resume from the newest checkpoint with a lower learning rate,"
    " or without the samples that caused it."
)


def in_words(judgement: Judgement) -> Verdict:
    """Return the verdict for a judgment, with all its texts."""
    signature = judgement.signature
    rank = judgement.end.first_rank
    if judgement.candidate is not None:
        rank = judgement.candidate.statement.rank
    flight = judgement.evidence.flight
    if flight is not None and flight.rule == signature.id:
        rank = flight.rank
    # Changes that were already applied to this attempt did not help, so they are not suggested
    # again.
    applied = judgement.evidence.applied_changes
    changes = signature.changes.items()
    return Verdict(
        cause=signature.id,
        family=signature.family,
        title=title(judgement),
        summary=summary(judgement),
        fix=_fix(judgement),
        certainty=judgement.certainty,
        evidence=tuple(_exhibits(judgement)),
        runner_up=judgement.runner_up,
        tried=judgement.evidence.tried,
        missing=tuple(_missing(judgement)),
        restart=signature.restart,
        changes=tuple((name, value) for name, value in changes if applied.get(name) != value),
        where=judgement.place,
        rank=rank,
        step=judgement.steps,
        speed=judgement.evidence.speed,
    )


def _fix(judgement: Judgement) -> str:
    """Return the fix: the location of a memory leak, a Guard's fix, or the signature's fix."""
    signature = judgement.signature
    evidence = judgement.evidence
    if signature.id == endings.NOT_LEARNED:
        return signature.fix
    for finding in evidence.speed:
        if finding.rule == signature.id:
            return finding.fix
    if judgement.never_had_a_finite_loss:
        return FIX_OF_A_LOSS_THAT_NEVER_WAS_FINITE
    unsaved = observations.unsaved_steps(evidence)
    if signature.id == endings.NOT_SAVED and unsaved is not None and unsaved.was_refused:
        return fix_of_training(evidence) or _FIX_OF_NONFINITE_STATE
    fix_of_leak = _fix_of_leak(judgement)
    if fix_of_leak:
        return fix_of_leak
    if judgement.is_good_end:
        return fix_of_training(evidence) or signature.fix
    return signature.fix


def _fix_of_leak(judgement: Judgement) -> str:
    """Return the fix that names the place of a traced leak; empty if there is none."""
    leak = judgement.leak
    rest = judgement.signature.fix
    if judgement.is_good_end:
        leak = observations.newest_leak(judgement.evidence)
        rest = "A longer run would run out of memory."
    place = observations.leak_place(leak) if leak is not None else ""
    if not place:
        return ""
    words = f"Look first at {place}, where memory is kept alive from step to step."
    return f"{words} {rest}".strip()


# --- Evidence -------------------------------------------------------------------------------------


def _exhibits(judgement: Judgement) -> list[Exhibit]:
    """Return the evidence without duplicates, with the strongest exhibit first."""
    evidence = judgement.evidence
    exhibits: list[Exhibit] = []
    if judgement.doubt is not None and judgement.doubt.candidate is not None:
        exhibits.append(quote(judgement.doubt.candidate.statement, "fact"))
    if judgement.is_good_end:
        exhibits += good_ends.exhibits(evidence)
    flight = [] if evidence.flight is None else list(exhibits_of_flight(evidence.flight))
    if evidence.flight is not None and evidence.flight.rule == judgement.signature.id:
        exhibits += flight
    if judgement.candidate is not None:
        exhibits += _exhibits_of_cause(judgement.candidate)
    if not judgement.is_good_end:
        exhibits += flight
    exhibits += judgement.end.exhibits
    learning = evidence.learning
    if judgement.is_good_end and learning is not None and learning.outcome == "fell":
        exhibits.append(Exhibit(text=learning.sentence(), source="recorded steps"))
    exhibits += exhibits_of_training(evidence)
    if evidence.nan_at_end is not None and judgement.signature.id == endings.INTERRUPTED_LOST:
        exhibits.append(Exhibit(text=evidence.nan_at_end.sentence(), source=evidence.source))
    exhibits += _exhibits_of_other_candidates(judgement)
    return list(dict.fromkeys(exhibits))[:_MAX_EXHIBITS]


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


def _missing(judgement: Judgement) -> Iterator[str]:
    """Yield the missing evidence that would make the verdict more certain, one clause each."""
    missing = judgement.evidence.missing
    if judgement.candidate is not None and judgement.candidate.statement.kind == "exception":
        # The exit status of a command that an exception has ended shows nothing new.
        missing = tuple(clause for clause in missing if clause != NO_STATUS)
    yield from missing
    if judgement.signature.role == "cascade":
        yield "the original failure, which is neither in the log nor in the recordings"
    is_unknown = judgement.signature.id == endings.UNKNOWN and judgement.candidate is None
    if is_unknown and not judgement.evidence.statements:
        yield "no line that reports an error"
