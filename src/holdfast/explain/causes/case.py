"""`Case`: the evidence about one attempt and the possible causes found in it."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.explain.causes.candidate import CandidateCause
from holdfast.explain.causes.candidate_search import find_candidates, order_candidates
from holdfast.explain.causes.ends import AttemptEnd, find_end
from holdfast.explain.evidence import Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The evidence about one attempt and the possible causes from which `choosing` picks one.

    Attributes:
        evidence: The collected evidence, such as endings of processes, events and statements.
        end: How the attempt ended, according to its signals, exit codes and counters.
        candidates: All possible causes found in statements, in the order of the statements.
        roots: The candidates that can be the original failure, with the most likely one first.
        cascades: The candidates that are consequences of a failure elsewhere, with the most likely
            one first.
    """

    evidence: Evidence
    end: AttemptEnd
    candidates: tuple[CandidateCause, ...]
    roots: tuple[CandidateCause, ...]
    cascades: tuple[CandidateCause, ...]

    @property
    def root(self) -> CandidateCause | None:
        """Return the most likely root, or None if there is no root."""
        return self.roots[0] if self.roots else None

    @property
    def cascade(self) -> CandidateCause | None:
        """Return the most likely cascade, or None if there is no cascade."""
        return self.cascades[0] if self.cascades else None


def open_case(evidence: Evidence) -> Case:
    """Determine how an attempt ended and what may have caused this, and return a `Case`."""
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
