"""Determine from the reports of all ranks on which rank NaN or Inf appeared first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from holdfast.guard.result import Provenance


class OriginReport(NamedTuple):
    """The findings of one rank about NaN or Inf, which it sends to all ranks."""

    has_origin: bool
    # Whether the rank sent NaN or Inf in a collective that the loss or the model started.
    is_sent: bool
    # A description of the origin, or the reason why it is unknown.
    text: str
    # Whether the loss or the model starts collectives.
    has_collectives: bool


def report_of(own: Provenance, *, has_collectives: bool) -> OriginReport:
    """Create the report of a rank from its findings.

    Args:
        own: The findings of the rank.
        has_collectives: Whether the loss or the model starts collectives.
    """
    return OriginReport(
        has_origin=own.origin is not None,
        is_sent=own.origin is not None and own.origin.sent,
        text=str(own.origin) if own.origin is not None else own.problem,
        has_collectives=has_collectives,
    )


def origin_among_ranks(
    rank: int, own: Provenance, suspects: Sequence[int], reports: Sequence[OriginReport]
) -> Provenance:
    """Return the rank on which NaN or Inf appeared first, and their origin on that rank.

    The first rank that meets one of these conditions is chosen, in this order: a suspect that sent
    NaN in a collective, a suspect that found an origin, or any rank that sent NaN in a collective.
    If there is no such rank, the result names all suspects.

    Args:
        rank: This rank.
        own: The findings of this rank. Their details are not in the reports.
        suspects: The ranks whose loss is not finite, or all ranks.
        reports: The reports of all ranks, in order of rank.
    """
    senders = [sender for sender, report in enumerate(reports) if report.is_sent]
    candidates = [
        *(sender for sender in senders if sender in suspects),
        *(suspect for suspect in suspects if reports[suspect].has_origin),
        *senders,
    ]
    if candidates:
        blamed = candidates[0]
        where = _listed([blamed])
        if blamed == rank:
            return replace(own, where=where)
        return Provenance(problem=reports[blamed].text, where=where)
    where = _listed(suspects)
    if any(report.has_collectives for report in reports):
        where += ", after a collective of the loss or the model"
    return Provenance(problem=reports[suspects[0]].text, where=where)


def _listed(ranks: Sequence[int]) -> str:
    """Return a list of ranks for a sentence, such as "ranks 0 and 2"."""
    *others, last = map(str, ranks)
    if not others:
        return f"rank {last}"
    return f"ranks {', '.join(others)} and {last}"
