"""Write a verdict, from the parts that the other modules of this package choose and write.

`causes.choosing` has already chosen the cause, which does not change here.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.explain.evidence import NO_STATUS
from holdfast.explain.signatures import ids
from holdfast.explain.verdict import Verdict
from holdfast.explain.wording.fixes import choose_fix
from holdfast.explain.wording.judgement import Judgement
from holdfast.explain.wording.sentences import summary, title
from holdfast.explain.wording.verdict_evidence import choose_exhibits


def write_verdict(judgement: Judgement) -> Verdict:
    """Return the verdict for a judgment, with all its texts."""
    signature = judgement.signature
    # Changes that were already applied to this attempt did not help, so they are not suggested
    # again.
    applied = judgement.evidence.applied_changes
    changes = signature.changes.items()
    return Verdict(
        cause=signature.id,
        family=signature.family,
        title=title(judgement),
        summary=summary(judgement),
        fix=choose_fix(judgement),
        certainty=judgement.certainty,
        evidence=tuple(choose_exhibits(judgement)),
        runner_up=judgement.runner_up,
        tried=judgement.evidence.tried,
        missing=tuple(_missing(judgement)),
        restart=signature.restart,
        changes=tuple((name, value) for name, value in changes if applied.get(name) != value),
        where=judgement.place,
        rank=_rank(judgement),
        step=judgement.steps,
        speed=judgement.evidence.speed,
    )


def _rank(judgement: Judgement) -> int | None:
    """Return the rank to name: that which differs, or printed the cause, or failed first."""
    flight = judgement.evidence.flight
    if flight is not None and flight.rule == judgement.signature.id:
        return flight.rank
    if judgement.candidate is not None:
        return judgement.candidate.statement.rank
    return judgement.end.first_rank


def _missing(judgement: Judgement) -> Iterator[str]:
    """Yield the missing evidence that would make the verdict more certain, one clause each."""
    missing = judgement.evidence.missing
    if judgement.candidate is not None and judgement.candidate.statement.kind == "exception":
        # The exit status of a command that an exception has ended shows nothing new.
        missing = tuple(clause for clause in missing if clause != NO_STATUS)
    yield from missing
    if judgement.signature.role == "cascade":
        yield "the original failure, which is neither in the log nor in the recordings"
    is_unknown = judgement.signature.id == ids.UNKNOWN and judgement.candidate is None
    if is_unknown and not judgement.evidence.statements:
        yield "no line that reports an error"
