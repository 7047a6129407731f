"""Turn evidence into a verdict.

1. `causes.case` determines how the attempt ended and which statements may name the cause.
2. `causes.choosing` picks one cause with an ordered table of rules.
3. If the run ended well, `causes.doubts` looks for reasons to distrust the exit status, and
   `causes.good_ends` for problems such as a loss that did not fall.
4. This module computes the confidence in the cause and in its class, and finds the second most
   likely cause (the runner-up).
5. `wording` writes the text of the verdict.

If the cause comes from a statement, the confidence is a measured accuracy: the fraction of verdicts
with the same kind of evidence that were correct (`causes.candidate.SHARES`). Contradicting evidence
lowers the confidence. If the cause comes from an exit status, a signal, a counter or a hang, the
rules in `causes.ends` set the confidence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from holdfast.explain import observations
from holdfast.explain.causes.case import Case, open_case
from holdfast.explain.causes.choosing import Choice, choose
from holdfast.explain.causes.doubts import Doubt, find_doubt
from holdfast.explain.causes.good_ends import find_shortfalls
from holdfast.explain.evidence import Evidence
from holdfast.explain.signatures import UNJUDGED, WELL, all_signatures, endings
from holdfast.explain.signatures.signature import Signature
from holdfast.explain.verdict import Verdict
from holdfast.explain.wording.judgement import Judgement
from holdfast.explain.wording.verdict_words import in_words

# The highest confidence that a run ended well if there is a doubt about its exit status.
_MAX_CONFIDENCE_IN_DOUBT = 0.7
# The highest confidence of any verdict, because no verdict is certain.
_MAX_CONFIDENCE = 0.99
# The lowest confidence at which a runner-up is shown.
_MIN_SHOWN_CONFIDENCE = 0.02
# The confidence in a cause that was not chosen is multiplied by this factor.
_SHARE_OF_OTHERS = 0.5
# How much of the remaining probability (1 minus the confidence in the chosen cause) is assigned to
# a hardware error that the kernel logged, and to a loss that diverged before an exception in user
# code.
_SHARE_OF_XID = 0.95
_SHARE_OF_LOST_TRAINING = 0.9


def judge(evidence: Evidence) -> Verdict:
    """Return the verdict on why a run ended, including its texts."""
    return in_words(reach_judgement(evidence))


def reach_judgement(evidence: Evidence) -> Judgement:
    """Return the judgment on why a run ended, from which `wording` writes the verdict's texts."""
    case = open_case(evidence)
    choice = choose(case)
    doubt = None
    if choice.signature is WELL:
        doubt = find_doubt(case)
        choice = _examine_good_end(case, choice, doubt)
    return Judgement(
        case=case,
        signature=choice.signature,
        confidence=_rounded(choice.confidence),
        class_confidence=_rounded(_class_confidence(choice)),
        candidate=choice.candidate,
        doubt=doubt,
        runner_up=_runner_up(case, choice),
    )


def _examine_good_end(case: Case, choice: Choice, doubt: Doubt | None) -> Choice:
    """Return the choice for a run that ended well, adjusted for doubts and shortfalls.

    A doubt about the exit status lowers the confidence and may change the fix. A shortfall, such as
    a loss that did not fall, replaces the cause.
    """
    if doubt is not None:
        choice = replace(choice, confidence=min(choice.confidence, _MAX_CONFIDENCE_IN_DOUBT))
        if doubt.candidate is not None:
            signature = replace(WELL, fix=doubt.candidate.signature.fix)
            return replace(choice, signature=signature)
    evidence = case.evidence
    if observations.unsaved_steps(evidence) is not None or observations.training_faults(evidence):
        # The verdict reports the unsaved steps or the training faults, which are more informative
        # than a shortfall.
        return choice
    shortfalls = find_shortfalls(evidence)
    if shortfalls:
        confidence = min(choice.confidence, shortfalls[0].confidence)
        return replace(choice, signature=shortfalls[0].signature, confidence=confidence)
    if doubt is not None:
        return replace(choice, signature=UNJUDGED)
    return choice


def _class_confidence(choice: Choice) -> float:
    """Return the confidence in the class of the chosen cause.

    It is 0 if the cause is unknown, and otherwise at least the confidence in the cause.
    """
    if choice.signature.family == "unknown":
        return 0.0
    if choice.candidate is None:
        return choice.confidence
    # Evidence against the cause counts equally against its class.
    contradicted = max(choice.candidate.confidence - choice.confidence, 0.0)
    return max(choice.confidence, choice.candidate.class_confidence - contradicted)


def _rounded(confidence: float) -> float:
    """Return a confidence clamped to 0 to `_MAX_CONFIDENCE` and rounded to two decimals."""
    return round(min(max(confidence, 0.0), _MAX_CONFIDENCE), 2)


# --- The next likely cause ------------------------------------------------------------------------


def _runner_up(case: Case, choice: Choice) -> tuple[str, str, float] | None:
    """Return the id, title and confidence of the second most likely cause.

    Return None if the run ended well or if that cause is too unlikely to be shown.
    """
    if case.end.well:
        return None
    remainder = 1.0 - choice.confidence
    best: tuple[str, str, float] | None = None
    for signature, confidence in _other_causes(case, choice):
        if signature.id == choice.signature.id:
            continue
        share = round(min(confidence, remainder), 2)
        if best is None or share > best[2]:
            best = (signature.id, signature.title, share)
    if best is None or best[2] < _MIN_SHOWN_CONFIDENCE:
        return None
    return best


def _other_causes(case: Case, choice: Choice) -> Iterator[tuple[Signature, float]]:
    """Yield the other causes that the evidence suggests, with the confidence in each cause."""
    remainder = 1.0 - choice.confidence
    for candidate in (*case.roots, *case.cascades):
        if candidate is not choice.candidate:
            yield candidate.signature, candidate.confidence * _SHARE_OF_OTHERS
    if choice.candidate is not None:
        for signature in choice.candidate.also:
            yield signature, remainder * _SHARE_OF_OTHERS
    yield from _other_killers(case, choice)
    logged_by_kernel = any("NVRM: Xid" in line.text for line in case.evidence.statements)
    if choice.signature.family != "hardware" and logged_by_kernel:
        yield all_signatures()[endings.XID], remainder * _SHARE_OF_XID
    lost = case.evidence.lost
    if choice.signature.family != "numerics" and lost is not None and lost.exploded:
        yield all_signatures()[endings.TRAINING_LOST], remainder * _SHARE_OF_LOST_TRAINING
    if case.end.cause is not None and case.end.cause != endings.STATUS_ONLY:
        yield all_signatures()[case.end.cause], case.end.confidence * _SHARE_OF_OTHERS


def _other_killers(case: Case, choice: Choice) -> Iterator[tuple[Signature, float]]:
    """Yield the alternative explanation for a SIGKILL, with the confidence in it.

    If the kernel was chosen as the sender, the alternative is a person or a scheduler. If a person
    or a scheduler was chosen, the alternative is the kernel, unless the kernel's counter of
    out-of-memory kills is known.
    """
    remainder = 1.0 - choice.confidence
    if choice.candidate is not None and choice.signature.id == endings.KILLED_UNCOUNTED:
        yield all_signatures()[endings.KILLED], remainder
    kills = observations.count_kernel_kills(case.evidence.endings)
    if choice.signature.id == endings.KILLED and kills is None:
        yield all_signatures()[endings.KILLED_UNCOUNTED], remainder
