"""Find reasons to doubt that a run with exit status 0 completed its training.

The verdict mentions the doubt that the first applicable rule returns. `good_ends` looks for other
problems, such as a loss that did not fall, whether or not the exit status is in doubt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from holdfast.explain import observations
from holdfast.explain.causes.candidate import CandidateCause
from holdfast.explain.causes.case import Case
from holdfast.explain.exhibits import first_line
from holdfast.explain.signatures import ids

# A script may skip a few samples and print an error line for each of them. If a run made no step,
# up to this many error lines are no reason for doubt.
_MAX_LINES_OF_SKIPPED_SAMPLES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """A reason to doubt that the run ended well.

    Attributes:
        words: The clause that follows "ended with status 0" in the verdict's title.
        candidate: The candidate cause that raises the doubt, or None if the doubt has another
            reason.
    """

    words: str
    candidate: CandidateCause | None = None


DoubtRule: TypeAlias = Callable[[Case], Doubt | None]


def find_doubt(case: Case) -> Doubt | None:
    """Return the first reason to doubt that the run ended well, or None if there is none."""
    if case.evidence.divergence is not None or case.end.status != 0:
        return None
    for rule in RULES:
        doubt = rule(case)
        if doubt is not None:
            return doubt
    return None


def ends_with_a_traceback(case: Case) -> Doubt | None:
    """Return a doubt if the output ends with a traceback that may not have been caught."""
    final = observations.final_traceback(case.evidence)
    if final is None:
        return None
    words = "but its output ends with a traceback"
    for candidate in _candidates(case):
        if final in candidate.chain:
            return Doubt(words=words, candidate=candidate)
    return Doubt(words=words)


def reports_a_kill(case: Case) -> Doubt | None:
    """Return a doubt if a log line reports an event that no process survives."""
    for candidate in _candidates(case):
        if candidate.reports_a_kill:
            words = f"but its output says: {first_line(candidate.statement)}"
            return Doubt(words=words, candidate=candidate)
    return None


def made_no_step(case: Case) -> Doubt | None:
    """Return a doubt if errors were caught and the run made no step.

    The script may have skipped every batch.
    """
    if not case.evidence.made_no_step:
        return None
    errors = [
        candidate
        for candidate in _candidates(case)
        if candidate.signature.family != "loader" and candidate.signature.id != ids.ERROR_LINE
    ]
    exceptions = [error for error in errors if error.statement.kind == "exception"]
    lines = [error for error in errors if not error.statement.logged]
    decisive = exceptions or lines[_MAX_LINES_OF_SKIPPED_SAMPLES:]
    if not decisive:
        return None
    return Doubt(words="but no step was taken", candidate=decisive[0])


def was_not_observed(case: Case) -> Doubt | None:
    """Return a doubt if holdfast observed none of the processes of a supervised run."""
    if not observations.was_not_observed(case.evidence):
        return None
    return Doubt(words="and none of its processes were observed")


def log_does_not_show_training(case: Case) -> Doubt | None:
    """Return a doubt if a bare log contains no losses and no message that training is done."""
    evidence = case.evidence
    if evidence.observed is not None or evidence.output_says_done or evidence.printed_loss_count:
        return None
    return Doubt(words="and its output does not show whether it trained")


RULES: tuple[DoubtRule, ...] = (
    ends_with_a_traceback,
    reports_a_kill,
    made_no_step,
    was_not_observed,
    log_does_not_show_training,
)


def _candidates(case: Case) -> Iterator[CandidateCause]:
    """Yield the roots and then the cascades, each group with the most likely candidate first."""
    yield from case.roots
    yield from case.cascades
