"""`Case`: the evidence about one attempt and the possible causes found in it."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.explain.causes.candidate import CandidateCause
from holdfast.explain.causes.ends import End, find_end
from holdfast.explain.causes.weighing import find_candidates, order_candidates
from holdfast.explain.evidence import Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The input from which a verdict on one attempt is made.

    Attributes:
        evidence: The collected evidence: endings of processes, events and statements.
        end: How the attempt ended, judged by signals, exit codes and counters.
        candidates: All possible causes found in statements, in the order of the statements.
        roots: The candidates that can be the original failure, most likely first.
        cascades: The candidates that follow from a failure elsewhere, most likely first.
    """

    evidence: Evidence
    end: End
    candidates: tuple[CandidateCause, ...]
    roots: tuple[CandidateCause, ...]
    cascades: tuple[CandidateCause, ...]

    @property
    def root(self) -> CandidateCause | None:
        """Return the most likely root, if there is one."""
        return self.roots[0] if self.roots else None

    @property
    def cascade(self) -> CandidateCause | None:
        """Return the most likely cascade, if there is one."""
        return self.cascades[0] if self.cascades else None


def open_case(evidence: Evidence) -> Case:
    """Find how an attempt ended and the possible causes, and return both with the evidence."""
    end = find_end(evidence)
    candidates = find_candidates(evidence)
    by_role: dict[str, list[CandidateCause]] = {"root": [], "cascade": []}
    for candidate in candidates:
        by_role[candidate.signature.role].append(candidate)
    return Case(
        evidence=evidence,
        end=end,
        candidates=tuple(candidates),
        roots=tuple(order_candidates(by_role["root"], first_rank=end.first_rank)),
        cascades=tuple(order_candidates(by_role["cascade"], first_rank=end.first_rank)),
    )
