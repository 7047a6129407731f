"""Turn evidence into a verdict.

1. `causes.case` determines how the attempt ended and which statements may name the cause.
2. `causes.choosing` picks one cause with an ordered table of rules.
3. If the run ended well, `causes.doubts` looks for reasons to distrust the exit status, and
   `causes.good_ends` for problems such as a loss that did not fall.
4. This module decides how certain the cause is, and finds the second most likely cause (the
   runner-up).
5. `wording` writes the text of the verdict.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from holdfast.explain import observations
from holdfast.explain.causes.case import Case, open_case
from holdfast.explain.causes.choosing import Choice, choose
from holdfast.explain.causes.doubts import Doubt, find_doubt
from holdfast.explain.causes.good_ends import find_shortfalls
from holdfast.explain.certainty import Certainty
from holdfast.explain.evidence import Evidence
from holdfast.explain.signatures import UNJUDGED, WELL, all_signatures, ids
from holdfast.explain.signatures.signature import Signature
from holdfast.explain.verdict import Verdict
from holdfast.explain.wording.judgement import Judgement
from holdfast.explain.wording.verdict_text import write_verdict


def judge(evidence: Evidence) -> Verdict:
    """Return the verdict on why a run ended, including its texts."""
    return write_verdict(reach_judgement(evidence))


def reach_judgement(evidence: Evidence) -> Judgement:
    """Return the judgment on why a run ended, from which `wording` writes the verdict's texts."""
    case = open_case(evidence)
    choice = _name_collective(case, choose(case))
    doubt = None
    if choice.signature is WELL:
        doubt = find_doubt(case)
        choice = _examine_good_end(case, choice, doubt)
    return Judgement(
        case=case,
        signature=choice.signature,
        certainty=_certainty_to_show(choice),
        candidate=choice.candidate,
        doubt=doubt,
        runner_up=_runner_up(case, choice),
    )


def _name_collective(case: Case, choice: Choice) -> Choice:
    """Return a more specific choice if the flight recorders say why a collective timed out.

    That ranks differ in a collective explains a timeout and a hang, but no other failure.
    """
    flight = case.evidence.flight
    explained = (ids.COLLECTIVE_TIMEOUT, ids.COLLECTIVE_HANG)
    specific = (ids.COLLECTIVE_NOT_ENTERED, ids.DIFFERENT_COLLECTIVES)
    if flight is None or choice.signature.id not in explained or flight.rule not in specific:
        return choice
    signature = all_signatures()[flight.rule]
    return replace(choice, signature=signature, certainty=signature.certainty)


def _examine_good_end(case: Case, choice: Choice, doubt: Doubt | None) -> Choice:
    """Return the choice for a run that ended well, adjusted for doubts and shortfalls.

    A doubt about the exit status may change the fix. A shortfall, such as a loss that did not fall,
    replaces the cause.
    """
    if doubt is not None and doubt.candidate is not None:
        signature = replace(WELL, fix=doubt.candidate.signature.fix)
        return replace(choice, signature=signature)
    evidence = case.evidence
    if observations.unsaved_steps(evidence) is not None or observations.training_faults(evidence):
        # The verdict reports the unsaved steps or the training faults, which are more informative
        # than a shortfall.
        return choice
    shortfalls = find_shortfalls(evidence)
    if shortfalls:
        return replace(choice, signature=shortfalls[0].signature)
    if doubt is not None:
        return replace(choice, signature=UNJUDGED)
    return choice


def _certainty_to_show(choice: Choice) -> Certainty | None:
    """Return how certain the cause is, or None if it needs no word.

    A good end was observed, and so was an exception that ended its process if nothing contradicts
    it. Otherwise an exception that matches no signature is a guess, because its message often
    reports a consequence. If the cause is unknown, there is nothing to be certain of.
    """
    if choice.signature.family == "ended well" or choice.signature.id == ids.UNKNOWN:
        return None
    candidate = choice.candidate
    if candidate is not None and candidate.quotes_an_exception:
        return None if choice.certainty == "certain" else "a guess"
    return choice.certainty


# --- The next likely cause ------------------------------------------------------------------------


def _runner_up(case: Case, choice: Choice) -> tuple[str, str] | None:
    """Return the id and title of the second most likely cause.

    Return None if the run ended well, or if the evidence suggests no other cause.
    """
    if case.end.well:
        return None
    same = {choice.signature.id}
    if choice.signature.id in ids.INTERRUPTED_STATES:
        # The user also interrupted the run, as the title says.
        same.add(ids.INTERRUPTED)
    for signature in _other_causes(case, choice):
        if signature.id not in same:
            return signature.id, signature.title
    return None


def _other_causes(case: Case, choice: Choice) -> Iterator[Signature]:
    """Yield the other causes that the evidence suggests, with the most likely one first."""
    yield from _silent_causes(case, choice)
    for candidate in (*case.roots, *case.cascades):
        if candidate is not choice.candidate:
            yield candidate.signature
    yield from _other_killers(case, choice)
    if case.end.cause is not None and case.end.cause != ids.STATUS_ONLY:
        yield all_signatures()[case.end.cause]
    if choice.candidate is not None:
        yield from choice.candidate.other_signatures


def _silent_causes(case: Case, choice: Choice) -> Iterator[Signature]:
    """Yield causes that never end a process with a message of their own.

    These are a GPU error that the kernel logged, and training that diverged.
    """
    logged_by_kernel = any("NVRM: Xid" in line.text for line in case.evidence.statements)
    if choice.signature.family != "hardware" and logged_by_kernel:
        yield all_signatures()[ids.XID]
    divergence = case.evidence.divergence
    if choice.signature.family != "numerics" and divergence is not None and divergence.exploded:
        yield all_signatures()[ids.TRAINING_DIVERGED]


def _other_killers(case: Case, choice: Choice) -> Iterator[Signature]:
    """Yield the alternative explanation for a SIGKILL.

    If the kernel was chosen as the sender, the alternative is a person or a scheduler. If a person
    or a scheduler was chosen, the alternative is the kernel, unless the kernel's counter of
    out-of-memory kills is known.
    """
    if choice.candidate is not None and choice.signature.id == ids.KILLED_UNCOUNTED:
        yield all_signatures()[ids.KILLED]
    kills = observations.count_kernel_kills(case.evidence.endings)
    if choice.signature.id == ids.KILLED and kills is None:
        yield all_signatures()[ids.KILLED_UNCOUNTED]
